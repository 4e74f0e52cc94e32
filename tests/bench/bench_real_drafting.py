"""How many drafts of lookup a model that was really trained accepts: `bench_real_drafting.py`.

Counts, not times: they do not depend on the machine. Greedy answers of SmolLM2-135M-Instruct to
chats of three kinds, until it ends them itself or `--tokens`; each draft count's answers are
checked to be those of none.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from baton_testing import real_model as real
from baton_testing.gguf_folder import write_gguf_folder
from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.build import build_engine
from baton_worker.identity import make_handle
from baton_worker.messages import Submit
from baton_worker.records.rows import rows
from baton_worker.sampling import SamplingParams

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
    """One draft count on one kind of chats."""

    prompts: str
    k: int
    tokens: int
    tokens_per_row: float
    proposed: int
    accepted: int


def answers(
    folder: Path, prompts: list[tuple[int, ...]], k: int, tokens: int
) -> tuple[list[list[int]], Yield]:
    """Return each prompt's greedy answer, and what drafts gave."""
    method = SpeculativeConfig("ngram", k) if k else SpeculativeConfig("none", 0)
    limits = EngineConfig(max_running=len(prompts), max_model_len=1024)
    engine = build_engine(
        ProcessConfig(ModelConfig(str(folder)), speculative=method, engine=limits)
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    for number, prompt in enumerate(prompts):
        handle = make_handle(1, number)
        engine.submit(Submit(handle, 0, prompt_token_ids=prompt, sampling=sampling))
    said: list[list[int]] = [[] for _ in prompts]
    lengths: list[int] = []
    proposed, accepted = 0, 0
    while engine.has_work():
        result = engine.step()
        lengths += result.stats.accept_lengths
        proposed += int(result.stats.proposed_by_position.sum())
        accepted += int(result.stats.accepted_by_position.sum())
        for row in rows(result.columns):
            said[row.handle - make_handle(1, 0)] += row.tokens
    engine.close()
    count = sum(map(len, said))
    return said, Yield("", k, count, sum(lengths) / len(lengths), proposed, accepted)


def main() -> int:
    """Print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--commit", default="unknown", help="which code this is, for the record")
    options = parser.parse_args()
    found: list[Yield] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / real.NAME
        write_gguf_folder(real.real_gguf(), folder, "float32")
        for kind, questions in QUESTIONS.items():
            prompts = [tuple(real.chat_ids(folder, question)) for question in questions]
            plain, _ = answers(folder, prompts, 0, options.tokens)
            for answer in plain:
                sys.stderr.write(f"{kind}: {real.tokenizer_of(folder).decode(answer)!r}\n")
            for k in (1, 2, 3):
                said, counted = answers(folder, prompts, k, options.tokens)
                assert said == plain, f"{k} drafts changed an answer"
                found.append(Yield(**(asdict(counted) | {"prompts": kind})))
                y, most = found[-1], max(found[-1].proposed, 1)
                sys.stdout.write(
                    f"{kind:8s} {k}  {y.tokens:4d} tokens  {y.tokens_per_row:.2f} a row  "
                    f"{y.accepted}/{y.proposed} = {y.accepted / most:.2f}\n"
                )
                sys.stdout.flush()
    if options.json:
        payload = {
            "model": real.NAME,
            "machine": {"gpu": MACHINE},
            "commit": options.commit,
            "tokens": options.tokens,
            "yields": [*map(asdict, found)],
        }
        options.json.write_text(json.dumps(payload, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
