"""Measure steps over tensor-parallel ranks against the same steps on one GPU, in one run.

    python3 tools/gpu.py run tests/gpu/bench_ranks.py [--ranks 2 4] [--json FILE]
    PYTHONPATH=tests/support python tests/gpu/bench_ranks.py --device numpy --shape small

Qwen3-32B's shape, random bfloat16 weights that each rank draws where they lie. A step is what a
worker's is: inputs filled by the host, one order to the other ranks, an upload and a captured
graph; steps are launched one behind the other, as with overlap, and timed by events over many. The
KV of many sequences is more than one GPU has beside these weights: then sequences name the same
blocks, each in an order of its own, and the record says how many tokens the pool holds. Over NumPy
nothing is measured but that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

import bench_steps  # noqa: E402
from bench_steps import FIRST_BLOCK, Case  # noqa: E402

from baton_testing import random_rank  # noqa: E402
from baton_testing.rank_heads import look_at_ranks  # noqa: E402
from baton_worker.engine.backends.device.engine import DeviceEngine  # noqa: E402
from baton_worker.engine.backends.device.program import N_LANES  # noqa: E402
from baton_worker.engine.options import NO_DRAFTS, EngineOptions  # noqa: E402

GOALS = {1: 1.8, 64: 1.75}
"""How many times as fast two ranks shall be, by batch."""
BLOCK_SIZE = 64
LEFT_BYTES = 3 << 30
"""Of a GPU's memory for what is neither weights, pool nor the largest step."""
ROUNDS = 7


class Sizes(NamedTuple):
    """As `bench_steps` asks of a bench."""

    block_size: int
    n_blocks: int
    vocab_size: int


def options(batch: int, context: int, n_blocks: int) -> EngineOptions:
    """Return an engine's that holds every case, one step at a time."""
    return EngineOptions(
        block_size=BLOCK_SIZE,
        n_blocks=n_blocks,
        max_running=batch,
        max_waiting=1,
        max_model_len=context + 64,
        prefill_tokens=64,
        n_draft=0,
        use_mtp=False,
        drafts=NO_DRAFTS,
        max_top_k=20,
        overlap=True,
    )


def blocks_that_fit(loaded: Any, wanted: int) -> int:
    """Return as many of the wanted blocks as one GPU has room for beside the weights."""
    shape, use = loaded.model_shape, loaded.device.memory()
    item = 2 if loaded.weights.dtype == "bfloat16" else 4
    block = 2 * shape.n_layers * shape.kv_size * BLOCK_SIZE * item // loaded.n_ranks
    left = use.free - LEFT_BYTES if use.free > LEFT_BYTES else use.free // 2
    return max(min(wanted, left // block), 8)


def stepped(engine: DeviceEngine, case: Case, sizes: Sizes) -> Callable[[], Any]:
    """Return what launches a step of a case on all ranks, as the runner does."""
    runner = engine.runner
    program = runner._programs.of(case.shape(BLOCK_SIZE))
    lanes = iter(lambda: runner._next_lane(), None)
    for lane in range(N_LANES):
        shape = program.shape
        bench_steps.fill(program.inputs[lane], case, shape, sizes.n_blocks, sizes.vocab_size)
        tables = program.inputs[lane].tables
        usable = sizes.n_blocks - FIRST_BLOCK
        for row in range(len(tables)):  # each in another order: neighbours read other blocks
            tables[row] = FIRST_BLOCK + (tables[row] + 7919 * row) % usable
    return lambda: runner._launch(program, next(lanes))


def timed(engine: DeviceEngine, step: Callable[[], Any], steps: int) -> list[float]:
    """Return microseconds a step, of some rounds of steps one behind the other."""
    device, found = engine.model.device, []
    for _ in range(3):
        step()
    device.record().wait()
    for _ in range(ROUNDS):
        began = device.record()
        landing: deque[Any] = deque()
        for _ in range(steps):
            if len(landing) == N_LANES:  # a lane is filled again when its step has landed
                landing.popleft().wait()
            step()
            landing.append(device.record())
        ended = device.record()
        ended.wait()
        found.append(ended.seconds_since(began) * 1e6 / steps)
    return found


@contextlib.contextmanager
def engine_over(chosen: Any, arguments: argparse.Namespace) -> Iterator[DeviceEngine]:
    """Give an engine over so many ranks, and end them."""
    loaded = random_rank.over_ranks(arguments.device, "drawn", chosen)
    most = max(arguments.batches)
    wanted = most * -(-arguments.context // BLOCK_SIZE) + 8
    n_blocks = blocks_that_fit(loaded, wanted)
    engine = DeviceEngine(loaded, options(most, arguments.context, n_blocks), time.monotonic)
    try:
        yield engine
    finally:
        engine.close()
        if loaded.team is not None and loaded.team.followers is not None:
            loaded.team.followers.close()  # type: ignore[attr-defined]
        vars(engine).clear()


def measured(ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every batch over so many ranks."""
    found = []
    most = max(arguments.batches)
    chosen = random_rank.config(
        arguments.shape, ranks, max_running=most, prefill_chunk_tokens=64, block_size=BLOCK_SIZE
    )
    began = time.monotonic()
    with engine_over(chosen, arguments) as engine:
        print(f"{ranks} ranks are there after {time.monotonic() - began:.1f} s", flush=True)
        sizes = Sizes(BLOCK_SIZE, engine.options.n_blocks, engine.shape.vocab_size)
        for batch in arguments.batches:
            case = Case(batch, arguments.context)
            times = timed(engine, stepped(engine, case, sizes), arguments.steps)
            record = {"ranks": ranks, "batch": batch, "context": arguments.context}
            record |= {"us": statistics.median(times), "low_us": min(times), "high_us": max(times)}
            record["pool_tokens"] = sizes.n_blocks * BLOCK_SIZE
            found.append(record)
            print(record, flush=True)
        if engine.model.team is not None:
            look_at_ranks(engine.model.device, engine.model.team.collective)
    return found


def apart(ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure so many ranks in a process of its own, which gives all memory back."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        given: dict[str, Any] = vars(arguments) | {"ranks": [ranks], "json": report}
        command = [sys.executable, str(Path(__file__).resolve())]
        for name, value in given.items():
            values = value if isinstance(value, list) else [value]
            command += [f"--{name}", *map(str, values)]
        subprocess.run(command, check=True)
        cases: list[dict[str, Any]] = json.loads(report.read_text())["cases"]
        return cases


def compared(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how many times as fast several ranks are as one, by batch."""
    one = {r["batch"]: r["us"] for r in records if r["ranks"] == 1}
    return [
        {"ranks": r["ranks"], "batch": r["batch"], "speedup": one[r["batch"]] / r["us"]}
        | ({"goal": GOALS.get(r["batch"])} if r["ranks"] == 2 else {})
        for r in records
        if r["ranks"] > 1 and r["batch"] in one
    ]


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("out/bench/gpu-ranks.json"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--shape", default="qwen3-32b", help="see drawn_parts; NAME/LAYERS")
    parser.add_argument("--device", choices=["gpu", "numpy"], default="gpu")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"shape": arguments.shape, "steps": arguments.steps, "rounds": ROUNDS}
    if arguments.device == "gpu":
        import gpu

        record |= {"machine": gpu.machine(), "commit": gpu.commit()}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    if len(arguments.ranks) == 1:
        record["cases"] = measured(arguments.ranks[0], arguments)
    else:
        record["cases"] = [case for ranks in arguments.ranks for case in apart(ranks, arguments)]
    record["speedups"] = compared(record["cases"])
    arguments.json.write_text(json.dumps(record) + "\n")
    for line in record["speedups"]:
        print(line, flush=True)


if __name__ == "__main__":
    main()
