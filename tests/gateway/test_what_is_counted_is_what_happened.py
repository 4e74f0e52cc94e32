"""Counts of the gateway that one pays by or is called by, each against what its clients saw."""

import asyncio
import json
import socket
import time

import pytest

from baton_testing.scripted_link import RowSpec
from baton_worker.gateway.server import http
from baton_worker.gateway.serving.admission_queue import unless_gone
from baton_worker.identity import Role
from baton_worker.messages import Submit
from baton_worker.records.columns import ErrorCode

PROMPT = [20, 21, 22, 23, 24]
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
TEXT = "/v1/completions"


def connection_of_a_request(gateway):
    """A raw connection with the request sent, so that nobody reads or ends it unless told."""
    data = json.dumps(BODY).encode()
    connection = socket.socket()
    host, port = gateway.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def wait_counted(gateway, name, **labels):
    limit = time.monotonic() + 60.0
    while gateway.metric(name, **labels) != 1:
        assert time.monotonic() < limit, (name, labels, gateway.metric(name, **labels))


def counts(gateway, *names):
    """Return the counters' samples by name and labels, of these names alone where some are told."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in gateway.registry.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and (not names or sample.name in names)
    }


def test_a_client_that_leaves_the_line_has_left_and_was_not_refused(start_gateway):
    gateway = start_gateway(max_outstanding_requests=1, max_wait_seconds=600.0)
    gateway.link.pause()
    first = gateway.ask(BODY)
    gateway.wait_metric("baton_gateway_live_requests", 1)
    with connection_of_a_request(gateway):
        gateway.wait_metric("baton_gateway_line_requests", 1, n_live=1)
    wait_counted(gateway, "baton_gateway_client_aborts_total", reason="client_gone")
    gateway.link.resume()
    assert first.result().status_code == 200
    assert not any(counts(gateway, "baton_gateway_refusals_total").values())


def test_a_client_that_leaves_while_its_choices_are_sent_is_counted_once(
    start_gateway, monkeypatch
):
    gateway = start_gateway(workers="m", max_choices=1000, info={"max_running": 1000})
    link, leaves = gateway.link, asyncio.Event()
    link.pause()
    send = link.send

    def sends_and_leaves(worker_id, command):
        leaves.set()
        return send(worker_id, command)

    async def left():
        await leaves.wait()
        return {"type": "http.disconnect"}

    monkeypatch.setattr(link, "send", sends_and_leaves)
    monkeypatch.setattr(http, "unless_gone", lambda _, starting: unless_gone(left, starting))
    body = BODY | {"prompt": [PROMPT] * 8, "n": 120}
    with gateway.http() as client:
        assert client.post(TEXT, json=body).status_code == 499
    assert 0 < len(link.sent(Submit)) < 960, "it left while they were sent"
    ended = {"endpoint": "completion", "outcome": "client_gone"}
    wait_counted(gateway, "baton_gateway_requests_total", **ended)
    assert gateway.metric("baton_gateway_client_aborts_total", reason="client_gone") == 1


@pytest.mark.parametrize("workers", ["pd", "m"])
def test_a_prompt_that_is_scored_alone_has_no_first_token_to_be_late(start_gateway, workers):
    gateway = start_gateway(workers=workers)
    body = BODY | {"echo": True, "logprobs": 2}
    with gateway.http() as client:
        assert client.post(TEXT, json=body | {"max_tokens": 0}).status_code == 200
        assert gateway.metric("baton_gateway_time_to_first_token_seconds_count") == 0
        assert client.post(TEXT, json=body | {"max_tokens": 1}).status_code == 200
    assert gateway.metric("baton_gateway_time_to_first_token_seconds_count") == 1


def test_whether_workers_can_serve_is_told_also_while_nobody_asks(start_gateway):
    """Probes send clients elsewhere within seconds: then there is no refusal to count."""
    gateway = start_gateway(workers="p")
    assert gateway.metric("baton_gateway_usable") == 0
    gateway.link.up("decode-0", Role.DECODE)
    for usable, status in ((1, 200), (0, 503), (1, 200)):
        gateway.wait_metric("baton_gateway_usable", usable)
        with gateway.http() as client:
            assert client.get("/readyz").status_code == status
        if usable:
            gateway.link.down("decode-0")
        else:
            gateway.link.up("decode-0", Role.DECODE)
    gateway.wait_metric("baton_gateway_usable", 0)


def test_nothing_that_goes_wrong_is_the_first_sample_of_its_series(start_gateway):
    """A rate takes a series' first value for its beginning. What a dead worker ends it ends at
    once: of a series that comes with it no rate tells anything.
    """
    gateway = start_gateway(workers="m", max_retries=0)
    there = counts(gateway)
    assert not any(there.values())
    gateway.link.pause()
    lost = gateway.ask(BODY)
    gateway.link.wait_until(lambda: len(gateway.link.sent(Submit)) == 1)
    handle = gateway.link.sent(Submit)[0][1].handle
    gateway.link.publish("mixed-0", RowSpec(handle, 0, (70,)), RowSpec(handle, 0, (70,)))
    gateway.link.down("mixed-0", "disconnected")
    assert lost.error["code"] == "worker_lost"
    with gateway.http() as client:
        assert client.post(TEXT, json=BODY).json()["error"]["code"] == "no_usable_pair"
        for wrong in ({"n": -1}, {"model": "other"}, {"prompt": {}}, {"suffix": "x"}):
            assert 400 <= client.post(TEXT, json=BODY | wrong).status_code < 500
        page = {"origin": "http://elsewhere.example", "content-type": "text/plain"}
        assert client.post(TEXT, content=b"{}", headers=page).status_code == 415
    gateway.link.up("mixed-1", Role.MIXED)
    gateway.wait_metric("baton_gateway_usable", 1)
    with connection_of_a_request(gateway):
        gateway.wait_metric("baton_gateway_live_requests", 1)
    wait_counted(gateway, "baton_gateway_client_aborts_total", reason="client_gone")
    now = counts(gateway)
    moved = {key for key in now if now[key] != there.get(key, 0)}
    assert ("outcome", "worker_lost") in {pair for key in moved for pair in key[1:]}
    assert ("reason", "duplicate") in {pair for key in moved for pair in key[1:]}
    assert moved - there.keys() == set()


def test_a_failure_is_logged_by_the_name_that_its_client_has_and_the_one_that_workers_log(
    start_gateway, caplog
):
    gateway = start_gateway(workers="m", max_retries=0)
    gateway.link.refusals["mixed-0"] = ErrorCode.INTERNAL
    answer = gateway.ask(BODY).result()
    (submit,) = [command for _, command in gateway.link.sent(Submit)]
    (told,) = [r for r in caplog.records if r.msg == "a worker ended a request with an error"]
    assert told.request == answer.headers["x-request-id"]
    assert told.key == submit.key
