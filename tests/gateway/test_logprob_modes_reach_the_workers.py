"""What logprobs shall describe, and how many, arrives at the worker as it was asked (R3, R34)."""

import pytest

from baton_worker.messages import Submit
from baton_worker.sampling import RAW_LOGPROBS, LogprobParams

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a stop here"}]}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, RAW_LOGPROBS),
        ({"logprobs_mode": "raw_logprobs"}, RAW_LOGPROBS),
        ({"logprobs_mode": "processed_logprobs"}, LogprobParams(processed=True)),
        ({"temp_scaled_logprobs": True}, LogprobParams(temp_scaled=True)),
        (
            {"top_p_normalized_logprobs": True, "temp_scaled_logprobs": True},
            LogprobParams(temp_scaled=True, top_p_normalized=True),
        ),
    ],
)
def test_a_submit_carries_the_mode(start_gateway, body, expected):
    gateway = start_gateway()
    with gateway.http() as client:
        reply = client.post("/v1/chat/completions", json=CHAT | {"logprobs": True} | body)
        assert reply.status_code == 200
    ((_, submit),) = gateway.link.sent(Submit)
    assert submit.logprobs == expected


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"logprobs": True, "logprobs_mode": "raw_logits"}, "logprobs_mode"),
        ({"logprobs_mode": "processed_logprobs"}, "logprobs_mode"),
        ({"temp_scaled_logprobs": True}, "temp_scaled_logprobs"),
        ({"top_p_normalized_logprobs": True}, "top_p_normalized_logprobs"),
    ],
)
def test_a_mode_that_cannot_be_had_is_refused_by_name(start_gateway, body, field):
    gateway = start_gateway()
    with gateway.http() as client:
        reply = client.post("/v1/chat/completions", json=CHAT | body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert gateway.link.commands == []


def test_a_worker_of_an_older_version_is_never_asked_for_another_mode(start_gateway):
    """It would not read the mode, and answer with raw logprobs."""
    gateway = start_gateway(info={"features": ()})
    with gateway.http() as client:
        body = CHAT | {"logprobs": True}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        reply = client.post("/v1/chat/completions", json=body | {"temp_scaled_logprobs": True})
    assert reply.status_code == 503
    assert "logprob_params" in reply.json()["error"]["message"]
    assert len(gateway.link.sent(Submit)) == 1


@pytest.mark.parametrize(("bound", "k", "status"), [(64, 64, 200), (20, 21, 400), (64, 65, 400)])
def test_alternatives_are_bounded_by_configuration(start_gateway, bound, k, status):
    gateway = start_gateway(max_top_k=bound)
    with gateway.http() as client:
        body = CHAT | {"logprobs": True, "top_logprobs": k}
        reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == status
    if status == 200:
        content = reply.json()["choices"][0]["logprobs"]["content"]
        assert {len(entry["top_logprobs"]) for entry in content} == {k}
    else:
        assert f"the most is {bound}" in reply.json()["error"]["message"]
