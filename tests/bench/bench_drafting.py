"""What each drafting method yields, and what shared prefixes save: `bench_drafting.py`.

Counts, not times: tokens per decode row and accepted drafts do not depend on the machine. The
baseline is method `none`, whose output every method must repeat. `new` prompts are text that the
model wrote; `quoting` ones hold a text, part of its answer, and the text again, as edits of code or
documents do. CPU time is given for prefix caching alone, paired with the same run without it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.api import StepStats
from baton_worker.engine.build import build_engine
from baton_worker.identity import make_handle
from baton_worker.messages import Submit
from baton_worker.records.rows import rows
from baton_worker.sampling import SamplingParams

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-mtp"
N_PROMPTS, MAX_TOKENS = 32, 48
Prompt = tuple[int, ...]

METHODS = [
    SpeculativeConfig("none", 0),
    SpeculativeConfig("ngram", 3),
    SpeculativeConfig("ngram", 5),
    SpeculativeConfig("mtp", 1),
    SpeculativeConfig("mtp", 3),
    SpeculativeConfig("mtp", 5),
    SpeculativeConfig("mtp_ngram", 3),
    SpeculativeConfig("mtp_ngram", 5),
]


@dataclass(frozen=True)
class Yield:
    """One method on one kind of prompt."""

    prompts: str
    method: str
    k: int
    tokens_per_row: float
    proposed: int
    accepted: int


@dataclass(frozen=True)
class Saved:
    """Prompts with one beginning, one after the other, with and without prefix caching."""

    shared_tokens: int
    fed_with: int
    fed_without: int
    cpu_ratio: float


def run(
    prompts: Sequence[Prompt], speculative: SpeculativeConfig, **engine: object
) -> tuple[list[list[int]], list[StepStats], float]:
    """Run greedy requests to their ends; return outputs, statistics and CPU seconds."""
    sizes = {"max_running": 32, "overlap": False, "max_tokens": MAX_TOKENS} | engine
    sampling = SamplingParams(
        temperature=0.0, max_tokens=int(str(sizes.pop("max_tokens"))), ignore_eos=True
    )
    config = ProcessConfig(
        model=ModelConfig(str(MODEL)),
        speculative=speculative,
        engine=EngineConfig(**sizes),  # type: ignore[arg-type]
    )
    built = build_engine(config)
    for number, prompt in enumerate(prompts):
        built.submit(Submit(make_handle(1, number), 0, prompt_token_ids=prompt, sampling=sampling))
    output: list[list[int]] = [[] for _ in prompts]
    stats = []
    started = time.process_time()
    while built.has_work():
        result = built.step()
        stats.append(result.stats)
        for row in rows(result.columns):
            output[row.handle - make_handle(1, 0)] += row.tokens
    return output, stats, time.process_time() - started


def prompts_of(kind: str) -> list[Prompt]:
    """Return texts that the model continues, all from the same seeds."""
    rng = np.random.default_rng(0)
    seeds = [tuple(rng.integers(8, 512, 8).tolist()) for _ in range(N_PROMPTS)]
    written, _, _ = run(seeds, METHODS[0])
    texts = [tuple(text[8:32]) for text in written]
    if kind == "new":
        return texts
    return [t + tuple(w[32:44]) + t for t, w in zip(texts, written, strict=True)]


def yields(kind: str) -> list[Yield]:
    """Run every method on one kind of prompts."""
    prompts, expected, found = prompts_of(kind), None, []
    for method in METHODS:
        output, stats, _ = run(prompts, method)
        expected = expected or output
        assert output == expected, f"{method} changed the output"
        lengths = [length for step in stats for length in step.accept_lengths]
        proposed = sum(int(step.proposed_by_position.sum()) for step in stats)
        accepted = sum(int(step.accepted_by_position.sum()) for step in stats)
        name, k = method.method, method.num_speculative_tokens
        found.append(Yield(kind, name, k, sum(lengths) / len(lengths), proposed, accepted))
    return found


def saved(shared: int, rounds: int = 7) -> Saved:
    """Compare prefix caching on and off, in alternating rounds."""
    rng = np.random.default_rng(1)
    system = tuple(rng.integers(8, 512, shared).tolist())
    prompts = [system + tuple(rng.integers(8, 512, 16).tolist()) for _ in range(16)]
    ratios, fed = [], {}
    for round_number in range(rounds):
        seconds = {}
        for caching in (True, False) if round_number % 2 else (False, True):
            _, stats, seconds[caching] = run(
                prompts, METHODS[3], prefix_caching=caching, max_running=1, max_tokens=1
            )
            fed[caching] = sum(step.prefill_tokens for step in stats)
        ratios.append(seconds[True] / seconds[False])
    return Saved(shared, fed[True], fed[False], float(np.median(ratios)))


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = yields("new") + yields("quoting")
    write = sys.stdout.write
    write("prompts  method     K  tokens/row  accepted/proposed\n")
    for y in found:
        share = f"{y.accepted}/{y.proposed} = {y.accepted / max(y.proposed, 1):.2f}"
        write(f"{y.prompts:8s} {y.method:10s} {y.k}  {y.tokens_per_row:10.2f}  {share}\n")
    savings = [saved(shared) for shared in (64, 192, 384)]
    write("\nshared tokens  fed with / without  CPU ratio\n")
    for s in savings:
        write(f"{s.shared_tokens:13d}  {s.fed_with:8d} / {s.fed_without:7d}  {s.cpu_ratio:9.2f}\n")
    if options.json:
        payload = {"yields": [asdict(y) for y in found], "saved": [asdict(s) for s in savings]}
        options.json.write_text(json.dumps(payload, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
