"""What happened to every stream, and whether it may have happened: the judge of the fault tests.

A history is the list of events that one observer saw, in order: a client of its own streams, or a
recorder of the rows that came over the link. Each token event says where in its stream it stands.
`violations` compares a history with the text that each stream should have carried. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

WHOLE = "whole"
"""How a stream ended that carried all of its text; any other word is an explicit error."""


class Fault(StrEnum):
    """What may not happen."""

    LOST = "lost"
    DOUBLED = "doubled"
    MISATTRIBUTED = "misattributed"
    REORDERED = "reordered"
    CORRUPTED = "corrupted"
    ENDED_TWICE = "ended twice"
    AFTER_THE_END = "tokens after the end"
    NEVER_ENDED = "never ended"
    UNASKED = "nobody asked"


@dataclass(frozen=True, slots=True)
class Asked:
    """The stream begins; `first` is the position of its first token."""

    stream: str
    first: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens arrived; `position` is that of the first one."""

    stream: str
    position: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream ended: `WHOLE`, or the error's name."""

    stream: str
    how: str


Event = Asked | Tokens | Ended


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that may not have happened, and to which stream."""

    stream: str
    fault: Fault
    detail: str

    def __str__(self) -> str:
        return f"{self.stream}: {self.fault}: {self.detail}"


@dataclass(slots=True)
class _Stream:
    """One stream as far as it was seen."""

    first: int
    times_asked: int = 0
    next: int = 0
    seen: set[int] = field(default_factory=set)
    ends: list[str] = field(default_factory=list)


class Judge:
    """Takes a history's events one by one; see `violations`.

    Args:
        wanted: each stream's whole text.
    """

    def __init__(self, wanted: Mapping[str, Sequence[int]]) -> None:
        self._wanted = wanted
        self._streams: dict[str, _Stream] = {}
        self._found: list[Violation] = []

    def take(self, event: Event) -> None:
        """Look at the next event."""
        if isinstance(event, Asked):
            stream = self._streams.setdefault(event.stream, _Stream(event.first, 0, event.first))
            stream.times_asked += 1
            if event.stream not in self._wanted or stream.times_asked > 1:
                self._blame(event.stream, Fault.UNASKED, f"{stream.times_asked} times asked")
            return
        known = self._streams.get(event.stream)
        if known is None:
            self._blame(event.stream, Fault.UNASKED, f"{event}")
        elif isinstance(event, Ended):
            known.ends.append(event.how)
        else:
            self._take_tokens(known, event)

    def verdict(self) -> list[Violation]:
        """Return all that was wrong, now that nothing more will come."""
        found = list(self._found)
        for name, stream in self._streams.items():
            found += self._of_ending(name, stream)
        return found

    def _blame(self, stream: str, fault: Fault, detail: str) -> None:
        self._found.append(Violation(stream, fault, detail))

    def _take_tokens(self, stream: _Stream, event: Tokens) -> None:
        if stream.ends:
            self._blame(event.stream, Fault.AFTER_THE_END, f"{len(event.tokens)} tokens")
        stop = event.position + len(event.tokens)
        places = range(event.position, stop)
        if twice := [place for place in places if place in stream.seen]:
            self._blame(event.stream, Fault.DOUBLED, f"positions {twice} came again")
        elif event.position < stream.next:
            self._blame(event.stream, Fault.REORDERED, f"position {event.position} came late")
        stream.seen.update(places)
        stream.next = max(stream.next, stop)
        self._check_text(event)

    def _check_text(self, event: Tokens) -> None:
        wanted = tuple(self._wanted.get(event.stream, ()))
        stop = event.position + len(event.tokens)
        if wanted[event.position : stop] == event.tokens:
            return
        fault, detail = self._explained(event, wanted)
        self._blame(event.stream, fault, f"at {event.position}: {detail}")

    def _explained(self, event: Tokens, wanted: tuple[int, ...]) -> tuple[Fault, str]:
        """Say what text it is, if it is not the stream's own of that place."""
        owner = self._owner_of(event)
        if owner:
            return Fault.MISATTRIBUTED, f"{list(event.tokens)} is {owner}'s"
        size = len(event.tokens)
        own = [p for p in range(len(wanted) - size + 1) if wanted[p : p + size] == event.tokens]
        if any(place < event.position for place in own):
            return Fault.DOUBLED, f"{list(event.tokens)} is the text of position {own[0]}"
        if own:
            return Fault.LOST, f"{list(event.tokens)} is the text of position {own[0]}"
        return Fault.CORRUPTED, f"{list(event.tokens)} is no text of anybody at that place"

    def _owner_of(self, event: Tokens) -> str:
        """Return the other stream whose text at this place it is; empty if it is nobody's."""
        stop = event.position + len(event.tokens)
        for name, text in self._wanted.items():
            if name != event.stream and tuple(text[event.position : stop]) == event.tokens:
                return name
        return ""

    def _of_ending(self, name: str, stream: _Stream) -> Iterable[Violation]:
        if not stream.ends:
            yield Violation(name, Fault.NEVER_ENDED, f"its last token was {stream.next - 1}")
        if len(stream.ends) > 1:
            yield Violation(name, Fault.ENDED_TWICE, f"by {stream.ends}")
        is_whole = WHOLE in stream.ends
        stop = len(self._wanted.get(name, ())) if is_whole else stream.next
        missing = [place for place in range(stream.first, stop) if place not in stream.seen]
        if missing:
            yield Violation(name, Fault.LOST, f"{len(missing)} tokens, the first is {missing[0]}")


def violations(events: Iterable[Event], wanted: Mapping[str, Sequence[int]]) -> list[Violation]:
    """Return everything in a history that may not have happened; an empty list is a right one.

    Each stream must be asked for once, carry its text in order without a hole or a repetition, and
    end exactly once: whole, or with an error behind a beginning of its text.
    """
    judge = Judge(wanted)
    for event in events:
        judge.take(event)
    return judge.verdict()


def endings(events: Iterable[Event]) -> Counter[str]:
    """Return how often each way to end occurred."""
    return Counter(event.how for event in events if isinstance(event, Ended))


def told(found: Sequence[Violation], most: int = 20) -> str:
    """Return the violations as text: how many of each kind, and the first few."""
    kinds = Counter(str(violation.fault) for violation in found)
    examples: dict[Fault, list[Violation]] = defaultdict(list)
    for violation in found:
        examples[violation.fault].append(violation)
    share = max(1, most // max(1, len(examples)))
    lines = [str(v) for of_kind in examples.values() for v in of_kind[:share]]
    return f"{dict(kinds)}\n" + "\n".join(lines)
