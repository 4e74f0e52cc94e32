"""What streams and lists of choices carry: indices, usage, token ids, stops, drafts."""

import json

import pytest

from baton_worker.messages import Abort, Reserve, Submit

PROMPT = "the quick brown fox"


def events(gateway, path, **body):
    """Every event of a stream, parsed; the last must be [DONE]."""
    with gateway.http() as client:
        answer = client.post(path, json={"model": "tiny", "stream": True} | body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = answer.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def post(gateway, path, **body):
    with gateway.http() as client:
        answer = client.post(path, json={"model": "tiny"} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_usage_comes_once_at_the_end_and_only_when_asked_for(start_gateway):
    gateway = start_gateway()
    path = "/v1/completions"
    options = {"stream_options": {"include_usage": True}}
    chunks = events(gateway, path, prompt=PROMPT, **options)
    assert chunks[-1]["choices"] == []
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"] == post(gateway, path, prompt=PROMPT)["usage"]
    assert all("usage" not in chunk for chunk in events(gateway, path, prompt=PROMPT))


@pytest.mark.parametrize("logprobs", [None, 1])
def test_each_chunk_tells_its_choices_usage_so_far_when_asked_to(start_gateway, logprobs):
    """What guidellm counts tokens by: it asks for it in every stream."""
    gateway = start_gateway()
    both = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    body = {"prompt": [PROMPT, "a stop"], "n": 2, "logprobs": logprobs, "return_token_ids": True}
    chunks = events(gateway, "/v1/completions", **body, **both)
    whole = post(gateway, "/v1/completions", **body)
    counts = [0] * 4
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        index = choice["index"]
        counts[index] += len(choice["token_ids"])
        prompt = len(whole["choices"][index]["prompt_token_ids"])
        assert chunk["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": counts[index],
            "total_tokens": prompt + counts[index],
        }
    assert counts == [len(choice["token_ids"]) for choice in whole["choices"]]
    assert chunks[-1]["usage"]["completion_tokens"] == sum(counts)
    alone = {"stream_options": {"continuous_usage_stats": True}}
    assert all(
        "usage" not in chunk for chunk in events(gateway, "/v1/completions", **body, **alone)
    )


def test_a_chats_first_chunk_tells_the_prompt_and_tokens_without_text_count(start_gateway):
    """A stop text that may go on is held back: its tokens are told with the next chunk."""
    gateway = start_gateway(per_step=1)
    both = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [{"role": "user", "content": PROMPT}], "stop": ["ck brown fox jumps"]}
    chunks = events(gateway, "/v1/chat/completions", **body, stream_options=both)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts[0] == 0
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {
        chunks[-1]["usage"]["prompt_tokens"]
    }
    assert counts == sorted(counts)
    assert counts[-1] == chunks[-1]["usage"]["completion_tokens"] > len(chunks) - 2


@pytest.mark.parametrize("workers", ["pd", "m"])
def test_usage_splits_drafts_into_accepted_and_rejected(start_gateway, tokenizer, workers):
    gateway = start_gateway(per_step=3, workers=workers)
    usage = post(gateway, "/v1/completions", prompt=PROMPT)["usage"]
    n = len(tokenizer.encode(PROMPT, add_special_tokens=False)) + 1
    steps = -(-(n - 1) // 3)
    accepted = n - 1 - steps
    assert usage["completion_tokens"] == n
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": 2 * steps - accepted,
    }
    assert gateway.metric("baton_gateway_accepted_prediction_tokens_total") == accepted


@pytest.mark.parametrize("workers", ["pd", "m"])
def test_usage_counts_cached_tokens_of_each_prompt_once(start_gateway, workers):
    """A prompt was computed as far as the choice that found least had to compute it."""
    gateway = start_gateway(workers=workers)
    found = {(1, 2, 3, 4): iter([2, 3]), (5, 6, 7): iter([0, 3]), (8, 9): iter([1, 1])}
    gateway.link.reused = lambda submit: next(found[submit.prompt_token_ids])
    usage = post(gateway, "/v1/completions", prompt=[list(p) for p in found], n=2)["usage"]
    assert usage["prompt_tokens"] == 9
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


def test_each_choice_of_each_prompt_has_its_place(start_gateway):
    gateway = start_gateway()
    body = {"prompt": ["the fox", "a stop"], "n": 2, "seed": 9, "return_token_ids": True}
    whole = post(gateway, "/v1/completions", **body)
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in whole["choices"]] == ["the fox"] * 2 + ["a stop"] * 2
    prompts = [c["prompt_token_ids"] for c in whole["choices"]]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    streamed = {i: "" for i in range(4)}
    for chunk in events(gateway, "/v1/completions", **body):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == [c["text"] for c in whole["choices"]]
    by_prompt = {}
    for _, submit in gateway.link.sent(Submit)[:4]:
        by_prompt.setdefault(submit.prompt_token_ids, []).append(submit.sampling.seed)
    first, second = by_prompt.values()
    assert first == second
    assert first[0] == 9 != first[1]


@pytest.mark.parametrize("k", [None, 2])
def test_a_stop_string_ends_text_and_tokens_and_aborts_the_workers(start_gateway, k):
    gateway = start_gateway(lambda submit: [*tokens, *tokens * 20, 1])
    with gateway.http() as client:
        tokens = client.post(
            "/tokenize", json={"prompt": "the quick brown fox ", "add_special_tokens": False}
        ).json()["tokens"]
    body = {"prompt": "x", "max_tokens": 300, "stop": ["wn f", "zzz"], "logprobs": k}
    choice = post(gateway, "/v1/completions", **body, return_token_ids=True)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("the quick bro", "stop")
    n = len(choice["token_ids"])
    assert choice["token_ids"] == tokens[:n]
    assert k is None or len(choice["logprobs"]["tokens"]) == n
    gateway.link.wait_until(lambda: len(gateway.link.sent(Abort)) == 2)
    gateway.link.do(lambda: None)
    assert gateway.link.held() == 0
    streamed = events(gateway, "/v1/completions", **body)
    shown = "".join(c["text"] for chunk in streamed for c in chunk["choices"])
    assert shown == "the quick bro"


def test_chat_returns_ids_of_prompt_and_output_on_request(start_gateway, tokenizer):
    gateway = start_gateway()
    body = {"messages": [{"role": "user", "content": PROMPT}], "return_token_ids": True}
    whole = post(gateway, "/v1/chat/completions", **body)
    chunks = events(gateway, "/v1/chat/completions", **body)
    text = "<s><|user|>" + PROMPT + "<|assistant|>"
    assert whole["prompt_token_ids"] == tokenizer.encode(text, add_special_tokens=False)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    ids = [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]
    assert ids[-1] == 1
    assert "prompt_token_ids" not in post(
        gateway, "/v1/chat/completions", messages=body["messages"]
    )


def test_a_chat_stream_opens_with_the_role_of_each_choice(start_gateway):
    gateway = start_gateway()
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    chunks = events(gateway, "/v1/chat/completions", messages=messages, n=2)
    opening = [chunk["choices"][0] for chunk in chunks[:2]]
    assert [(c["index"], c["delta"]) for c in opening] == [
        (0, {"content": "", "role": "assistant"}),
        (1, {"content": "", "role": "assistant"}),
    ]
    ends = [c["index"] for k in chunks for c in k["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1]


def test_sampling_reaches_the_worker_as_asked(start_gateway):
    gateway = start_gateway()
    asked = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": -1, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "repetition_penalty": 1.1, "max_tokens": 9, "min_tokens": 2,
        "ignore_eos": True, "stop_token_ids": [5, 6, 5],
    }  # fmt: skip
    post(gateway, "/v1/completions", prompt=[70], **asked, logprobs=4)
    _, submit = gateway.link.sent(Submit)[0]
    expected = asked | {"seed": (1 << 64) - 1, "stop_token_ids": (5, 6)}
    assert {name: getattr(submit.sampling, name) for name in asked} == expected
    assert submit.logprobs_k == 4
    assert submit.decode.worker_id == "decode-0"
    _, reserve = gateway.link.sent(Reserve)[0]
    assert (reserve.handle, reserve.prompt_tokens, reserve.max_tokens) == (submit.handle, 1, 9)


def test_chat_without_a_limit_may_fill_the_context(start_gateway):
    gateway = start_gateway()
    post(gateway, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    _, submit = gateway.link.sent(Submit)[0]
    assert len(submit.prompt_token_ids) + submit.sampling.max_tokens == 512
