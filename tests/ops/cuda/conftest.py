"""Fixtures for the CUDA ops: the device or a reason to skip, poisoned runs, hard rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

import baton_ops
from baton_testing import hard_logits

POISON = -777
GUARD = 3
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is here: `make gpu-test` runs it by that."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def torch() -> ModuleType:
    """PyTorch with a CUDA device and a library that has CUDA kernels, or a skip that says why."""
    module = pytest.importorskip("torch", reason="PyTorch, which allocates on the GPU, is absent")
    if not module.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    try:
        baton_ops.workspace_bytes(module.zeros(1, 8, device="cuda"), 1)
    except RuntimeError as error:
        pytest.skip(f"baton_ops was built without CUDA kernels: {error}")
    if baton_ops.workspace_bytes(module.zeros(1, 8, device="cuda"), 1) == 0:
        pytest.skip("baton_ops was built without CUDA kernels")
    return module


class Run(NamedTuple):
    """A run's columns on the host and its workspace on the device."""

    columns: baton_ops.LogprobColumns
    workspace: Any


@pytest.fixture
def run_logprobs(torch: ModuleType) -> Callable[..., Run]:
    """`logprobs_into` on the device over poisoned outputs with a guard behind each."""

    def run(
        logits: Any,
        token: npt.NDArray[np.int32],
        k: npt.NDArray[np.int32],
        workspace: Any = None,
        **options: Any,
    ) -> Run:
        places = baton_ops.offsets(k)
        n_rows, n_topk = int(places.row[-1]), int(places.topk[-1])
        kinds = [
            (n_rows, torch.float32),
            (n_rows, torch.int32),
            (n_topk, torch.int32),
            (n_topk, torch.float32),
        ]
        out = [torch.full((n + GUARD,), POISON, dtype=d, device="cuda") for n, d in kinds]
        if workspace is None:
            size = baton_ops.workspace_bytes(logits, len(token))
            workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        on_device = {
            name: torch.as_tensor(value, device="cuda") if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        }
        baton_ops.logprobs_into(
            logits,
            torch.as_tensor(token, device="cuda"),
            torch.as_tensor(k, device="cuda"),
            tuple(out),
            offsets=tuple(torch.as_tensor(o, device="cuda") for o in places),
            workspace=workspace,
            **on_device,
        )
        host = [column.cpu().numpy() for column in out]
        for column, (n, _) in zip(host, kinds, strict=True):
            assert (column[n:] == POISON).all(), "wrote past the end"
            assert not (column[:n] == POISON).any(), "left an entry unwritten"
        columns = [column[:n] for column, (n, _) in zip(host, kinds, strict=True)]
        return Run(baton_ops.LogprobColumns(*columns), workspace)

    return run


@pytest.fixture
def hard_rows() -> Callable[[str, int, int], npt.NDArray[np.float32]]:
    """See `hard_logits.rows`."""
    return hard_logits.rows
