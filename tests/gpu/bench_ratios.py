"""How many GPUs should prefill, and how many decode: the same requests to each ratio, over HTTP.

    python3 tools/gpu.py --gpus 4 run tests/gpu/bench_ratios.py [--seconds N] [--json FILE]

Every deployment stands alone on all GPUs: mixed workers first, which set the rate, then 2P+2D,
3P+1D, 1P+3D, and tensor-parallel workers of 2 GPUs each, mixed ones and pairs (2P+2D of those from
8 GPUs on).
Each serves three mixes of prompts and answers twice: all requests at once, which shows the most
that it does, and arriving by chance at one rate for all, a share of what the mixed workers did.
`--model tiny --engine cpu` tries the whole path without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

import numpy as np  # noqa: E402
from bench_gateway import BLOCK_SIZE, FIRST_TEXT_ID, Load, model_folder  # noqa: E402
from pair_deployments import KvWay, Processors, Serving, Way, serving  # noqa: E402
from pair_numbers import gaps, poisson, quantile, second_gaps, tokens_between, waits  # noqa: E402
from pair_parts import shown_ms, whole  # noqa: E402
from pair_report import Limit, Report, say  # noqa: E402
from stream_clients import Served  # noqa: E402

from baton_worker.engine.model.shape import load_shape  # noqa: E402

CHUNK, RUNNING = 2048, 128
SECONDS_OF_START, SECONDS_OF_MIX = 30.0, 20.0
SEED = 7 << 20


class Mix(NamedTuple):
    """Requests of one kind: tokens in and out, how many at once, and seconds of arrivals."""

    name: str
    prompt: int
    tokens: int
    burst: int
    window: float


class Case(NamedTuple):
    """A deployment to measure: `tp` GPUs a worker."""

    name: str
    prefill: int
    decode: int
    mixed: int
    tp: int = 1

    @property
    def gpus(self) -> int:
        """It stands on so many."""
        return self.tp * (self.prefill + self.decode + self.mixed)


MIXES = {
    "qwen3-8b": (
        Mix("long prompts, short answers", 8192, 64, 48, 8.0),
        Mix("even", 2048, 256, 128, 8.0),
        Mix("short prompts, long answers", 256, 512, 256, 8.0),
    ),
    "tiny": (Mix("long prompts, short answers", 128, 8, 6, 1.0), Mix("even", 32, 24, 6, 1.0)),
}
LOAD = 0.6
"""Of the requests a second that the mixed workers served at once: what arrives by chance."""


def cases(n_gpus: int) -> list[Case]:
    """Return what is measured on so many GPUs, the baseline first."""
    half = n_gpus // 2
    found = [
        Case(f"{n_gpus} mixed", 0, 0, n_gpus),
        Case(f"{half}P+{n_gpus - half}D", half, n_gpus - half, 0),
    ]
    if n_gpus > 2:
        found += [
            Case(f"{n_gpus - 1}P+1D", n_gpus - 1, 1, 0),
            Case(f"1P+{n_gpus - 1}D", 1, n_gpus - 1, 0),
            Case(f"{half} mixed of 2 GPUs each", 0, 0, half, 2),
            Case(f"{half // 2}P+{half // 2}D of 2 GPUs each", half // 2, half // 2, 0, 2),
        ]
    return found


class Bench:
    """What is asked of each deployment, and what was seen."""

    def __init__(self, vocab_size: int, limit: Limit, report: Report) -> None:
        self.limit, self.report = limit, report
        self._vocab_size = vocab_size
        self._rates: dict[str, float] = {}

    def measure(self, serving: Serving, case: Case, mix: Mix) -> None:
        """Serve a mix at once, and at the rate that the first deployment set."""
        self.limit.need(SECONDS_OF_MIX, f"{mix.name} on {case.name}")
        served = whole(serving.clients.serve(self._bodies(mix, mix.burst, 0)))
        serving.wait_idle()
        at_once = burst_numbers(served, mix)
        rate = self._rates.setdefault(mix.name, LOAD * at_once["requests_per_s"])
        times = poisson(rate, mix.window, SEED) or [0.0]
        served = whole(serving.clients.serve(self._bodies(mix, len(times), 1), times))
        serving.wait_idle()
        record = case._asdict() | {"gpus": case.gpus, "mix": mix._asdict(), "at_once": at_once}
        record["arriving"] = arriving_numbers(served, times, rate)
        self.report.add("ratios", record)
        say(line(record))

    def warm(self, serving: Serving, mixes: Sequence[Mix]) -> None:
        """Serve some of each mix."""
        for mix in mixes:
            whole(serving.clients.serve(self._bodies(mix._replace(tokens=8), 8, 2)))

    def _bodies(self, mix: Mix, count: int, round_: int) -> list[dict[str, Any]]:
        rng = np.random.default_rng(SEED + 1000 * mix.prompt + round_)
        told = {"max_tokens": mix.tokens, "temperature": 0.8, "ignore_eos": True, "stream": True}
        return [
            {"prompt": rng.integers(FIRST_TEXT_ID, self._vocab_size, mix.prompt).tolist(),
             "seed": number, "logprobs": 0} | told
            for number in range(count)
        ]  # fmt: skip


def burst_numbers(served: Served, mix: Mix) -> dict[str, Any]:
    """Return what was seen of requests that came at once, from the first byte to the last token."""
    begin, end = float(served.sent.min()), float(served.arrivals.time.max())
    return {
        "seconds": end - begin,
        "requests_per_s": mix.burst / (end - begin),
        "tokens_per_s": tokens_between(served.arrivals, None, begin, end) / (end - begin),
        "prompt_tokens_per_s": mix.burst * mix.prompt / (end - begin),
    }


def arriving_numbers(served: Served, times: Sequence[float], rate: float) -> dict[str, Any]:
    """Return what was seen of requests that came by chance."""
    requests = range(len(times))
    firsts = waits(served, requests)
    between = gaps(served.arrivals, requests, -math.inf, math.inf)
    seconds = second_gaps(served.arrivals, requests)
    return {
        "requests_per_s": rate,
        "requests": len(times),
        "ttft_p50": quantile(firsts, 0.5),
        "ttft_p99": quantile(firsts, 0.99),
        "second_p50": quantile(seconds, 0.5),
        "second_p99": quantile(seconds, 0.99),
        "gap_p50": quantile(between, 0.5),
        "gap_p99": quantile(between, 0.99),
        "client_busy": served.busy,
    }


def line(record: dict[str, Any]) -> str:
    """Return a deployment's numbers of a mix in words."""
    at_once, arriving = record["at_once"], record["arriving"]
    return (
        f"{record['name']}, {record['mix']['name']}: {at_once['tokens_per_s']:,.0f} tokens/s and "
        f"{at_once['prompt_tokens_per_s']:,.0f} of prompts at once; at "
        f"{arriving['requests_per_s']:.1f} requests/s first token {shown_ms(arriving['ttft_p50'])} "
        f"ms, p99 {shown_ms(arriving['ttft_p99'])}; the second {shown_ms(arriving['second_p50'])} "
        f"behind it, p99 {shown_ms(arriving['second_p99'])}; gaps {shown_ms(arriving['gap_p50'])}, "
        f"p99 {shown_ms(arriving['gap_p99'])}"
    )


def way_of(case: Case, options: argparse.Namespace, longest: int) -> Way:
    """Return how a deployment is started: with room for a burst of any mix on each worker, if there
    is so much; `longest`: what the model takes, in tokens.
    """
    blocks = max(
        min(mix.burst, RUNNING) * ((mix.prompt + mix.tokens) // BLOCK_SIZE + 2)
        for mix in options.mixes
    )
    most = -(-longest // BLOCK_SIZE) + 2
    blocks = max(most, min(blocks, options.most_blocks))  # who has no room waits in decode's line
    more = options.kv.flags if case.prefill else ()
    tp = ("--tp", str(case.tp)) if case.tp > 1 else ()
    return Way(case.name, case.prefill, case.decode, case.mixed, CHUNK, blocks, RUNNING,
               more=(*more, *tp))  # fmt: skip


def run(options: argparse.Namespace, folder: Path, report: Report) -> None:
    """Measure every deployment, one after the other."""
    shape = load_shape(folder)
    bench = Bench(shape.vocab_size, options.limit, report)
    on = Processors.of(sorted(os.sched_getaffinity(0)), options.clients)
    names = options.gpus.split(",")
    for case in cases(len(names)):
        if options.only and case.name not in options.only:
            continue
        with report.part(case.name), contextlib.ExitStack() as stack:
            options.limit.need(SECONDS_OF_START, f"starting {case.name}")
            way = way_of(case, options, shape.max_position_embeddings)
            flags = way.flags(folder, options.engine, options.gpus * (options.engine == "gpu"))
            began = time.monotonic()
            one = stack.enter_context(serving(way, flags, options.clients, on))
            took = {"way": case.name, "chunk": CHUNK, "seconds": time.monotonic() - began}
            report.add("starts", took)
            bench.warm(one, options.mixes)
            for mix in options.mixes:
                bench.measure(one, case, mix)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=[*MIXES], default="qwen3-8b")
    parser.add_argument("--folder", type=Path, help="of the model, written before")
    parser.add_argument("--engine", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--gpus", default="0,1,2,3", help="as CUDA_VISIBLE_DEVICES names them; on "
                        "a machine without any, how many workers there are")  # fmt: skip
    parser.add_argument("--layers", type=int, default=36, help="of the random model")
    parser.add_argument("--kv", type=KvWay.of, default=KvWay.of("nvlink"), metavar="WAY",
                        help="of KV: nvlink, zmq, or NAME=FLAGS")  # fmt: skip
    parser.add_argument("--most-blocks", type=int, default=22_000,
                        help="of 16 tokens, that fit beside the model on a card")  # fmt: skip
    parser.add_argument("--only", action="append", metavar="NAME",
                        help="a deployment to measure, as '2P+2D'; again for more")  # fmt: skip
    parser.add_argument("--clients", type=int, default=4, help="processes that read")
    parser.add_argument("--seconds", type=float, default=540, help="nothing begins after them")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(words)
    known = [case.name for case in cases(len(options.gpus.split(",")))]
    for name in options.only or ():
        if name not in known:
            parser.error(f"argument --only: {name!r} is none of {', '.join(known)}")
    options.mixes = MIXES[options.model]
    options.limit = Limit(options.seconds)
    longest = max(mix.prompt + mix.tokens for mix in options.mixes)
    options.load, options.drafts = Load(0, longest, 64, 0, 0), 0  # of the folder
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if something was not measured."""
    options = parsed(words)
    told = {"model": options.model, "layers": options.layers, "kv": options.kv.name, "load": LOAD}
    report = Report(options.json, options.engine, told)
    with report.part("the run"), model_folder(options) as folder:
        run(options, folder, report)
    for one in report.told["unmeasured"]:
        say(f"not measured: {one}")
    return int(bool(report.told["unmeasured"]))


if __name__ == "__main__":
    sys.exit(main())
