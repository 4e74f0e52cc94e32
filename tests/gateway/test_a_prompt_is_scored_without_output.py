"""`max_tokens: 0` asks about the prompt alone: its text and logprobs, and no token of output."""

import json
import threading

import pytest

from baton_testing.scripted_link import EOS
from baton_worker.identity import Role
from baton_worker.messages import Submit

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [20, 21, 22, 23, 24]
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2}


def chunks(text):
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


@pytest.fixture(params=["pd", "m"])
def gateway(start_gateway, request):
    return start_gateway(workers=request.param)


def test_an_echo_is_the_prompt_with_its_logprobs_and_nothing_behind_it(gateway):
    with gateway.http() as client:
        scored = client.post(TEXT, json=BODY).json()
        further = client.post(TEXT, json=BODY | {"max_tokens": 1}).json()
    (choice,), (longer,) = scored["choices"], further["choices"]
    assert choice["finish_reason"] == "length"
    assert longer["text"].startswith(choice["text"])
    for name, values in choice["logprobs"].items():
        assert len(values) == len(PROMPT)
        assert values == longer["logprobs"][name][: len(PROMPT)]
    usage = scored["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 0)
    assert usage["total_tokens"] == len(PROMPT)
    assert gateway.metric("baton_gateway_completion_tokens_total") == 1, "the longer one's"
    assert gateway.link.sent(Submit)[0][1].sampling.max_tokens == 1


def test_a_stream_tells_the_same(gateway):
    with gateway.http() as client:
        whole = client.post(TEXT, json=BODY).json()
        told = chunks(
            client.post(
                TEXT, json=BODY | {"stream": True, "stream_options": {"include_usage": True}}
            ).text
        )
    choices = [chunk["choices"][0] for chunk in told if chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    found = [v for choice in choices for v in choice["logprobs"]["token_logprobs"]]
    assert found == whole["choices"][0]["logprobs"]["token_logprobs"]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert told[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chats_prompt_is_scored_too(gateway, field):
    body = {"messages": [{"role": "user", "content": "the fox"}], "prompt_logprobs": 1, field: 0}
    with gateway.http() as client:
        answer = client.post(CHAT, json=body | {"return_token_ids": True, "logprobs": True}).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == ""
    assert (choice["token_ids"], choice["logprobs"]["content"]) == ([], [])
    assert choice["finish_reason"] == "length"
    assert len(choice["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0


def test_a_model_that_would_end_at_once_changes_nothing(start_gateway):
    gateway = start_gateway(lambda submit: [EOS])
    with gateway.http() as client:
        answer = client.post(TEXT, json=BODY | {"n": 2, "return_token_ids": True}).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert [choice["token_ids"] for choice in answer["choices"]] == [[], []]
    assert answer["usage"]["completion_tokens"] == 0


def test_a_worker_that_is_lost_before_the_prompt_is_told_is_replaced(start_gateway):
    gateway = start_gateway()
    gateway.link.up("prefill-1", Role.PREFILL)
    gateway.link.pause()

    def lose_the_first():
        gateway.link.wait_until(lambda: len(gateway.link.sent(Submit)) == 1)
        gateway.link.down(gateway.link.sent(Submit)[0][0])
        gateway.link.resume()

    thread = threading.Thread(target=lose_the_first)
    thread.start()
    with gateway.http() as client:
        answer = client.post(TEXT, json=BODY).json()
    thread.join()
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == 0
    assert gateway.metric("baton_gateway_retries_total", how="from_start") == 1


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (TEXT, {"prompt": PROMPT, "max_tokens": 0}, "max_tokens is 0: the least is 1; with echo"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0},
         "max_completion_tokens is 0: the least is 1; with echo or prompt_logprobs 0 scores"),
        (TEXT, BODY | {"max_tokens": -1}, "max_tokens is -1: the least is 0"),
        (TEXT, BODY | {"min_tokens": 1}, "min_tokens is 1, more than the 0 output tokens"),
        (TEXT, BODY | {"prompt": [5] * 512}, "length is 512 tokens: the prompt has 512"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(start_gateway, path, body, said):
    gateway = start_gateway()
    with gateway.http() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
