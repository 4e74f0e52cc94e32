"""How often the tiny model's first draft is accepted, by the float64 reference.

Owns the prompts and the count, and reads the saved folder as a worker would.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from baton_testing.numpy_reference import greedy
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import load_weights
from corpus import SOURCES, load_documents

PROMPTS = 16
TOKENS_PER_PROMPT = 64
_PROMPT_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Drafts at position 1 under greedy K=1 speculation, over all prompts."""

    proposed: int
    accepted: int
    tokens: int
    distinct_tokens: int

    def __str__(self) -> str:
        return (
            f"first-draft acceptance {self.accepted / self.proposed:.3f} "
            f"({self.accepted}/{self.proposed}) over {self.tokens} greedy tokens, "
            f"{self.distinct_tokens / self.tokens:.2f} of them distinct within their text"
        )


def measure_acceptance(model_dir: Path, texts: list[str], seed: int) -> Acceptance:
    """Continue the beginnings of 16 long paragraphs by 64 tokens each."""
    shape = load_shape(model_dir)
    weights = load_weights(model_dir, shape)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    long = [text for text in texts if len(text) > 2 * _PROMPT_CHARACTERS]
    prompts = random.Random(seed).sample(long, PROMPTS)  # noqa: S311  a sample, not a secret
    runs = [
        greedy(weights, shape, tokenizer.encode(text[:_PROMPT_CHARACTERS]).ids, TOKENS_PER_PROMPT)
        for text in prompts
    ]
    return Acceptance(
        proposed=sum(run.proposed for run in runs),
        accepted=sum(run.accepted for run in runs),
        tokens=sum(len(run.token_ids) for run in runs),
        distinct_tokens=sum(len(set(run.token_ids)) for run in runs),
    )


def main() -> None:
    """Print the acceptance of a saved model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="folder of the model")
    parser.add_argument("--corpus", choices=SOURCES, default="auto", help="source of prompts")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of prompts")
    arguments = parser.parse_args()
    texts = [text for doc in load_documents(arguments.corpus) for text in doc.paragraphs]
    print(measure_acceptance(arguments.model_dir, texts, arguments.seed))


if __name__ == "__main__":
    main()
