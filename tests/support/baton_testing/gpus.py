"""The GPUs of a machine, for tests that need some of them."""

from __future__ import annotations

import os
from typing import Any

import pytest


def _torch() -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch, which allocates on the GPU, is absent")
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    return torch


def gpu_name() -> str:
    """Return the id that no other GPU has of the first one that this process sees."""
    return str(_torch().cuda.get_device_properties(0).uuid)


def some_gpus(count: int) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES calls the first GPUs; skip where there are fewer, or where
    they are of two kinds.
    """
    torch = _torch()
    if (found := torch.cuda.device_count()) < count:
        pytest.skip(f"CUDA devices of this machine: {found}, needed: {count}")
    kinds = {torch.cuda.get_device_name(index) for index in range(count)}
    if len(kinds) > 1:
        pytest.skip(f"its first {count} GPUs are of two kinds: {sorted(kinds)}")
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return names.split(",")[:count]


def two_gpus() -> tuple[str, str]:
    """Return what CUDA_VISIBLE_DEVICES calls the first two GPUs; see `some_gpus`."""
    first, second = some_gpus(2)
    return first, second


def other_gpu() -> str:
    """Return what CUDA_VISIBLE_DEVICES calls the second GPU; see `two_gpus`."""
    return two_gpus()[1]
