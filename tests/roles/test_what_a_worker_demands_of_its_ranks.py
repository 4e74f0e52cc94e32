"""A worker whose ranks have parts of its pool is refused what such ranks have no way for."""

from __future__ import annotations

from typing import Any

import pytest

from baton_worker.config import ConfigError, EngineConfig, HandoffConfig, ModelConfig, ProcessConfig
from baton_worker.roles.process import _check_sharing


def config(ranks: int, require: str, nixl: str = "off", device: Any = "gpu") -> ProcessConfig:
    return ProcessConfig(
        model=ModelConfig("/models/m"),
        engine=EngineConfig(device=device, tensor_parallel_size=ranks),
        handoff=HandoffConfig(shared_dir="/pools", require=require, nixl=nixl),  # type: ignore[arg-type]
    )


def test_a_way_that_ranks_have_not_is_refused_by_field_and_value() -> None:
    wanted = (
        "handoff.require is 'rdma', but engine.tensor_parallel_size is 2 and engine.device 'cpu'"
    )
    with pytest.raises(ConfigError, match=wanted):
        _check_sharing(config(2, "rdma", "rdma", device="cpu"))


@pytest.mark.parametrize(
    ("ranks", "require", "nixl", "device"),
    [
        (1, "nvlink", "off", "gpu"),
        (2, "nvlink", "off", "gpu"),
        (8, "any", "off", "gpu"),
        (2, "rdma", "rdma", "gpu"),
        (1, "rdma", "rdma", "cpu"),
        (2, "any", "rdma", "cpu"),
    ],
)
def test_all_else_may_start(ranks: int, require: str, nixl: str, device: str) -> None:
    _check_sharing(config(ranks, require, nixl, device))
