"""The judge of the fault tests: every kind of bad history is caught by its name, no good one is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_faults.history import WHOLE, Asked, Ended, Event, Fault, Tokens, violations

TEXTS = {name: tuple(random.Random(name).sample(range(500), 40)) for name in ("a", "b", "c")}


def good(name: str, step: int = 3, stop: int = 40, how: str = WHOLE) -> list[Event]:
    """Return a stream that carries the first `stop` tokens of its text, `step` at once."""
    text = TEXTS[name][:stop]
    parts = [Tokens(name, p, text[p : p + step]) for p in range(0, stop, step)]
    return [Asked(name), *parts, Ended(name, how)]


def faults(events: list[Event]) -> set[Fault]:
    return {violation.fault for violation in violations(events, TEXTS)}


def renumbered(events: list[Event]) -> list[Event]:
    """Return them as an observer numbers them that counts what it gets and cannot see a hole."""
    place, found = 0, list[Event]()
    for event in events:
        if isinstance(event, Tokens):
            found.append(Tokens(event.stream, place, event.tokens))
            place += len(event.tokens)
        else:
            found.append(event)
    return found


def without(events: list[Event], number: int) -> list[Event]:
    return events[:number] + events[number + 1 :]


def swapped(events: list[Event], number: int) -> list[Event]:
    return [
        *events[:number], events[number + 1], events[number], *events[number + 2 :]
    ]  # fmt: skip


BAD: dict[str, tuple[list[Event], Fault]] = {
    "a hole": (without(good("a"), 5), Fault.LOST),
    "a hole that the numbers hide": (renumbered(without(good("a"), 5)), Fault.LOST),
    "the last token is missing": (without(good("a"), -2), Fault.LOST),
    "an error behind a hole": (without(good("a", stop=30, how="worker_lost"), 4), Fault.LOST),
    "a part twice": ([*good("a")[:5], good("a")[4], *good("a")[5:]], Fault.DOUBLED),
    "a part twice under new numbers": (
        renumbered([*good("a")[:5], good("a")[4], *good("a")[5:]]),
        Fault.DOUBLED,
    ),
    "another's tokens": (
        [*good("a")[:3], Tokens("a", 6, TEXTS["b"][6:9]), *good("a")[4:]],
        Fault.MISATTRIBUTED,
    ),
    "another's whole text": ([Asked("a"), Tokens("a", 0, TEXTS["c"]), Ended("a", WHOLE)],
                             Fault.MISATTRIBUTED),
    "two parts in the wrong order": (swapped(good("a"), 4), Fault.REORDERED),
    "a token that nobody said": (
        [*good("a")[:3], Tokens("a", 6, (999, 998, 997)), *good("a")[4:]],
        Fault.CORRUPTED,
    ),
    "two ends": ([*good("a"), Ended("a", WHOLE)], Fault.ENDED_TWICE),
    "an end and an error": ([*good("a"), Ended("a", "worker_lost")], Fault.ENDED_TWICE),
    "no end": (good("a")[:-1], Fault.NEVER_ENDED),
    "no token and no end": ([Asked("a")], Fault.NEVER_ENDED),
    "a token behind the end": (
        [*good("a", stop=30, how="broken"), Tokens("a", 30, TEXTS["a"][30:33])],
        Fault.AFTER_THE_END,
    ),
    "tokens for nobody": ([Tokens("a", 0, TEXTS["a"][:3])], Fault.UNASKED),
    "an end for nobody": ([Ended("a", WHOLE)], Fault.UNASKED),
    "one stream for two": ([Asked("a"), *good("a")], Fault.UNASKED),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_caught_by_its_name(name: str) -> None:
    events, fault = BAD[name]
    assert fault in faults(events)
    assert fault in faults([*good("b"), *events, *good("c")]), "beside others too"


@given(st.data())
def test_good_streams_in_any_interleaving_are_right(data: st.DataObject) -> None:
    streams = [
        good(name, data.draw(st.integers(1, 40)), stop, how)
        for name, stop, how in zip(
            TEXTS,
            (40, data.draw(st.integers(0, 40)), 40),
            (WHOLE, "worker_lost", WHOLE),
            strict=True,
        )
    ]
    events: list[Event] = []
    while streams := [stream for stream in streams if stream]:
        events.append(data.draw(st.sampled_from(streams)).pop(0))
    assert violations(events, TEXTS) == []


@given(st.integers(1, 13), st.sampled_from(["lose", "double", "swap", "mix", "end"]))
def test_one_thing_wrong_anywhere_is_caught(number: int, what: str) -> None:
    events = good("a")
    event = events[number]
    assert isinstance(event, Tokens)
    if what == "lose":
        events = without(events, number)
    elif what == "double":
        events.insert(number, event)
    elif what == "swap":
        events = swapped(events, number)
    elif what == "mix":
        stop = event.position + len(event.tokens)
        events[number] = Tokens("a", event.position, TEXTS["b"][event.position : stop])
    else:
        events.insert(number, Ended("a", "error"))
    assert violations(events, TEXTS) != []


def test_a_recorder_may_see_a_stream_from_its_middle() -> None:
    """Behind a retry another worker goes on where the first one stopped."""
    text = TEXTS["a"]
    events: list[Event] = [Asked("a", 20), Tokens("a", 20, text[20:40]), Ended("a", WHOLE)]
    assert violations(events, TEXTS) == []
    assert faults([Asked("a", 20), Tokens("a", 24, text[24:40]), Ended("a", WHOLE)]) == {Fault.LOST}
