"""A gateway that is told to stop and has time serves on until nobody needs it any more."""

import json
import socket
import threading
import time

import pytest

from baton_testing.scripted_link import EOS, RowSpec
from baton_worker.gateway.serving.live_requests import LiveRequests
from baton_worker.messages import Submit

PATIENCE_SECONDS = 300.0
BODY = {"model": "tiny", "prompt": [70, 71], "max_tokens": 8}


def wait_for(claim):
    limit = time.monotonic() + PATIENCE_SECONDS
    while not claim():
        assert time.monotonic() < limit, "the condition did not come true"


class Clock:
    """A clock that only a test moves on."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    """A clock that moves on at the end, however the test ended: gateways wait for it."""
    standing = Clock()
    yield standing
    standing.now += 3600


def after_turns(gateway, count):
    """Return when the gateway's housekeeping has had so many turns more."""
    goal = len(gateway.link.lags) + count
    gateway.link.wait_until(lambda: len(gateway.link.lags) >= goal)


def is_closed_behind_the_answer(client):
    answer = client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    return answer.headers.get("connection") == "close"


@pytest.fixture
def leave():
    """Tell a gateway to stop, on a thread; joined at the end."""
    threads = []

    def start(gateway):
        threads.append(threading.Thread(target=gateway.stop))
        threads[-1].start()
        with gateway.http() as client:
            wait_for(lambda: client.get("/readyz").status_code == 503)
        return threads[-1]

    yield start
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


@pytest.fixture
def stream():
    """Begin a stream on a thread; join the returned reader, then see its lines."""
    readers = []

    def start(gateway):
        def read():
            with (
                gateway.http() as client,
                client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer,
            ):
                reader.lines = [line for line in answer.iter_lines() if line]

        reader = threading.Thread(target=read)
        readers.append(reader)
        goal = len(gateway.link.commands) + 2
        reader.start()
        gateway.link.wait_until(lambda: len(gateway.link.commands) == goal)
        return reader

    yield start
    for reader in readers:
        reader.join(PATIENCE_SECONDS)
        assert not reader.is_alive()


def test_a_live_stream_ends_in_full(start_gateway, leave, stream):
    gateway = start_gateway(lambda submit: [70] * 5 + [EOS], drain_seconds=600)
    gateway.link.pause()
    reader = stream(gateway)
    leave(gateway)
    gateway.link.resume()
    reader.join(PATIENCE_SECONDS)
    assert reader.lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in reader.lines[:-1]]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "stop"


def test_requests_that_still_come_are_served_and_their_connections_closed(
    start_gateway, clock, leave
):
    """Behind its settling time, should this machine take longer, too: its clock stands."""
    gateway = start_gateway(clock=clock, settle_seconds=1, drain_seconds=600)
    with gateway.http() as client:
        assert client.post("/v1/completions", json=BODY).headers.get("connection") is None
        leaving = leave(gateway)
        wait_for(lambda: is_closed_behind_the_answer(client))
        assert client.get("/readyz").json()["reasons"] == ["the gateway is leaving"]
        assert client.get("/health").status_code == 503
    clock.now += 1
    leaving.join(PATIENCE_SECONDS)
    assert not leaving.is_alive()


def test_who_asks_again_behind_the_last_stream_is_served_while_that_is_a_moment_ago(
    start_gateway, clock, leave, stream
):
    """The clock of the gateway stands, however long this machine takes for the next request."""
    gateway = start_gateway(clock=clock, drain_seconds=600)
    with gateway.http() as client:
        assert client.post("/v1/completions", json=BODY).headers.get("connection") is None
        gateway.link.pause()
        reader = stream(gateway)
        leaving = leave(gateway)
        gateway.link.resume()
        reader.join(PATIENCE_SECONDS)
        after_turns(gateway, 5)
        wait_for(lambda: is_closed_behind_the_answer(client))
    after_turns(gateway, 5)
    assert leaving.is_alive()
    clock.now += 1
    leaving.join(PATIENCE_SECONDS)
    assert not leaving.is_alive()


def test_a_prompt_that_is_still_being_sent_is_served_however_slow_its_client_is(
    start_gateway, clock, leave
):
    gateway = start_gateway(clock=clock, drain_seconds=600)
    body = json.dumps(BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 60) as client:
        client.sendall(head.encode() + b"Expect: 100-continue\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 100"), "somebody reads it now"
        client.sendall(body[:20])
        leaving = leave(gateway)
        for _ in range(5):
            clock.now += 2
            after_turns(gateway, 2)
        assert leaving.is_alive()
        client.sendall(body[20:])
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    clock.now += 1
    leaving.join(PATIENCE_SECONDS)
    assert not leaving.is_alive()


def test_a_defect_while_a_gateway_still_settles_ends_it_and_not_the_time_it_would_have_had(
    start_gateway, leave, monkeypatch
):
    gateway = start_gateway(settle_seconds=3600, drain_seconds=3600)
    leaving = leave(gateway)
    monkeypatch.setattr(LiveRequests, "__len__", lambda self: 1 // 0)
    leaving.join(PATIENCE_SECONDS)
    assert not leaving.is_alive()
    assert gateway.service.faults.fatal == "housekeeping"


def test_a_stream_that_outlives_the_drain_gets_an_explicit_error(start_gateway, stream):
    gateway = start_gateway(lambda submit: [70] * 400, drain_seconds=2)
    gateway.link.pause()
    reader = stream(gateway)
    handle = gateway.link.sent(Submit)[0][1].handle
    gateway.link.publish("prefill-0", RowSpec(handle, 0, [70]))
    gateway.stop()
    reader.join(60)
    assert not reader.is_alive()
    assert json.loads(reader.lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"


def test_an_idle_gateway_without_a_settling_time_leaves_at_once(start_gateway):
    gateway = start_gateway(drain_seconds=600)
    gateway.stop()  # which waits for no longer than a minute
