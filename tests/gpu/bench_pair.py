"""Prefill and decode on two GPUs of one host, against mixed workers on the same GPUs, over HTTP.

    python3 tools/gpu.py run tests/gpu/bench_pair.py [--only PART ...] [--seconds N] [--json FILE]

Owns the four parts, each against the whole stack (gateway, workers, SSE): `ttft` of an idle
deployment, `steady` streams while long prompts arrive, what `logprobs` cost, and `exact`: whether
the answers are the same bits. The pair and the mixed workers stand side by side on the GPUs, and
one of them is at work at a time. A part that fails or has no time left is told in the JSON and
costs the others nothing. `--model tiny --engine cpu` tries the whole path without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

import numpy as np  # noqa: E402
import pair_exact  # noqa: E402
from bench_gateway import BLOCK_SIZE, FIRST_TEXT_ID, Load, model_folder  # noqa: E402
from pair_deployments import (  # noqa: E402
    Processors,
    Serving,
    Way,
    all_of,
    handed_over_since,
    serving,
)
from pair_numbers import (  # noqa: E402
    capacity,
    distribution,
    gaps,
    poisson,
    quantile,
    token_times,
    tokens_between,
    waits,
)
from stream_clients import Served  # noqa: E402

import gpu  # noqa: E402
from baton_testing.arrivals import Phase  # noqa: E402
from baton_worker.engine.model.shape import load_shape  # noqa: E402

PARTS = ("ttft", "steady", "logprobs", "exact")
FIRST_TOKENS, WARM_TOKENS, WARM_REQUESTS = 8, 24, 3
TOP = 20
MIXED_SHARE = 0.6
"""Of the streams' room, for each of two mixed workers: they are not spread evenly to the token."""
SECONDS_A_ROUND, SECONDS_A_REQUEST, SECONDS_OF_ANSWERS = 25.0, 2.0, 15.0
SEEDS = {"warm": 1 << 20, "ttft": 2 << 20, "capacity": 3 << 20, "steady": 4 << 20, "wide": 5 << 20}
"""Prompts of different parts, and of one part's requests, begin differently: nothing is cached."""


class Sizes(NamedTuple):
    """How much is asked in each part.

    Attributes:
        ttft: prompts' tokens, each so many times (`repeats`).
        streams, context, tokens: the steady streams, and what each has in and may have out.
        skip: tokens that each has before anything counts.
        arriving, arriving_tokens: in and out of a prompt that arrives beside them.
        lead, window, grace: seconds before the first may arrive, in which they arrive, and after.
        load: of the prefill capacity that was measured with so many prompts (`prompts`).
        wide: the streams that logprobs are told of, each of so many tokens in and out.
        rounds: of them.
        exact, exact_longest, exact_tokens: requests of every kind, and their sizes.
    """

    ttft: tuple[int, ...]
    repeats: int
    streams: int
    context: int
    tokens: int
    skip: int
    arriving: int
    arriving_tokens: int
    lead: float
    window: float
    grace: float
    load: float
    prompts: int
    wide: Load
    rounds: int
    exact: int
    exact_longest: int
    exact_tokens: int

    @property
    def longest(self) -> int:
        """Of any request, in tokens."""
        return max(
            max(self.ttft) + FIRST_TOKENS,
            self.context + self.tokens,
            self.arriving + self.arriving_tokens,
            self.wide.prompt + self.wide.tokens,
            self.exact_longest + self.exact_tokens,
        )

    def blocks(self, share: float = 1.0, wide: bool = False) -> int:
        """Return room for the streams, four prompts that arrive, any one request, and the wide."""
        of_streams = self.streams * ((self.context + self.tokens) // BLOCK_SIZE + 2)
        of_prompts = 4 * ((self.arriving + self.arriving_tokens) // BLOCK_SIZE + 2)
        of_longest = -(-(self.longest + 128) // BLOCK_SIZE) + 2
        of_wide = self.wide.kv_blocks if wide else 0
        return max(round(of_streams * share) + of_prompts, of_longest, of_wide)


SIZES = {
    "qwen3-8b": Sizes(
        ttft=(512, 8192), repeats=20,
        streams=64, context=1024, tokens=3328, skip=8, arriving=8192, arriving_tokens=16,
        lead=4.0, window=20.0, grace=4.0, load=0.7, prompts=12,
        wide=Load(256, 128, 480, 16, 192), rounds=3,
        exact=200, exact_longest=1024, exact_tokens=48,
    ),
    "tiny": Sizes(
        ttft=(32, 256), repeats=3,
        streams=4, context=32, tokens=900, skip=2, arriving=256, arriving_tokens=4,
        lead=1.0, window=1.5, grace=0.5, load=0.2, prompts=4,
        wide=Load(8, 16, 200, 8, 40), rounds=2,
        exact=24, exact_longest=96, exact_tokens=12,
    ),
}  # fmt: skip


class OutOfTime(RuntimeError):
    """What is left of the run's seconds is less than a measurement takes."""


class Limit:
    """The run's seconds."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Of them."""
        return self._until - time.monotonic()

    def need(self, seconds: float, what: str) -> None:
        """Begin nothing that takes more than is left.

        Raises:
            OutOfTime: it does.
        """
        if self.left < seconds:
            raise OutOfTime(f"{what} takes {seconds:.0f} s, {self.left:.0f} are left")


class Report:
    """The JSON, written each time that something was measured: it outlives what fails later."""

    def __init__(self, options: argparse.Namespace) -> None:
        sizes: Sizes = options.sizes
        on_gpu = options.engine == "gpu"
        self._path: Path | None = options.json
        self.told: dict[str, Any] = {
            "machine": gpu.machine() if on_gpu else {"cores": str(os.cpu_count())},
            "commit": gpu.commit(),
            "model": options.model,
            "engine": options.engine,
            "chunks": options.chunks,
            "share_kv": options.share_kv,
            "sizes": sizes._asdict() | {"wide": sizes.wide._asdict()},
            "unmeasured": [],
        }

    def add(self, part: str, record: dict[str, Any]) -> None:
        """Add a part's record."""
        self.told.setdefault(part, []).append(record)
        self.write()

    def write(self) -> None:
        """Write what there is so far."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.told, allow_nan=False) + "\n")

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Tell what goes wrong in a part, and go on behind it."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the others are still worth having
            self.told["unmeasured"].append(f"{name}: {type(error).__name__}: {error}"[:600])
            say(f"{name} FAILED: {error!r}"[:600])
        self.write()
        say(f"{name}: {time.monotonic() - began:.0f} s")


class Bench:
    """What the parts share: sizes, time, the vocabulary, and where their numbers go."""

    def __init__(self, sizes: Sizes, vocab_size: int, limit: Limit, report: Report) -> None:
        self.sizes, self.limit, self.report = sizes, limit, report
        self._vocab_size = vocab_size

    def bodies(
        self, count: int, prompt: int, tokens: int, seed: int, **more: Any
    ) -> list[dict[str, Any]]:
        """Return streams with prompts that no other seed has."""
        rng = np.random.default_rng(seed)
        told = {"max_tokens": tokens, "temperature": 0.8, "ignore_eos": True, "stream": True}
        return [
            {
                "prompt": rng.integers(FIRST_TEXT_ID, self._vocab_size, prompt).tolist(),
                "seed": number,
                "logprobs": 0,
            }
            | told
            | more
            for number in range(count)
        ]

    def warm(self, serving: Serving) -> None:
        """Serve a few requests of each size, and all streams for a few tokens."""
        sizes, seed = self.sizes, SEEDS["warm"]
        for prompt in {*sizes.ttft, sizes.arriving}:
            for _ in range(WARM_REQUESTS):
                seed += 1
                whole(serving.clients.serve(self.bodies(1, prompt, FIRST_TOKENS, seed)))
        whole(
            serving.clients.serve(
                self.bodies(sizes.streams, sizes.context, WARM_TOKENS, SEEDS["warm"])
            )
        )

    def ttft(self, pair: Serving, mixed: Serving) -> None:
        """Measure single requests to idle deployments, in turns."""
        for prompt in self.sizes.ttft:
            seen: dict[str, list[tuple[float, float]]] = {"pair": [], "mixed": []}
            before = pair.handed_over()
            for number in range(self.sizes.repeats):
                self.limit.need(SECONDS_A_REQUEST, f"a request of {prompt} tokens")
                asked = self.bodies(1, prompt, FIRST_TOKENS, SEEDS["ttft"] + prompt * 100 + number)
                ways = [("pair", pair), ("mixed", mixed)]
                for name, way in ways if number % 2 else ways[::-1]:
                    served = whole(way.clients.serve(asked))
                    seen[name].append((waits(served, [0])[0], waits(served, [0], 2)[0]))
            record = first_tokens(prompt, seen)
            record["handoff"] = handed_over_since(before, pair.handed_over())
            self.report.add("ttft", record)
            say(ttft_line(record))

    def prefill_capacity(self, pair: Serving) -> float:
        """Measure prompts that wait for one another: computed alone, and handed over too."""
        sizes, rates = self.sizes, {}
        for name, tokens in (("computed", 1), ("handed_over", sizes.arriving_tokens)):
            seed = SEEDS["capacity"] + tokens
            asked = self.bodies(sizes.prompts, sizes.arriving, tokens, seed)
            served = whole(pair.clients.serve(asked))
            rates[name] = capacity(served, sizes.prompts, sizes.arriving)
            pair.wait_idle()
        self.report.told["capacity_tokens_per_s"] = rates
        say(
            f"prefill capacity of one GPU: {rates['computed']:,.0f} tokens/s, "
            f"{rates['handed_over']:,.0f} where the KV is handed over"
        )
        return rates["computed"]

    def steady(self, serving: Serving, prompts_per_s: float) -> None:
        """Measure steady streams while prompts arrive."""
        sizes = self.sizes
        stop = sizes.lead + sizes.window + sizes.grace
        self.limit.need(stop + 5, f"steady streams on {serving.way.name}")
        if not prompts_per_s:
            raise ValueError("the prefill capacity was not measured")
        times = poisson(prompts_per_s, sizes.window, SEEDS["steady"])
        if not times:
            raise ValueError(f"no prompt arrives at {prompts_per_s:.2f} a second")
        streams = self.bodies(sizes.streams, sizes.context, sizes.tokens, SEEDS["steady"])
        seed = SEEDS["steady"] + 1
        prompts = self.bodies(len(times), sizes.arriving, sizes.arriving_tokens, seed)
        at = [0.0] * len(streams) + [sizes.lead + time for time in times]
        before = serving.handed_over()
        served = serving.clients.serve(streams + prompts, at, stop)
        serving.wait_idle()
        record = steady_numbers(served, sizes, len(times))
        record |= {"way": serving.way.name, "chunk": serving.way.chunk}
        record |= {"prompts_per_s": prompts_per_s}
        if serving.way.prefill:
            record["handoff"] = handed_over_since(before, serving.handed_over())
        self.report.add("steady", record)
        say(steady_line(record))

    def logprobs(self, pair: Serving) -> None:
        """Measure many streams, with all alternatives and with no logprobs, in turns."""
        for number in range(self.sizes.rounds):
            for k in (None, TOP) if not number else ():
                self._wide(pair, k, WARM_TOKENS, number)
            self.limit.need(2 * SECONDS_A_ROUND, "a round of logprobs")
            rates: dict[str, Any] = {}
            for k in (None, TOP) if number % 2 else (TOP, None):
                served = self._wide(pair, k, self.sizes.wide.tokens, 1 + number)
                phase = wide_phase(served, self.sizes.wide)
                rates["none" if k is None else "top"] = phase.tokens_per_s
                rates["client_busy"] = max(served.busy, rates.get("client_busy", 0.0))
            rates["ratio"] = rates["top"] / rates["none"]
            self.report.add("logprobs", rates)
            say(
                f"{self.sizes.wide.streams} streams: {rates['none']:,.0f} tokens/s without, "
                f"{rates['top']:,.0f} with k = {TOP}: {100 * rates['ratio']:.1f} %"
            )

    def _wide(self, pair: Serving, k: int | None, tokens: int, number: int) -> Served:
        wide = self.sizes.wide
        seed = SEEDS["wide"] + 10 * number + (k or 0) + 1000 * tokens
        asked = self.bodies(wide.streams, wide.prompt, tokens, seed, logprobs=k)
        for body in asked:
            body["return_token_ids"] = True  # what is counted, the same with and without logprobs
        served = whole(pair.clients.serve(asked, counted="ids"))
        pair.wait_idle()
        return served


def whole(served: Served) -> Served:
    """Return what was served if no request failed."""
    if served.failures:
        raise ValueError(f"{len(served.failures)} requests failed: {served.failures[0]}")
    return served


def first_tokens(prompt: int, seen: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return what was seen of single requests: (first, second token) by way, in turns."""
    record: dict[str, Any] = {"prompt": prompt}
    for name, times in seen.items():
        firsts, seconds = zip(*times, strict=True)
        record[name] = {"first": quantile(firsts, 0.5), "second": quantile(seconds, 0.5)}
        record[name]["firsts"], record[name]["seconds"] = firsts, seconds
    for which, name in enumerate(("difference", "second_difference")):
        pairs = zip(seen["pair"], seen["mixed"], strict=True)
        record[name] = quantile([ours[which] - theirs[which] for ours, theirs in pairs], 0.5)
    return record


def steady_numbers(served: Served, sizes: Sizes, n_prompts: int) -> dict[str, Any]:
    """Return what was seen of steady streams, request 0 and on, and of the prompts behind them.

    The phase begins when prompts may arrive and all streams run, and ends with their window or with
    the first stream that has no more to say.
    """
    streams, prompts = range(sizes.streams), range(sizes.streams, sizes.streams + n_prompts)
    times = [token_times(served.arrivals, stream) for stream in streams]
    failed = [line for line in served.failures if int(line.split()[1].rstrip(":")) in streams]
    if failed or any(len(of) <= sizes.skip for of in times):
        few = min(map(len, times))
        raise ValueError(f"a stream had {few} tokens: {failed[0] if failed else 'too slow'}")
    due = float(min(served.sent[: sizes.streams])) + sizes.lead
    begin = max(due, *(float(of[sizes.skip]) for of in times))
    end = min(due + sizes.window, *(float(of[-1]) for of in times))
    if end <= begin:
        raise ValueError(f"the streams ran together for {end - begin:.2f} s of the window")
    between = gaps(served.arrivals, streams, begin, end)
    if not between.any():
        raise ValueError("no two tokens of a stream came one after the other")
    firsts = waits(served, prompts)
    return {
        "seconds": end - begin,
        "gap_p50": quantile(between, 0.5, sizes.streams),
        "gap_p99": quantile(between, 0.99, sizes.streams),
        "gap_most": float(between.max()),
        "together": float((between == 0).mean()),
        "pause_p99": quantile(between[between > 0], 0.99, sizes.streams),
        "gaps": distribution(between),
        "steady_tokens_per_s": tokens_between(served.arrivals, streams, begin, end) / (end - begin),
        "tokens_per_s": tokens_between(served.arrivals, None, begin, end) / (end - begin),
        "prompts": n_prompts,
        "unserved": sum(not math.isfinite(first) for first in firsts),
        "ttft_p50": quantile(firsts, 0.5),
        "ttft_p99": quantile(firsts, 0.99),
        "failures": served.failures[:3],
        "client_busy": served.busy,
    }


def wide_phase(served: Served, wide: Load) -> Phase:
    """Return the phase in which all streams run."""
    wrong = [n for n in served.arrivals.totals(wide.streams).tolist() if n != wide.tokens]
    if wrong:
        raise ValueError(f"{len(wrong)} streams have not {wide.tokens} tokens: {wrong[:8]}")
    phase: Phase = served.arrivals.steady(wide.streams, wide.skip, wide.length)
    if not phase.seconds:
        raise ValueError("the streams' tokens came together: the phase took no time")
    return phase


def ttft_line(record: dict[str, Any]) -> str:
    """Return a size in words."""
    ours, theirs = (shown_ms(record[way]["first"]) for way in ("pair", "mixed"))
    apart = shown_ms(record["difference"])
    return f"{record['prompt']} tokens: first token {ours} ms, mixed {theirs}, apart {apart}"


def steady_line(record: dict[str, Any]) -> str:
    """Return a way's steady streams in words."""
    return (
        f"{record['way']}, chunks of {record['chunk']}: gaps {shown_ms(record['gap_p50'])} ms, "
        f"p99 {shown_ms(record['gap_p99'])}; {record['tokens_per_s']:,.0f} tokens/s; first tokens "
        f"of {record['prompts']} prompts {shown_ms(record['ttft_p50'])} ms, "
        f"p99 {shown_ms(record['ttft_p99'])}, {record['unserved']} without; "
        f"a client is busy {100 * record['client_busy']:.0f} %"
    )


def shown_ms(told: dict[str, Any]) -> str:
    """Return a quantile in milliseconds."""
    return "-" if told["value"] is None else f"{1e3 * told['value']:.2f}"


class Session:
    """A run: the deployments that its parts need, one set after the other."""

    def __init__(self, options: argparse.Namespace, folder: Path, report: Report) -> None:
        self.options, self.folder, self.report = options, folder, report
        self.sizes: Sizes = options.sizes
        self.shape = load_shape(folder)
        self.limit: Limit = options.limit
        self.bench = Bench(self.sizes, self.shape.vocab_size, self.limit, report)
        self.on = Processors.of(sorted(os.sched_getaffinity(0)), options.clients)
        report.told["client_processors"] = len(self.on.clients)

    def run(self) -> None:
        """Measure all parts that were asked for."""
        only = self.options.only
        if {"ttft", "steady", "logprobs"} & {*only}:
            with self.report.part("side by side"):
                self._side_by_side(only)
        if "exact" in only:
            with self.report.part("exact"):
                self._exact()

    def _side_by_side(self, only: Sequence[str]) -> None:
        chunk, *others = self.options.chunks
        with contextlib.ExitStack() as stack:
            prompts_per_s = 0.0
            say(f"starting a pair and two mixed workers, {self.limit.left:.0f} s are left")
            pair, mixed = all_of(stack, [self._start(self._pair(chunk)),
                                         self._start(self._mixed(chunk))])  # fmt: skip
            say(f"the deployments are there, {self.limit.left:.0f} s are left")
            for one in (pair, mixed):
                with self.report.part(f"warming of {one.way.name}"):
                    self.bench.warm(one)
            if "ttft" in only:
                with self.report.part("ttft"):
                    self.bench.ttft(pair, mixed)
            if "steady" in only:
                with self.report.part("capacity"):
                    tokens_per_s = self.bench.prefill_capacity(pair)
                    prompts_per_s = self.sizes.load * tokens_per_s / self.sizes.arriving
                for one in (pair, mixed):
                    with self.report.part(f"steady streams on {one.way.name}"):
                        self.bench.steady(one, prompts_per_s)
            if "logprobs" in only:
                with self.report.part("logprobs"):
                    self.bench.logprobs(pair)
        for another in others if "steady" in only else ():
            with (
                self.report.part(f"steady streams, chunks of {another}"),
                self._start(self._mixed(another)) as one,
            ):
                self.bench.warm(one)
                self.bench.steady(one, prompts_per_s)

    def _exact(self) -> None:
        """Compare answers: every K of the pair with a mixed worker that drafts nothing."""
        sizes, drafts = self.sizes, 3 if self.shape.n_mtp_layers else 0
        blocks, running, chunk = self._exact_blocks(), pair_exact.AT_ONCE, self.options.chunks[-1]
        asks = pair_exact.asks(
            sizes.exact, self.shape.vocab_size, sizes.exact_longest, sizes.exact_tokens
        )
        pair = Way("1P+1D", 1, 1, 0, chunk, blocks, running, drafts, self._more())
        say(f"starting a pair and a mixed worker, {self.limit.left:.0f} s are left")
        with contextlib.ExitStack() as stack:
            ours, theirs = all_of(
                stack,
                [self._start(pair), self._start(Way("mixed", 0, 0, 1, chunk, blocks, running))],
            )
            self.limit.need(SECONDS_OF_ANSWERS, "the answers of a mixed worker")
            wanted = pair_exact.answers(theirs.deployment, asks, self.folder.name)
            for k in range(drafts, -1, -1):
                self.limit.need(SECONDS_OF_ANSWERS, f"the answers at K = {k}")
                ours.speculate(k)
                accepted = ours.accepted()
                got = pair_exact.answers(ours.deployment, asks, self.folder.name)
                ours.wait_idle()
                record = pair_exact.compared(got, wanted, f"K = {k}")
                record |= {"k": k, "accepted_drafts": ours.accepted() - accepted}
                self.report.add("exact", record)
                say(
                    f"K = {k}: {record['differ']} of {record['requests']} answers differ, "
                    f"{record['accepted_drafts']:.0f} drafts were accepted"
                )

    def _exact_blocks(self) -> int:
        of_each = (self.sizes.exact_longest + self.sizes.exact_tokens) // BLOCK_SIZE + 3
        return max(pair_exact.AT_ONCE * of_each, self.sizes.blocks(0.0))

    def _pair(self, chunk: int) -> Way:
        sizes = self.sizes
        running = max(sizes.wide.streams, sizes.streams + 8)
        return Way("1P+1D", 1, 1, 0, chunk, sizes.blocks(wide=True), running, more=self._more())

    def _mixed(self, chunk: int) -> Way:
        sizes = self.sizes
        return Way("2 mixed", 0, 0, 2, chunk, sizes.blocks(MIXED_SHARE), sizes.streams + 8)

    def _more(self) -> tuple[str, ...]:
        return ("--share-kv",) if self.options.share_kv else ()

    def _start(self, way: Way) -> contextlib.AbstractContextManager[Serving]:
        self.limit.need(SECONDS_OF_ANSWERS, f"starting {way.name}")
        gpus = self.options.gpus if self.options.engine == "gpu" else ""
        flags = way.flags(self.folder, self.options.engine, gpus)
        return serving(way, flags, self.options.clients, self.on)


def say(text: str) -> None:
    """Print at once, with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)


BEGAN = time.monotonic()


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; sizes are the model's, but for those that are told."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=[*SIZES], default="qwen3-8b")
    parser.add_argument("--engine", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--gpus", default="0,1", help="as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--layers", type=int, default=36, help="of the random model")
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=[2048, 512],
        help="prompt tokens a step: of all; further ones of mixed workers, for steady streams",
    )  # fmt: skip
    parser.add_argument("--share-kv", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, help="single requests of a size")
    parser.add_argument("--window", type=float, help="seconds in which prompts arrive")
    parser.add_argument("--rounds", type=int, help="of logprobs")
    parser.add_argument("--exact", type=int, help="requests that are compared")
    parser.add_argument("--clients", type=int, default=4, help="processes that read")
    parser.add_argument("--seconds", type=float, default=450, help="nothing begins after them")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(words)
    told = {name: getattr(options, name) for name in ("repeats", "window", "rounds", "exact")}
    told = {name: value for name, value in told.items() if value is not None}
    options.sizes = SIZES[options.model]._replace(**told)
    options.limit = Limit(options.seconds)
    options.load, options.drafts = Load(0, options.sizes.longest, 64, 0, 0), 1  # of the folder
    return options


def main() -> int:
    """Measure and print; 1 if something was not measured, or answers differ."""
    options = parsed()
    report = Report(options)
    with report.part("the run"), model_folder(options) as folder:
        Session(options, folder, report).run()
    differ = sum(one["differ"] for one in report.told.get("exact", ()))
    for line in report.told["unmeasured"]:
        say(f"not measured: {line}")
    return int(bool(differ or report.told["unmeasured"]))


if __name__ == "__main__":
    sys.exit(main())
