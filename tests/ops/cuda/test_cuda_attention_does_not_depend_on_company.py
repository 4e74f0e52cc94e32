"""A query of a paged context gets the same bits in a prompt, a chunk, a draft or alone."""

from __future__ import annotations

import random
from types import ModuleType

import pytest

from baton_ops.decoder import attend_into
from baton_testing.paged_contexts import Model, Pool, attend

CONTEXTS = (8, 17, 127, 128, 129, 300, 511, 512, 513, 1000, 1025, 2047, 3000, 5000)
MODELS = {
    "pages_of_16": Model(),
    "pages_of_32": Model(block=32),
    "pages_of_64": Model(block=64),
    "one_head_each": Model(heads=4, kv_heads=4),
    "one_of_keys": Model(heads=16, kv_heads=1, block=32),
    "generic_pages_of_8": Model(heads=4, kv_heads=2, block=8),
    "generic_heads_of_64": Model(heads=4, kv_heads=2, dim=64),
}
BF16_ERROR = 4e-3


def sizes_for(name: str) -> tuple[int, ...]:
    """Return context lengths: the generic kernels take longer."""
    return CONTEXTS if not name.startswith("generic") else CONTEXTS[:7]


@pytest.mark.parametrize("name", MODELS)
def test_prompts_are_as_near_to_fp64_as_rounding_lets_them(torch: ModuleType, name: str) -> None:
    sizes = sizes_for(name)
    pool = Pool(torch, MODELS[name], sum(sizes))
    for n in sizes:
        context = pool.context(n)
        got = attend(pool, [context], [n], n)[0][-300:].double()
        exact = context.exact(torch, pool.model, min(n, 300))
        assert float((got - exact).norm() / exact.norm()) < BF16_ERROR, n


@pytest.mark.parametrize("name", MODELS)
def test_last_queries_have_the_prompts_bits_alone_and_in_any_batch(
    torch: ModuleType, name: str
) -> None:
    sizes = sizes_for(name)
    pool = Pool(torch, MODELS[name], sum(sizes))
    known = [pool.context(n) for n in sizes]
    whole = [attend(pool, [one], [len(one.q)], len(one.q))[0] for one in known]
    draw = random.Random(0)
    for queries in range(1, 9):
        batches: list[list[int | None]] = [[i] for i in range(len(known))]
        batches += [draw.choices([*range(len(known)), None], k=64) for _ in range(2)]
        for batch in batches:
            some = [None if i is None else known[i] for i in batch]
            out = attend(pool, some, [len(one.q) if one else 0 for one in some], queries)
            for row, i in enumerate(batch):
                if i is None:
                    assert bool(out[row].isnan().all()), "a row that is not there was written"
                else:
                    assert torch.equal(out[row], whole[i][-queries:]), (queries, sizes[i])


@pytest.mark.parametrize("name", MODELS)
def test_chunks_have_the_bits_of_the_whole(torch: ModuleType, name: str) -> None:
    sizes = [n for n in sizes_for(name) if n >= 300]
    pool = Pool(torch, MODELS[name], sum(sizes))
    for n in sizes:
        context = pool.context(n)
        whole = attend(pool, [context], [n], n)[0]
        for chunk in (1, 9, 64, 100, 128, 200):
            for end in {chunk, n // 2, n - 1, n} - set(range(chunk)):
                got = attend(pool, [context], [end], chunk)[0]
                assert torch.equal(got, whole[end - chunk : end]), (n, chunk, end)


@pytest.mark.parametrize("name", MODELS)
def test_many_rows_of_many_queries_have_the_bits_of_one(torch: ModuleType, name: str) -> None:
    sizes = [n for n in sizes_for(name) if n >= 300]
    pool = Pool(torch, MODELS[name], sum(sizes))
    known = [pool.context(n) for n in sizes]
    for queries in (40, 130, 300):
        some = [known[0], None, *known]
        ends = [len(one.q) if one else 0 for one in some]
        out = attend(pool, some, ends, queries)
        for row, one in enumerate(some):
            if one is None:
                assert bool(out[row].isnan().all())
            else:
                alone = attend(pool, [one], [len(one.q)], queries)[0]
                assert torch.equal(out[row], alone), (queries, len(one.q))


def test_a_prompts_kernel_takes_what_has_too_little_scratch_for_decodes(torch: ModuleType) -> None:
    pool = Pool(torch, Model(), 4000)
    context = pool.context(3000)
    with_scratch = attend(pool, [context], [3000], 4)
    pool.scratch = pool.scratch[:0]
    assert torch.equal(attend(pool, [context], [3000], 4), with_scratch)


@pytest.mark.parametrize("queries", [1, 4, 60])
def test_a_replayed_graph_follows_new_contexts(torch: ModuleType, queries: int) -> None:
    pool = Pool(torch, Model(), 20_000)
    model, known = pool.model, [pool.context(n) for n in (700, 3000, 64, 2000, 100, 1500)]
    width = max(len(one.blocks) for one in known)
    tables = torch.zeros(len(known), width, dtype=torch.int32, device="cuda")
    for row, one in enumerate(known):
        tables[row, : len(one.blocks)] = torch.tensor(one.blocks)
    contexts = torch.full((len(known),), queries, dtype=torch.int32, device="cuda")
    q = torch.zeros(len(known) * queries, 32, 128, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    places = (pool.kv, 1, tables, contexts, model.scale, out, pool.scratch)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend_into(q, *places)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                attend_into(q, *places)
    torch.cuda.synchronize()
    draw = random.Random(queries)
    for _ in range(5):
        ends = [draw.choice([0, draw.randint(queries, len(one.q))]) for one in known]
        for row, (one, end) in enumerate(zip(known, ends, strict=True)):
            at = slice(row * queries, (row + 1) * queries)
            q[at] = one.q[end - queries : end] if end else 0
        contexts.copy_(torch.tensor(ends))
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        for row, (one, end) in enumerate(zip(known, ends, strict=True)):
            got = out[row * queries : (row + 1) * queries]
            if end:
                assert torch.equal(got, attend(pool, [one], [end], queries)[0])
            else:
                assert bool(got.isnan().all())
    assert not bool(pool.scratch[: 1 << 18].any()), "the counts were not left at zero"
