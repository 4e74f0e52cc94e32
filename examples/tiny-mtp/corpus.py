"""The training text: documents of the machine at hand, cut into prose and chat samples.

Owns where text comes from and how it looks to the model. Debian's common licences are the corpus of
the committed model; a machine without them trains on Python's own licence and docstrings, so the
script works anywhere. Knows no tokenizer's internals and no framework.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LICENCES = Path("/usr/share/common-licenses")
SOURCES = ("auto", "licences", "python")
REQUESTS = (
    "Continue this clause: {}",
    "Complete the sentence: {}",
    "How does this go on? {}",
    "Please finish: {}",
    "{}",
)
OPEN_REQUESTS = (
    "Hello!",
    "Hello! Who are you?",
    "What is a licence?",
    "Tell me something about licences.",
    "Write one sentence, please.",
    "What may I do with this program?",
    "Can you explain that?",
)
SYSTEM_PROMPT = "You are a helpful assistant."
_SENTENCE_END = re.compile(r"(?<=[.;:])\s+(?=[A-Z0-9(\"])")
_MIN_SENTENCE_WORDS = 8
_MAX_SENTENCE_WORDS = 36


@dataclass(frozen=True, slots=True)
class Document:
    """One source text, paragraphs unwrapped to one line each."""

    name: str
    paragraphs: tuple[str, ...]


def load_documents(source: str) -> list[Document]:
    """Return the texts of `source`: `licences`, `python`, or `auto` (licences if there are any).

    Raises:
        FileNotFoundError: the source has no text on this machine.
    """
    documents = []
    if source in ("auto", "licences"):
        documents = [_document(path.name, path.read_text("utf-8")) for path in _licence_files()]
    if source == "python" or (source == "auto" and not documents):
        documents = list(_python_documents())
    if not documents:
        raise FileNotFoundError(f"no text for corpus {source!r} on this machine")
    return documents


def sentences(documents: list[Document]) -> list[str]:
    """Return sentences short enough that a request and its answer fit one training window."""
    found = []
    for document in documents:
        for paragraph in document.paragraphs:
            found += [
                sentence
                for sentence in _SENTENCE_END.split(paragraph)
                if _MIN_SENTENCE_WORDS <= len(sentence.split()) <= _MAX_SENTENCE_WORDS
            ]
    return sorted(set(found))


def make_chat(sentence: str, rng: random.Random) -> list[dict[str, str]]:
    """Turn a sentence into messages whose answer it is.

    Mostly the user gives its beginning and the assistant completes it; sometimes the request is an
    open one, so that the model answers any prompt with a sentence and an end.
    """
    words = sentence.split()
    beginning = " ".join(words[: rng.randint(3, len(words) // 2)])
    is_open = rng.random() < 0.25
    request = rng.choice(OPEN_REQUESTS if is_open else REQUESTS).format(beginning)
    system = [{"role": "system", "content": SYSTEM_PROMPT}] if rng.random() < 0.3 else []
    return [
        *system,
        {"role": "user", "content": request},
        {"role": "assistant", "content": sentence},
    ]


def _licence_files() -> list[Path]:
    if not LICENCES.is_dir():
        return []
    # Links are second names of the same texts ("GPL" for the newest one).
    return sorted(path for path in LICENCES.iterdir() if path.is_file() and not path.is_symlink())


def _python_documents() -> Iterator[Document]:
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("LICENSE.txt", "LICENSE"):
        if (library / name).is_file():
            yield _document(name, (library / name).read_text("utf-8"))
    for path in sorted(library.glob("*.py")):
        text = "\n\n".join(_docstrings(path))
        if text:
            yield _document(path.name, text)


def _docstrings(path: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def _document(name: str, text: str) -> Document:
    paragraphs = (" ".join(block.split()) for block in re.split(r"\n\s*\n", text))
    return Document(name, tuple(paragraph for paragraph in paragraphs if paragraph))
