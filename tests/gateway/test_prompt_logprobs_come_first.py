"""A prompt's logprobs are whole and come before any output, or the request ends with an error."""

import itertools
import json

import pytest

from baton_testing.scripted_link import logprob_of, top_of
from baton_worker.messages import Submit

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PROMPT = [20, 21, 22, 23, 24, 25, 26, 27]


def body(path, **more):
    common = {"model": "tiny", "max_tokens": 5, "return_token_ids": True}
    if path == CHAT:
        return common | {"messages": [{"role": "user", "content": "a fox"}]} | more
    return common | {"prompt": PROMPT} | more


def expected(prompt, k):
    """The entries as candidates by id, of the scripted worker's numbers."""
    entries = [None]
    for position, token in enumerate(prompt[1:], 1):
        tops = [top_of(token, r) for r in range(k)]
        values = {str(token): logprob_of(token, position)}
        entries.append(values | {str(t): value for t, value in tops})
    return entries


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("workers", ["pd", "m"])
def test_an_answer_has_an_entry_per_prompt_token(start_gateway, path, k, workers):
    gateway = start_gateway(workers=workers)
    with gateway.http() as client:
        reply = client.post(path, json=body(path, prompt_logprobs=k)).json()
    choice = reply["choices"][0]
    prompt = choice.get("prompt_token_ids") or reply["prompt_token_ids"]
    got = choice["prompt_logprobs"]
    values = [e and {t: c["logprob"] for t, c in e.items()} for e in got]
    assert values == expected(prompt, k)
    assert all(e[str(t)]["rank"] == 2 for e, t in zip(got[1:], prompt[1:], strict=True))
    assert choice["logprobs"] is None


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_tells_the_prompt_once_before_any_token(start_gateway, path):
    gateway = start_gateway()
    asked = body(path, prompt_logprobs=1, n=2, seed=1)
    with gateway.http() as client:
        whole = client.post(path, json=asked).json()["choices"]
        text = client.post(path, json=asked | {"stream": True}).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    for index in (0, 1):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        telling = [i for i, c in enumerate(mine) if "prompt_logprobs" in c]
        first_token = next(i for i, c in enumerate(mine) if c.get("token_ids"))
        assert len(telling) == 1
        assert telling[0] <= first_token
        assert mine[telling[0]]["prompt_logprobs"] == whole[index]["prompt_logprobs"]


def test_a_prompt_of_one_token_has_only_its_null(start_gateway):
    gateway = start_gateway(lambda submit: [30, 31, 1])
    asked = {"model": "tiny", "prompt": [20], "prompt_logprobs": 2, "max_tokens": 3}
    with gateway.http() as client:
        choice = client.post(TEXT, json=asked).json()["choices"][0]
    assert choice["prompt_logprobs"] == [None]


@pytest.mark.parametrize("lost", [{0}, {1}, {2}])
def test_lost_prompt_logprobs_are_an_error_and_not_a_null(start_gateway, lost):
    gateway = start_gateway()
    gateway.link.lost_prompt_rows.update(lost)
    with gateway.http() as client:
        reply = client.post(TEXT, json=body(TEXT, prompt_logprobs=1))
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "gap_timeout"


@pytest.mark.parametrize(
    ("k", "message"), [(21, "the most is 20"), (-1, "the least is 0"), ("x", "")]
)
def test_a_bad_count_is_refused_by_name(start_gateway, k, message):
    gateway = start_gateway()
    with gateway.http() as client:
        reply = client.post(TEXT, json=body(TEXT, prompt_logprobs=k))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert message in reply.json()["error"]["message"]
    assert gateway.link.commands == []


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_and_its_logprobs_before_the_output(start_gateway, tokenizer, stream):
    gateway = start_gateway(lambda submit: [30, 31, 32, 33])
    asked = body(TEXT, prompt="the quick fox", max_tokens=4, logprobs=2)
    with gateway.http() as client:
        plain = client.post(TEXT, json=asked).json()["choices"][0]
        answer = client.post(TEXT, json=asked | {"echo": True, "stream": stream})
    if stream:
        lines = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
        parts = [c for line in lines for c in json.loads(line)["choices"]]
        lists = [part["logprobs"] for part in parts]
        text = "".join(part["text"] for part in parts)
        logprobs = {
            name: list(itertools.chain.from_iterable(part[name] for part in lists))
            for name in lists[0]
        }
    else:
        choice = answer.json()["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    prompt = plain["prompt_token_ids"]
    n = len(prompt)
    assert text == "the quick fox" + plain["text"]
    assert {len(column) for column in logprobs.values()} == {n + 4}
    own = [logprob_of(token, i) for i, token in enumerate(prompt)]
    assert logprobs["token_logprobs"][:n] == [None, *own[1:]]
    assert logprobs["top_logprobs"][0] is None
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert logprobs[name][n:] == plain["logprobs"][name]
    offsets = logprobs["text_offset"]
    assert offsets[n:] == [13 + offset for offset in plain["logprobs"]["text_offset"]]
    names = tokenizer.vocabulary.names
    for offset, token in list(zip(offsets, prompt, strict=False))[1:]:
        assert text[offset:].startswith(names[token])


def test_echo_without_logprobs_asks_no_worker_for_them(start_gateway):
    gateway = start_gateway()
    with gateway.http() as client:
        reply = client.post(TEXT, json=body(TEXT, prompt=["a fox", "the dog"], echo=True))
    texts = [choice["text"] for choice in reply.json()["choices"]]
    assert texts[0].startswith("a fox")
    assert texts[1].startswith("the dog")
    assert {submit.logprobs.prompt_k for _, submit in gateway.link.sent(Submit)} == {-1}
