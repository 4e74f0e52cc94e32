"""Stop strings are found across any cutting of the text, and no part of one is ever shown."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from baton_worker.gateway.output.stops import StopMatcher

LETTERS = st.text("ab\u00e9", max_size=30)
STOPS = st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=3)


def oracle(text, stops):
    """The text before the stop string that is completed first, reading character by character."""
    for end in range(1, len(text) + 1):
        begins = [end - len(s) for s in stops if text[:end].endswith(s)]
        if begins:
            return text[: min(begins)], True
    return text, False


def feed(pieces, stops):
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        scan = matcher.feed(piece)
        shown += scan.text
        if scan.stopped:
            return shown, True
    return shown + matcher.flush(), False


@given(LETTERS, STOPS, st.data())
def test_any_cutting_gives_what_reading_character_by_character_would(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert feed(pieces, stops) == oracle(text, stops)


@given(LETTERS, STOPS)
def test_what_is_shown_is_never_the_beginning_of_a_stop(text, stops):
    matcher, shown = StopMatcher(stops), ""
    for character in text:
        scan = matcher.feed(character)
        shown += scan.text
        if scan.stopped:
            break
    before, stopped = oracle(text, stops)
    assert before.startswith(shown)
    assert not stopped or shown == before


@given(LETTERS, STOPS, st.data())
def test_what_ends_where_none_may_end_does_not_count_and_what_only_begins_there_does(
    text, stops, data
):
    n_kept = data.draw(st.integers(0, len(text)))
    ends = [
        (end, end - len(stop))
        for end in range(n_kept + 1, len(text) + 1)
        for stop in stops
        if text[:end].endswith(stop)
    ]
    matcher, shown, stopped = StopMatcher(stops), "", False
    for at, character in enumerate(text):
        scan = matcher.feed(character, may_end=at >= n_kept)
        shown, stopped = shown + scan.text, scan.stopped
        if stopped:
            break
    shown += matcher.flush()
    assert (shown, stopped) == ((text[: min(ends)[1]], True) if ends else (text, False))


def test_text_that_turns_out_to_be_no_stop_is_shown_at_the_end():
    matcher = StopMatcher(["abc"])
    assert matcher.feed("xab") == ("x", False)
    assert matcher.flush() == "ab"


def test_a_false_beginning_hides_no_true_one_right_behind_it():
    matcher = StopMatcher(["abc"])
    assert matcher.feed("aa") == ("a", False)
    assert matcher.feed("bc") == ("", True)


def test_without_stop_strings_everything_is_shown_at_once():
    assert StopMatcher([]).feed("anything") == ("anything", False)
