"""That kernels pass on the host says something: with a barrier less, they do not.

Barriers that only keep a later use of the same memory apart are not all in the list: with the
orders that are drawn here, some of them make no difference.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from baton_testing import (
    host_decode,
    host_latent,
    host_matmul,
    host_routes,
    host_scaled,
)
from baton_testing.host_cuda import (
    OPS,
    SAMPLER,
    HostLibrary,
    HostTorch,
    barriers,
    load_gpu_tests,
    rewritten,
)

gpu = load_gpu_tests("test_sampling_probabilities_keep_the_cpus_tokens")
SELECT = "select.cuh"


def functions_of(header: str) -> list[tuple[str, int]]:
    """Return a header's barriers, each with the name of the function that it is in."""
    lines = (OPS / "include" / "baton_ops" / header).read_text().splitlines()
    found = []
    for _, number in barriers([header]):
        above = reversed(lines[: number - 1])
        names = (re.match(r"__device__ .*?(\w+)\(", line) for line in above)
        found.append((next(m[1] for m in names if m), number))
    return found


def cut(torch: HostTorch) -> bytes:
    """Return what is left of two fixed rows."""
    logits = np.random.default_rng(7).standard_normal((2, 700)).astype(np.float32)
    logits[1] = np.round(logits[1])
    rows = gpu.Rows(torch, logits)
    rows.top_p[:], rows.top_k[:] = 0.7, 300
    return bytes(rows.run()[0].tobytes())


def differs(host: HostLibrary, torch: HostTorch, barrier: tuple[str, int], seed: int) -> bool:
    """Whether rows are cut differently, or not at all, without a barrier."""
    host.set(seed)
    wanted = cut(torch)
    host.set(seed, skipped=barrier)
    try:
        return cut(torch) != wanted
    except RuntimeError:
        return True


@pytest.mark.parametrize("function", ["BlockSumBefore", "EndOfTie", "Select"])
def test_a_cut_needs_its_barriers(host: HostLibrary, torch: HostTorch, function: str) -> None:
    numbers = [number for name, number in functions_of(SELECT) if name == function]
    assert numbers
    for number in numbers:
        assert any(differs(host, torch, (SELECT, number), seed) for seed in range(1, 9)), number


def test_with_all_barriers_the_order_of_threads_makes_no_difference(
    host: HostLibrary, torch: HostTorch
) -> None:
    assert not any(differs(host, torch, ("", 0), seed) for seed in range(1, 9))


UNITS = {
    "sampling": SAMPLER, "attention": host_decode.UNIT, "matmuls": host_matmul.UNIT,
    "fp8": host_scaled.TURNED, "mla": host_latent.HOPPER, "experts": host_routes.UNIT,
}  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_what_is_rewritten_stays_on_its_line(unit: str) -> None:
    """A barrier is passed by where its header has it."""
    n_headers = 0
    for path in (OPS / "include" / "baton_ops").glob("*.cuh"):
        try:
            text = UNITS[unit].rewrite(path.name, path.read_text())
        except NotImplementedError:  # another unit's
            continue
        n_headers += 1
        of_both = (both.split("\n") for both in (path.read_text(), text))
        for number, (old, new) in enumerate(zip(*of_both, strict=True), start=1):
            assert old.startswith("}") == new.startswith("}"), (path.name, number)
    assert n_headers > 20


def test_an_instruction_that_nothing_stands_for_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="elect"):
        rewritten('asm volatile("elect.sync %0;" : "=r"(x));')
