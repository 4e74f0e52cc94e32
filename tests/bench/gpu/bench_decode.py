"""Check that decode's attention has the bits of a prompt's, then time it against memory's roof.

    python tests/bench/gpu/bench_decode.py [--json FILE]

Compiles canonical_decode.cu and canonical_attention.cu in a folder of its own. The last 1 to 8
queries of contexts of 8 to 20,000 tokens must get the bits that canonical_attention.cu gives them
among all queries of the context, alone and in batches of 256 in any order, with pages of 16 and of
64; a context's error is held to fp64. PyTorch's scaled_dot_product_attention is the control.
Then decode is timed: medians of CUDA graphs' replays, over keys and values that come from memory.
The roof is the rate of a kernel that only reads, and of one that copies, measured in the same run;
PyTorch's scaled_dot_product_attention (the quicker of its backends, on dense keys and values) is
timed in turns. 32 heads, 8 of keys and values, 128 dimensions, bf16.
Needs PyTorch with a Hopper GPU, and nvcc.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import roof
import timing
import torch
import torch.nn.functional as functional
from bench_attention import BF16_ERROR, DIM, HEADS, HEADS_A_KV, SCALE, SPLIT_TILES
from bench_attention import SOURCE as PROMPT_SOURCE
from hopper import call, library, product
from torch.nn.attention import SDPBackend, sdpa_kernel

SOURCE = Path(__file__).with_name("canonical_decode.cu")
KV_HEADS, TILE = HEADS // HEADS_A_KV, 128
STAGES = 6
PAGES, SPLITS = (16, 64), (2, 4, 8)
QUERIES = range(1, 9)
CHECKED_CONTEXTS = (
    8, 17, 127, 128, 129, 300, 511, 512, 513, 1000, 1024, 1025, 2047, 3000, 4096, 5000, 20000,
)  # fmt: skip
CHECKED_BATCHES, BATCH = 3, 256
POOL_TOKENS = 1_310_720  # 5.4 GB of keys and values
ROTATED_BYTES, TOKEN_BYTES = 300_000_000, 2 * KV_HEADS * DIM * 2
TIMED = [(rows, 4096, q) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256) for q in (1, 4)]
TIMED += [(64, 4096, 2), (64, 4096, 8), (64, 2048, 1), (64, 2048, 4), (1, 3000, 1), (64, 3000, 1)]
TIMED += [(1, 32768, 1), (8, 32768, 1), (8, 32768, 4)]
CALLS, REPLAYS, PAIRS = 12, 5, 5
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


class Pool(NamedTuple):
    """Pages of keys and values [pages, kv heads, page, dim]."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def page(self) -> int:
        """Tokens in a page."""
        return self.k.shape[2]

    def paged(self, tokens: int) -> int:
        """Return the number of pages for a context."""
        return -(-tokens // self.page)


def pool_of(tokens: int, page: int) -> Pool:
    """Return pages of random keys and values."""
    shape = (tokens // page, KV_HEADS, page, DIM)
    return Pool(*(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)))


def splits_of(contexts: Sequence[int], split_tiles: int) -> int:
    """Return the number of splits of all contexts and heads."""
    return KV_HEADS * sum(-(-n // (TILE * split_tiles)) for n in contexts)


class Batch:
    """A launch's page tables, contexts, output and scratch."""

    def __init__(
        self, pool: Pool, tables: list[torch.Tensor], contexts: Sequence[int], queries: int, s: int
    ) -> None:
        """Take each row's table and context; the output and the scratch begin as NaN."""
        rows, most = len(contexts), max(map(len, tables))
        self.pool, self.queries = pool, queries
        self.tables = torch.zeros(rows, most, dtype=torch.int32)
        for row, table in enumerate(tables):
            self.tables[row, : len(table)] = table
        self.tables = self.tables.cuda()
        self.contexts = torch.tensor(contexts, dtype=torch.int32, device="cuda")
        used, splits = queries * HEADS_A_KV, splits_of(contexts, s)
        nan = {"fill_value": torch.nan, "device": "cuda"}
        self.left = [torch.full((splits, used, width), **nan) for width in (DIM, 4, 1)]
        self.brought = torch.zeros(rows, KV_HEADS, dtype=torch.int32, device="cuda")
        self.out = torch.full((rows, queries, HEADS, DIM), dtype=torch.bfloat16, **nan)

    def attend(self, decode: Any, q: torch.Tensor, overlaps: bool = False) -> torch.Tensor:
        """Return the output for queries [rows, queries, heads, dim]."""
        sizes = (len(q), self.queries, KV_HEADS, HEADS_A_KV, self.tables.shape[1], len(self.pool.k))
        places = (self.tables, self.contexts, self.out, *self.left, self.brought)
        numbers = (*sizes, SCALE * math.log2(math.e), int(overlaps))
        call(decode, q, self.pool.k, self.pool.v, *places, *numbers)
        return self.out


class Known(NamedTuple):
    """A context: queries [n, heads, dim] of every position, its table, and what a prompt makes."""

    q: torch.Tensor
    table: torch.Tensor
    whole: torch.Tensor

    def dense(self, paged: torch.Tensor) -> torch.Tensor:
        """Return keys or values as [heads, n, dim]."""
        rows = paged[self.table.long().cuda()].transpose(0, 1).reshape(KV_HEADS, -1, DIM)
        return rows[:, : len(self.q)].repeat_interleave(HEADS_A_KV, 0)


def known(prompt: Any, pool: Pool, n: int) -> Known:
    """Return a context of pages in random order, and what all its queries get from a prompt."""
    table = torch.randperm(len(pool.k))[: pool.paged(n)].int()
    q = torch.randn(n, HEADS, DIM, device="cuda").bfloat16()
    whole = torch.full_like(q, torch.nan)
    sizes = (n, n, HEADS, HEADS_A_KV, len(pool.k))
    call(prompt, q, pool.k, pool.v, table.cuda(), whole, *sizes, SCALE * math.log2(math.e))
    return Known(q, table, whole)


def error_of(sequence: Known, pool: Pool, few: int) -> float:
    """Return the relative error of the last queries of a context against fp64."""
    n = len(sequence.q)
    k, v = sequence.dense(pool.k).double(), sequence.dense(pool.v).double()
    scores = torch.einsum("qhd,hkd->hqk", sequence.q[-few:].double(), k) * SCALE
    unseen = torch.ones(few, n, device="cuda", dtype=torch.bool).triu(n - few + 1)
    exact = torch.einsum("hqk,hkd->qhd", scores.masked_fill(unseen, -math.inf).softmax(-1), v)
    return float((sequence.whole[-few:].double() - exact).norm() / exact.norm())


def held(decode: Any, pool: Pool, some: list[Known | None], queries: int, s: int) -> int:
    """Hold a batch to what prompts made, twice; return the number of queries compared.

    Raises:
        RuntimeError: a query has other bits, or a row that is not there was written.
    """
    no_table = torch.zeros(1, dtype=torch.int32)
    contexts = [len(one.q) if one else 0 for one in some]
    tables = [one.table if one else no_table for one in some]
    blank = torch.zeros(queries, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    q = torch.stack([one.q[-queries:] if one else blank for one in some])
    batch = Batch(pool, tables, contexts, queries, s)
    for overlaps in (False, True):
        out = batch.attend(decode, q, overlaps)
        for row, one in enumerate(some):
            if one is None and not bool(out[row].isnan().all()):
                raise RuntimeError(f"row {row} of {len(some)} is not there, and was written")
            if one and not torch.equal(out[row], one.whole[-queries:]):
                raise RuntimeError(
                    f"{len(some)} rows, {queries} queries of {len(one.q)}: other bits"
                )
        out.fill_(torch.nan)
    return 2 * queries * sum(one is not None for one in some)


def check(prompt: Any, decode: Any, page: int, split_tiles: int) -> dict[str, Any]:
    """Hold contexts alone and in batches to what a prompt makes of them.

    Raises:
        RuntimeError: some bits differ, or an error is larger than bf16's.
    """
    pool = pool_of(4 * sum(CHECKED_CONTEXTS), page)
    sequences = [known(prompt, pool, n) for n in CHECKED_CONTEXTS]
    errors = {n: error_of(one, pool, 8) for n, one in zip(CHECKED_CONTEXTS, sequences, strict=True)}
    if not max(errors.values()) < BF16_ERROR:
        raise RuntimeError(f"errors of {errors}")
    draw, compared, control = random.Random(0), 0, 0
    for queries in QUERIES:
        batches: list[list[Known | None]] = [[one] for one in sequences]
        batches += [list(sequences), list(reversed(sequences))]
        for _ in range(CHECKED_BATCHES):
            batches.append(draw.choices([*sequences, None], k=BATCH))
        for some in batches:
            compared += held(decode, pool, some, queries, split_tiles)
    for one in sequences:
        q, k, v = one.q.transpose(0, 1)[None], one.dense(pool.k)[None], one.dense(pool.v)[None]
        whole = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        last = functional.scaled_dot_product_attention(q[:, :, -1:], k, v)
        control += not torch.equal(whole[:, :, -1:], last)
    return {"compared": compared, "errors": errors, "control_differs": control}


def dense_times(rows: int, n: int, queries: int) -> tuple[str, Callable[[], float]] | None:
    """Return PyTorch's quickest backend for queries that see all of a dense context."""
    copies = ROTATED_BYTES // (rows * n * TOKEN_BYTES) + 1
    shape = (copies, rows, KV_HEADS, n, DIM)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(rows, HEADS, queries, DIM, device="cuda", dtype=torch.bfloat16)
    found = {}
    for backend in BACKENDS:

        def run(i: int) -> Any:
            at = i % copies
            return functional.scaled_dot_product_attention(q, k[at], v[at], enable_gqa=True)

        def time(backend: SDPBackend = backend, run: Any = run) -> float:
            with sdpa_kernel(backend):
                return timing.by_graph(run, CALLS, REPLAYS).median_us

        try:
            found[time()] = (backend.name, time)
        except RuntimeError as error:
            print(f"PyTorch's {backend.name} does not take it: {str(error)[:100]}")
    return found[min(found)] if found else None


def tables_for(pool: Pool, contexts: Sequence[int]) -> list[list[torch.Tensor]]:
    """Return page tables of a batch, as many times as it takes to come from memory."""
    copies = ROTATED_BYTES // (sum(contexts) * TOKEN_BYTES) + 1
    free = torch.randperm(len(pool.k)).int()
    counts = [pool.paged(n) for _ in range(copies) for n in contexts]
    tables = list(free[: sum(counts)].split(counts))
    return [tables[i * len(contexts) : (i + 1) * len(contexts)] for i in range(copies)]


def decode_time(
    decode: Any, pool: Pool, contexts: Sequence[int], queries: int, s: int, overlaps: bool = False
) -> Callable[[], float]:
    """Return what times a batch of these contexts in microseconds."""
    batches = [Batch(pool, t, contexts, queries, s) for t in tables_for(pool, contexts)]
    shape = (len(contexts), queries, HEADS, DIM)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def run(i: int) -> Any:
        return batches[i % len(batches)].attend(decode, q, overlaps)

    return lambda: timing.by_graph(run, CALLS, REPLAYS).median_us


def timed(decode: Any, pool: Pool, memory: roof.Roof, case: tuple[int, int, int]) -> Any:
    """Time one case in turns with PyTorch; print its line and return its record."""
    rows, n, queries = case
    ways = [decode_time(decode, pool, [n] * rows, queries, SPLIT_TILES, o) for o in (False, True)]
    theirs = dense_times(rows, n, queries)
    triples = [
        (theirs[1]() if theirs else math.nan, *(way() for way in ways)) for _ in range(PAIRS)
    ]
    their_us, us, over_us = (statistics.median(column) for column in zip(*triples, strict=True))
    rate = rows * n * TOKEN_BYTES / us * 1e6
    print(
        f"| {rows} | {n} | {queries} | {pool.page} | {us:.1f} | {rate / 1e12:.2f}"
        f" | {rate / memory.read:.2f} | {rate / memory.copy:.2f} | {over_us:.1f} | {their_us:.1f}"
        f" | {theirs[0] if theirs else '-'} |",
        flush=True,
    )
    return {"case": case, "page": pool.page, "triples": triples, "backend": theirs and theirs[0]}


def ragged(decode: Any, pool: Pool, memory: roof.Roof, queries: int) -> dict[str, Any]:
    """Time 64 contexts of 128 to 8,192 tokens, whatever they are."""
    draw = random.Random(1)
    contexts = [draw.randint(128, 8192) for _ in range(64)]
    us = statistics.median(
        decode_time(decode, pool, contexts, queries, SPLIT_TILES)() for _ in range(PAIRS)
    )
    rate = sum(contexts) * TOKEN_BYTES / us * 1e6
    print(
        f"64 contexts of 128 to 8192 ({sum(contexts)} tokens), {queries} queries: {us:.1f} us,"
        f" {rate / 1e12:.2f} TB/s, {rate / memory.read:.2f} of reading",
        flush=True,
    )
    return {"tokens": sum(contexts), "queries": queries, "us": us}


def compiled(folder: Path, page: int, split_tiles: int) -> tuple[Any, Any]:
    """Return the kernel for prompts and the one for decode."""
    place = folder / f"{page}_{split_tiles}"
    place.mkdir()
    wrappers = product("multiply", 128) + product("add_weighted", 128, a_in_registers=True)
    (place / "wgmma.inc").write_text(wrappers)
    defines = {"SPLIT_TILES": split_tiles, "PAGE": page, "STAGES": STAGES}
    prompt = library(PROMPT_SOURCE, place, "attend", defines)
    return prompt, library(SOURCE, place, "decode_attention", defines)


def main() -> None:
    """Compile, check and time; print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where every time goes")
    options = parser.parse_args()
    torch.manual_seed(0)
    memory = roof.measured()
    print(f"memory: read {memory.read / 1e12:.2f} TB/s, copied {memory.copy / 1e12:.2f} TB/s")
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    record |= {"roof": memory, "checks": [], "splits": [], "times": [], "ragged": []}
    ways = [(PAGES[0], s) for s in SPLITS] + [(page, SPLIT_TILES) for page in PAGES[1:]]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool_of_threads:
        jobs = [pool_of_threads.submit(compiled, Path(folder), *way) for way in ways]
        kernels = {way: job.result() for way, job in zip(ways, jobs, strict=True)}
    for (page, s), (prompt, decode) in kernels.items():
        found = check(prompt, decode, page, s)
        record["checks"].append({"page": page, "split_tiles": s} | found)
        print(f"page {page}, splits of {s * TILE}: {found}", flush=True)
    print(
        "| rows | context | queries | page | us | TB/s | of reading | of copying | overlapping, us"
        " | PyTorch, us | backend |\n" + "|---" * 11 + "|"
    )
    for page in PAGES:
        pool, decode = pool_of(POOL_TOKENS, page), kernels[page, SPLIT_TILES][1]
        for case in TIMED if page == PAGES[0] else [(64, 4096, 1), (64, 4096, 4), (1, 4096, 1)]:
            record["times"].append(timed(decode, pool, memory, case))
        record["ragged"] += [{"page": page} | ragged(decode, pool, memory, q) for q in (1, 4)]
        if page == PAGES[0]:
            record["splits"] = [
                {"split_tiles": s, "case": case, "us": us}
                for s in SPLITS
                for case in [(1, 4096, 1), (8, 4096, 1), (64, 4096, 1), (64, 4096, 4)]
                for us in [
                    decode_time(kernels[page, s][1], pool, [case[1]] * case[0], case[2], s)()
                ]
            ]
    for entry in record["splits"]:
        print(f"splits of {entry['split_tiles'] * TILE}: {entry['case']} {entry['us']:.1f} us")
    if options.json:
        options.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
