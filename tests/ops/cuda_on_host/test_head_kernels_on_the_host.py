"""Heads are biased, normed, rotated and stored as fp64 does it, by every kernel, on the host.

The three kernels that do it (a warp a head, eight lanes a head, heads of any size) are chosen by
the head's size, the element and the number of heads; here each is made to run.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing import host_cuda
from baton_testing.exactness.rounding import nearest
from baton_testing.host_heads import UNIT, Call, HostHeads

Array = npt.NDArray[Any]

EPS, LAYERS, BLOCK_SIZE, HEADS, KV_HEADS = 1e-6, 2, 4, 4, 2
SEQUENCE = [0, 0, 1, -1, 1, 1, 0, 1, 2]
POSITION = [0, 5, 3, 2, 19, 20, 6, 12, 1]
TABLES = [[2, 3, 0, 4, 5], [6, 7, 8, 0, 9]]
MANY = 800
"""Tokens of which a warp, or eight lanes, takes several heads."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostHeads:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    return HostHeads(host_cuda.build(compiler, tmp_path_factory.mktemp("heads"), UNIT))


def on_vector(array: Array) -> Array:
    """Return a copy at a place where 16 bytes may be read at once."""
    raw = np.zeros(array.nbytes + 32, np.uint8)
    start = -raw.ctypes.data % 16
    made = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


class Case:
    """A call, and what fp64 says of it. `sizes`: query heads, and those of keys."""

    def __init__(
        self, dtype: str, head_dim: int, style: str, norms: bool, bias: bool, n_many: int = 0
    ) -> None:
        self._rng = np.random.default_rng(head_dim + 7 * norms + 11 * bias + n_many)
        self._is_wide = dtype == "float32"
        self.head_dim = head_dim
        sequence = np.array(SEQUENCE if not n_many else [0] * n_many, np.int32)
        position = np.array(POSITION if not n_many else range(n_many), np.int32)
        tables = np.array(TABLES, np.int32)
        if n_many:
            tables = np.arange(2, 2 + n_many // BLOCK_SIZE, dtype=np.int32)[None]
        angles = self._rng.uniform(0, 2 * np.pi, (max(32, n_many), head_dim // 2))
        width = (HEADS + 2 * KV_HEADS) * head_dim
        pool = (int(tables.max()) + 3, LAYERS, 2, KV_HEADS, BLOCK_SIZE, head_dim)
        self.call = Call(
            qkv=self._random(len(sequence), width),
            bias=self._random(width) if bias else None,
            norms=(self._random(head_dim), self._random(head_dim)) if norms else None,
            eps=EPS,
            cos=on_vector(np.cos(angles).astype(np.float32)),
            sin=on_vector(np.sin(angles).astype(np.float32)),
            is_interleaved=style == "interleaved",
            sequence=sequence,
            position=position,
            tables=tables,
            kv=self._random(*pool),
            layer=1,
            query=self._random(len(sequence), HEADS, head_dim),
        )

    def _random(self, *shape: int) -> Array:
        values = self._rng.normal(size=shape).astype(np.float32)
        bits = nearest(values).reshape(shape).view(np.uint32) >> 16
        return on_vector(values if self._is_wide else bits.astype(np.uint16))

    def values(self, array: Array) -> Array:
        """Return what E holds, as fp64."""
        if array.dtype == np.uint16:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float64)

    def head(self, token: int, head: int) -> Array:
        """A head as fp64 has it: values are only biased."""
        call, part = self.call, slice(head * self.head_dim, (head + 1) * self.head_dim)
        x = self.values(call.qkv)[token, part]
        if call.bias is not None:
            x = x + self.values(call.bias)[part]
        if head >= HEADS + KV_HEADS:
            return x
        if call.norms is not None:
            weight = self.values(call.norms[head >= HEADS])
            x = x / np.sqrt(np.mean(x * x) + EPS) * weight
        at, half = int(call.position[token]), self.head_dim // 2
        pairs = (slice(None, half), slice(half, None))
        if call.is_interleaved:
            pairs = (slice(0, None, 2), slice(1, None, 2))
        cos, sin = call.cos[at].astype(np.float64), call.sin[at].astype(np.float64)
        out = np.empty_like(x)
        out[pairs[0]] = x[pairs[0]] * cos - x[pairs[1]] * sin
        out[pairs[1]] = x[pairs[1]] * cos + x[pairs[0]] * sin
        return out

    def slot(self, token: int) -> tuple[int, int]:
        """Block and offset of a token's key; block 1 is the trash."""
        at, row = int(self.call.position[token]), int(self.call.sequence[token])
        column = at // BLOCK_SIZE
        block = self.call.tables[row, column] if column < self.call.tables.shape[1] else 0
        return int(block) or 1, at % BLOCK_SIZE

    def close(self, found: Array, wanted: Array) -> None:
        relative = (2**-8 if found.dtype == np.uint16 else 0) + 4e-6
        np.testing.assert_allclose(self.values(found), wanted, rtol=relative, atol=2e-5)

    def check(self, tokens: Any) -> None:
        call = self.call
        for token in tokens:
            for head in range(HEADS):
                self.close(call.query[token, head], self.head(token, head))
            block, offset = self.slot(token)
            if block == 1:
                continue
            for head in range(KV_HEADS):
                key, value = call.kv[block, 1, :, head, offset]
                self.close(key, self.head(token, HEADS + head))
                self.close(value, self.head(token, HEADS + KV_HEADS + head))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [2, 6, 16, 64, 128, 192, 300])
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_each_head_is_fp64s(
    kernels: HostHeads, dtype: str, head_dim: int, style: str, norms: bool, bias: bool
) -> None:
    case = Case(dtype, head_dim, style, norms, bias)
    query, kv = case.call.query.copy(), case.call.kv.copy()
    kernels.run(case.call, seed=head_dim)
    there = [n for n, row in enumerate(SEQUENCE) if 0 <= row < len(TABLES)]
    case.check(there)
    absent = sorted(set(range(len(SEQUENCE))) - set(there))
    np.testing.assert_array_equal(case.call.query[absent], query[absent])
    np.testing.assert_array_equal(case.call.kv[:, 0], kv[:, 0], "another layer was written")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "head_dim", "n"), [("float32", 6, MANY), ("bfloat16", 128, 4 * MANY)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_many_heads_have_the_bits_of_few(
    kernels: HostHeads, dtype: str, head_dim: int, n: int, bias: bool
) -> None:
    """From so many on a warp, or eight lanes, takes several heads of a token."""
    case = Case(dtype, head_dim, "half", True, bias, n_many=n)
    kernels.run(case.call, seed=1)
    case.check(range(0, n, 97))
    few = case.call._replace(
        qkv=on_vector(case.call.qkv[40:44]),
        sequence=case.call.sequence[40:44].copy(),
        position=case.call.position[40:44].copy(),
        query=np.zeros_like(case.call.query[40:44]),
        kv=np.zeros_like(case.call.kv),
    )
    few = few._replace(query=on_vector(few.query), kv=on_vector(few.kv))
    kernels.run(few, seed=2)
    np.testing.assert_array_equal(few.query, case.call.query[40:44])
    block = int(few.tables[0, 40 // BLOCK_SIZE])
    np.testing.assert_array_equal(few.kv[block, 1], case.call.kv[block, 1])


@pytest.mark.parametrize("head_dim", [16, 128, 192])
def test_a_bias_of_zeros_changes_no_bit(kernels: HostHeads, head_dim: int) -> None:
    """The kernels with a bias are others than those without."""
    without = Case("bfloat16", head_dim, "half", True, False)
    query, kv = without.call.query.copy(), without.call.kv.copy()
    zeros = on_vector(np.zeros(without.call.qkv.shape[1], np.uint16))
    kernels.run(without.call, seed=3)
    also = without.call._replace(bias=zeros, query=on_vector(query), kv=on_vector(kv))
    kernels.run(also, seed=4)
    np.testing.assert_array_equal(also.query, without.call.query)
    # Several tokens write to block 1, the trash, in the order that was drawn.
    np.testing.assert_array_equal(also.kv[2:], without.call.kv[2:])
