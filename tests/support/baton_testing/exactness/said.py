"""What a request was told, as bits, and where two of them first differ.

Owns the comparison. Floats are compared as their four bytes: -0.0 is not 0.0, and a NaN is itself.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from baton_testing.engine_bench import Stream


class Said(NamedTuple):
    """Columns of a request's output, and of its prompt where that was scored.

    Attributes:
        topk: for each token its alternatives' ids and bits.
        prompt: the same five columns for prompt tokens 1 and on.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[bytes, ...]
    ranks: tuple[int, ...]
    topk: tuple[tuple[tuple[int, bytes], ...], ...]
    finish: int
    prompt: tuple[Any, ...] = ()


def bits(value: float) -> bytes:
    """Return a float32's four bytes."""
    return struct.pack("<f", value)


def said_of(stream: Stream) -> Said:
    """Return what a stream's rows have said, all of them taken together."""
    return Said(
        tuple(stream.tokens),
        tuple(map(bits, stream.logprobs)),
        tuple(stream.ranks),
        tuple(tuple((token, bits(value)) for token, value in row) for row in stream.topk),
        int(stream.finish),
        prompt_of(stream),
    )


def prompt_of(stream: Stream) -> tuple[Any, ...]:
    """Return what was said of prompt tokens: (token, bits, rank, alternatives) for each."""
    found = []
    for row in stream.prompt:
        k = row.width - 1
        pairs = [
            (token, bits(value))
            for token, value in zip(row.topk_tokens, row.topk_logprobs, strict=True)
        ]
        for i, token in enumerate(row.tokens):
            top = tuple(pairs[i * k : (i + 1) * k])
            found.append((int(token), bits(row.logprobs[i]), int(row.ranks[i]), top))
    return tuple(found)


def digest(all_said: Iterable[Said]) -> str:
    """Return one hash of what all requests were told."""
    state = hashlib.sha256()
    for said in all_said:
        state.update(repr(said).encode())
    return state.hexdigest()


def shown(value: Any) -> str:
    """Return a value as people read it, with its bits where it is a float."""
    if isinstance(value, bytes):
        return f"{struct.unpack('<f', value)[0]:.9g} ({value[::-1].hex()})"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(shown, value)) + ")"
    return str(value)


def first_difference(got: Said, wanted: Said) -> str:
    """Return the first column and place that differ, "" for none.

    Logprobs come before tokens: where both differ, the former tell of it earlier.
    """
    for column in ("prompt", "logprobs", "topk", "tokens", "ranks"):
        ours, theirs = getattr(got, column), getattr(wanted, column)
        for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                return f"{column}[{place}] is {shown(a)}, not {shown(b)}"
    for column in Said._fields:
        ours, theirs = getattr(got, column), getattr(wanted, column)
        if ours != theirs:
            sizes = f"{len(ours)} and {len(theirs)}" if isinstance(ours, tuple) else (ours, theirs)
            return f"{column}: {sizes}"
    return ""


def differences(got: Sequence[Said], wanted: Sequence[Said], where: str) -> list[str]:
    """Return a line for each request that was told something else."""
    found = []
    for number, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        if told := first_difference(ours, theirs):
            found.append(f"{where}, request {number}: {told}")
    return found
