"""What cutting a prompt costs: its first token by the size of chunks, launched ahead and not.

    python3 tools/gpu.py run tests/gpu/bench_chunks.py [--json FILE] [--layers N] [--rounds N]

Qwen3-8B's shape with random bfloat16 weights, one engine, no process around it. A prompt's time is
from its submission to the step that has its first token. The ways to cut take turns, each with an
engine of its own over the same weights; *waits* are chunks that are planned and launched when the
one before has landed. The second part times the tokens of streams that decode beside such a prompt.
`--model tiny` tries all of it on a CPU, over NumPy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

import numpy as np  # noqa: E402

import gpu  # noqa: E402
from baton_testing.exactness import devices  # noqa: E402
from baton_worker.engine.api import Launched, LaunchKind  # noqa: E402
from baton_worker.engine.options import NO_DRAFTS, EngineOptions  # noqa: E402
from baton_worker.identity import make_handle  # noqa: E402
from baton_worker.messages import DecodeTarget, Submit  # noqa: E402
from baton_worker.sampling import SamplingParams  # noqa: E402

BLOCK_SIZE, STREAMS, STREAM_TOKENS = 16, 8, 160


class Way(NamedTuple):
    """How prompts are cut, and whether the next chunk is launched ahead."""

    chunk: int
    is_ahead: bool


class Prompt(NamedTuple):
    """Milliseconds to a first token, and those in which the device had the prompt's kernels."""

    first_ms: float
    device_ms: float


def ways(chunks: list[int]) -> list[Way]:
    """Return what is tried: each size both ways."""
    return [Way(chunk, is_ahead) for chunk in chunks for is_ahead in (False, True)]


def options_of(way: Way, length: int, scale: int) -> EngineOptions:
    """Return an engine's limits; all of a tiny model's sizes are a `scale`th."""
    most = length + STREAM_TOKENS
    return EngineOptions(
        block_size=BLOCK_SIZE,
        n_blocks=(most + STREAMS * 2 * STREAM_TOKENS) // BLOCK_SIZE,
        max_running=STREAMS + 2,
        max_waiting=16,
        max_model_len=most,
        prefill_tokens=way.chunk // scale,
        n_draft=0,
        use_mtp=False,
        drafts=NO_DRAFTS,
        max_top_k=20,
        overlap=True,
        prefix_caching=False,
        share_kv=True,
    )


@contextmanager
def engine_of(loaded: Any, way: Way, options: EngineOptions) -> Iterator[Any]:
    """Give an engine that cuts prompts in this way."""
    engine = devices.engine_of(loaded, options)
    if not way.is_ahead:
        ahead = engine.runner.start_ahead

        def waiting(behind: Any, plan: Any, n_draft: int) -> Any:
            return None if plan.prefill else ahead(behind, plan, n_draft)

        engine.runner.start_ahead = waiting
    try:
        yield engine
    finally:
        engine.close()


def submit(engine: Any, number: int, prompt: Any, n_tokens: int, stays: bool) -> Any:
    """Ask for so many tokens, or, if its KV stays for decode, for the first one."""
    request = Submit(
        make_handle(1, number),
        0,
        prompt_token_ids=tuple(prompt.tolist()),
        sampling=SamplingParams(max_tokens=n_tokens, temperature=0.0, ignore_eos=True),
        decode=DecodeTarget("decode-0", "") if stays else None,
    )
    engine.submit(request, stays)
    return request.key


def one(engine: Any, number: int, prompt: Any) -> Prompt:
    """Compute a prompt whose KV stays, and forget it."""
    before = _device_seconds(engine)
    began = time.perf_counter()
    key = submit(engine, number, prompt, 64, True)
    handed: Any = ()
    while not handed:
        handed = engine.step().handoffs
    first = time.perf_counter() - began
    engine.release_handoff(key)
    return Prompt(1e3 * first, 1e3 * (_device_seconds(engine) - before))


def _device_seconds(engine: Any) -> float:
    mixed: Launched = engine.runner.launches.by_kind[LaunchKind.MIXED]
    return mixed.seconds


def beside(engine: Any, prompts: Any, number: int) -> dict[str, float]:
    """Return the gaps between steps of streams that decode while a prompt is computed, in ms."""
    for index in range(STREAMS):
        submit(engine, number + index, prompts[0][index * 7 : index * 7 + 32], STREAM_TOKENS, False)
    for _ in range(12):
        engine.step()
    key = submit(engine, number + STREAMS, prompts[1], 2, False)
    gaps, emitted, last = [], 0, time.perf_counter()
    while not emitted:
        columns = engine.step().columns
        now = time.perf_counter()
        gaps.append(1e3 * (now - last))
        last = now
        emitted = int((columns.handle == key.handle).sum())
    for request in [*engine._requests]:
        engine.abort(request)
    while engine.has_work():
        engine.step()
    return {"median": statistics.median(gaps), "longest": max(gaps), "all": sum(gaps)}


def load(model: str, layers: int) -> Any:
    """Return a model on the device."""
    name = "numpy-tiny" if model == "tiny" else "gpu-qwen3-8b"
    known = devices.KNOWN[name]._replace(n_layers=0 if model == "tiny" else layers)
    return devices._on_numpy(known) if model == "tiny" else devices._on_gpu(known)


def measured(loaded: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all ways by turns; yield a record of each."""
    scale = 32 if options.model == "tiny" else 1
    length, vocab = options.tokens // scale, loaded.model_shape.vocab_size
    rng, tried = np.random.default_rng(0), ways(options.chunks)
    first: dict[Way, list[Prompt]] = {way: [] for way in tried}
    gaps: dict[Way, list[dict[str, float]]] = {way: [] for way in tried}
    with ExitStack() as stack:
        engines = {
            way: stack.enter_context(engine_of(loaded, way, options_of(way, length, scale)))
            for way in tried
        }
        for turn in range(-1, options.rounds):
            prompts = rng.integers(6, vocab, (2, length))
            order = tried if turn % 2 else tried[::-1]
            for way in order:
                found = one(engines[way], 1000 + turn, prompts[0])
                if turn >= 0:  # the first round warms
                    first[way].append(found)
            for way in order if turn < options.beside else ():
                told = beside(engines[way], prompts, 2000 + 20 * turn)
                gaps[way] += [told] if turn >= 0 else []
    for way in tried:
        record: dict[str, Any] = way._asdict() | {"tokens": length}
        record["first_ms"] = [round(p.first_ms, 3) for p in first[way]]
        record["device_ms"] = [round(p.device_ms, 3) for p in first[way]]
        yield record | {"beside": gaps[way]}


def line(record: dict[str, Any]) -> str:
    """Return a record in words."""
    way = f"chunks of {record['chunk']:5}, {'ahead' if record['is_ahead'] else 'waits'}"
    first, device = (statistics.median(record[name]) for name in ("first_ms", "device_ms"))
    told = f"{way}: first token {first:.2f} ms, of that the device's {device:.2f}"
    for name in ("median", "longest"):
        if record["beside"]:
            found = statistics.median(gap[name] for gap in record["beside"])
            told += f"; {name} gap beside {found:.2f}"
    return told


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=["qwen3-8b", "tiny"], default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--rounds", type=gpu.at_least_one, default=6)
    parser.add_argument("--beside", type=int, default=2, help="rounds with streams beside")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    records = list(measured(load(options.model, options.layers), options))
    print("\n".join(map(line, records)), flush=True)
    if options.json:
        machine = gpu.machine() if options.model != "tiny" else {}
        whole = {"machine": machine, "commit": gpu.commit(), "model": options.model}
        whole |= {"layers": options.layers} if options.model != "tiny" else {}
        options.json.write_text(json.dumps(whole | {"records": records}) + "\n")


if __name__ == "__main__":
    main()
