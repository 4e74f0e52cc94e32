"""Request-level merge: rows of several workers, in any order and number, become one sequence.

Pure; the caller gives the time. The rule is idempotent by output position: a row at the next
position is delivered, one before it is a duplicate (and must agree), one after it waits for the gap
to close. A gap that stays open is an error, never a silent hole. Logprobs of the prompt, when asked
for, come before the output: until they are whole, every token waits as behind a gap.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from baton_worker.records.columns import FINISH_MASK, Finish
from baton_worker.records.rows import Row
from baton_worker.records.scored import ScoredRow

MAX_HELD_ROWS = 64
MAX_HELD_TOKENS = 256
MAX_GAP_SECONDS = 2.0

_AT_ONCE = (Finish.ABORT, Finish.ERROR)
_ENDS = {int(finish): finish for finish in (Finish.STOP, Finish.LENGTH, *_AT_ONCE)}
"""By a row's flag; any other is a notice and no end."""


class Fault(enum.Enum):
    """Why a sequence cannot be continued; the value is the error code that clients see."""

    GAP_TIMEOUT = "gap_timeout"
    OVERLAP_MISMATCH = "overlap_mismatch"


class Part(NamedTuple):
    """A row to deliver, without its first `skip` tokens, which were delivered before."""

    row: Row
    skip: int


class Merged(NamedTuple):
    """What one offered row led to.

    Attributes:
        parts: what to deliver, in order.
        finish: how the request ended, NONE while it goes on.
        fault: why it cannot go on; then `parts` is still to be delivered.
        duplicates: rows dropped because all their tokens had been delivered or already wait.
        held: by how many rows more (or fewer) a gap now keeps waiting.
        stale: the row belongs to another attempt and was dropped.
        prompt: the prompt's tokens with their logprobs, once, when they are whole.
    """

    parts: tuple[Part, ...] = ()
    finish: Finish = Finish.NONE
    fault: Fault | None = None
    duplicates: int = 0
    held: int = 0
    stale: bool = False
    prompt: tuple[ScoredRow, ...] = ()


_new = tuple.__new__
"""Makes one of all its values, for what is made once a row; see `records.rows`."""

_DUPLICATE = Merged(duplicates=1)
_NOTHING = Merged()
_ONE_HELD = Merged(held=1)


class _Held(NamedTuple):
    row: Row
    since: float


class RowMerge:
    """The merge state of one request; rows of another attempt than the newest are stale.

    Args:
        prompt_tokens: the prompt's length when its logprobs are to come; the first token has none.
    """

    __slots__ = ("_held", "_prompt", "_prompt_next", "_prompt_tokens", "_tokens", "attempt")

    def __init__(self, attempt: int = 0, prompt_tokens: int = 0) -> None:
        self.attempt = attempt
        self._prompt_tokens = prompt_tokens
        self._prompt_next = 1
        self._prompt: list[ScoredRow] = []
        self._tokens: list[int] = []
        self._held: dict[tuple[int, int, int], _Held] = {}

    @property
    def held_rows(self) -> int:
        """Rows that wait for a gap to close."""
        return len(self._held)

    @property
    def next_position(self) -> int:
        """The output position that is delivered next."""
        return len(self._tokens)

    @property
    def delivered(self) -> tuple[int, ...]:
        """The tokens given out."""
        return tuple(self._tokens)

    @property
    def lacks_prompt(self) -> bool:
        """Whether logprobs of the prompt are still to come."""
        return self._prompt_next < self._prompt_tokens

    def begin_attempt(self, attempt: int) -> int:
        """Go on at the same position with another attempt; return how many rows stop waiting.

        A prompt that was told in part is told again from its beginning.
        """
        dropped = len(self._held)
        self._held.clear()
        if self._prompt:
            self._prompt, self._prompt_next = [], 1
        self.attempt = attempt
        return dropped

    def offer(self, row: Row, now: float) -> Merged:
        """Take a row at time `now` (seconds of any steady clock).

        PREEMPTED is a notice: the tokens after it are still to come.
        """
        if row.attempt != self.attempt:
            return Merged(stale=True)
        finish = _ENDS.get(row.flags & FINISH_MASK, Finish.NONE)
        if finish in _AT_ONCE:
            return Merged(finish=finish)
        if row.prompt_tokens is not None:
            return self._take_prompt(row.prompt_tokens)
        if row.position > len(self._tokens) or self.lacks_prompt:
            return self._hold(row, now)
        first = self._append(row, finish)
        return self._drain(first) if self._held else first

    def gap_expired(self, now: float) -> bool:
        """Whether some row has waited longer than a gap may stay open."""
        return any(now - held.since >= MAX_GAP_SECONDS for held in self._held.values())

    def _take_prompt(self, told: ScoredRow) -> Merged:
        """One worker tells the prompt, in order, so that what is missing will never come."""
        if told.first > self._prompt_next:
            return Merged(fault=Fault.GAP_TIMEOUT)
        if told.first < self._prompt_next:
            return _DUPLICATE
        self._prompt.append(told)
        self._prompt_next += len(told.tokens)
        if self.lacks_prompt:
            return _NOTHING
        whole, self._prompt = tuple(self._prompt), []
        return self._drain(_NOTHING)._replace(prompt=whole)

    def _append(self, row: Row, finish: Finish) -> Merged:
        """Deliver a row that starts at or before the next position."""
        tokens, delivered = row.tokens, self._tokens
        skip, n = len(delivered) - row.position, len(tokens)
        if skip and tokens[:skip] != delivered[row.position : row.position + n]:
            return Merged(fault=Fault.OVERLAP_MISMATCH)
        if finish and n < skip:
            return Merged(fault=Fault.OVERLAP_MISMATCH)
        if n > skip:
            delivered.extend(tokens[skip:] if skip else tokens)
            part = _new(Part, (row, skip))
            return _new(Merged, ((part,), finish, None, 0, 0, False, ()))
        if finish:
            return Merged(finish=finish)
        return _DUPLICATE if n else _NOTHING

    def _hold(self, row: Row, now: float) -> Merged:
        key = (row.position, len(row.tokens), row.flags & FINISH_MASK)
        if key in self._held:
            return _DUPLICATE
        self._held[key] = _Held(row, now)
        held_tokens = sum(n for _, n, _ in self._held)
        if len(self._held) > MAX_HELD_ROWS or held_tokens > MAX_HELD_TOKENS:
            return Merged(fault=Fault.GAP_TIMEOUT, held=1)
        return _ONE_HELD

    def _drain(self, first: Merged) -> Merged:
        """Deliver the held rows that the gap no longer hides."""
        parts, duplicates, last = list(first.parts), first.duplicates, first
        before = len(self._held)
        while self._held and not (last.finish or last.fault):
            key = min(self._held)
            if key[0] > len(self._tokens):
                break
            row = self._held.pop(key).row
            last = self._append(row, _end_of(row))
            parts.extend(last.parts)
            duplicates += last.duplicates
        held = len(self._held) - before
        return Merged(tuple(parts), last.finish, last.fault, duplicates, held)


def _end_of(row: Row) -> Finish:
    return _ENDS.get(row.flags & FINISH_MASK, Finish.NONE)
