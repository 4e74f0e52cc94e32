"""Hopper's attention of decode on the host: near float64's, and the same bits for a query in any
company, whether it is a row of the products or a column, on any number of multiprocessors.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing import host_cuda, host_decode
from baton_testing.host_cuda import FIRST_FIRST
from baton_testing.host_decode import Call, HostDecode
from baton_testing.host_matmul import bf16, filled, fp32

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
        kernels.attend(Call(query, kv, 1, tables, contexts, DIM**-0.5, out), seed, processors)
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


NEEDED = [
    *((8, "decode_few.cuh", nth) for nth in (0, 1, 3, 4)),
    (8, "decode_work.cuh", 0),
    *((12, "decode_work.cuh", nth) for nth in (0, 1, 3)),
    (12, "decode_attention.cuh", 0),
]
"""Heads that share keys, and a header's barrier that their kernel needs. Two are not in the list:
one keeps the next split's scores off products, which are over here once any of their warps goes on,
one orders blocks, which here follow each other.
"""


@pytest.mark.parametrize(("heads_a_kv", "header", "nth"), NEEDED)
def test_a_missing_barrier_is_found(
    kernels: HostDecode, heads_a_kv: int, header: str, nth: int
) -> None:
    barriers = host_decode.barriers(header)
    assert len(barriers) == {"decode_few.cuh": 5, "decode_work.cuh": 4}.get(header, 1)
    text = Text(heads_a_kv)

    def differs(seed: int) -> bool:
        def attend() -> bytes:
            ends = [LENGTH, 0, 700, 130]
            return bytes(text.attend(kernels, ends, seed=seed, processors=10).tobytes())

        wanted = attend()
        kernels.skip((header, barriers[nth]))
        try:
            return attend() != wanted
        except RuntimeError:
            return True
        finally:
            kernels.skip()

    assert any(map(differs, (1, 2, FIRST_FIRST)))


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
