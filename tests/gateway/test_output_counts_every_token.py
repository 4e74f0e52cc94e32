"""Tokens, text and drafts of a choice: what counts, what shows, and what a stop string cuts off."""

import pytest

from baton_worker.gateway.output.merge import Part
from baton_worker.gateway.output.sequence import LogprobsMissingError, SequenceOutput
from baton_worker.gateway.text.vocabulary import Vocabulary
from baton_worker.records.columns import Finish
from baton_worker.records.rows import Row

WORDS = {0: b"</s>", 1: b"one ", 2: b"two ", 3: b"st", 4: b"op", 5: b"\xe4\xbd", 6: b"\xa0"}


def output(**options):
    return SequenceOutput(0, Vocabulary(WORDS, frozenset({0})), **options)


def part(position, tokens, finish=Finish.NONE, k=-1, skip=0, drafts=(0, 0)):
    n, width = len(tokens), k + 1
    logprobs = [-float(position + i) for i in range(n)] if width else []
    top = [10 * t + j for t in tokens for j in range(k)] if k > 0 else []
    row = Row(1, 0, position, list(tokens), width, int(finish), logprobs, [1] * len(logprobs),
              top, [-1.0] * len(top), [], *drafts)  # fmt: skip
    return Part(row, skip)


def test_the_ending_token_counts_and_adds_no_text():
    delta = output(logprobs_k=0).push([part(0, [1, 0], Finish.STOP, k=0)], Finish.STOP)
    assert (delta.text, delta.token_ids, delta.logprobs) == ("one ", [1, 0], [0.0, -1.0])
    assert delta.finish_reason == "stop"


def test_an_ordinary_stop_token_adds_no_text_either():
    delta = output().push([part(0, [1, 2], Finish.STOP)], Finish.STOP)
    assert (delta.text, delta.token_ids) == ("one ", [1, 2])


def test_a_length_end_shows_every_token():
    delta = output().push([part(0, [1, 2], Finish.LENGTH)], Finish.LENGTH)
    assert (delta.text, delta.finish_reason) == ("one two ", "length")


def test_a_stop_string_cuts_after_the_token_that_completes_it():
    made = output(stops=["stop"], logprobs_k=2)
    first = made.push([part(0, [1, 3], k=2)], Finish.NONE)
    second = made.push([part(2, [4, 1, 2], k=2, drafts=(2, 2))], Finish.NONE)
    assert (first.text, first.token_ids) == ("one ", [1, 3])
    assert (second.text, second.token_ids, second.finish_reason) == ("", [4], "stop")
    assert second.topk_tokens == [40, 41]
    assert (made.n_tokens, made.accepted, made.rejected) == (3, 1, 0)


def test_text_held_for_a_stop_shows_when_the_sequence_ends():
    made = output(stops=["stop"])
    assert made.push([part(0, [3])], Finish.NONE).text == ""
    assert made.push([part(1, [0], Finish.STOP)], Finish.STOP).text == "st"


def test_a_stop_string_within_min_tokens_does_not_end():
    made = output(stops=["one"], min_tokens=2)
    assert made.push([part(0, [1, 2])], Finish.NONE).finish_reason is None
    delta = made.push([part(2, [1, 2])], Finish.NONE)
    assert (delta.token_ids, delta.finish_reason) == ([1], "stop")


@pytest.mark.parametrize("sizes", [[3], [1, 1, 1], [2, 1], [1, 2]])
def test_a_stop_string_that_begins_within_min_tokens_and_ends_behind_them_ends_the_text(sizes):
    tokens, position, text = [1, 3, 4], 0, ""
    made = output(stops=["stop", "one"], min_tokens=2)
    for size in sizes:
        delta = made.push([part(position, tokens[position : position + size])], Finish.NONE)
        position, text = position + size, text + delta.text
    assert (text, delta.finish_reason) == ("one ", "stop")


def test_an_unfinished_character_shows_only_at_the_end():
    made = output()
    assert made.push([part(0, [5])], Finish.NONE).text == ""
    assert made.push([part(1, [6])], Finish.NONE).text == "\u4f60"
    assert made.push([part(2, [5], Finish.LENGTH)], Finish.LENGTH).text == "\ufffd"


@pytest.mark.parametrize("end", ["length", "stop"])
def test_a_stop_string_that_an_unfinished_character_completes_ends_the_text_before_it(end):
    made = output(stops=["st\ufffd"])
    assert made.push([part(0, [1, 3])], Finish.NONE).text == "one "
    tokens, finish = ([5], Finish.LENGTH) if end == "length" else ([5, 0], Finish.STOP)
    delta = made.push([part(2, tokens, finish)], finish)
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", tokens, "stop")


@pytest.mark.parametrize("end", ["length", "stop"])
def test_within_min_tokens_an_unfinished_character_completes_no_stop_string(end):
    tokens, finish = ([1, 5], Finish.LENGTH) if end == "length" else ([1, 5, 0], Finish.STOP)
    for min_tokens, text in ((2, "one \ufffd"), (1, "one ")):
        made = output(stops=["\ufffd"], min_tokens=min_tokens)
        delta = made.push([part(0, tokens, finish)], finish)
        assert delta.text == text
        assert delta.finish_reason == ("stop" if min_tokens == 1 else end)


def test_text_held_for_a_stop_shows_with_the_unfinished_character_behind_it():
    made = output(stops=["stop"])
    assert made.push([part(0, [3])], Finish.NONE).text == ""
    delta = made.push([part(1, [5], Finish.LENGTH)], Finish.LENGTH)
    assert (delta.text, delta.finish_reason) == ("st\ufffd", "length")


def test_offsets_tell_where_each_token_begins():
    made = output(logprobs_k=0, want_offsets=True)
    assert made.push([part(0, [1, 5], k=0)], Finish.NONE).text_offsets == [0, 4]
    end = made.push([part(2, [6, 2, 0], Finish.STOP, k=0)], Finish.STOP)
    assert end.text_offsets == [4, 5, 9]


@pytest.mark.parametrize("stops", [(), ("never",)])
def test_offsets_are_the_same_token_by_token(stops):
    """Rows of one token have a way of their own, rows of several and stop strings another."""
    tokens, wanted = [1, 5, 6, 2, 3, 1], [0, 4, 4, 5, 9, 11]

    def told(sizes):
        made, offsets, position = output(logprobs_k=0, want_offsets=True, stops=stops), [], 0
        for size in sizes:
            row = part(position, tokens[position : position + size], k=0)
            offsets += made.push([row], Finish.NONE).text_offsets
            position += size
        return offsets

    for sizes in ([6], [1] * 6, [1, 3, 1, 1], [2, 1, 3]):
        assert told(sizes) == wanted


def test_the_offset_of_an_ending_token_alone_is_the_end_of_the_text():
    made = output(logprobs_k=0, want_offsets=True)
    assert made.push([part(0, [1], k=0)], Finish.NONE).text_offsets == [0]
    assert made.push([part(1, [0], Finish.STOP, k=0)], Finish.STOP).text_offsets == [4]


@pytest.mark.parametrize(
    "options",
    [{"want_offsets": True}, {"logprobs_k": 0}, {"logprobs_k": 0, "stops": ["never"]}, {}],
)
@pytest.mark.parametrize("n", [1, 3])
def test_there_are_offsets_only_beside_logprobs_and_where_they_are_asked_for(options, n):
    k = options.get("logprobs_k", -1)
    delta = output(**options).push([part(0, [1, 2, 1][:n], k=k)], Finish.NONE)
    assert delta.token_ids == [1, 2, 1][:n]
    assert delta.text_offsets == []


def test_a_part_of_a_delta_has_the_offsets_of_its_tokens():
    delta = output(logprobs_k=0, want_offsets=True).push([part(0, [1, 2, 1], k=0)], Finish.NONE)
    assert delta.between(1, 3).text_offsets == [4, 8]
    assert delta.between(0, 1).text_offsets == [0]


def test_a_trimmed_row_gives_out_only_what_is_new():
    made = output(logprobs_k=1)
    delta = made.push([part(3, [1, 2, 3], k=1, skip=2, drafts=(3, 2))], Finish.NONE)
    assert (delta.token_ids, delta.logprobs, delta.topk_tokens) == ([3], [-5.0], [30])
    assert (made.accepted, made.rejected) == (0, 1)


def test_several_rows_join_in_order():
    parts = [part(0, [1], k=0), part(1, [2, 0], Finish.STOP, k=0)]
    delta = output(logprobs_k=0).push(parts, Finish.STOP)
    assert (delta.text, delta.token_ids, delta.logprobs) == ("one two ", [1, 2, 0], [0.0, -1, -2])


@pytest.mark.parametrize("k", [-1, 0, 3])
def test_a_row_without_the_columns_asked_for_is_an_error(k):
    with pytest.raises(LogprobsMissingError, match="position 4"):
        output(logprobs_k=2).push([part(4, [1], k=k)], Finish.NONE)
