"""How many drafts a model that was really trained accepts: `bench_real_drafting.py`.

Counts, which do not depend on the machine, of drafts by lookup; and of those by a draft layer with
`--folder FOLDER --methods ngram mtp mtp_ngram`, where FOLDER is what `train_draft_layer` wrote.
Greedy answers of SmolLM2-135M-Instruct to chats of three kinds, until it ends them itself or
`--tokens`; each draft count's answers are checked to be those of none. `--device gpu` also tells
how long answers take there, the median of `--rounds` by turns, behind one that warms.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from baton_testing import real_model as real
from baton_testing.gguf_folder import write_gguf_folder
from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.build import build_engine
from baton_worker.identity import make_handle
from baton_worker.messages import Submit
from baton_worker.records.rows import rows
from baton_worker.sampling import SamplingParams

Method = Literal["none", "ngram", "mtp", "mtp_ngram"]
Device = Literal["cpu", "gpu"]
MACHINE = "The CPU's engine in float32"
LOG = "\n".join(
    f"2026-11-{day:02} {hour:02}:00 {level} pump {pump}: pressure {bar} bar"
    for day, hour, level, pump, bar in (
        (3, 7, "INFO", 1, 2.1),
        (3, 8, "INFO", 2, 2.0),
        (3, 9, "WARNING", 1, 3.4),
        (3, 10, "ERROR", 1, 4.9),
        (3, 11, "INFO", 2, 2.0),
    )
)
CLASS = """class Account:
    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.balance = 0

    def deposit(self, amount: int) -> None:
        self.balance += amount
"""
QUESTIONS = {
    "chat": (
        real.CHATS["explain"],
        "Give me five ideas for a birthday party for a child who likes dinosaurs.",
        "What should I look for when I buy a used bicycle?",
        "Write a short letter to my landlord about a broken heater.",
    ),
    "quoting": (
        real.CHATS["summarise"],
        f"Correct the spelling of this text and repeat it whole.\n\n{real.PARAGRAPH}",
        f"List the facts in this text, each in a line.\n\n{real.PARAGRAPH}",
        f"Repeat the lines of this log that tell of pump 1.\n\n{LOG}",
    ),
    "code": (
        real.CHATS["code"],
        f"Add a method withdraw to this class and show the whole class.\n\n{CLASS}",
        f"Write tests for this function with pytest.\n\n{real.CODE}",
        "Write a Python function that reads a CSV file and returns its rows as dictionaries.",
    ),
}


@dataclass(frozen=True)
class Yield:
    """One method and draft count on one kind of chats; `seconds` of all its answers, on a GPU."""

    prompts: str
    method: str
    k: int
    tokens: int
    tokens_per_row: float
    proposed: int
    accepted: int
    seconds: float | None = None


class Drafting:
    """The model with one method and draft count, ready to answer; closed by `close`."""

    def __init__(
        self, folder: Path, method: Method, k: int, device: Device, runs: Iterator[int]
    ) -> None:
        self.method, self.k = method, k
        limits = EngineConfig(device=device, max_running=4, max_model_len=1024, kv_blocks=512)
        speculative = SpeculativeConfig(method if k else "none", k)
        model = ModelConfig(str(folder))
        self._engine = build_engine(ProcessConfig(model, speculative=speculative, engine=limits))
        self._runs = runs

    def answers(self, prompts: list[tuple[int, ...]], most: int) -> tuple[list[list[int]], Yield]:
        """Return each prompt's greedy answer, all at once, and what drafts gave."""
        engine, first = self._engine, make_handle(next(self._runs), 0)
        sampling = SamplingParams(temperature=0.0, max_tokens=most)
        for number, prompt in enumerate(prompts):
            handle = first + number
            engine.submit(Submit(handle, 0, prompt_token_ids=prompt, sampling=sampling))
        said: list[list[int]] = [[] for _ in prompts]
        lengths: list[int] = []
        proposed, accepted, began = 0, 0, time.perf_counter()
        while engine.has_work():
            result = engine.step()
            lengths += result.stats.accept_lengths
            proposed += int(result.stats.proposed_by_position.sum())
            accepted += int(result.stats.accepted_by_position.sum())
            for row in rows(result.columns):
                said[row.handle - first] += row.tokens
        seconds, count = time.perf_counter() - began, sum(map(len, said))
        rate = sum(lengths) / len(lengths)
        return said, Yield("", self.method, self.k, count, rate, proposed, accepted, seconds)

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


def measured(
    ways: list[Drafting], prompts: list[tuple[int, ...]], options: argparse.Namespace
) -> Iterator[Yield]:
    """Yield what each way's drafts gave, each answer that of the first way, which drafts nothing;
    on a GPU also the median seconds of rounds by turns.
    """
    is_timed = options.device == "gpu"
    plain, _ = ways[0].answers(prompts, options.tokens)
    for answer in plain:
        sys.stderr.write(f"{real.tokenizer_of(options.folder).decode(answer)!r}\n")
    took: dict[Drafting, list[float]] = {way: [] for way in ways}
    counted: dict[Drafting, Yield] = {}
    for round_ in range(1 + is_timed * options.rounds):
        for way in ways:
            said, counted[way] = way.answers(prompts, options.tokens)
            assert said == plain, f"{way.k} drafts by {way.method} changed an answer"
            if round_:
                took[way].append(counted[way].seconds or 0.0)
    for way, one in counted.items():
        if way.k or is_timed:
            yield replace(one, seconds=statistics.median(took[way]) if is_timed else None)


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="of the model; else it is made of its file")
    parser.add_argument("--methods", nargs="+", default=["ngram"],
                        choices=["ngram", "mtp", "mtp_ngram"])  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="that are timed on a GPU")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--commit", default="unknown", help="which code this is, for the record")
    parser.add_argument("--machine", default=MACHINE, help="what the record says it is of")
    return parser.parse_args()


def main() -> int:
    """Print and keep the table."""
    options, found, runs = parsed(), [], itertools.count(1)
    with contextlib.ExitStack() as stack:
        if options.folder is None:
            place = stack.enter_context(tempfile.TemporaryDirectory())
            options.folder = Path(place) / real.NAME
            write_gguf_folder(real.real_gguf(), options.folder, "float32")
        ways: list[Any] = []
        for method, k in [("none", 0), *itertools.product(options.methods, (1, 2, 3))]:
            ways.append(Drafting(options.folder, method, k, options.device, runs))
            stack.callback(ways[-1].close)
        for kind, questions in QUESTIONS.items():
            prompts = [tuple(real.chat_ids(options.folder, question)) for question in questions]
            for y in measured(ways, prompts, options):
                found.append(replace(y, prompts=kind))
                speed = f"  {y.tokens / y.seconds:.0f} tokens/s" if y.seconds else ""
                sys.stdout.write(
                    f"{kind:8s} {y.method:9s} {y.k}  {y.tokens:4d} tokens  {y.tokens_per_row:.2f} "
                    f"a row  {y.accepted}/{y.proposed} = {y.accepted / max(y.proposed, 1):.2f}"
                    f"{speed}\n"
                )
                sys.stdout.flush()
    if options.json:
        payload = {
            "model": real.NAME,
            "machine": {"gpu": options.machine},
            "commit": options.commit,
            "tokens": options.tokens,
            "yields": [*map(asdict, found)],
        }
        options.json.write_text(json.dumps(payload, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
