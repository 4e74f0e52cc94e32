"""The official client against a real pair: stream, logprobs, n, usage, error shapes."""

from __future__ import annotations

import openai
import pytest

MESSAGES = [{"role": "user", "content": "Who may copy the work?"}]


@pytest.fixture(scope="module")
def client(pair):
    with openai.OpenAI(base_url=pair.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_stream_carries_the_same_tokens_and_logprobs_as_one_answer(client):
    settings = {
        "model": "tiny-mtp",
        "messages": MESSAGES,
        "max_tokens": 24,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**settings)
    stream = client.chat.completions.create(
        **settings, stream=True, stream_options={"include_usage": True}
    )
    text, entries, usage, finish = "", [], None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            entries += choice.logprobs.content if choice.logprobs else []
            finish = choice.finish_reason or finish
    choice = whole.choices[0]
    assert text == choice.message.content
    assert finish == choice.finish_reason
    assert [e.token for e in entries] == [e.token for e in choice.logprobs.content]
    assert len(entries) == whole.usage.completion_tokens == usage.completion_tokens
    for streamed, entry in zip(entries, choice.logprobs.content, strict=True):
        assert streamed.logprob == pytest.approx(entry.logprob, abs=5e-5)
        assert len(entry.top_logprobs) == 2
    assert (
        b"".join(bytes(e.bytes) for e in entries[:-1]).decode(errors="replace") in text + "\ufffd"
    )


def test_n_choices_differ_by_seed_and_each_has_its_logprobs(client):
    reply = client.chat.completions.create(
        model="tiny-mtp", messages=MESSAGES, n=3, max_tokens=16, seed=1, logprobs=True
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in reply.choices}) > 1
    total = sum(len(choice.logprobs.content) for choice in reply.choices)
    assert total == reply.usage.completion_tokens


def test_completions_take_text_lists_and_ids(client):
    for prompt, count in (("a b", 1), (["a", "b"], 2), ([9, 10, 11], 1), ([[9], [10]], 2)):
        reply = client.completions.create(
            model="tiny-mtp", prompt=prompt, max_tokens=3, extra_body={"ignore_eos": True}
        )
        assert len(reply.choices) == count
        assert reply.usage.completion_tokens == 3 * count


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model"),
        ({"top_logprobs": 30, "logprobs": True}, openai.BadRequestError, "top_logprobs"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_tokens": 100000}, openai.BadRequestError, "max_tokens"),
    ],
)
def test_a_bad_request_names_its_field(client, change, error, param):
    settings = {"model": "tiny-mtp", "messages": MESSAGES, **change}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**settings)
    assert caught.value.param == param


def test_drafts_are_reported_in_usage(client):
    reply = client.completions.create(
        model="tiny-mtp", prompt="The license", max_tokens=40, temperature=0
    )
    details = reply.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.accepted_prediction_tokens < reply.usage.completion_tokens


def test_models_lists_what_is_served(client):
    assert [model.id for model in client.models.list()] == ["tiny-mtp"]
