"""What the host can see of a bad CUDA call, it refuses by name."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

import baton_ops


def arguments(torch: ModuleType) -> dict[str, Any]:
    """Return a correct call."""
    logits = torch.randn(2, 100, device="cuda")
    ints = torch.zeros(2, dtype=torch.int32, device="cuda")
    ends = torch.arange(3, dtype=torch.int32, device="cuda")
    return {
        "logits": logits,
        "token": ints,
        "k": ints,
        "out": (torch.zeros(2, device="cuda"), ints.clone(), ints[:0], torch.zeros(0).cuda()),
        "offsets": (ends, torch.zeros_like(ends)),
        "workspace": torch.zeros(
            baton_ops.workspace_bytes(logits, 2), dtype=torch.uint8, device="cuda"
        ),
    }


def test_a_correct_call_passes(torch: ModuleType) -> None:
    baton_ops.logprobs_into(**arguments(torch))
    torch.cuda.synchronize()


def test_no_workspace(torch: ModuleType) -> None:
    with pytest.raises(ValueError, match="workspace"):
        baton_ops.logprobs_into(**{**arguments(torch), "workspace": None})


def test_a_small_workspace(torch: ModuleType) -> None:
    call = arguments(torch)
    with pytest.raises(ValueError, match="workspace"):
        baton_ops.logprobs_into(**{**call, "workspace": call["workspace"][:-256]})


@pytest.mark.parametrize("name", ["token", "k"])
def test_an_argument_on_the_host(torch: ModuleType, name: str) -> None:
    call = arguments(torch)
    with pytest.raises(ValueError, match=name):
        baton_ops.logprobs_into(**{**call, name: call[name].cpu()})


def test_logits_of_integers(torch: ModuleType) -> None:
    call = arguments(torch)
    with pytest.raises(TypeError, match="logits"):
        baton_ops.logprobs_into(**{**call, "logits": call["logits"].int()})
