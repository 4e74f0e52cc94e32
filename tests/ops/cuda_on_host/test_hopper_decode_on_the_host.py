"""Hopper's attention of decode and of prompts on the host: near float64's, and the same bits for a
query in any company, whether it is a row of the products or a column, on any number of
multiprocessors, whoever comes last.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing import host_cuda, host_decode
from baton_testing.host_cuda import FIRST_FIRST
from baton_testing.host_decode import Call, HostDecode
from baton_testing.host_matmul import bf16, filled, fp32
from baton_testing.host_orders import WARP, Order, each_last

Array = npt.NDArray[Any]

DIM, KV_HEADS, LAYERS, SPLIT = 128, 2, 2, 512
GUARD, NO_NUMBER = np.uint16(0x40E0), np.uint16(0x7FC0)
LENGTH = 2 * SPLIT + 300
"""Two splits, and two tiles and a part of one in the third."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostDecode:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("hopper_decode")
    return HostDecode(host_cuda.build(compiler, folder, host_decode.UNIT))


class Text:
    """Keys and values of a text, and queries of so many heads at its last positions."""

    def __init__(self, heads_a_kv: int) -> None:
        rng = np.random.default_rng(heads_a_kv)
        self.heads = heads_a_kv * KV_HEADS
        own = rng.standard_normal((LENGTH, 2, KV_HEADS, DIM)).astype(np.float32)
        self.own = bf16(own).reshape(own.shape)
        queries = rng.standard_normal((LENGTH, self.heads, DIM)).astype(np.float32)
        self.queries = bf16(queries).reshape(queries.shape)

    def attend(
        self,
        kernels: HostDecode,
        ends: list[int],
        q_len: int = 1,
        page: int = 16,
        seed: int = 1,
        processors: int = 9,
        kernel: Literal["decode", "prompt"] = "decode",
    ) -> Array:
        """Return [sequences, q_len, heads, DIM]; what is not a context's is no number."""
        width = -(-LENGTH // page)
        blocks = np.random.default_rng(seed).permutation(len(ends) * width) + 2
        tables = np.ascontiguousarray(blocks.reshape(-1, width), np.int32)
        kv = filled(NO_NUMBER, len(ends) * width + 2, LAYERS, 2, KV_HEADS, page, DIM)
        query = filled(NO_NUMBER, len(ends) * q_len, self.heads, DIM)
        for row, end in enumerate(ends):
            for at in range(end):
                kv[tables[row, at // page], 1, :, :, at % page] = self.own[at]
            if end:
                query[row * q_len : (row + 1) * q_len] = self.queries[end - q_len : end]
        out = filled(GUARD, *query.shape)
        contexts = np.array(ends, np.int32)
        call = Call(query, kv, 1, tables, contexts, DIM**-0.5, out)
        kernels.attend(call, seed, processors, kernel)
        return out.reshape(len(ends), q_len, self.heads, DIM)

    def exact(self, end: int) -> Array:
        """Return float64 of the query at a context's last position."""
        own = fp32(self.own[:end]).astype(np.float64)
        query = fp32(self.queries[end - 1]).astype(np.float64).reshape(KV_HEADS, -1, DIM)
        scores = np.einsum("khd,ckd->khc", query, own[:, 0]) * DIM**-0.5
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        found: Array = np.einsum("khc,ckd->khd", weights, own[:, 1]).reshape(-1, DIM)
        return found


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("heads_a_kv", [1, 5, 8, 9, 16])
def test_attention_is_near_fp64s(kernels: HostDecode, heads_a_kv: int, page: int) -> None:
    """Up to eight heads that share keys are columns of the products, more are rows."""
    text = Text(heads_a_kv)
    ends = [1, 17, 0, 127, 128, 129, SPLIT, SPLIT + 1, LENGTH]
    out = text.attend(kernels, ends, page=page)
    for row, end in enumerate(ends):
        if not end:
            assert (out[row] == GUARD).all(), "a sequence that is not there was written"
            continue
        wanted = text.exact(end)
        assert np.linalg.norm(fp32(out[row, 0]) - wanted) < 4e-3 * np.linalg.norm(wanted), end


@pytest.mark.parametrize("heads_a_kv", [2, 8])
@pytest.mark.parametrize("end", [4, 130, SPLIT + 2, LENGTH])
def test_a_query_has_the_same_bits_as_a_row_and_as_a_column(
    kernels: HostDecode, heads_a_kv: int, end: int
) -> None:
    """More queries of a sequence are more rows that share keys."""
    text = Text(heads_a_kv)
    alone = text.attend(kernels, [end])[0, 0]
    most = min(end, 32 // heads_a_kv)
    for q_len in range(2, most + 1):
        assert np.array_equal(text.attend(kernels, [end], q_len)[0, -1], alone), q_len


ANY = [Order()]
FIRST_WARP_LAST = [Order(range(WARP), are_warps_apart=True)]
"""What a product reads is given back by its first warp: without the others' the ring is safe."""
TOLD_TOO_EARLY = [
    Order(range(1, 128), block, is_once_told=True, is_side_by_side=True) for block in range(10)
]
NEEDED = [
    *((8, "decode_few.cuh", nth, ANY) for nth in (0, 1, 3, 4)),
    (8, "decode_few.cuh", 2, FIRST_WARP_LAST),
    (8, "decode_work.cuh", 0, ANY),
    *((12, "decode_work.cuh", nth, ANY) for nth in (0, 1, 3)),
    *((heads, "decode_work.cuh", 2, TOLD_TOO_EARLY) for heads in (8, 12)),
    (12, "decode_attention.cuh", 0, ANY),
]
"""Heads that share keys, a header's barrier that their kernel needs, and the orders that show it:
one keeps the next split's scores off products that other warps have not made yet, one what a block
has left before other blocks are told of it.
"""


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("heads_a_kv", "header", "nth", "orders"), NEEDED)
def test_a_missing_barrier_is_found(
    kernels: HostDecode, heads_a_kv: int, header: str, nth: int, orders: list[Order]
) -> None:
    barriers = host_decode.barriers(header)
    assert len(barriers) == {"decode_few.cuh": 5, "decode_work.cuh": 4}.get(header, 1)
    text = Text(heads_a_kv)

    def attend(seed: int, order: Order = ANY[0]) -> bytes:
        with kernels.ordered(order):
            found = text.attend(kernels, [LENGTH, 0, 700, 130], seed=seed, processors=10)
        return bytes(found.tobytes())

    def differs(seed: int, order: Order) -> bool:
        wanted = attend(seed)
        assert attend(seed, order) == wanted
        kernels.skip((header, barriers[nth]))
        try:
            return attend(seed, order) != wanted
        except RuntimeError:
            return True
        finally:
            kernels.skip()

    assert any(differs(seed, order) for seed in (1, 2, FIRST_FIRST) for order in orders)


@pytest.mark.slow
@pytest.mark.parametrize("heads_a_kv", [4, 12])
def test_whoever_comes_last_in_decode_changes_no_bit(kernels: HostDecode, heads_a_kv: int) -> None:
    """Of every block, or one of them; these run side by side and merge what others left."""
    text, ends = Text(heads_a_kv), [LENGTH, 0, 700]
    wanted = text.attend(kernels, ends)
    apart = [
        Order(range(WARP), are_copies_late=late, are_warps_apart=True) for late in (False, True)
    ]
    blocks = [Order(range(160), block, are_copies_late=True) for block in range(0, 13, 4)]
    for nth, order in enumerate((*each_last(160, seed=heads_a_kv), *apart, *blocks)):
        with kernels.ordered(replace(order, is_side_by_side=True)):
            found = text.attend(kernels, ends, seed=nth, processors=13)
        assert np.array_equal(found, wanted), order


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("heads_a_kv", [1, 5])
def test_a_prompts_queries_have_the_bits_that_decode_gives_them(
    kernels: HostDecode, heads_a_kv: int, page: int
) -> None:
    """Of two pieces of queries, and splits behind the first; a sequence that is not there."""
    text, q_len = Text(heads_a_kv), 131
    ends = [SPLIT + 140, 0, 140]
    out = text.attend(kernels, ends, q_len, page, kernel="prompt")
    assert (out[1] == GUARD).all(), "a sequence that is not there was written"
    for row in (0, 2):
        for nth in (0, 2, 127, 128, 130):
            alone = text.attend(kernels, [ends[row] - q_len + nth + 1])[0, 0]
            assert np.array_equal(out[row, nth], alone), (row, nth)


PROMPT = [SPLIT + 8]
OF_PROMPT = (5, 70)
"""Heads that share keys, and queries: ten works, of which a block takes two. They have two splits,
and end where no tile does.
"""


def prompt(kernels: HostDecode, text: Text, seed: int, order: Order = ANY[0]) -> Array:
    with kernels.ordered(order):
        return text.attend(kernels, PROMPT, OF_PROMPT[1], seed=seed, kernel="prompt")


@pytest.mark.slow
def test_whoever_comes_last_in_a_prompt_changes_no_bit(kernels: HostDecode) -> None:
    """The warp that loads, or of the warpgroups that take turns a thread, a warp or all."""
    text = Text(OF_PROMPT[0])
    wanted = prompt(kernels, text, seed=1)
    apart = [Order(range(at, at + WARP), are_warps_apart=True) for at in (128, 256)]
    for nth, order in enumerate((*each_last(384, seed=1, most=14), *apart)):
        assert np.array_equal(prompt(kernels, text, nth, order), wanted), order


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("fault", host_decode.FAULTS)
def test_a_planted_fault_of_prompts_is_found_by_who_comes_last(
    kernels: HostDecode, fault: str
) -> None:
    text = Text(OF_PROMPT[0])
    wanted = prompt(kernels, text, seed=1)

    def differs(order: Order) -> bool:
        try:
            with kernels.planted(fault):
                return not np.array_equal(prompt(kernels, text, 2, order), wanted)
        except RuntimeError:
            return True

    assert any(differs(Order(range(first, first + 128))) for first in (0, 128, 256))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("heads_a_kv", [4, 12])
@pytest.mark.parametrize("seed", [2, 3, FIRST_FIRST])
def test_neither_threads_blocks_nor_company_change_a_bit(
    kernels: HostDecode, seed: int, heads_a_kv: int
) -> None:
    text = Text(heads_a_kv)
    alone = {end: text.attend(kernels, [end])[0] for end in (LENGTH, 700)}
    for processors in (9, 10, 13):
        both = text.attend(kernels, [LENGTH, 0, 700], seed=seed, processors=processors)
        assert np.array_equal(both[0], alone[LENGTH])
        assert np.array_equal(both[2], alone[700])
