r"""Check the CUDA logprob op against fp64, then time it and its baselines, in one run.

    python tests/bench/gpu/bench_logprobs.py [--json FILE] [--part op|baselines] [--cub LIBRARY]

Cold calls visit buffers of four times the L2 cache in turn, so each reads from memory; hot calls
read one buffer again and again. Prints tables, writes JSON. Needs PyTorch with a CUDA device and a
baton_ops that was built with BATON_OPS_CUDA. For `--cub`, compile cub_topk.cu:

    nvcc -std=c++17 -O3 -arch=sm_90 -shared -Xcompiler -fPIC -o LIBRARY \
        -DCUB_DISABLE_TOPK_UNSUPPORTED_ARCH_ASSERT -I CCCL tests/bench/gpu/cub_topk.cu

where CCCL holds the headers of nvidia-cuda-cccl 13.3 or later.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any, NamedTuple

import baselines
import cub_baseline
import distributions
import reference
import timing
import torch
import triton_baselines
from op import Op

import baton_ops

VOCAB = 103_424
ROTATED_BYTES = 250_000_000
MOST_CALLS = 1_300
K_MAX = 20


class Size(NamedTuple):
    """T rows of `vocab` logits."""

    rows: int
    vocab: int = VOCAB
    dtype: torch.dtype = torch.bfloat16

    @property
    def bytes(self) -> int:
        """One read of every row."""
        return self.rows * self.vocab * self.dtype.itemsize


class Batch:
    """Rotated logits, tokens drawn from each as a sampler would, and k by row."""

    def __init__(self, size: Size, k: int | None, generator: torch.Generator) -> None:
        """Fill the buffers; `k` None means mixed, 0 to 20."""
        self.size = size
        self.copies = min(MOST_CALLS, max(4, -(-ROTATED_BYTES // size.bytes)))
        rows = size.rows * self.copies
        self.logits = torch.empty(rows, size.vocab, dtype=size.dtype, device="cuda")
        self.token = torch.empty(rows, dtype=torch.int32, device="cuda")
        for first in range(0, rows, 512):
            x = distributions.llm_like(min(512, rows - first), size.vocab, generator).to(size.dtype)
            noise = torch.empty_like(x, dtype=torch.float32).exponential_(generator=generator)
            self.logits[first : first + 512] = x
            self.token[first : first + 512] = (x.float() - noise.log()).argmax(dim=1)
        # Cut beforehand: slicing would cost the host as much as a launch.
        self.views = list(
            zip(self.logits.split(size.rows), self.token.split(size.rows), strict=True)
        )
        draw = torch.randint(K_MAX + 1, (size.rows,), generator=generator, device="cuda")
        self.k = draw.int() if k is None else torch.full_like(draw.int(), k)
        self.k_max = K_MAX if k is None else k

    def at(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the i-th buffer and its tokens."""
        return self.views[i % self.copies]

    def op(self) -> Op:
        """Return the op with its buffers."""
        return Op(*self.at(0), self.k)

    @property
    def calls(self) -> int:
        """Calls that visit every buffer, and enough of them."""
        return max(8, self.copies)


def check(generator: torch.Generator) -> dict[str, Any]:
    """Compare every distribution, dtype and some vocabularies with fp64; raise on a difference."""
    worst, cases = 0.0, 0
    for vocab in (VOCAB, 32_000, 151_936, 129_280, 8_191):
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            for name, rows in distributions.ALL.items():
                strict = cases % 2 == 1
                error = check_one(rows(17, vocab, generator).to(dtype), strict, generator)
                if error > 1:
                    raise AssertionError(f"{name}, {dtype}, V={vocab}: {error} tolerances off")
                worst, cases = max(worst, error), cases + 1
    return {"cases": cases, "worst_error_over_tolerance": worst}


def check_one(x: torch.Tensor, strict: bool, generator: torch.Generator) -> float:
    """Return the largest error over its tolerance; inf where an id or a rank differs."""
    rows, vocab = x.shape
    token = torch.randint(vocab, (rows,), generator=generator, device="cuda", dtype=torch.int32)
    k = torch.randint(0, 65, (rows,), generator=generator, device="cuda", dtype=torch.int32)
    op = Op(x, token, k)
    op.poison()
    op.run(x, rank_mode=baton_ops.RankMode(int(strict)))
    wanted = reference.expected(x, token, 64, strict=strict)
    taken = torch.arange(64, device="cuda")[None] < k[:, None]
    exact = torch.equal(op.columns.rank.long(), wanted.rank) and torch.equal(
        op.columns.topk_token.long(), wanted.topk_token[taken]
    )
    if not exact:
        return float("inf")
    return max(
        reference.excess(op.columns.logprob, wanted.logprob),
        reference.excess(op.columns.topk_logprob, wanted.topk_logprob[taken]),
    )


def copy_rate() -> float:
    """Return bytes read and written per second of a large device-to-device copy."""
    source = torch.randint(255, (2**30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    took = timing.by_stream(lambda _: target.copy_(source), 10)
    return 2 * 2**30 / (took.median_us * 1e-6)


def floor_us(size: Size) -> float:
    """Time a plain read of the same bytes."""
    copies = min(MOST_CALLS, max(4, -(-ROTATED_BYTES // size.bytes)))
    words = max(1, size.bytes // 4 // 4096) * 4096
    data = [torch.randn(words, device="cuda") for _ in range(copies)]
    out = torch.empty(words // 4096, device="cuda")
    return timing.by_graph(
        lambda i: triton_baselines.read(data[i % copies], out), max(10, copies)
    ).median_us


def time_op(size: Size, k: int | None, generator: torch.Generator) -> dict[str, Any]:
    """Time the op on one size in every way."""
    batch = Batch(size, k, generator)
    op = batch.op()

    def launch(i: int) -> None:
        op.run(*batch.at(i))

    def to_device_end(i: int) -> None:
        op.run(*batch.at(i))
        op.copy_to_host()

    return {
        "rows": size.rows,
        "vocab": size.vocab,
        "dtype": str(size.dtype).removeprefix("torch."),
        "k": "0..20" if k is None else k,
        "graph": timing.by_graph(launch, batch.calls),
        "graph_hot": timing.by_graph(lambda _: launch(0), 40),
        "stream": timing.by_stream(launch, min(batch.calls, 100)),
        "graph_with_copy": timing.by_graph(to_device_end, batch.calls),
        "host_to_bytes": timing.by_host(lambda i: op.run_to_host(*batch.at(i)), 30),
    }


def time_op_by_k(rows: int, k: int, generator: torch.Generator) -> dict[str, Any]:
    """Time the op with one k for all rows."""
    batch = Batch(Size(rows), k, generator)
    op = batch.op()
    return {
        "rows": rows,
        "k": k,
        "graph": timing.by_graph(lambda i: op.run(*batch.at(i)), batch.calls),
    }


def check_baseline(name: str, run: baselines.Baseline, batch: Batch) -> bool:
    """Raise unless logprobs and ranks are right; return whether the ids are the lowest of ties."""
    x, token = batch.at(0)
    lp, rank, ids, _ = run(x, token, batch.k_max)
    wanted = reference.expected(x[:8], token[:8], max(batch.k_max, 1))
    if not torch.allclose(lp.reshape(-1)[:8].double(), wanted.logprob, atol=1e-3):
        raise AssertionError(f"{name}: wrong logprobs")
    if not torch.equal(rank.reshape(-1)[:8].long(), wanted.rank):
        raise AssertionError(f"{name}: wrong ranks")
    return not batch.k_max or torch.equal(ids[:8].long(), wanted.topk_token)


def time_baseline(
    name: str, run: baselines.Baseline, size: Size, k: int | None, generator: torch.Generator
) -> dict[str, Any]:
    """Time a baseline on the same inputs, after comparing it with the reference."""
    torch._dynamo.reset()
    batch = Batch(size, k, generator)
    exact = check_baseline(name, run, batch)
    calls = min(batch.calls, 300 if size.rows == 1 else 40)
    pinned = [c.cpu().pin_memory() for c in run(*batch.at(0), batch.k_max) if c is not None]

    def launch(i: int) -> Any:
        return run(*batch.at(i), batch.k_max)

    def with_copy(i: int) -> None:
        columns = [column for column in launch(i) if column is not None]
        for column, host in zip(columns, pinned, strict=True):
            host.copy_(column, non_blocking=True)

    def to_host(i: int) -> None:
        for column in launch(i):
            if column is not None:
                column.cpu()

    return {
        "name": name,
        "rows": size.rows,
        "dtype": str(size.dtype).removeprefix("torch."),
        "k": batch.k_max,
        "topk_is_exact": exact,
        "graph": timing.by_graph(launch, calls, 9),
        "graph_with_copy": timing.by_graph(with_copy, calls, 9),
        "stream": timing.by_stream(launch, min(calls, 40), 9),
        "host_to_bytes": timing.by_host(to_host, 10),
    }


CUB_NAME = "our k = 0 op + CUB batched top-k"
CAPACITY = 1536
SHARES = (1 / 6, 1 / 2, 1.0)


def accepted_share(generator: torch.Generator) -> list[dict[str, Any]]:
    """Time 512 requests x 3 rows of which 1/6, 1/2 or all are accepted, counted on the device."""
    results = []
    batch = Batch(Size(CAPACITY), None, generator)
    op = batch.op()
    for share in SHARES:
        rows = int(CAPACITY * share)
        count = torch.tensor([rows], dtype=torch.int32, device="cuda")
        index = torch.randperm(CAPACITY, generator=generator, device="cuda").int()
        tokens = [batch.at(i)[1][index.long()] for i in range(batch.copies)]

        def launch(i: int, count: Any = count, index: Any = index, tokens: Any = tokens) -> None:
            token = tokens[i % batch.copies]
            op.run(batch.at(i)[0], token, row_index=index, num_rows=count)

        results.append({"rows": rows, "capacity": CAPACITY, "graph": timing.by_graph(launch, 8)})
    return results


def accepted_share_of_baselines(
    all_baselines: dict[str, baselines.Baseline], generator: torch.Generator
) -> list[dict[str, Any]]:
    """Time the chains on the accepted rows, which they copy first; the host knows the count."""
    results = []
    batch = Batch(Size(CAPACITY), None, generator)
    for share in SHARES:
        rows = int(CAPACITY * share)
        index = torch.randperm(CAPACITY, generator=generator, device="cuda")[:rows]
        for name, run in all_baselines.items():
            torch._dynamo.reset()

            def launch(i: int, run: Any = run, index: Any = index) -> object:
                x, token = batch.at(i)
                return run(x.index_select(0, index), token[index], batch.k_max)

            took = timing.by_graph(launch, 4, 5)
            results.append({"name": name, "rows": rows, "capacity": CAPACITY, "graph": took})
    return results


def machine() -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def run_op(generator: torch.Generator) -> dict[str, Any]:
    """Check the op and return its times."""
    sizes = [1, 2, 8, 16, 64, 128, 256, 600, 1024, 2048, 3000]

    def both(rows: int) -> list[Size]:
        return [Size(rows), Size(rows, dtype=torch.float32)]

    return {
        "check": check(generator),
        "copy_bytes_per_second": copy_rate(),
        "floor": [{"bytes": Size(t).bytes, "us": floor_us(Size(t))} for t in sizes],
        "op": [time_op(s, k, generator) for t in sizes for s in both(t) for k in (None, 0)],
        "op_by_k": [
            time_op_by_k(t, k, generator)
            for t in (1, 8, 64, 256, 1024, 3000)
            for k in (0, 1, 5, 20, 50)
        ],
        "accepted": accepted_share(generator),
    }


def run_baselines(cub: Path | None, generator: torch.Generator) -> dict[str, Any]:
    """Return the baselines' times."""
    sizes = [1, 8, 64, 256, 1024]
    results = [
        time_baseline(name, run, Size(t), k, generator)
        for name, run in baselines.ALL.items()
        for t in sizes
        for k in (None, 0)
    ]
    results += [
        time_baseline("Triton, row one-pass", triton_baselines.row, Size(t), 5, generator)
        for t in sizes
    ]
    if cub:
        run_cub = cub_baseline.CubTopK(cub)
        results += [time_baseline(CUB_NAME, run_cub, Size(t), None, generator) for t in sizes]
    return {"baselines": results}


def run_accepted_baselines(cub: Path | None, generator: torch.Generator) -> list[dict[str, Any]]:
    """Return what the chains take where only some rows are accepted."""
    # Compiling takes minutes for shapes that differ by step.
    shared = {name: run for name, run in baselines.ALL.items() if "compile" not in name}
    if cub:
        shared[CUB_NAME] = cub_baseline.CubTopK(cub)
    return accepted_share_of_baselines(shared, generator)


def show_op(report: dict[str, Any]) -> None:
    """Print the op's tables."""
    rate = report["copy_bytes_per_second"]
    print(f"{report['device']}: {report['check']}, copy {rate / 1e12:.2f} TB/s")
    print("op: T dtype k | graph [10..90 %] | of copy rate | hot | stream | with copy | host (us)")
    for r in report["op"]:
        width = 4 if r["dtype"] == "float32" else 2
        floor = r["rows"] * r["vocab"] * width / rate * 1e6
        g = r["graph"]
        others = " | ".join(
            f"{r[name].median_us:6.1f}"
            for name in ("graph_hot", "stream", "graph_with_copy", "host_to_bytes")
        )
        print(
            f"{r['rows']:5d} {r['dtype']:9s} {r['k']!s:6s} | {g.median_us:6.1f}"
            f" [{g.low_us:.1f}..{g.high_us:.1f}] | {100 * floor / g.median_us:4.0f} % | {others}"
        )
    by_k = [(r["rows"], r["k"], round(r["graph"].median_us, 1)) for r in report["op_by_k"]]
    print("by T, k:", by_k)
    print("accepted:", [(r["rows"], round(r["graph"].median_us, 1)) for r in report["accepted"]])
    print("floor:", [(f["bytes"], round(f["us"], 1)) for f in report["floor"]])


def show_baselines(report: dict[str, Any]) -> None:
    """Print the baselines' tables."""
    print("baseline: T k | graph | with copies | stream | host to bytes (us) | ids exact")
    for r in report["baselines"]:
        times = " | ".join(
            f"{r[name].median_us:7.1f}"
            for name in ("graph", "graph_with_copy", "stream", "host_to_bytes")
        )
        print(f"{r['name']:32s} {r['rows']:5d} {r['k']:2d} | {times} | {r['topk_is_exact']}")


def show_accepted_baselines(report: dict[str, Any]) -> None:
    """Print what the chains take on accepted rows."""
    for r in report["accepted_baselines"]:
        print(f"accepted {r['rows']:5d}: {r['name']:32s} {r['graph'].median_us:7.1f}")


def write(report: dict[str, Any], path: Path | None) -> None:
    """Write the report, if a path was given."""
    if path:
        plain = json.loads(json.dumps(report, default=str))
        path.write_text(json.dumps(plain, indent=1) + "\n")


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=["op", "baselines"])
    parser.add_argument("--cub", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this machine has no CUDA device")
    generator = torch.Generator("cuda").manual_seed(20)
    report = machine()
    # Written part by part: what was measured is not lost when a later part fails.
    if options.part != "baselines":
        report |= run_op(generator)
        show_op(report)
        write(report, options.json)
    if options.part != "op":
        report |= run_baselines(options.cub, generator)
        show_baselines(report)
        write(report, options.json)
        report |= {"accepted_baselines": run_accepted_baselines(options.cub, generator)}
        show_accepted_baselines(report)
        write(report, options.json)


if __name__ == "__main__":
    main()
