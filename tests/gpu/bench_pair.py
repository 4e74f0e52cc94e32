"""Prefill and decode on two GPUs of one host, against mixed workers on the same GPUs, over HTTP.

    python3 tools/gpu.py --gpus 2 run tests/gpu/bench_pair.py [--only PART ...] [--seconds N]
        [--kv WAY ...] [--json FILE]

Owns the four parts, each against the whole stack (gateway, workers, SSE): `ttft`, single requests
to idle deployments and what handing over adds to them; `exact`, whether the answers are the same
bits, by the way of KV; `steady` streams while long prompts arrive; what `logprobs` cost. Of what
stands on the GPUs at the same time one is at work. A part that fails or has no time left is told in
the JSON and costs the others nothing. `--model tiny --engine cpu` tries the whole path without a
GPU. `battery_two.py` runs this beside the other programs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

import numpy as np  # noqa: E402
import pair_exact  # noqa: E402
from bench_gateway import FIRST_TEXT_ID, Load, model_folder  # noqa: E402
from pair_deployments import (  # noqa: E402
    HELP_FLAG,
    KvWay,
    Processors,
    Serving,
    Way,
    all_of,
    handed_over_since,
    serving,
)
from pair_numbers import capacity, poisson  # noqa: E402
from pair_parts import (  # noqa: E402
    first_tokens,
    first_waits,
    gateway_line,
    queue_numbers,
    steady_line,
    steady_numbers,
    ttft_line,
    whole,
    wide_phase,
)
from pair_report import Limit, Report, say  # noqa: E402
from pair_sizes import AT_ONCE, FIRST_TOKENS, SIZES, Sizes  # noqa: E402
from process_cpu import CpuWatch, spent  # noqa: E402
from stream_clients import Served  # noqa: E402

from baton_testing.exactness.asks import Ask  # noqa: E402
from baton_testing.exactness.said import Said  # noqa: E402
from baton_worker.engine.model.shape import load_shape  # noqa: E402

HELPED = "1P+1D, decode helps"
PARTS = ("ttft", "exact", "steady", "logprobs")
WARM_TOKENS, WARM_REQUESTS = 24, 3
WARM_LINE = 8
"""Prompts at once, of which decode computes some if it helps."""
TOP, MOST_DRAFTS = 20, 3
MIXED_SHARE = 0.6
"""Of the streams' room, for each of two mixed workers: they are not spread evenly to the token."""
SECONDS_OF_WIDE, SECONDS_A_REQUEST, SECONDS_OF_ANSWERS, SECONDS_OF_START = 15.0, 2.0, 15.0, 25.0
SEEDS = {"warm": 1 << 20, "ttft": 2 << 20, "capacity": 3 << 20, "steady": 4 << 20, "wide": 5 << 20}
"""Prompts of different parts, and of one part's requests, begin differently: nothing is cached."""


class Bench:
    """What the parts share: sizes, time, the vocabulary, and where their numbers go."""

    def __init__(self, sizes: Sizes, vocab_size: int, limit: Limit, report: Report) -> None:
        self.sizes, self.limit, self.report = sizes, limit, report
        self._vocab_size = vocab_size
        self._wanted: list[list[Said]] = []

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

    def warm(self, serving: Serving, *, streams: bool = True) -> None:
        """Serve a few requests of each size, and all streams for a few tokens."""
        sizes, seed = self.sizes, SEEDS["warm"]
        for prompt in {*sizes.ttft, sizes.arriving}:
            for _ in range(WARM_REQUESTS):
                seed += 1
                whole(serving.clients.serve(self.bodies(1, prompt, FIRST_TOKENS, seed)))
        if serving.way.helps:
            line = self.bodies(WARM_LINE, sizes.arriving, FIRST_TOKENS, seed + 1)
            whole(serving.clients.serve(line))
        if streams:
            many = self.bodies(sizes.streams, sizes.context, WARM_TOKENS, SEEDS["warm"])
            whole(serving.clients.serve(many))

    def ttft(self, pairs: Sequence[Serving], mixed: Serving) -> None:
        """Measure single requests to idle deployments, in turns."""
        ways = [*pairs, mixed]
        for prompt in self.sizes.ttft:
            seen: dict[Serving, list[tuple[float, ...]]] = {way: [] for way in ways}
            before = {pair: pair.handed_over() for pair in pairs}
            for number in range(self.sizes.repeats):
                self.limit.need(SECONDS_A_REQUEST, f"a request of {prompt} tokens")
                asked = self.bodies(1, prompt, FIRST_TOKENS, SEEDS["ttft"] + prompt * 100 + number)
                for way in ways if number % 2 else ways[::-1]:
                    seen[way].append(first_waits(whole(way.clients.serve(asked))))
            for pair in pairs:
                record = first_tokens(prompt, seen[pair], seen[mixed])
                record |= {"chunk": pair.way.chunk, "mixed_chunk": mixed.way.chunk}
                record["handoff"] = handed_over_since(before[pair], pair.handed_over())
                self.report.add("ttft", record)
                say(ttft_line(record))

    def exact(self, pair: Serving, kv: str, mixed: Serving, name: str, most_k: int) -> None:
        """Compare answers, slice after slice: every K of the pair with a mixed worker's at K = 0.

        What was compared before time ran out is in the report.
        """
        sizes = self.sizes
        asks = pair_exact.asks(
            sizes.exact, self._vocab_size, sizes.exact_longest, sizes.exact_tokens
        )
        found: dict[int, dict[str, Any]] = {}
        for number, start in enumerate(range(0, sizes.exact, sizes.exact_slice)):
            some = asks[start : start + sizes.exact_slice]
            if number == len(self._wanted):
                self.limit.need(SECONDS_OF_ANSWERS, "the answers of a mixed worker")
                self._wanted.append(pair_exact.answers(mixed.deployment, some, name))
            for k in range(most_k, -1, -1):
                self.limit.need(SECONDS_OF_ANSWERS, f"the answers at K = {k} over {kv}")
                told = self._compared(pair, some, self._wanted[number], name, k)
                is_new = k not in found
                record = {"kv": kv} | (told if is_new else pair_exact.added(found[k], told))
                if is_new:
                    found[k] = record
                    self.report.add("exact", record)
                else:
                    found[k].update(record)
                    self.report.write()
                say(
                    f"{kv}, K = {k}: {record['differ']} of {record['requests']} answers differ, "
                    f"{record['accepted_drafts']:.0f} drafts were accepted, decode computed "
                    f"{record['by_decode']:.0f} prompts"
                )

    def _compared(
        self, pair: Serving, asks: Sequence[Ask], wanted: Sequence[Said], name: str, k: int
    ) -> dict[str, Any]:
        pair.speculate(k)
        accepted, before, own = pair.accepted(), pair.handed_over(), pair.own_prompts()
        got = pair_exact.answers(pair.deployment, asks, name)
        handoff = handed_over_since(before, pair.handed_over())
        return pair_exact.compared(got, wanted, f"K = {k}") | {
            "k": k,
            "greedy": sum(ask.sampling["temperature"] == 0 for ask in asks),
            "accepted_drafts": pair.accepted() - accepted,
            "bytes": handoff["bytes"],
            "by_decode": pair.own_prompts() - own,
            "ways": sorted(handoff["bytes_by_transport"]),
        }

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

    @property
    def steady_seconds(self) -> float:
        """What steady streams take, from the first request on."""
        return self.sizes.lead + self.sizes.window + self.sizes.grace

    def steady(self, serving: Serving, tokens_per_s: float) -> None:
        """Measure steady streams while prompts arrive, at a load of this prefill capacity."""
        sizes = self.sizes
        self.limit.need(self.steady_seconds + 5, f"steady streams on {serving.way.name}")
        if not tokens_per_s:
            raise ValueError("the prefill capacity was not measured")
        prompts_per_s = sizes.load * tokens_per_s / sizes.arriving
        times = poisson(prompts_per_s, sizes.window, SEEDS["steady"])
        if not times:
            raise ValueError(f"no prompt arrives at {prompts_per_s:.2f} a second")
        streams = self.bodies(sizes.streams, sizes.context, sizes.tokens, SEEDS["steady"])
        seed = SEEDS["steady"] + 1
        prompts = self.bodies(len(times), sizes.arriving, sizes.arriving_tokens, seed)
        at = [0.0] * len(streams) + [sizes.lead + time for time in times]
        before, own = serving.handed_over(), serving.own_prompts()
        served = serving.clients.serve(streams + prompts, at, self.steady_seconds)
        serving.wait_idle()
        way = serving.way
        record = steady_numbers(served, sizes, len(times))
        record |= {"way": way.name, "chunk": way.chunk, "prompts_per_s": prompts_per_s}
        if not way.helps:  # else there is one server more, of another speed, now and then
            servers = way.prefill or way.mixed
            record["queue"] = queue_numbers(times, sizes.arriving / tokens_per_s, servers)
        if way.prefill:
            record["handoff"] = handed_over_since(before, serving.handed_over())
        if way.helps:
            record["decode_chunk"] = int(way.more[way.more.index(HELP_FLAG) + 1])
            record["by_decode"] = serving.own_prompts() - own
        self.report.add("steady", record)
        say(steady_line(record))

    def logprobs(self, pair: Serving, reserve_seconds: float) -> None:
        """Measure many streams, with all alternatives and with no logprobs, in turns."""
        for number in range(self.sizes.rounds):
            for k in (None, TOP) if not number else ():
                self._wide(pair, k, WARM_TOKENS, number)
            self.limit.need(2 * SECONDS_OF_WIDE + reserve_seconds, "a round of logprobs")
            rates: dict[str, Any] = {"cpu_us_per_token": {}}
            for k in (None, TOP) if number % 2 else (TOP, None):
                with CpuWatch(pair.pids) as watch:
                    served = self._wide(pair, k, self.sizes.wide.tokens, 1 + number)
                phase = wide_phase(served, self.sizes.wide)
                name = "none" if k is None else "top"
                rates[name] = phase.tokens_per_s
                cpu = {of: spent(seen, phase) for of, seen in watch.seen().items()}
                rates["cpu_us_per_token"][name] = cpu
                rates["client_busy"] = max(served.busy, rates.get("client_busy", 0.0))
            rates["ratio"] = rates["top"] / rates["none"]
            self.report.add("logprobs", rates)
            say(
                f"{self.sizes.wide.streams} streams: {rates['none']:,.0f} tokens/s without, "
                f"{rates['top']:,.0f} with k = {TOP}: {100 * rates['ratio']:.1f} %; "
                f"{gateway_line(rates['cpu_us_per_token'])}"
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
        only = {*self.options.only}
        if {"ttft", "exact"} & only:
            with self.report.part("idle deployments"):
                self._idle(only)
        if {"steady", "logprobs"} & only:
            with self.report.part("deployments under load"):
                self._loaded(only)

    def _idle(self, only: set[str]) -> None:
        """Single requests to pairs of every chunk, then answers over every way of KV; the mixed
        worker beside them stays.
        """
        chunks, kv = self.options.chunks, self.options.kv
        with contextlib.ExitStack() as stack:
            with contextlib.ExitStack() as until_measured:
                ways = [self._small("mixed", chunks[0], mixed=1)]
                if "ttft" in only:
                    ways += [self._small("1P+1D", chunk, more=kv[0].flags) for chunk in chunks]
                stacks = [stack] + [until_measured] * (len(ways) - 1)
                mixed, *pairs = all_of(stacks, [self._start(way) for way in ways])
                if pairs:
                    self._single(pairs, mixed)
            for way in kv if "exact" in only else ():
                with self.report.part(f"exact over {way.name}"):
                    self._exact(way, mixed)

    def _single(self, pairs: Sequence[Serving], mixed: Serving) -> None:
        for one in (mixed, *pairs):
            with self.report.part(f"warming of {one.way.name}, chunks of {one.way.chunk}"):
                self.bench.warm(one, streams=False)
        with self.report.part("ttft"):
            self.bench.ttft(pairs, mixed)

    def _exact(self, kv: KvWay, mixed: Serving) -> None:
        drafts = MOST_DRAFTS if self.shape.n_mtp_layers else 0
        more = (*kv.flags, "--no-prefix-caching")  # so that every K computes and hands over all
        way = self._small("1P+1D", self.options.chunks[-1], drafts=drafts, more=more)
        with self._start(way) as pair:
            self.bench.exact(pair, kv.name, mixed, self.folder.name, drafts)

    def _loaded(self, only: set[str]) -> None:
        """The pair, the pair whose decode helps, and mixed workers of every chunk, one after the
        other: each needs the memory of both GPUs.
        """
        tokens_per_s = 0.0
        chunks = self.options.chunks if "steady" in only else []
        with self._start(self._pair(self.options.pair_chunk)) as pair:
            with self.report.part(f"warming of {pair.way.name}"):
                self.bench.warm(pair)
            if "steady" in only:
                with self.report.part("capacity"):
                    tokens_per_s = self.bench.prefill_capacity(pair)
                with self.report.part(f"steady streams on {pair.way.name}"):
                    self.bench.steady(pair, tokens_per_s)
            if "logprobs" in only:
                n_more = len(chunks) + (bool(chunks) and self.options.decode_chunk > 0)
                reserve = n_more * (self.bench.steady_seconds + SECONDS_OF_START)
                with self.report.part("logprobs"):
                    self.bench.logprobs(pair, reserve)
        others = [self._mixed(chunk) for chunk in chunks]
        if chunks and self.options.decode_chunk:
            others.insert(0, self._helped(self.options.pair_chunk, self.options.decode_chunk))
        for way in others:
            with (
                self.report.part(f"steady streams on {way.name}, chunks of {way.chunk}"),
                self._start(way) as one,
            ):
                self.bench.warm(one)
                self.bench.steady(one, tokens_per_s)

    def _pair(self, chunk: int) -> Way:
        sizes = self.sizes
        running, kv = max(sizes.wide.streams, sizes.streams + 8), self.options.kv[0]
        return Way("1P+1D", 1, 1, 0, chunk, sizes.blocks(wide=True), running, more=kv.flags)

    def _helped(self, chunk: int, decode_chunk: int) -> Way:
        """The pair, decode computing prompts behind one that waits."""
        behind = ("--decode-prompts-behind", str(self.sizes.arriving))
        pair = self._pair(chunk)
        more = (*pair.more, HELP_FLAG, str(decode_chunk), *behind)
        return pair._replace(name=HELPED, more=more)

    def _mixed(self, chunk: int) -> Way:
        sizes = self.sizes
        return Way("2 mixed", 0, 0, 2, chunk, sizes.blocks(MIXED_SHARE), sizes.streams + 8)

    def _small(
        self, name: str, chunk: int, *, mixed: int = 0, drafts: int = 0, more: Sequence[str] = ()
    ) -> Way:
        """A deployment beside which others have room."""
        pairs, compares = 1 - mixed, mixed or "--no-prefix-caching" in more
        blocks = self.sizes.exact_blocks if compares else self.sizes.idle_blocks
        return Way(name, pairs, pairs, mixed, chunk, blocks, AT_ONCE, drafts, tuple(more))

    @contextlib.contextmanager
    def _start(self, way: Way) -> Iterator[Serving]:
        way = way._replace(gateways=self.options.gateways)
        self.limit.need(SECONDS_OF_ANSWERS, f"starting {way.name}")
        say(f"starting {way.name}, chunks of {way.chunk}; {self.limit.left:.0f} s are left")
        gpus = self.options.gpus if self.options.engine == "gpu" else ""
        flags = way.flags(self.folder, self.options.engine, gpus)
        began = time.monotonic()
        with serving(way, flags, self.options.clients, self.on) as one:
            took = {"way": way.name, "chunk": way.chunk, "seconds": time.monotonic() - began}
            self.report.add("starts", took)
            yield one


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; sizes are the model's, but for those that are told."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=[*SIZES], default="qwen3-8b")
    parser.add_argument("--folder", type=Path, help="of the model, written before")
    parser.add_argument("--engine", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--gpus", default="0,1", help="as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--layers", type=int, default=36, help="of the random model")
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=[2048, 512],
        help="prompt tokens a step: of idle pairs, and of mixed workers under load",
    )  # fmt: skip
    parser.add_argument("--pair-chunk", type=int, help="of the pair under load (the first chunk)")
    parser.add_argument(
        "--decode-chunk", type=int, default=0, metavar="TOKENS",
        help="under load, measure the pair also with a decode that computes prompts in such chunks",
    )  # fmt: skip
    parser.add_argument(
        "--kv", nargs="+", type=KvWay.of, default=[KvWay.of("nvlink")], metavar="WAY",
        help="ways of KV: nvlink, nixl, zmq, or NAME=FLAGS of `baton-worker local`; the first is "
        "that of all parts, answers are compared over each",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, help="single requests of a size")
    parser.add_argument("--window", type=float, help="seconds in which prompts arrive")
    parser.add_argument("--rounds", type=int, help="of logprobs")
    parser.add_argument("--gateways", type=int, default=1, help="in front of each deployment")
    parser.add_argument("--exact", type=int, help="requests that are compared")
    parser.add_argument("--clients", type=int, default=4, help="processes that read")
    parser.add_argument("--seconds", type=float, default=450, help="nothing begins after them")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(words)
    told = {name: getattr(options, name) for name in ("repeats", "window", "rounds", "exact")}
    told = {name: value for name, value in told.items() if value is not None}
    options.sizes = SIZES[options.model]._replace(**told)
    options.limit = Limit(options.seconds)
    options.pair_chunk = options.pair_chunk or options.chunks[0]
    options.load, options.drafts = Load(0, options.sizes.longest, 64, 0, 0), 1  # of the folder
    return options


def report_of(options: argparse.Namespace) -> Report:
    """Return the report of a run with these options."""
    told = {
        "model": options.model,
        "layers": options.layers,
        "chunks": options.chunks,
        "pair_chunk": options.pair_chunk,
        "gateways": options.gateways,
        "kv": [way.name for way in options.kv],
        "sizes": options.sizes._asdict() | {"wide": options.sizes.wide._asdict()},
    }
    return Report(options.json, options.engine, told)


def main() -> int:
    """Measure and print; 1 if something was not measured, or answers differ."""
    options = parsed()
    report = report_of(options)
    with report.part("the run"), model_folder(options) as folder:
        Session(options, folder, report).run()
    differ = sum(one["differ"] for one in report.told.get("exact", ()))
    for line in report.told["unmeasured"]:
        say(f"not measured: {line}")
    return int(bool(differ or report.told["unmeasured"]))


if __name__ == "__main__":
    sys.exit(main())
