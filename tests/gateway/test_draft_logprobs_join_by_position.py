"""Draft logprobs stand beside the token of their position; a missing one is null (R28)."""

import json

import pytest

from baton_testing.scripted_link import draft_logprob_of

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
WORDS = "the quick brown fox"


def body(path, **more):
    common = {"model": "tiny", "max_tokens": 9, "return_token_ids": True, "ignore_eos": True}
    if path == CHAT:
        messages = [{"role": "user", "content": WORDS}]
        return common | {"messages": messages, "logprobs": True, "top_logprobs": 2} | more
    return common | {"prompt": WORDS, "logprobs": 2} | more


def streamed(gateway, path, **more):
    """Return a stream's choices, chunk by chunk."""
    with gateway.http() as client:
        text = client.post(path, json=body(path, stream=True, **more)).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    return [choice for chunk in chunks for choice in chunk["choices"]]


def entries(draft_logprobs):
    """Both shapes as [(token, logprob) or None, ...]."""
    if "content" in draft_logprobs:
        return [e and (e["token"], e["logprob"]) for e in draft_logprobs["content"]]
    pairs = zip(draft_logprobs["tokens"], draft_logprobs["token_logprobs"], strict=True)
    return [None if token is None else (token, value) for token, value in pairs]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_each_token_has_its_positions_draft_or_null(start_gateway, path):
    """The first token and each step's last have no draft; position 4 lost its logprobs."""
    gateway = start_gateway(lambda submit: list(range(20, 40)), per_step=3)
    gateway.link.draft_gaps.add(4)
    with gateway.http() as client:
        reply = client.post(path, json=body(path, include_draft_logprobs=True))
    choice = reply.json()["choices"][0]
    got, ids = entries(choice["draft_logprobs"]), choice["token_ids"]
    assert len(got) == len(ids) == 9
    for position, (entry, token) in enumerate(zip(got, ids, strict=True)):
        is_last_of_step = position % 3 == 0
        if is_last_of_step or position in (4, 5):
            assert entry is None
        else:
            assert entry[1] == pytest.approx(draft_logprob_of(token, position))
    tops = choice["draft_logprobs"].get("top_logprobs")
    if path == TEXT:
        assert [bool(top) for top in tops] == [entry is not None for entry in got]
    else:
        content = choice["draft_logprobs"]["content"]
        assert {len(e["top_logprobs"]) for e in content if e} == {2}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_says_the_same_and_each_chunk_has_one_per_token(start_gateway, path):
    gateway = start_gateway(per_step=3)
    with gateway.http() as client:
        whole = client.post(path, json=body(path, include_draft_logprobs=True)).json()
    told = []
    for choice in streamed(gateway, path, include_draft_logprobs=True):
        ids = choice.get("token_ids") or []
        if ids:
            assert len(entries(choice["draft_logprobs"])) == len(ids)
            told += entries(choice["draft_logprobs"])
    assert told == entries(whole["choices"][0]["draft_logprobs"])


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_nothing_else_of_the_answer_changes(start_gateway, path):
    gateway = start_gateway(per_step=3)
    gateway.link.draft_gaps.update(range(100))
    with gateway.http() as client:
        plain = client.post(path, json=body(path, seed=1)).json()["choices"]
        reply = client.post(path, json=body(path, seed=1, include_draft_logprobs=True))
    asked = reply.json()["choices"]
    assert all(entry is None for entry in entries(asked[0].pop("draft_logprobs")))
    assert asked == plain
    assert "draft_logprobs" not in plain[0]


def test_they_need_logprobs(start_gateway):
    gateway = start_gateway()
    with gateway.http() as client:
        reply = client.post(
            TEXT, json={"model": "tiny", "prompt": "a", "include_draft_logprobs": True}
        )
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "include_draft_logprobs")


def test_step_details_name_each_verified_draft(start_gateway, tokenizer):
    gateway = start_gateway(per_step=3)
    ids, steps = [], []
    for choice in streamed(gateway, TEXT, include_step_details=True):
        ids += choice.get("token_ids") or []
        steps += choice.get("step_details") or []
    names = tokenizer.vocabulary.names
    assert [step["n_proposed"] for step in steps[:2]] == [0, 2]
    for step in steps:
        told = step["verified_drafts"]
        assert len(told) == step["n_proposed"]
        at = step["position"]
        accepted = [names[token] for token in ids[at : at + step["n_accepted"]]]
        assert told[: step["n_accepted"]] == accepted
