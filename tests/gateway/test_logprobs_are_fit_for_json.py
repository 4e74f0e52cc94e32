"""Logprob entries: one per token, finite, alternatives apart from the sampled token's column."""

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.gateway.answers.logprob_entries import (
    FLOOR,
    chat_logprobs,
    completion_logprobs,
    finite,
)
from baton_worker.gateway.output.sequence import Delta
from baton_worker.gateway.text.vocabulary import Vocabulary

VOCABULARY = Vocabulary({0: b"a", 1: b"b", 2: b"\xe4", 3: b"a", 4: b"</s>"}, frozenset({4}))
LOWEST = -3.4028234663852886e38


def delta(tokens, logprobs, top=(), top_logprobs=()):
    return Delta(0, "", list(tokens), list(logprobs), list(top), list(top_logprobs), [0], None)


@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan, LOWEST, -9999.5])
def test_what_json_cannot_hold_becomes_the_floor(bad):
    assert finite([-1.0, bad, -2.0]) == [-1.0, FLOOR, -2.0]
    assert finite([bad, -1.0]) == [FLOOR, -1.0]


def test_ordinary_values_stay_exactly_as_they_were():
    values = [-0.0, -1e-9, -9998.9, 9e-4]
    assert finite(values) == values
    assert finite([]) == []


def test_chat_entries_hold_the_k_alternatives_and_not_the_sampled_column():
    made = chat_logprobs(delta([1, 4], [-0.5, -0.25], [0, 2, 1, 0], [-0.1, LOWEST, -0.2, -0.3]),
                         VOCABULARY, 2)  # fmt: skip
    shown = json.loads(msgspec.json.encode(made))["content"]
    assert [(e["token"], e["logprob"], e["bytes"]) for e in shown] == [
        ("b", -0.5, [98]),
        ("</s>", -0.25, list(b"</s>")),
    ]
    assert shown[0]["top_logprobs"] == [
        {"token": "a", "logprob": -0.1, "bytes": [97]},
        {"token": "bytes:\\xe4", "logprob": FLOOR, "bytes": [0xE4]},
    ]
    assert [top["token"] for top in shown[1]["top_logprobs"]] == ["b", "a"]


def test_completion_dictionaries_hold_the_alternatives_best_first_and_the_token():
    made = completion_logprobs(
        delta([1, 0], [-0.5, -0.1], [0, 2, 0, 1], [-0.2, -0.9, -0.1, -0.4]), VOCABULARY, 2
    )
    assert list(made.top_logprobs[0].items()) == [("a", -0.2), ("bytes:\\xe4", -0.9), ("b", -0.5)]
    assert made.top_logprobs[1] == {"a": -0.1, "b": -0.4}
    assert (made.tokens, made.token_logprobs) == (["b", "a"], [-0.5, -0.1])


def test_of_two_alternatives_with_one_text_the_likelier_counts():
    made = completion_logprobs(delta([1], [-0.5], [0, 3], [-0.2, -0.9]), VOCABULARY, 2)
    assert made.top_logprobs == [{"a": -0.2, "b": -0.5}]


def test_without_alternatives_there_is_the_token_alone():
    assert completion_logprobs(delta([1], [-0.5]), VOCABULARY, 0).top_logprobs == [{"b": -0.5}]
    (entry,) = json.loads(bytes(chat_logprobs(delta([1], [-0.5]), VOCABULARY, 0).content))
    assert entry["top_logprobs"] == []
    assert bytes(chat_logprobs(delta([], []), VOCABULARY, 0).content) == b"[]"


LOGPROBS = st.floats(max_value=0.0) | st.sampled_from([math.nan, math.inf, LOWEST])


class Alternative(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class Token(Alternative):
    top_logprobs: list[Alternative]


@given(st.lists(st.binary(max_size=6), min_size=1, max_size=6), st.data())
def test_entries_are_what_encoding_them_as_objects_gives(full, data):
    """Quotes, signs of formatting and halves of characters too, and every digit of a logprob."""
    k, n = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    ids = data.draw(st.lists(st.integers(0, 8), min_size=n * (k + 1), max_size=n * (k + 1)))
    values = data.draw(st.lists(LOGPROBS, min_size=n * (k + 1), max_size=n * (k + 1)))
    vocabulary = Vocabulary(dict(enumerate([*full, b'%b%%"', b"%(a)s"])), frozenset())
    made = chat_logprobs(delta(ids[:n], values[:n], ids[n:], values[n:]), vocabulary, k)

    def told(ids, values):
        datas = [vocabulary.text_bytes[token_id] for token_id in ids]
        return zip(vocabulary.names.of(ids), finite(values), map(list, datas), strict=True)

    top = [Alternative(*each) for each in told(ids[n:], values[n:])]
    each = enumerate(told(ids[:n], values[:n]))
    expected = [Token(*one, top[i * k : (i + 1) * k]) for i, one in each]
    assert msgspec.json.encode(made.content) == msgspec.json.encode(expected)


def test_a_count_of_logprobs_other_than_of_tokens_is_an_error():
    for build in (chat_logprobs, completion_logprobs):
        with pytest.raises(ValueError, match=r"zip|1 logprobs of 2 tokens"):
            build(delta([1, 0], [-0.5]), VOCABULARY, 0)
