"""What of an engine's tokens a second reaches clients: the engine alone, and behind a gateway.

    python3 tools/gpu.py run tests/gpu/bench_gateway.py [--model qwen3-8b|tiny] [--logprobs 0 5]
        [--json FILE]

The same requests go to an engine alone in a process, and as SSE streams with logprobs through
`baton-worker local` (a gateway and a mixed worker) to clients in processes of their own, in turns.
Both are held to the phase in which all streams run, of the same tokens and so of the same contexts.
Qwen3-8B's shape has random weights, which are written to a folder first; the tiny model's step is
short, so that it shows what the host costs. `--engine cpu` tries the whole path without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

import numpy as np  # noqa: E402
from engine_alone import EngineAlone  # noqa: E402
from process_cpu import CpuWatch, spent  # noqa: E402
from stream_clients import Clients  # noqa: E402

import gpu  # noqa: E402
from baton_testing.arrivals import Phase  # noqa: E402
from baton_testing.local_deployment import Deployment, start  # noqa: E402
from baton_testing.processes import sums  # noqa: E402
from baton_testing.tiny_model import TINY_MODEL  # noqa: E402
from baton_worker.config import (  # noqa: E402
    EngineConfig,
    ModelConfig,
    ProcessConfig,
    SpeculativeConfig,
)
from baton_worker.engine.model.shape import load_shape  # noqa: E402
from baton_worker.sampling import SamplingParams  # noqa: E402

BLOCK_SIZE, PREFILL_CHUNK = EngineConfig().block_size, 4096
FIRST_TEXT_ID = 6
"""Ids below are special in the tiny model's tokenizer."""
FOLDER_BYTES = 20e9
WARM_TOKENS = 24


class Load(NamedTuple):
    """What is asked: so many streams, each of so many tokens in and out."""

    streams: int
    prompt: int
    tokens: int
    skip: int
    length: int

    @property
    def kv_blocks(self) -> int:
        """Room for all, and a block more each for what is launched ahead."""
        return self.streams * ((self.prompt + self.tokens) // BLOCK_SIZE + 2)


class Case(NamedTuple):
    """One round's requests, as the engine and as the gateway are given them."""

    submits: list[dict[str, Any]]
    bodies: list[dict[str, Any]]


def case(load: Load, vocab_size: int, k: int, seed: int, tokens: int) -> Case:
    """Return requests with prompts that no round before had: nothing of them is cached."""
    rng = np.random.default_rng(seed)
    made = Case([], [])
    for number in range(load.streams):
        prompt = rng.integers(FIRST_TEXT_ID, vocab_size, load.prompt).tolist()
        sampling: dict[str, Any] = {
            "max_tokens": tokens,
            "temperature": 0.8,
            "seed": number,
            "ignore_eos": True,
        }
        made.submits.append(
            {
                "prompt_token_ids": tuple(prompt),
                "sampling": SamplingParams(**sampling),
                "logprobs_k": k,
            }
        )
        made.bodies.append({"prompt": prompt, "stream": True, "logprobs": k} | sampling)
    return made


def write_random_model(folder: str, layers: int, max_model_len: int, drafts: bool) -> None:
    """Make Qwen3-8B's shape on the GPU and write it; runs in a process that ends with it."""
    import torch

    from baton_testing.exactness.random_model import qwen3_8b, random_weights
    from baton_testing.model_folder import write_folder

    shape = qwen3_8b(layers, int(drafts))
    weights = random_weights(torch, shape)
    shape = dataclasses.replace(shape, max_position_embeddings=max_model_len)
    write_folder(
        Path(folder), shape, weights, lambda part: part.view(torch.uint8).cpu().numpy().reshape(-1)
    )


@contextlib.contextmanager
def model_folder(options: argparse.Namespace) -> Iterator[Path]:
    """Give the model's folder: one that was written before, or a new one, in memory if it fits."""
    if written := getattr(options, "folder", None):
        yield written
        return
    if options.model == "tiny":
        yield TINY_MODEL
        return
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > FOLDER_BYTES
    with tempfile.TemporaryDirectory(dir=memory if has_room else None) as scratch:
        folder = Path(scratch) / options.model
        longest = options.load.prompt + options.load.tokens + 64
        write_folder_apart(folder, options.layers, longest, drafts=options.drafts > 0)
        yield folder


def write_folder_apart(folder: Path, layers: int, longest: int, *, drafts: bool) -> None:
    """Write the random model in a process that ends with it, so that nothing stays on the GPU.

    Raises:
        RuntimeError: it was not written.
    """
    folder.mkdir()
    began = time.monotonic()
    writer = multiprocessing.get_context("spawn").Process(
        target=write_random_model, args=(str(folder), layers, longest, drafts)
    )
    writer.start()
    writer.join(120)
    if writer.exitcode != 0:
        writer.kill()
        raise RuntimeError(f"the model's folder was not written: {writer.exitcode}")
    say(f"wrote {folder} in {time.monotonic() - began:.1f} s")


def configuration(options: argparse.Namespace, folder: Path) -> ProcessConfig:
    """Return what the engine alone is told: what `local` tells its worker."""
    load, drafts = options.load, options.drafts
    return ProcessConfig(
        model=ModelConfig(str(folder)),
        speculative=SpeculativeConfig("mtp", drafts) if drafts else SpeculativeConfig("none", 0),
        engine=EngineConfig(
            device=options.engine,
            kv_blocks=load.kv_blocks,
            max_running=load.streams,
            prefill_chunk_tokens=PREFILL_CHUNK,
        ),
    )


def flags(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the same for `local`."""
    load = options.load
    told = {
        "model": folder,
        "engine": options.engine,
        "prefill": 0,
        "decode": 0,
        "mixed": 1,
        "num-speculative-tokens": options.drafts,
        "kv-blocks": load.kv_blocks,
        "max-running": load.streams,
        "prefill-chunk": PREFILL_CHUNK,
    }
    return [word for name, value in told.items() for word in (f"--{name}", str(value))]


class Bench:
    """Both ways to serve, side by side on one device; only one of them is at work at a time."""

    def __init__(
        self, options: argparse.Namespace, vocab_size: int, alone: EngineAlone, served: Deployment
    ) -> None:
        self.load: Load = options.load
        self.vocab_size = vocab_size
        self.alone, self.served = alone, served
        port = int(served.url.rpartition(":")[2])
        self.clients = Clients(port, options.clients)
        self.pids = {role: [int(served.latest(role)["pid"])] for role in ("gateway", "mixed")}
        self.pids["clients"] = self.clients.pids

    def round(self, k: int, seed: int, engine_first: bool) -> dict[str, Any]:
        """Serve the same requests both ways; return both rates and what explains them."""
        asked = case(self.load, self.vocab_size, k, seed, self.load.tokens)
        record: dict[str, Any] = {"logprobs": k, "seed": seed, "engine_first": engine_first}
        parts = [self.engine_alone, self.through_gateway]
        for part in parts if engine_first else reversed(parts):
            record |= part(asked)
        record["ratio"] = record["gateway"]["tokens_per_s"] / record["engine"]["tokens_per_s"]
        return record

    def warm(self, k: int) -> None:
        """Serve a few tokens both ways."""
        asked = case(self.load, self.vocab_size, k, 1 << 20, WARM_TOKENS)
        self.alone.run(asked.submits)
        self.clients.run(asked.bodies)

    def engine_alone(self, asked: Case) -> dict[str, Any]:
        """Measure the engine's own loop."""
        arrivals, cpu = self.alone.run(asked.submits)
        phase = self._phase(arrivals)
        return {"engine": rates(phase) | {"cpu_us_per_token": spent(cpu, phase)}}

    def through_gateway(self, asked: Case) -> dict[str, Any]:
        """Measure what clients receive."""
        self.served.wait_idle("gateway", "mixed")
        before = self._sums()
        with CpuWatch(self.pids) as watch:
            arrivals = self.clients.run(asked.bodies)
        phase = self._phase(arrivals)
        self.served.wait_idle("gateway", "mixed")
        after = self._sums()
        cpu = {
            f"{name}_cpu_us_per_token": spent(seen, phase) for name, seen in watch.seen().items()
        }
        moved = {
            role: {name: told[name] - before[role].get(name, 0.0) for name in told}
            for role, told in after.items()
        }
        metrics = {r: {name: by for name, by in told.items() if by} for r, told in moved.items()}
        return {"gateway": rates(phase) | cpu, "metrics": metrics}

    def _phase(self, arrivals: Any) -> Phase:
        load = self.load
        wrong = [n for n in arrivals.totals(load.streams).tolist() if n != load.tokens]
        if wrong:
            raise ValueError(f"{len(wrong)} streams have not {load.tokens} tokens: {wrong[:8]}")
        phase: Phase = arrivals.steady(load.streams, load.skip, load.length)
        return phase

    def _sums(self) -> dict[str, dict[str, float]]:
        urls = self.served.metrics_urls
        return {role: sums(url) for role, url in urls.items()}


def rates(phase: Phase) -> dict[str, float]:
    """Return a phase as numbers of a record."""
    return {
        "tokens_per_s": phase.tokens_per_s,
        "seconds": phase.seconds,
        "tokens": phase.tokens,
        "tokens_each_at_begin": phase.mean_begin,
    }


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start both, serve round by round until the rounds or the seconds are spent; yield each."""
    until = time.monotonic() + options.seconds
    with model_folder(options) as folder, contextlib.ExitStack() as stack:
        alone = stack.enter_context(EngineAlone(configuration(options, folder)))
        served = stack.enter_context(start(*flags(options, folder)))
        alone.wait()
        bench = Bench(options, load_shape(folder).vocab_size, alone, served)
        stack.enter_context(bench.clients)
        say(f"ready, {until - time.monotonic():.0f} s are left")
        for number in range(options.rounds):
            for k in options.logprobs:
                if not number:
                    bench.warm(k)
                if time.monotonic() > until:
                    say("no time is left for more rounds")
                    return
                yield bench.round(k, number * 100 + k, engine_first=number % 2 == 0)


def line(record: dict[str, Any]) -> str:
    """Return a round in words."""
    engine, gateway = record["engine"], record["gateway"]
    cpu = ", ".join(
        f"{name.removesuffix('_cpu_us_per_token')} {value:.1f}"
        for name, value in gateway.items()
        if name.endswith("_cpu_us_per_token")
    )
    return (
        f"logprobs {record['logprobs']}: engine {engine['tokens_per_s']:,.0f} tokens/s, "
        f"gateway {gateway['tokens_per_s']:,.0f}: {100 * record['ratio']:.1f} %; CPU us a token: "
        f"engine alone {engine['cpu_us_per_token']:.1f}; {cpu}"
    )


def summary(options: argparse.Namespace, rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the medians of each number of alternatives."""
    found = []
    for k in options.logprobs:
        of_k = [record for record in rounds if record["logprobs"] == k]
        if of_k:
            found.append(
                {
                    "logprobs": k,
                    "rounds": len(of_k),
                    "engine": statistics.median(r["engine"]["tokens_per_s"] for r in of_k),
                    "gateway": statistics.median(r["gateway"]["tokens_per_s"] for r in of_k),
                    "ratio": statistics.median(r["ratio"] for r in of_k),
                    "ratios": [r["ratio"] for r in of_k],
                }
            )
    return found


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def parsed() -> argparse.Namespace:
    """Return the options; `load` is made of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=["qwen3-8b", "tiny"], default="qwen3-8b")
    parser.add_argument("--engine", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--layers", type=int, default=36, help="of the random model")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=256, help="tokens in of each stream")
    parser.add_argument("--tokens", type=int, default=352, help="tokens out of each stream")
    parser.add_argument("--skip", type=int, default=48, help="tokens before the phase")
    parser.add_argument("--length", type=int, default=192, help="tokens of each in the phase")
    parser.add_argument("--drafts", type=int, default=0, help="K, of the model's draft layer")
    parser.add_argument("--logprobs", type=int, nargs="+", default=[0], help="alternatives")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4, help="processes that read")
    parser.add_argument("--seconds", type=float, default=100, help="no round begins after them")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    options.load = Load(
        options.streams, options.prompt, options.tokens, options.skip, options.length
    )
    return options


def main() -> None:
    """Measure, print, and write what was asked for."""
    options = parsed()
    rounds: list[dict[str, Any]] = []
    for record in measured(options):
        rounds.append(record)
        say(line(record))
        if options.json:
            write(options, rounds)  # each time: what was measured outlives a failure
    for told in summary(options, rounds):
        say(
            f"== {options.model}, {options.streams} streams, logprobs {told['logprobs']}, "
            f"{told['rounds']} rounds: engine {told['engine']:,.0f} tokens/s, gateway "
            f"{told['gateway']:,.0f}: {100 * told['ratio']:.1f} % in the median"
        )


def write(options: argparse.Namespace, rounds: list[dict[str, Any]]) -> None:
    """Write the rounds so far and their medians."""
    machine = gpu.machine() if options.engine == "gpu" else {"cores": str(os.cpu_count())}
    record = {"machine": machine, "commit": gpu.commit(), "load": options.load._asdict()}
    record |= {"model": options.model, "engine": options.engine, "drafts": options.drafts}
    record |= {"summary": summary(options, rounds), "rounds": rounds}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
