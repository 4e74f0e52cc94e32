"""The official client against the real application: streams, logprobs, several choices, usage."""

import openai
import pytest

from baton_testing.scripted_link import logprob_of
from baton_worker.messages import Submit

MESSAGES = [{"role": "user", "content": "the quick brown café 你好"}]


def test_chat_answers_with_text_usage_and_finish_reason(start_gateway):
    client = start_gateway().openai()
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=100)
    assert answer.choices[0].message.content == "the quick brown café 你好"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_stream_joins_to_the_same_text_with_one_logprob_per_token(start_gateway):
    client = start_gateway().openai()
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            stream=True,
            logprobs=True,
            top_logprobs=3,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    ids = [t for c in chunks if c.choices for t in getattr(c.choices[0], "token_ids", None) or []]
    entries = [
        e
        for c in chunks
        if c.choices and c.choices[0].logprobs
        for e in c.choices[0].logprobs.content
    ]
    assert text == "the quick brown café 你好"
    assert chunks[-1].usage.completion_tokens == len(ids) == len(entries)
    assert chunks[0].prompt_token_ids[-1] == 3
    for position, (token, entry) in enumerate(zip(ids, entries, strict=True)):
        assert entry.logprob == pytest.approx(logprob_of(token, position), abs=0)
        assert len(entry.top_logprobs) == 3
    assert entries[-1].token == "</s>"
    assert bytes(b for e in entries[:-1] for b in e.bytes).decode() == text


def test_two_choices_carry_their_own_index_and_seed(start_gateway):
    running = start_gateway()
    answer = running.openai().chat.completions.create(model="tiny", messages=MESSAGES, n=2, seed=5)
    assert [c.index for c in answer.choices] == [0, 1]
    seeds = [c.sampling.seed for _, c in running.link.sent(Submit)]
    assert seeds[0] == 5
    assert seeds[1] != 5


def test_completions_take_every_kind_of_prompt(start_gateway):
    client = start_gateway().openai()
    for prompt, texts in (
        ("the fox", ["the fox"]),
        (["the", "fox"], ["the", "fox"]),
        ([70, 71], None),
        ([[70, 71], [72]], None),
    ):
        answer = client.completions.create(model="tiny", prompt=prompt, logprobs=2, max_tokens=40)
        if texts:
            assert [c.text for c in answer.choices] == texts
        for choice in answer.choices:
            lengths = {
                len(choice.logprobs.tokens),
                len(choice.logprobs.token_logprobs),
                len(choice.logprobs.top_logprobs),
                len(choice.logprobs.text_offset),
            }
            assert len(lengths) == 1


def test_a_wrong_field_raises_the_clients_bad_request(start_gateway):
    client = start_gateway().openai()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=9)
    assert caught.value.body["param"] == "temperature"
