"""Multi-head latent attention on the host: each kernel computes what NumPy's double says, and a
token has the same bits in any company, any blocks and any order of threads.
"""

from __future__ import annotations

import os
import shutil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton_testing import host_cuda, host_latent
from baton_testing.host_latent import HostLatent
from baton_testing.host_matmul import bf16, fp32
from baton_testing.host_orders import Order, each_last
from baton_testing.numpy_latent import NumpyLatentKernels
from baton_worker.engine.backends.device.operands import Places, Rotation
from baton_worker.engine.model.mla import Mla

Array = npt.NDArray[Any]

EPS, LAYERS, BLOCK_SIZE, POSITIONS = 1e-6, 2, 4, 32
SEQUENCE = [0, 0, 1, -1, 1, 1, 0, 1, 2]
POSITION = [0, 5, 3, 2, 19, 20, 6, 12, 1]
TABLES = [[2, 3, 0, 4, 5], [6, 7, 8, 0, 9]]
GUARD = 7.0


class Model(NamedTuple):
    """Sizes, and how many heads."""

    mla: Mla
    heads: int

    @property
    def kv_up_shape(self) -> tuple[int, int]:
        return self.heads * self.mla.unfolded_size, self.mla.kv_rank


def model(heads: int, kv_rank: int, nope: int, rope: int, value: int) -> Model:
    return Model(Mla(0, kv_rank, nope, rope, value, (nope + rope) ** -0.5), heads)


MODELS = {
    "small": model(4, 32, 16, 8, 16),
    "odd": model(3, 30, 5, 6, 7),
    "nothing_wide": model(2, 9, 3, 2, 1),
    "deepseek_v3s_heads": model(4, 512, 128, 64, 128),
    "other_heads": model(3, 256, 192, 32, 64),
}
TENSOR_CORES = {
    f"{heads}_of_deepseek_v3s_heads": model(heads, 512, 128, 64, 128) for heads in (48, 96, 192)
}
"""What tensor cores attend to, in bf16: 16, 32 and 64 heads a block, three blocks a token."""
OF_MODELS = pytest.mark.parametrize("name", MODELS)
OF_TYPES = pytest.mark.parametrize("is_bf16", [False, True], ids=["fp32", "bf16"])
OF_STYLES = pytest.mark.parametrize("style", ["half", "interleaved"])
DOUBLE: Any = NumpyLatentKernels(lambda work, *arguments: work(*arguments))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostLatent:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("latent")
    found = HostLatent(host_cuda.build(compiler, folder, host_latent.UNIT))
    found.set(seed=1)
    return found


def on_vector(array: Array) -> Array:
    """Return a copy at a place where 16 bytes may be read at once."""
    raw = np.zeros(array.nbytes + 32, np.uint8)
    start = -raw.ctypes.data % 16
    made = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def drawn(seed: int, is_bf16: bool, *shape: int) -> Array:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)
    return on_vector(bf16(values) if is_bf16 else values)


def filled(is_bf16: bool, *shape: int) -> Array:
    values = np.full(shape, GUARD, np.float32)
    return on_vector(bf16(values) if is_bf16 else values)


def plain(values: Array) -> Array:
    """Return what E holds, as float64, which NumPy's double takes too."""
    return (fp32(values) if values.dtype == np.uint16 else values).astype(np.float64)


def close(found: Array, wanted: Array, of: float = 1.0) -> None:
    """`of`: how large what is summed may be."""
    relative = (2**-8 if found.dtype == np.uint16 else 0) + 4e-6
    np.testing.assert_allclose(plain(found), wanted, rtol=relative, atol=2e-5 * of)


@OF_MODELS
@OF_TYPES
@pytest.mark.parametrize("tokens", [1, 8, 9, 70])
def test_queries_are_folded_and_values_unfolded(
    kernels: HostLatent, name: str, is_bf16: bool, tokens: int
) -> None:
    """In tiles for few tokens and for many, of which a token's bits tell nothing."""
    mla, heads = MODELS[name]
    kv_up = drawn(1, is_bf16, *MODELS[name].kv_up_shape)
    queries = drawn(2, is_bf16, tokens, heads * mla.query_size + 8)[:, : heads * mla.query_size]
    folded, wanted = (make(tokens, heads, mla.row_size) for make in (guarded(is_bf16), guarded()))
    kernels.set(seed=tokens)
    kernels.fold(queries, kv_up, mla, folded)
    DOUBLE.fold(plain(queries), plain(kv_up), mla, wanted)
    close(folded, wanted, of=mla.nope_size**0.5)
    assert (plain(folded)[..., mla.kv_rank :] == GUARD).all(), "what rotates is another's"

    attended = drawn(3, is_bf16, tokens, heads, mla.kv_rank)
    wide = filled(is_bf16, tokens, heads * mla.value_size + 8)
    values, made = wide[:, : heads * mla.value_size], np.zeros((tokens, heads * mla.value_size))
    kernels.unfold(attended, kv_up, mla, values)
    DOUBLE.unfold(plain(attended), plain(kv_up), mla, made)
    close(values, made, of=mla.kv_rank**0.5)
    assert (plain(wide)[:, heads * mla.value_size :] == GUARD).all()

    for token in {0, tokens // 2, tokens - 1}:
        only = slice(token, token + 1)
        alone = filled(is_bf16, 1, heads, mla.row_size)
        kernels.set(seed=1000 + token)
        kernels.fold(queries[only], kv_up, mla, alone)
        np.testing.assert_array_equal(alone[0], folded[token])
        one = filled(is_bf16, 1, heads * mla.value_size)
        kernels.unfold(attended[only], kv_up, mla, one)
        np.testing.assert_array_equal(one[0], values[token])


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [9, 33])
def test_whoever_comes_last_in_folding_changes_no_bit(kernels: HostLatent, tokens: int) -> None:
    """By tensor cores, whose tiles come through a ring of two; without its barrier one would."""
    mla, heads = MODELS["other_heads"]
    kv_up = drawn(1, True, *MODELS["other_heads"].kv_up_shape)
    queries = drawn(2, True, tokens, heads * mla.query_size)
    attended = drawn(3, True, tokens, heads, mla.kv_rank)

    def made(order: Order) -> bytes:
        folded = filled(True, tokens, heads, mla.row_size)
        values = filled(True, tokens, heads * mla.value_size)
        with kernels.ordered(order):
            kernels.fold(queries, kv_up, mla, folded)
            kernels.unfold(attended, kv_up, mla, values)
        return bytes(folded.tobytes() + values.tobytes())

    wanted = made(Order())
    orders = each_last(256, seed=tokens, most=2)
    assert [order for order in orders if made(order) != wanted] == []
    kernels.skip(host_cuda.barriers(["latent_mma.cuh"])[0])
    try:
        assert [order for order in orders if made(order) != wanted]
    finally:
        kernels.skip()


def guarded(is_bf16: bool | None = None) -> Any:
    """Return what makes tensors of guards, of E or for NumPy's double."""
    if is_bf16 is None:
        return lambda *shape: np.full(shape, GUARD)
    return lambda *shape: filled(is_bf16, *shape)


def test_sums_are_of_ranges_in_ascending_order(kernels: HostLatent) -> None:
    """The order that other products have, so that none depends on a tile's shape."""
    mla, heads = MODELS["deepseek_v3s_heads"]
    kv_up = drawn(1, False, *MODELS["deepseek_v3s_heads"].kv_up_shape)
    attended = drawn(2, False, 2, heads, mla.kv_rank)
    out = filled(False, 2, heads * mla.value_size)
    kernels.unfold(attended, kv_up, mla, out)
    matrices = kv_up.reshape(heads, mla.unfolded_size, mla.kv_rank)[:, mla.nope_size :]
    wanted = np.zeros((2, heads, mla.value_size), np.float32)
    for start in range(0, mla.kv_rank, 128):
        total = np.zeros_like(wanted)
        for k in range(start, start + 128):  # a float64 holds a product of float32s
            product = attended[:, :, None, k].astype(np.float64) * matrices[None, :, :, k]
            total = (total + product).astype(np.float32)
        wanted += total
    np.testing.assert_array_equal(out, wanted.reshape(out.shape))


class Placed:
    """Tokens of two sequences, padding among them, some without a block of their own."""

    def __init__(self, mla: Mla, style: Any) -> None:
        angles = np.random.default_rng(0).uniform(0, 2 * np.pi, (POSITIONS, mla.rope_size // 2))
        cos, sin = (on_vector(of(angles).astype(np.float32)) for of in (np.cos, np.sin))
        self.rotation = Rotation(None, EPS, cos, sin, style)
        ints = (np.array(values, np.int32) for values in (SEQUENCE, POSITION, TABLES))
        self.places = Places(*ints)
        self.there = [n for n, row in enumerate(SEQUENCE) if 0 <= row < len(TABLES)]

    @property
    def known(self) -> Places:
        """Places as NumPy's double takes them: who is not there is padding."""
        there = np.isin(np.arange(len(SEQUENCE)), self.there)
        return self.places._replace(sequence=np.where(there, self.places.sequence, -1))


@OF_MODELS
@OF_TYPES
@OF_STYLES
def test_queries_are_rotated_and_padding_is_left_alone(
    kernels: HostLatent, name: str, is_bf16: bool, style: str
) -> None:
    mla, heads = MODELS[name]
    placed, tokens = Placed(mla, style), len(SEQUENCE)
    queries = drawn(2, is_bf16, tokens, heads * mla.query_size + 8)[:, : heads * mla.query_size]
    query = filled(is_bf16, tokens, heads, mla.row_size)
    wanted = np.full(query.shape, GUARD)
    kernels.rotate(queries, placed.rotation, placed.places, mla, query)
    DOUBLE.rotate(plain(queries), placed.rotation, placed.known, mla, wanted)
    close(query, wanted)
    assert (plain(query)[3] == GUARD).all(), "padding was written"
    assert (plain(query)[..., : mla.kv_rank] == GUARD).all(), "what is folded is another's"


@OF_MODELS
@OF_TYPES
@OF_STYLES
def test_rows_are_normed_rotated_and_kept_in_their_own_blocks(
    kernels: HostLatent, name: str, is_bf16: bool, style: str
) -> None:
    mla, _ = MODELS[name]
    placed = Placed(mla, style)
    row = drawn(2, is_bf16, len(SEQUENCE), mla.row_size + 8)[:, : mla.row_size]
    norm = drawn(3, is_bf16, mla.kv_rank)
    kv = filled(is_bf16, 12, LAYERS, 1, 1, BLOCK_SIZE, mla.row_size)
    wanted = np.full(kv.shape, GUARD)
    kernels.store(row, norm, placed.rotation, placed.places, kv, 1)
    given = (plain(row), plain(norm), placed.rotation, placed.known, wanted, 1)
    DOUBLE.store(*given)
    # Several tokens write to block 1, the trash, in no order.
    own = [n for n in range(12) if n != 1]
    close(kv[own], wanted[own])
    assert (plain(kv)[1, 1] != GUARD).any()
    assert (plain(kv)[:, 0] == GUARD).all(), "another layer was written"
    for token in placed.there:
        alone = filled(is_bf16, *kv.shape)
        only = Places(
            placed.places.sequence[token : token + 1].copy(),
            placed.places.position[token : token + 1].copy(),
            placed.places.tables,
        )
        kernels.set(seed=token)
        kernels.store(row[token : token + 1], norm, placed.rotation, only, alone, 1)
        column, offset = divmod(POSITION[token], BLOCK_SIZE)
        blocks = TABLES[SEQUENCE[token]]
        if column < len(blocks) and blocks[column]:
            place = (blocks[column], 1, 0, 0, offset)
            np.testing.assert_array_equal(alone[place], kv[place])


class Paged:
    """One text's rows and queries at every position; each draw of blocks is a pool."""

    def __init__(self, name: str, is_bf16: bool, length: int) -> None:
        self.mla, self.heads = (MODELS | TENSOR_CORES)[name]
        self.length = length
        self.rows = drawn(1, is_bf16, length, self.mla.row_size)
        self.queries = drawn(2, is_bf16, length, self.heads, self.mla.row_size)

    def attend(
        self, kernels: HostLatent, ends: list[int], q_len: int, seed: int, block_size: int = 4
    ) -> Array:
        """Return [sequences, q_len, heads, kv_rank]: of each, its last queries before its end.

        An end of 0: the sequence is not there, and its output stays a guard.
        """
        rng = np.random.default_rng(seed)
        width, is_bf16 = -(-self.length // block_size) + 1, self.rows.dtype == np.uint16
        tables = (rng.permutation(len(ends) * width) + 2).astype(np.int32).reshape(-1, width)
        kv = filled(is_bf16, len(ends) * width + 2, LAYERS, 1, 1, block_size, self.mla.row_size)
        kv[...] = np.uint16(0x7FC0) if is_bf16 else np.nan  # what is not a context's
        query = filled(is_bf16, len(ends) * q_len, self.heads, self.mla.row_size)
        for row, end in enumerate(ends):
            for position in range(end):
                block = tables[row, position // block_size]
                kv[block, 1, 0, 0, position % block_size] = self.rows[position]
            if end:
                query[row * q_len : (row + 1) * q_len] = self.queries[end - q_len : end]
        out = filled(is_bf16, len(query), self.heads, self.mla.kv_rank)
        kernels.set(seed)
        contexts = np.array(ends, np.int32)
        kernels.attend(query, kv, 1, tables, contexts, self.mla.score_scale, out)
        return out.reshape(len(ends), q_len, *out.shape[1:])

    def exact(self, position: int) -> Array:
        rows, query = plain(self.rows[: position + 1]), plain(self.queries[position])
        scores = query @ rows.T * self.mla.score_scale
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        found: Array = weights @ rows[:, : self.mla.kv_rank] / weights.sum(axis=1)[:, None]
        return found


@OF_MODELS
@OF_TYPES
def test_attention_to_rows_is_fp64s(kernels: HostLatent, name: str, is_bf16: bool) -> None:
    """Beyond one range of keys, behind which another warp's begins."""
    paged = Paged(name, is_bf16, length=70)
    ends = [1, 70, 0, 33, 64]
    out = paged.attend(kernels, ends, q_len=1, seed=3)
    for row, end in enumerate(ends):
        if end:
            close(out[row, 0], paged.exact(end - 1))
        else:
            assert (plain(out[row]) == GUARD).all(), "a sequence that is not there was written"


@OF_TYPES
def test_attention_of_more_keys_than_a_round_has(kernels: HostLatent, is_bf16: bool) -> None:
    """A round is of eight warps' ranges, 512 keys."""
    paged = Paged("small", is_bf16, length=600)
    out = paged.attend(kernels, [600, 513], q_len=2, seed=4, block_size=16)
    for row, end in enumerate([600, 513]):
        for j in range(2):
            close(out[row, j], paged.exact(end - 2 + j))


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSOR_CORES)
def test_attention_on_tensor_cores_is_near_fp64s(kernels: HostLatent, name: str) -> None:
    """Probabilities are in bf16. Behind the last key of a tile lies what is no number."""
    paged = Paged(name, True, length=70)
    ends = [1, 70, 0, 33, 64]
    out = paged.attend(kernels, ends, q_len=1, seed=3)
    for row, end in enumerate(ends):
        if not end:
            assert (plain(out[row]) == GUARD).all(), "a sequence that is not there was written"
            continue
        wanted = paged.exact(end - 1)
        assert np.linalg.norm(plain(out[row, 0]) - wanted) < 4e-3 * np.linalg.norm(wanted)


LENGTH = 44
"""So many tokens at once are more blocks than values have slices for; fewer are fewer."""


@pytest.fixture(scope="module", params=["small", "odd", "deepseek_v3s_heads", *TENSOR_CORES])
def whole(request: pytest.FixtureRequest, kernels: HostLatent) -> tuple[Paged, Array]:
    """A text, and all its outputs as one prompt's: [length, heads, kv_rank]."""
    paged = Paged(request.param, True, LENGTH)
    return paged, paged.attend(kernels, [LENGTH], q_len=LENGTH, seed=5)[0]


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    q_len=st.integers(1, 6),
    seed=st.integers(1, 1000),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_a_token_has_the_same_bits_in_any_company_and_blocks(
    kernels: HostLatent,
    whole: tuple[Paged, Array],
    data: st.DataObject,
    q_len: int,
    seed: int,
    block_size: int,
) -> None:
    paged, prompt = whole
    end = st.one_of(st.just(0), st.integers(q_len, paged.length))
    ends = data.draw(st.lists(end, min_size=1, max_size=4))
    out = paged.attend(kernels, ends, q_len, seed, block_size)
    for row, stop in enumerate(ends):
        if stop:
            np.testing.assert_array_equal(out[row], prompt[stop - q_len : stop])


@pytest.mark.fast_cases(1)
def test_whoever_comes_last_changes_no_bit(kernels: HostLatent, whole: tuple[Paged, Array]) -> None:
    paged, prompt = whole
    for seed, order in enumerate(each_last(256, seed=1, most=2)):
        with kernels.ordered(order):
            out = paged.attend(kernels, [LENGTH, 40], 1, seed=seed)
        np.testing.assert_array_equal(out[:, 0], prompt[[LENGTH - 1, 39]], err_msg=str(order))


def test_a_changed_key_would_be_seen(kernels: HostLatent) -> None:
    """The comparisons can fail: one key of forty is off by a little."""
    paged = Paged("small", True, length=40)
    before = paged.attend(kernels, [40], q_len=1, seed=6)
    paged.rows[7, 3] ^= 4
    assert (before != paged.attend(kernels, [40], q_len=1, seed=6)).any()
