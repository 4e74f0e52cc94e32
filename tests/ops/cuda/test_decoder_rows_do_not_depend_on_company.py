"""A row of the decoder's row-wise ops has the same bits alone, among others, and unaligned."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from baton_ops import decoder

ROWS = 300
PARTS = [(0, 1), (299, 300), (7, 9), (3, 131)]


def random(torch: ModuleType, dtype: str, *shape: int) -> Any:
    return torch.randn(*shape, device="cuda").to(getattr(torch, dtype))


def shifted(torch: ModuleType, x: Any, by: int) -> Any:
    """The same rows in a wider matrix, `by` elements off."""
    wide = torch.zeros(x.shape[0], x.shape[1] + by + 3, dtype=x.dtype, device="cuda")
    wide[:, by : by + x.shape[1]] = x
    return wide[:, by : by + x.shape[1]]


def norm(weight: Any) -> Callable[[Any, Any], None]:
    return lambda x, out: decoder.add_norm_into(None, x, weight, 1e-6, out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", [7, 64, 100, 4096, 16384, 24_576])
@pytest.mark.parametrize("op", ["norm", "gate"])
def test_a_row_has_the_same_bits(torch: ModuleType, dtype: str, width: int, op: str) -> None:
    columns = width if op == "norm" else 2 * width
    call = norm(random(torch, dtype, width)) if op == "norm" else decoder.silu_mul_into
    x, whole = random(torch, dtype, ROWS, columns), random(torch, dtype, ROWS, width)
    call(x, whole)
    for start, stop in PARTS:
        part = torch.empty_like(whole[start:stop])
        call(x[start:stop], part)
        assert torch.equal(part, whole[start:stop])
    for by in (1, 4):
        off = shifted(torch, torch.zeros_like(whole), by)
        call(shifted(torch, x, by), off)
        assert torch.equal(off, whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_replays_as_a_graph(torch: ModuleType, dtype: str) -> None:
    """A chain of dependent launches, some of them early, gives what each gives when waited for."""
    table, weight = random(torch, dtype, 50, 256), random(torch, dtype, 256)
    up, down = random(torch, dtype, 512, 256) * 0.1, random(torch, dtype, 256, 256) * 0.1
    tokens = torch.randint(0, 50, (40,), device="cuda").int()
    x, normed, gated = (random(torch, dtype, 40, 256) for _ in range(3))
    gate_up, added = random(torch, dtype, 40, 512), random(torch, dtype, 40, 256)

    def chain(wait: Callable[[], None]) -> None:
        decoder.embed_into(table, tokens, x)
        wait()
        for layer in range(8):
            decoder.add_norm_into(added if layer else None, x, weight, 1e-6, normed)
            wait()
            decoder.matmul_into(normed, up, gate_up)
            wait()
            decoder.silu_mul_into(gate_up, gated)
            wait()
            decoder.matmul_into(gated, down, added)
            wait()

    chain(torch.cuda.synchronize)
    wanted = x.clone(), added.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(lambda: None)
    for _ in range(20):
        x.zero_()
        added.zero_()
        graph.replay()
        assert torch.equal(x, wanted[0])
        assert torch.equal(added, wanted[1])
