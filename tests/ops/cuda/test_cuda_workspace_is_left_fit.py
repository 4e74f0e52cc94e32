"""A call leaves its workspace fit for the next; bad offsets end a call and do not hang it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import baton_ops

ROWS, VOCAB = 40, 50_000


def arguments(torch: ModuleType, dtype: str) -> dict[str, Any]:
    """Rows of which some have no logprobs, with buffers for all of them."""
    k = (np.arange(ROWS, dtype=np.int32) % 9) - 1
    logits = torch.randn(ROWS, VOCAB, device="cuda").to(getattr(torch, dtype))
    ints = {"dtype": torch.int32, "device": "cuda"}
    columns = (
        torch.full((ROWS,), -777.0, device="cuda"),
        torch.full((ROWS,), -777, **ints),
        torch.full((ROWS * 8,), -777, **ints),
        torch.full((ROWS * 8,), -777.0, device="cuda"),
    )
    size = baton_ops.workspace_bytes(logits, ROWS)
    return {
        "logits": logits,
        "token": torch.arange(ROWS, **ints),
        "k": torch.as_tensor(k, device="cuda"),
        "out": columns,
        "offsets": tuple(torch.as_tensor(o, device="cuda") for o in baton_ops.offsets(k)),
        "workspace": torch.zeros(size, dtype=torch.uint8, device="cuda"),
    }


def launch(call: dict[str, Any]) -> None:
    """Run the op on keyword arguments."""
    call = dict(call)
    positional = [call.pop(name) for name in ("logits", "token", "k", "out")]
    baton_ops.logprobs_into(*positional, **call)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("indexed", [False, True])
def test_no_record_of_a_call_is_taken_for_one_of_the_next(
    torch: ModuleType, dtype: str, indexed: bool
) -> None:
    call = arguments(torch, dtype)
    if indexed:
        call["row_index"] = torch.arange(ROWS, dtype=torch.int32, device="cuda")
        call["num_rows"] = torch.tensor([ROWS], dtype=torch.int32, device="cuda")
    launch(call)
    first = [column.cpu().numpy().copy() for column in call["out"]]
    # A record that is still complete would be used before the scan has replaced it.
    call["logits"].neg_()
    launch(call)
    call["logits"].neg_()
    launch(call)
    for before, column in zip(first, call["out"], strict=True):
        assert before.tobytes() == column.cpu().numpy().tobytes()
    fresh = arguments(torch, dtype) | {"logits": call["logits"].neg()}
    reused = call | {"logits": fresh["logits"], "out": arguments(torch, dtype)["out"]}
    launch(fresh)
    launch(reused)
    for wanted, column in zip(fresh["out"], reused["out"], strict=True):
        assert wanted.cpu().numpy().tobytes() == column.cpu().numpy().tobytes()


def test_offsets_that_contradict_k_end(torch: ModuleType) -> None:
    call = arguments(torch, "bfloat16")
    row, topk = call["offsets"]
    # By these no row has outputs, so that nothing is scanned; by k all but a few do.
    launch(call | {"offsets": (torch.zeros_like(row), topk)})
    torch.cuda.synchronize()
    call["workspace"].zero_()
    launch(call)
    wanted = baton_ops.logprobs(
        call["logits"].float().cpu().numpy(), call["token"].cpu().numpy(), call["k"].cpu().numpy()
    )
    n = len(wanted.rank)
    np.testing.assert_array_equal(call["out"][1].cpu().numpy()[:n], wanted.rank)


def test_an_index_past_the_counted_rows_is_never_followed(torch: ModuleType) -> None:
    call = arguments(torch, "bfloat16")
    index = np.arange(ROWS, dtype=np.int32)
    index[10:] = 2**30
    k = call["k"].cpu().numpy()
    index[k < 0] = -(2**30)
    launch(
        call
        | {
            "row_index": torch.as_tensor(index, device="cuda"),
            "num_rows": torch.tensor([10], dtype=torch.int32, device="cuda"),
        }
    )
    torch.cuda.synchronize()
    wanted = baton_ops.logprobs(
        call["logits"][:10].float().cpu().numpy(), call["token"].cpu().numpy()[:10], k[:10]
    )
    n = len(wanted.rank)
    np.testing.assert_array_equal(call["out"][1].cpu().numpy()[:n], wanted.rank)
    assert (call["out"][1].cpu().numpy()[n:] == -777).all()


@pytest.mark.parametrize("rows", [1, 8, 64, 700])
def test_a_graph_gives_the_bits_of_eager_calls(
    torch: ModuleType, run_logprobs: Callable[..., Any], rows: int
) -> None:
    logits = torch.randn(rows, 32_000, device="cuda").bfloat16()
    token = np.arange(rows, dtype=np.int32)
    k = (np.arange(rows, dtype=np.int32) * 7) % 21
    eager = run_logprobs(logits, token, k).columns
    places = baton_ops.offsets(k)
    out = tuple(torch.empty(len(c), dtype=d, device="cuda") for c, d in zip(
        eager, (torch.float32, torch.int32, torch.int32, torch.float32), strict=True))  # fmt: skip
    call = {
        "logits": logits,
        "token": torch.as_tensor(token, device="cuda"),
        "k": torch.as_tensor(k, device="cuda"),
        "out": out,
        "offsets": tuple(torch.as_tensor(o, device="cuda") for o in places),
        "workspace": torch.zeros(
            baton_ops.workspace_bytes(logits, rows), dtype=torch.uint8, device="cuda"
        ),
    }
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(20):
                launch(call)
        for column in out:
            column.fill_(-777)
        graph.replay()
        stream.synchronize()
    for wanted, column in zip(eager, out, strict=True):
        assert wanted.tobytes() == column.cpu().numpy().tobytes()
