"""Multi-head latent attention: each op computes what NumPy's double says, with the same bits in any
company, blocks and captured graph.
"""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from baton_ops import decoder, latent
from baton_testing.numpy_latent import NumpyLatentKernels
from baton_worker.engine.backends.device.operands import Places, Rotation
from baton_worker.engine.model.mla import Mla

DOUBLE: Any = NumpyLatentKernels(lambda work, *arguments: work(*arguments))
LAYERS, BLOCK_SIZE, GUARD = 2, 16, 7.0
BF16_ERROR = 4e-3
"""Of attention, by norms: on tensor cores probabilities are in bf16."""
SEQUENCE = [0, 0, 1, -1, 1, 1, 0, 1]
POSITION = [0, 20, 3, 2, 79, 80, 25, 50]
TABLES = [[2, 3, 0, 4, 5], [6, 7, 8, 0, 9]]


class Model(NamedTuple):
    """Sizes, and how many heads."""

    mla: Mla
    heads: int


MODELS = {
    "small": Model(Mla(0, 32, 16, 8, 16, 24**-0.5), 4),
    "odd": Model(Mla(0, 30, 5, 6, 7, 11**-0.5), 3),
    "deepseek_v3": Model(Mla(0, 512, 128, 64, 128, 192**-0.5), 128),
    "deepseek_v3-of-4-ranks": Model(Mla(0, 512, 128, 64, 128, 192**-0.5), 32),
    "deepseek_v3-of-8-ranks": Model(Mla(0, 512, 128, 64, 128, 192**-0.5), 16),
    "heads-that-are-no-tile": Model(Mla(0, 512, 128, 64, 128, 192**-0.5), 6),
}
OF_MODELS = pytest.mark.parametrize("name", MODELS)
OF_TYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


def plain(tensor: Any) -> Any:
    """Return a tensor as NumPy's double takes it, f64."""
    return tensor.double().cpu().numpy()


class Case:
    """Tensors of one type, random."""

    def __init__(self, torch: ModuleType, dtype: str) -> None:
        self.torch, self.kind = torch, {"dtype": getattr(torch, dtype), "device": "cuda"}
        torch.manual_seed(0)

    def drawn(self, *shape: int) -> Any:
        return self.torch.randn(*shape, **self.kind)

    def filled(self, *shape: int) -> Any:
        return self.torch.full(shape, GUARD, **self.kind)

    def close(self, found: Any, wanted: Any, of: float = 1.0) -> None:
        """`of`: how large what is summed may be."""
        relative = (2**-8 if found.dtype == self.torch.bfloat16 else 0) + 4e-6
        np.testing.assert_allclose(plain(found), wanted, rtol=relative, atol=4e-5 * of)


@OF_MODELS
@OF_TYPES
@pytest.mark.parametrize("tokens", [1, 8, 9, 70])
def test_queries_are_folded_and_values_unfolded(
    torch: ModuleType, name: str, dtype: str, tokens: int
) -> None:
    mla, heads = MODELS[name]
    case = Case(torch, dtype)
    kv_up = case.drawn(heads * mla.unfolded_size, mla.kv_rank)
    queries = case.drawn(tokens, heads * mla.query_size + 8)[:, : heads * mla.query_size]
    folded = case.filled(tokens, heads, mla.row_size)
    latent.fold_into(queries, kv_up, mla.nope_size, folded)
    wanted = np.full(folded.shape, GUARD)
    DOUBLE.fold(plain(queries), plain(kv_up), mla, wanted)
    case.close(folded, wanted, of=mla.nope_size**0.5)

    attended = case.drawn(tokens, heads, mla.kv_rank)
    values = case.filled(tokens, heads * mla.value_size)
    latent.unfold_into(attended, kv_up, mla.nope_size, values)
    made = np.zeros(values.shape)
    DOUBLE.unfold(plain(attended), plain(kv_up), mla, made)
    case.close(values, made, of=mla.kv_rank**0.5)

    for token in {0, tokens - 1}:
        only = slice(token, token + 1)
        alone, one = case.filled(1, heads, mla.row_size), case.filled(1, heads * mla.value_size)
        latent.fold_into(queries[only], kv_up, mla.nope_size, alone)
        latent.unfold_into(attended[only], kv_up, mla.nope_size, one)
        assert torch.equal(alone[0], folded[token])
        assert torch.equal(one[0], values[token])


@OF_MODELS
@OF_TYPES
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rows_are_kept_and_queries_rotated(
    torch: ModuleType, name: str, dtype: str, style: Any
) -> None:
    mla, heads = MODELS[name]
    case = Case(torch, dtype)
    angles = torch.rand(96, mla.rope_size // 2, device="cuda") * 6
    rotation = Rotation(None, 1e-6, angles.cos(), angles.sin(), style)
    ints = [np.array(values, np.int32) for values in (SEQUENCE, POSITION, TABLES)]
    places = Places(*(torch.as_tensor(values, device="cuda") for values in ints))
    host = rotation._replace(cos=rotation.cos.cpu().numpy(), sin=rotation.sin.cpu().numpy())

    queries = case.drawn(len(SEQUENCE), heads * mla.query_size)
    query = case.filled(len(SEQUENCE), heads, mla.row_size)
    latent.rotate_into(queries, rotation, places, mla.rope_size, query)
    wanted = np.full(query.shape, GUARD)
    DOUBLE.rotate(plain(queries), host, Places(*ints), mla, wanted)
    case.close(query, wanted)

    row, norm = case.drawn(len(SEQUENCE), mla.row_size + 8)[:, 8:], case.drawn(mla.kv_rank)
    kv = case.filled(10, LAYERS, 1, 1, BLOCK_SIZE, mla.row_size)
    latent.store_into(row, norm, rotation, places, kv, 1)
    kept = np.full(kv.shape, GUARD)
    DOUBLE.store(plain(row), plain(norm), host, Places(*ints), kept, 1)
    own = [block for block in range(10) if block != 1]  # the trash is written in no order
    case.close(kv[own], kept[own])
    assert bool((kv[:, 0] == GUARD).all()), "another layer was written"


class Paged(Case):
    """A text's rows and queries at every position; each draw of blocks is a pool of NaN else."""

    def __init__(self, torch: ModuleType, dtype: str, name: str, length: int) -> None:
        super().__init__(torch, dtype)
        self.mla, self.heads = MODELS[name]
        self.rows = self.drawn(length, self.mla.row_size)
        self.queries = self.drawn(length, self.heads, self.mla.row_size)
        self.n_blocks = -(-length // BLOCK_SIZE)

    def pool(self, texts: int) -> tuple[Any, Any]:
        """Return a pool that has the text so many times, and its tables."""
        torch, kv = (
            self.torch,
            self.filled(texts * self.n_blocks + 2, LAYERS, 1, 1, BLOCK_SIZE, self.mla.row_size),
        )
        kv.fill_(torch.nan)
        order = torch.randperm(texts * self.n_blocks, device="cuda") + 2
        tables = order.reshape(texts, self.n_blocks).int()
        for table in tables.tolist():
            for index, block in enumerate(table):
                part = self.rows[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
                kv[block, 1, 0, 0, : len(part)] = part
        return kv, tables

    def scratch(self, sequences: int, tokens: int) -> Any:
        """Return scratch for so many, whose bytes are no numbers."""
        positions = self.n_blocks * BLOCK_SIZE
        size = decoder.attention_scratch_bytes(
            self.heads, 1, self.mla.row_size, sequences, tokens, positions
        )
        return self.torch.full((size,), 255, dtype=self.torch.uint8, device="cuda")

    def query(self, ends: list[int], q_len: int) -> Any:
        parts = [self.queries[max(end, q_len) - q_len : max(end, q_len)] for end in ends]
        return self.torch.cat(parts)

    def attend(self, ends: list[int], q_len: int) -> Any:
        """Return [sequences, q_len, heads, kv_rank]; an end of 0: not there."""
        kv, tables = self.pool(len(ends))
        query = self.query(ends, q_len)
        out = self.filled(len(query), self.heads, self.mla.kv_rank)
        contexts = self.torch.tensor(ends, dtype=self.torch.int32, device="cuda")
        scratch = self.scratch(len(ends), len(query))
        latent.attend_into(query, kv, 1, tables, contexts, self.mla.score_scale, out, scratch)
        return out.unflatten(0, (len(ends), q_len))

    def exact(self, position: int) -> Any:
        rows, query = self.rows[: position + 1].double(), self.queries[position].double()
        weights = (query @ rows.T * self.mla.score_scale).softmax(1)
        return (weights @ rows[:, : self.mla.kv_rank]).cpu().numpy()


@OF_MODELS
@OF_TYPES
def test_attention_to_rows(torch: ModuleType, name: str, dtype: str) -> None:
    paged = Paged(torch, dtype, name, 1500)
    ends = [2, 64, 0, 65, 600, 1500]
    out = paged.attend(ends, q_len=2)
    for row, end in enumerate(ends):
        if not end:
            assert bool((out[row] == GUARD).all()), "a sequence that is not there was written"
            continue
        for j in range(2):
            wanted, found = paged.exact(end - 2 + j), plain(out[row, j])
            if dtype == "float32":
                paged.close(out[row, j], wanted)
            assert np.linalg.norm(found - wanted) < BF16_ERROR * np.linalg.norm(wanted)


@OF_MODELS
@OF_TYPES
def test_a_token_has_the_same_bits_in_any_company_and_blocks(
    torch: ModuleType, name: str, dtype: str
) -> None:
    paged = Paged(torch, dtype, name, 700)
    whole = paged.attend([700], q_len=700)[0]
    draw = random.Random(0)
    for q_len in (1, 2, 5, 64, 300):
        for n_sequences in (1, 3, 9):
            ends = [draw.choice([0, draw.randint(q_len, 700)]) for _ in range(n_sequences)]
            out = paged.attend(ends, q_len)
            for row, end in enumerate(ends):
                if end:
                    assert torch.equal(out[row], whole[end - q_len : end]), (q_len, end)


@pytest.mark.parametrize("q_len", [1, 4])
def test_a_replayed_graph_follows_new_contexts(torch: ModuleType, q_len: int) -> None:
    """Fold, attend and unfold, one behind the other without a pause between them."""
    paged = Paged(torch, "bfloat16", "deepseek_v3-of-8-ranks", 300)
    (mla, heads), n = MODELS["deepseek_v3-of-8-ranks"], 6 * q_len
    kv, tables = paged.pool(6)
    kv_up = paged.drawn(heads * mla.unfolded_size, mla.kv_rank)
    queries = paged.drawn(n, heads * mla.query_size)
    contexts = torch.full((6,), q_len, dtype=torch.int32, device="cuda")
    query = paged.query([q_len] * 6, q_len)
    attended = paged.filled(n, heads, mla.kv_rank)
    out, scratch = paged.filled(n, heads * mla.value_size), paged.scratch(6, n)

    def work(query: Any, attended: Any, out: Any) -> None:
        latent.fold_into(queries, kv_up, mla.nope_size, query)
        latent.attend_into(query, kv, 1, tables, contexts, mla.score_scale, attended, scratch)
        latent.unfold_into(attended, kv_up, mla.nope_size, out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work(query, attended, out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work(query, attended, out)
    torch.cuda.synchronize()
    for seed in range(4):
        draw = random.Random(seed)
        contexts.copy_(torch.tensor([draw.randint(q_len, 300) for _ in range(6)]))
        queries.copy_(paged.drawn(*queries.shape))
        graph.replay()
        torch.cuda.synchronize()
        fresh = query.clone(), torch.zeros_like(attended), torch.zeros_like(out)
        work(*fresh)
        torch.cuda.synchronize()
        assert bool(torch.isfinite(out).all())
        assert torch.equal(fresh[2], out)
