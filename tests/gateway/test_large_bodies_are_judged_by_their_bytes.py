"""A large body is read like a small one, in slices; what cannot be served is refused unread."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_worker.config import GatewayConfig
from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.intake import body as body_module
from baton_worker.gateway.intake.body import (
    MAX_FIELD_BYTES,
    MAX_PROMPTS,
    MAX_STRINGS,
    SMALL_BODY_BYTES,
    read_object,
)
from baton_worker.gateway.intake.intake import Intake
from baton_worker.gateway.intake.schema import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    Prompt,
    TokenizeBody,
    decode_as,
    decode_object,
)
from baton_worker.gateway.request import Endpoint, ModelLimits

CONTEXT = 4096
PADDING = " " * SMALL_BODY_BYTES


class AnyBody(msgspec.Struct):
    """What an endpoint would make of a body that had all large fields."""

    prompt: Prompt | None = None
    messages: list[ChatMessage] | None = None
    tokens: list[int] | None = None


def read(value, context_tokens=CONTEXT, padding=PADDING, kind=AnyBody):
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return asyncio.run(read_object(raw + padding.encode(), context_tokens, kind))


def refusal(value, **options):
    with pytest.raises(ApiError) as caught:
        read(value, **options)
    return caught.value


@pytest.fixture
def decoded(monkeypatch):
    """Sizes of what is decoded into objects, in order."""
    sizes = []

    def recorded(data, kind, name):
        sizes.append(len(data))
        return decode_as(data, kind, name)

    monkeypatch.setattr(body_module, "decode_as", recorded)
    return sizes


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
PROMPTS = (
    st.text(max_size=9)
    | st.lists(st.integers(-3, 900), max_size=6)
    | st.lists(st.lists(st.integers(0, 900), max_size=5), max_size=5)
    | st.lists(st.text(max_size=5), max_size=5)
)
CALLS = st.none() | st.lists(
    st.fixed_dictionaries(
        {
            "function": st.fixed_dictionaries(
                {"name": st.text(max_size=3)},
                optional={"arguments": st.text(max_size=3) | st.dictionaries(st.text(), VALUES)},
            )
        }
    ),
    max_size=2,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.text(max_size=5),
            "content": st.none()
            | st.text(max_size=5)
            | st.lists(
                st.fixed_dictionaries({"type": st.text(max_size=4), "text": st.text(max_size=4)}),
                max_size=3,
            ),
        },
        optional={"name": st.text(max_size=3), "tool_calls": CALLS, "other": VALUES},
    ),
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.text(max_size=6) | st.just("n"), VALUES, max_size=4),
    st.fixed_dictionaries(
        {},
        optional={
            "prompt": PROMPTS,
            "tokens": st.lists(st.integers(-3, 900), max_size=6),
            "messages": MESSAGES,
        },
    ),
)
def test_a_large_body_is_read_as_a_small_one(others, known):
    value = others | known
    assert read(value) == decode_object(json.dumps(value).encode())


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["prompt", "tokens", "messages"]), VALUES)
def test_a_large_field_is_read_as_a_small_one_or_refused_by_its_name(name, value):
    refused = ""
    try:
        found = read({name: value})
    except ApiError as error:
        refused, found = str(error.param), {}
    assert refused.startswith(name) if refused else found == {name: value}


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([ChatBody, CompletionBody, TokenizeBody, DetokenizeBody]),
    st.sampled_from(["prompt", "tokens", "messages"]),
    VALUES,
)
def test_a_field_that_its_endpoint_does_not_have_is_not_judged(kind, name, value):
    if name not in kind.__struct_fields__:
        assert read({name: value}, kind=kind) == {name: value}


@pytest.mark.parametrize("padding", ["", PADDING], ids=["small", "large"])
def test_what_an_endpoint_ignores_may_be_anything(start_gateway, padding):
    gateway = start_gateway()
    with gateway.http() as client:
        for path, body in (
            ("/v1/completions", {"prompt": "a", "max_tokens": 1, "tokens": "x"}),
            ("/tokenize", {"prompt": "a", "tokens": {"a": 1}}),
            ("/detokenize", {"tokens": [70], "prompt": 1, "messages": "x"}),
        ):
            answer = client.post(path, content=json.dumps(body) + padding)
            assert answer.status_code == 200, answer.text


NO_VALUES = [b'"\xff"', b"1e999", b"9" * 5000, b'"\\ud800"', b"NaN"]
PLACES = [
    b'{"prompt": %b}', b'{"prompt": ["a", %b]}', b'{"prompt": [1, %b]}', b'{"prompt": [[1], [%b]]}',
    b'{"tokens": [%b]}', b'{"seed": %b}', b'{"other": {"a": [%b]}}', b'{"messages": %b}',
    b'{"messages": [{"role": "user", "content": %b}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": %b}]}]}',
    b'{"messages": [{"role": "user", "content": "a", "x": [%b]}]}',
]  # fmt: skip


@pytest.mark.parametrize("padding", ["", PADDING], ids=["small", "large"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrong", NO_VALUES, ids=["utf8", "float", "int", "pair", "nan"])
def test_what_is_no_value_is_refused_wherever_it_stands(place, wrong, padding):
    error = refusal(place % wrong, padding=padding)
    assert error.status == 400
    if wrong in (b"1e999", b"9" * 5000):
        name = place.split(b'"')[1].decode()
        assert str(error.param).startswith(name)
        assert name in error.message


LISTS = b"[" + b"[]," * 100_000 + b"[]]"


@pytest.mark.parametrize(
    ("place", "field"),
    [
        (b'{"prompt": {"a": %b}}', "prompt"),
        (b'{"prompt": ["a", %b]}', "prompt[1]"),
        (b'{"prompt": ["a", {"a": %b}]}', "prompt[1]"),
        (b'{"prompt": [1, %b]}', "prompt"),
        (b'{"tokens": %b}', "tokens"),
        (b'{"tokens": {"a": %b}}', "tokens"),
        (b'{"messages": [{"role": "user", "content": "a", "x": %b}]}', "messages[0].x"),
        (b'{"messages": [{"role": "user", "content": %b}]}', "messages[0].content[0]"),
        (b'{"messages": %b}', "messages[0]"),
        (b"{" + b",".join(b'"x%d": [%b[]]' % (i, b"[]," * 40_000) for i in range(9)) + b"}", "x4"),
    ],
)
def test_nothing_is_made_of_what_a_field_cannot_be(place, field):
    """A list of 300 kB is 100,000 objects; what is refused takes little more than its bytes."""
    raw = place % LISTS if b"%b" in place else place
    tracemalloc.start()
    try:
        error = refusal(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (error.status, error.param) == (400, field)
    assert peak < 4 * MAX_FIELD_BYTES * 24 + 4 * len(raw)


async def test_lists_of_ids_are_neither_converted_nor_checked_in_one_go(tokenizer):
    """Between the lists of a prompt others have their turn, from its bytes to the request."""
    intake = Intake("tiny", tokenizer, lambda: ModelLimits(CONTEXT, 512, 20), 20)
    raw = json.dumps({"prompt": [[7] * (CONTEXT - 16)] * 40}).encode()
    turns = []

    work = asyncio.create_task(intake.generation(Endpoint.COMPLETION, raw))
    while not work.done():
        turns.append(1)
        await asyncio.sleep(0)
    assert (await work).prompts == ((7,) * (CONTEXT - 16),) * 40
    assert len(turns) >= 60


@pytest.mark.parametrize("text", ["", "a"])
@pytest.mark.parametrize("n", [MAX_PROMPTS + 1, 30_000])
async def test_more_texts_than_anybody_may_have_are_refused(tokenizer, n, text):
    intake = Intake("tiny", tokenizer, lambda: ModelLimits(CONTEXT, 512, 20), 20)
    raw = json.dumps({"prompt": [text] * n}).encode()
    with pytest.raises(ApiError, match="more than 2048") as caught:
        await intake.generation(Endpoint.COMPLETION, raw)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b'{"a": NaN}', b"\xff"])
def test_what_is_no_object_is_refused_as_of_a_small_body(raw):
    error = refusal(raw)
    assert (error.status, error.code) == (400, "invalid_json")
    with pytest.raises(ApiError) as small:
        decode_object(raw)
    assert small.value.code == error.code


def test_more_ids_than_a_context_are_refused_undecoded(decoded):
    error = refusal({"prompt": [7] * (CONTEXT + 2)})
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert decoded == []


def test_a_list_of_more_ids_than_a_context_is_refused_undecoded(decoded):
    prompt = [[7], [8] * (CONTEXT + 2), [9]]
    assert refusal({"prompt": prompt}).code == "context_length_exceeded"
    assert decoded == [len(json.dumps(prompt)), len("[7]")], "the outer list, and what fits"


async def test_lists_of_ids_are_decoded_with_a_turn_after_each():
    """A second task has its turn between any two lists."""
    raw = json.dumps({"prompt": [list(range(CONTEXT))] * 40}).encode()
    turns = []

    work = asyncio.create_task(read_object(raw, CONTEXT, CompletionBody))
    while not work.done():
        turns.append(1)
        await asyncio.sleep(0)
    assert (await work)["prompt"] == [list(range(CONTEXT))] * 40
    assert len(turns) >= 40


class Bytes(bytes):
    """A body that notes how much of it is looked through in one go."""

    looked_through: list[int]

    def count(self, mark, start=0, end=None):
        self.looked_through[-1] += min(len(self), end) - start
        return super().count(mark, start, end)


@pytest.mark.parametrize(
    "prompt",
    [b'"' + b"x" * (4 << 20) + b'"', b"[" + b"7," * (2 << 20) + b"7]"],
    ids=["text", "ids"],
)
async def test_a_body_is_looked_through_in_slices(prompt):
    """Each is a window, of as many marks as there are to look for, and not the whole body."""
    raw = Bytes(b'{"prompt":' + prompt + b"}")
    raw.looked_through = [0]

    work = asyncio.create_task(read_object(raw, CONTEXT, CompletionBody))
    while not work.done():
        raw.looked_through.append(0)
        await asyncio.sleep(0)
    work.exception()
    assert sum(raw.looked_through) >= len(raw)
    assert max(raw.looked_through) <= 2 * (1 << 18)


def test_no_body_that_is_taken_by_default_is_decoded_in_one_long_go(decoded):
    """One pass over a byte costs 1 to 3 ns: 4 MiB stay below 20 ms, and 16 MiB did not."""
    bound = GatewayConfig().http.limits.max_body_bytes
    read({"prompt": "\n" * (bound // 2 - 40)}, padding="")
    assert max(decoded) <= bound <= 4 << 20


def test_a_large_field_is_refused_by_name_undecoded():
    error = refusal({"prompt": "x", "metadata": [[]] * (MAX_FIELD_BYTES // 3)})
    assert (error.param, error.code) == ("metadata", "field_too_large")


@pytest.mark.parametrize(
    "value",
    [
        {str(i): 1 for i in range(MAX_STRINGS + 9)},
        {"prompt": ["a"] * (MAX_STRINGS + 9)},
        {"messages": [{"role": "user", "content": "a"}] * (MAX_STRINGS // 4 + 9)},
    ],
    ids=["keys", "texts", "messages"],
)
def test_more_strings_than_a_body_may_have_are_refused(value):
    assert refusal(value).code == "body_too_large"


def test_a_long_text_full_of_quotes_is_one_string():
    text = '"He said \\"no\\", and ' * 20_000
    assert read({"prompt": text})["prompt"] == text


def test_more_prompts_than_anybody_may_have_are_refused():
    assert refusal({"prompt": [[1]] * (MAX_PROMPTS + 9)}).param == "prompt"


def test_a_message_of_a_wrong_shape_is_named():
    messages = [{"role": "user", "content": "x" * 30_000}] * 3 + [{"content": "x"}]
    assert refusal({"messages": messages}).param == "messages[3].role"


async def test_bad_words_are_tokenised_off_the_loop_when_they_are_many(tokenizer):
    threads = set()

    class Watched:
        vocabulary, chat_template = tokenizer.vocabulary, tokenizer.chat_template

        @staticmethod
        def encode(text, **options):
            threads.add((threading.get_ident(), len(text) > 3))
            return tokenizer.encode(text, **options)

        @staticmethod
        def encode_long(text, **options):
            threads.add((threading.get_ident(), len(text) > 3))
            return tokenizer.encode_long(text, **options)

    words = [f"word {i} {'x' * 200}" for i in range(100)]
    requests = []
    for some in (words, words[:1]):
        intake = Intake("tiny", Watched, lambda: ModelLimits(CONTEXT, 512, 20), 20)
        raw = json.dumps({"prompt": "a", "bad_words": some}).encode()
        requests.append(await intake.generation(Endpoint.COMPLETION, raw))
    assert requests[0].params.sampling.bad_words[:2] == requests[1].params.sampling.bad_words
    assert len({thread for thread, is_word in threads if is_word}) >= 2


def test_tokenize_refuses_a_text_that_no_context_holds(start_gateway, tokenizer):
    gateway = start_gateway()
    longest = 512 * tokenizer.vocabulary.longest + 1
    with gateway.http() as client:
        answer = client.post("/tokenize", json={"prompt": "x" * longest})
        assert client.post("/tokenize", json={"prompt": "x" * 100}).json()["count"] > 1
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt")
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("n", [513, 1_000_000])
def test_detokenize_refuses_more_tokens_than_a_context(start_gateway, n):
    gateway = start_gateway()
    with gateway.http() as client:
        answer = client.post("/detokenize", json={"tokens": [7] * n})
        assert client.post("/detokenize", json={"tokens": [70] * 512}).status_code == 200
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
