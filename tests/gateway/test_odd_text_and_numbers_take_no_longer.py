"""What is slow to read by its kind, not its size, holds the event loop no longer than the rest."""

import json
import math
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.intake.intake import Intake
from baton_worker.gateway.intake.schema import decode_object
from baton_worker.gateway.request import Endpoint, ModelLimits

EDGES = ["1e-324", "4.9e-324", "2.2250738585072011e-308", "1.7976931348623157e308"]
RATIO = 20
"""msgspec's own reading of them takes 70 to 150 times as long as that of plain numbers."""
N_NUMBERS, TRIES = 500, 100
"""Thread time counts what a busy host takes from the processor too: short tries, and many, have one
among them of which it took nothing.
"""


def processor_seconds(number):
    """Return the least time that a body full of a number takes."""
    body = b'{"x": [' + b",".join([number.encode()] * N_NUMBERS) + b"]}"
    found = []
    for _ in range(TRIES):
        begun = time.thread_time()
        decode_object(body)
        found.append(time.thread_time() - begun)
    return min(found)


def test_numbers_at_a_doubles_edges_are_read_as_fast_as_others():
    plain = processor_seconds("0.1")
    for number in EDGES:
        assert processor_seconds(number) < RATIO * plain, number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_read_to_the_last_bit(value):
    for text in (repr(value), f"{value:.25e}"):
        read = decode_object(f'{{"x": {text}}}'.encode())["x"]
        assert (read, math.copysign(1, read)) == (value, math.copysign(1, value))


@pytest.mark.parametrize("text", ["1e309", "-1e400", "1.8e308"])
def test_a_number_beyond_a_double_is_refused_by_its_fields_name(text):
    with pytest.raises(ApiError) as caught:
        decode_object(f'{{"a": 1, "b": {{"c": [{text}]}}}}'.encode())
    assert (caught.value.status, caught.value.code) == (400, "invalid_type")
    assert caught.value.param.startswith("b")


@pytest.mark.parametrize("character", ["\u4f60", "\U0001f600", "\u00e9"])
@pytest.mark.parametrize("field", ["prompt", "bad_words"])
async def test_text_beyond_ascii_counts_by_its_bytes_where_it_is_tokenised(
    tokenizer, field, character
):
    threads = set()

    class Watched:
        vocabulary, chat_template = tokenizer.vocabulary, tokenizer.chat_template

        @staticmethod
        def encode(text, **options):
            assert len(text.encode()) <= 16_384
            return tokenizer.encode(text, **options)

        @staticmethod
        def encode_long(text, **options):
            threads.add(threading.get_ident())
            return tokenizer.encode_long(text, **options)

    words = [character * 100 + str(i) for i in range(20)]
    value = {"prompt": character * 12_000} if field == "prompt" else {"prompt": "a", field: words}
    intake = Intake("tiny", Watched, lambda: ModelLimits(1 << 17, 512, 20), 20)
    await intake.generation(Endpoint.COMPLETION, json.dumps(value).encode())
    assert threads
    assert threading.get_ident() not in threads
