"""Hopper's attention to compressed rows on the host: near float64's, and the same bits for a token
in any company and blocks, on any number of multiprocessors, whether its splits are cut or not.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing import host_cuda, host_latent
from baton_testing.host_cuda import FIRST_FIRST
from baton_testing.host_latent import HostHopperLatent
from baton_testing.host_matmul import bf16, filled, fp32
from baton_testing.host_orders import WARP, Order, each_last

Array = npt.NDArray[Any]

ROW, VALUE, LAYERS, SPLIT = 576, 512, 2, 1024
SCALE = 192**-0.5
GUARD, NO_NUMBER = np.uint16(0x40E0), np.uint16(0x7FC0)
LENGTH = 2100
"""Two splits, and a part of a tile in the third."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostHopperLatent:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("hopper_latent")
    return HostHopperLatent(host_cuda.build(compiler, folder, host_latent.HOPPER))


class Launch(NamedTuple):
    """How a step is laid out and computed; none of it may change a bit."""

    block_size: int = 64
    processors: int = 9
    seed: int = 1
    scratch_bytes: int | None = None


class Paged:
    """A text's rows and queries at every position."""

    def __init__(self, kernels: HostHopperLatent, heads: int, length: int) -> None:
        self.kernels, self.heads, self.length = kernels, heads, length
        rng = np.random.default_rng([heads, length])
        self.rows = bf16(rng.standard_normal((length, ROW)).astype(np.float32))
        self.queries = bf16(rng.standard_normal((length, heads, ROW)).astype(np.float32))

    def attend(self, ends: list[int], q_len: int, how: Launch) -> Array:
        """Return [sequences, q_len, heads, VALUE]; what is not a context's is no number."""
        width = -(-self.length // how.block_size)
        blocks = np.random.default_rng(how.seed).permutation(len(ends) * width) + 2
        tables = np.ascontiguousarray(blocks.reshape(-1, width), np.int32)
        kv = filled(NO_NUMBER, len(ends) * width + 2, LAYERS, 1, 1, how.block_size, ROW)
        query = filled(NO_NUMBER, len(ends) * q_len, self.heads, ROW)
        for row, end in enumerate(ends):
            for start in range(0, end, how.block_size):
                part = self.rows[start : min(end, start + how.block_size)]
                kv[tables[row, start // how.block_size], 1, 0, 0, : len(part)] = part
            if end:
                query[row * q_len : (row + 1) * q_len] = self.queries[end - q_len : end]
        out = filled(GUARD, len(query), self.heads, VALUE)
        size = self.kernels.scratch_bytes(self.heads, len(query), self.length)
        scratch = filled(NO_NUMBER, (size if how.scratch_bytes is None else how.scratch_bytes) // 2)
        contexts = np.array(ends, np.int32)
        self.kernels.set(how.seed, how.processors)
        self.kernels.attend(query, kv, 1, tables, contexts, SCALE, out, scratch)
        return out.reshape(len(ends), q_len, self.heads, VALUE)

    def exact(self, position: int) -> Array:
        rows = fp32(self.rows[: position + 1]).astype(np.float64)
        scores = fp32(self.queries[position]).astype(np.float64) @ rows.T * SCALE
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        found: Array = weights @ rows[:, :VALUE] / weights.sum(axis=1)[:, None]
        return found


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("heads", [16, 64, 80])
def test_attention_is_near_fp64s(kernels: HostHopperLatent, heads: int, block_size: int) -> None:
    """Weights are in bf16. Tiles end within blocks and blocks within tiles."""
    paged = Paged(kernels, heads, 300)
    ends = [1, 63, 0, 64, 65, 130, 300]
    out = paged.attend(ends, 1, Launch(block_size))
    for row, end in enumerate(ends):
        if not end:
            assert (out[row] == GUARD).all(), "a sequence that is not there was written"
            continue
        wanted = paged.exact(end - 1)
        assert np.linalg.norm(fp32(out[row, 0]) - wanted) < 4e-3 * np.linalg.norm(wanted)


@pytest.fixture(scope="module")
def text(kernels: HostHopperLatent) -> tuple[Paged, dict[int, Array]]:
    """A text of several splits, and outputs at some positions, each computed alone."""
    paged = Paged(kernels, 80, LENGTH)
    ends = (3, SPLIT, SPLIT + 1, 2 * SPLIT, LENGTH - 1, LENGTH)
    return paged, {end: paged.attend([end], 1, Launch())[0, 0] for end in ends}


@pytest.mark.slow
def test_splits_are_merged_to_what_fp64_has(text: tuple[Paged, dict[int, Array]]) -> None:
    paged, alone = text
    for end, found in alone.items():
        wanted = paged.exact(end - 1)
        assert np.linalg.norm(fp32(found) - wanted) < 4e-3 * np.linalg.norm(wanted), end


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        Launch(16, 9, seed=2),
        Launch(128, 13, seed=3),
        pytest.param(Launch(64, 40, seed=4), id="each-split-on-a-processor"),
        pytest.param(Launch(64, 24, seed=5, scratch_bytes=200 * 200_000), id="more-memory"),
        pytest.param(Launch(64, 40, seed=6, scratch_bytes=140 * 131_072), id="lists-are-whole"),
    ],
)
def test_a_token_has_the_same_bits_however_its_splits_are_cut(
    text: tuple[Paged, dict[int, Array]], how: Launch
) -> None:
    paged, alone = text
    ends = [LENGTH, 0, SPLIT + 1, 2 * SPLIT, 3, LENGTH - 1, SPLIT]
    out = paged.attend(ends, 1, how)
    for row, end in enumerate(ends):
        if end:
            np.testing.assert_array_equal(out[row, 0], alone[end], err_msg=str(end))


@pytest.mark.slow
@pytest.mark.parametrize("processors", [9, 40])
def test_drafts_and_prompts_have_a_single_tokens_bits(
    text: tuple[Paged, dict[int, Array]], processors: int
) -> None:
    paged, alone = text
    out = paged.attend([LENGTH, SPLIT + 1], 2, Launch(32, processors))
    np.testing.assert_array_equal(out[0, 1], alone[LENGTH])
    np.testing.assert_array_equal(out[0, 0], alone[LENGTH - 1])
    np.testing.assert_array_equal(out[1, 1], alone[SPLIT + 1])
    np.testing.assert_array_equal(out[1, 0], alone[SPLIT])


@pytest.mark.slow
def test_more_tokens_than_may_be_cut_have_the_same_bits(kernels: HostHopperLatent) -> None:
    paged = Paged(kernels, 16, 300)
    prompt = paged.attend([300], 300, Launch(64, 50))[0]
    for end in (1, 64, 65, 299, 300):
        alone = paged.attend([end], 1, Launch())[0, 0]
        np.testing.assert_array_equal(prompt[end - 1], alone, err_msg=str(end))


@pytest.mark.slow
def test_a_warpgroup_that_runs_ahead_waits_to_be_heard(kernels: HostHopperLatent) -> None:
    """Contexts of one tile are the first warpgroup's alone, but for half of their values."""
    paged = Paged(kernels, 16, 60)
    ends = [*range(1, 61)]
    ahead = paged.attend(ends, 1, Launch(seed=FIRST_FIRST))
    np.testing.assert_array_equal(ahead, paged.attend(ends, 1, Launch()))


ENDS = [SPLIT + 200, 0, 70, 140, 65, 20, 30, 40, 50, 60, 64]
"""Of two splits, of some tiles, and of one, which are the first warpgroup's: a block takes two."""


@pytest.fixture(scope="module")
def few(kernels: HostHopperLatent) -> tuple[Paged, Array]:
    """A text of few heads, and outputs at some positions."""
    paged = Paged(kernels, 16, SPLIT + 200)
    return paged, paged.attend(ENDS, 1, Launch())


def differs(few: tuple[Paged, Array], order: Order, seed: int) -> bool:
    paged, wanted = few
    with paged.kernels.ordered(order):
        try:
            return not np.array_equal(paged.attend(ENDS, 1, Launch(seed=seed)), wanted)
        except RuntimeError:
            return True


@pytest.mark.slow
def test_whoever_comes_last_changes_no_bit(few: tuple[Paged, Array]) -> None:
    """A stage is given back by every warp that has read it: their products may end apart."""
    orders = each_last(288, seed=1, most=12)
    apart = [replace(order, are_warps_apart=True) for order in each_last(288, seed=2, most=6)]
    assert [o for seed, o in enumerate((*orders, *apart)) if differs(few, o, seed)] == []


OF_WHO_IS_LAST = {
    "weights are heard before they are told": Order(range(128)),
    "weights are told where other warps' products still read": Order(
        range(WARP), are_warps_apart=True
    ),
    "one warpgroup gives queries back for both": Order(range(128, 256)),
}
"""By fault: the order that shows it."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", host_latent.FAULTS)
def test_a_planted_fault_is_found_by_who_comes_last(
    kernels: HostHopperLatent, few: tuple[Paged, Array], fault: str
) -> None:
    with kernels.planted(fault):
        assert differs(few, OF_WHO_IS_LAST[fault], seed=2)


def test_a_changed_key_would_be_seen(kernels: HostHopperLatent) -> None:
    """The comparisons can fail: one key of a hundred is off by a little."""
    paged = Paged(kernels, 16, 100)
    before = paged.attend([100], 1, Launch())
    paged.rows[70, 3] ^= 64
    assert (before != paged.attend([100], 1, Launch())).any()


@pytest.mark.slow
def test_too_little_scratch_is_refused(kernels: HostHopperLatent) -> None:
    paged = Paged(kernels, 16, LENGTH)
    with pytest.raises(RuntimeError, match="scratch is too small"):
        paged.attend([LENGTH], 1, Launch(scratch_bytes=4096))
