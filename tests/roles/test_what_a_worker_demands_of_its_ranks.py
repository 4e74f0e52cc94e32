"""A worker whose ranks have parts of its pool says so where KV is demanded to go by RDMA."""

from __future__ import annotations

import pytest

from baton_worker.config import ConfigError, EngineConfig, HandoffConfig, ModelConfig, ProcessConfig
from baton_worker.roles.process import _check_sharing


def config(ranks: int, require: str, nixl: str = "off") -> ProcessConfig:
    return ProcessConfig(
        model=ModelConfig("/models/m"),
        engine=EngineConfig(device="gpu", tensor_parallel_size=ranks),
        handoff=HandoffConfig(shared_dir="/pools", require=require, nixl=nixl),  # type: ignore[arg-type]
    )


def test_a_way_that_ranks_have_not_is_refused_by_field_and_value() -> None:
    wanted = "handoff.require is 'rdma', but engine.tensor_parallel_size is 2"
    with pytest.raises(ConfigError, match=wanted):
        _check_sharing(config(2, "rdma", "rdma"))


@pytest.mark.parametrize(("ranks", "require"), [(1, "nvlink"), (2, "nvlink"), (8, "any")])
def test_all_else_may_start(ranks: int, require: str) -> None:
    _check_sharing(config(ranks, require))
