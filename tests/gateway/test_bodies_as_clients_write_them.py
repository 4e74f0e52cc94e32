"""What a body may look like that nobody would write by hand, and real clients send."""

import codecs
import json

import pytest

from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.intake.body import SMALL_BODY_BYTES
from baton_worker.gateway.intake.schema import (
    ChatBody,
    CompletionBody,
    TokenizeBody,
    convert,
)
from baton_worker.gateway.intake.unsupported import refuse_unsupported
from baton_worker.gateway.request import Endpoint

USER = {"role": "user", "content": "hi"}
CHAT = {"messages": [USER]}
INTEGERS = ("n", "max_tokens", "min_tokens", "top_k", "seed", "prompt_logprobs", "priority")
OF_BODIES = [
    *((ChatBody, CHAT, name) for name in (*INTEGERS, "max_completion_tokens", "top_logprobs")),
    *((CompletionBody, {"prompt": "x"}, name) for name in (*INTEGERS, "logprobs")),
]


@pytest.fixture
def gateway(start_gateway):
    return start_gateway()


def post(gateway, path, content):
    with gateway.http() as client:
        answer = client.post(path, content=content)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("size", [0, SMALL_BODY_BYTES], ids=["small", "large"])
def test_a_byte_order_mark_before_it_is_no_part_of_it(gateway, size):
    """Windows' editors and PowerShell write one before a file's text, which curl then sends."""
    body = json.dumps({"prompt": "the quick", "ignored": "x" * size}).encode()
    status, answer = post(gateway, "/v1/completions", codecs.BOM_UTF8 + body)
    assert (status, answer["choices"][0]["text"]) == (200, "the quick")
    status, answer = post(gateway, "/tokenize", codecs.BOM_UTF8 + body)
    assert status == 200
    status, answer = post(gateway, "/v1/completions", codecs.BOM_UTF8 * 2 + body)
    assert (status, answer["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(("kind", "base", "name"), OF_BODIES)
def test_an_integer_may_be_written_with_a_fraction_of_nothing(kind, base, name):
    made = getattr(convert(base | {name: 16.0}, kind), name)
    assert (made, type(made)) == (16, int)
    for wrong in (16.5, 1e17, float(1 << 53), True, "16"):
        with pytest.raises(ApiError) as refused:
            convert(base | {name: wrong}, kind)
        assert (refused.value.param, refused.value.code) == (name, "invalid_type")


ASK_FOR_NOTHING = [
    {"best_of": 1.0},
    {"best_of": 1.0, "n": 1},
    {"best_of": 2, "n": 2.0},
    {"top_logprobs": 0.0},
    {"thinking_token_budget": -1.0},
    {"length_penalty": 1},
    {"length_penalty": 1.0},
]
ASK_FOR_MORE = [{"best_of": 2.0}, {"best_of": True}, {"best_of": 2, "n": 2.5}, {"best_of": 1e300}]


@pytest.mark.parametrize("fields", ASK_FOR_NOTHING)
def test_what_asks_for_nothing_as_an_integer_does_so_with_a_fraction_of_nothing(fields):
    refuse_unsupported(Endpoint.COMPLETION, {"prompt": "x", **fields})


@pytest.mark.parametrize("fields", ASK_FOR_MORE)
def test_what_asks_for_more_is_refused_however_it_is_written(fields):
    with pytest.raises(ApiError) as refused:
        refuse_unsupported(Endpoint.COMPLETION, {"prompt": "x", **fields})
    assert (refused.value.param, refused.value.code) == ("best_of", "unsupported_parameter")


def test_numbers_that_are_no_field_of_the_api_stay_as_they_were_written():
    """A template would show 1 in place of 1.0."""
    kwargs = {"budget": 1.0}
    for kind in (ChatBody, TokenizeBody):
        made = convert(CHAT | {"chat_template_kwargs": kwargs}, kind)
        assert type(made.chat_template_kwargs["budget"]) is float
    assert type(convert(CHAT | {"temperature": 1.0}, ChatBody).temperature) is float


@pytest.mark.parametrize("turn", [{}, {"content": None}, {"content": None, "tool_calls": []}])
def test_an_answer_of_nothing_is_sent_back_as_an_empty_text(gateway, turn):
    with gateway.http() as client:
        counts = [
            client.post(
                "/tokenize", json={"messages": [USER, {"role": "assistant", **made}, USER]}
            ).json()
            for made in (turn, {"content": ""}, {"content": "None"})
        ]
    assert counts[0]["tokens"] == counts[1]["tokens"] != counts[2]["tokens"]


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
def test_nobody_else_may_say_nothing(gateway, role):
    messages = [USER, {"role": role, "content": None}]
    status, answer = post(
        gateway, "/v1/chat/completions", json.dumps({"messages": messages}).encode()
    )
    assert (status, answer["error"]["param"]) == (400, "messages[1].content")
