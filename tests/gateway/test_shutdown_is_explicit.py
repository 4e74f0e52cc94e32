"""A gateway that is told to stop ends live streams with an error, and waits for no client."""

import json
import socket
import threading
import time

import pytest

from baton_testing.scripted_link import RowSpec
from baton_worker.gateway.server.server import STALLED_CLIENT_SECONDS
from baton_worker.identity import Role
from baton_worker.messages import Abort, Submit

SOON_SECONDS = 20
"""More than a busy machine takes, and less than the kernel waits for a client that is stalled."""
assert SOON_SECONDS < STALLED_CLIENT_SECONDS

BODY = {"model": "tiny", "prompt": [70], "max_tokens": 400, "stream": True}


def test_live_streams_get_an_error_and_workers_an_abort(start_gateway):
    gateway = start_gateway(lambda submit: [70] * 400)
    link = gateway.link
    link.pause()
    lines = []

    def read():
        with (
            gateway.http() as client,
            client.stream("POST", "/v1/completions", json=BODY) as answer,
        ):
            lines.extend(line for line in answer.iter_lines() if line)

    reader = threading.Thread(target=read)
    reader.start()
    link.wait_until(lambda: len(link.commands) == 2)
    handle = link.sent(Submit)[0][1].handle
    link.publish("prefill-0", RowSpec(handle, 0, [70]))
    started = time.monotonic()
    gateway.stop()
    reader.join()
    assert time.monotonic() - started < SOON_SECONDS
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert {worker for worker, _ in link.sent(Abort)} == {"prefill-0", "decode-0"}


@pytest.mark.slow
def test_a_client_that_does_not_read_cannot_hold_up_the_end(start_gateway):
    tokens = [70] * 60_000
    gateway = start_gateway(lambda submit: tokens, 8, workers="", client_queue_tokens=256)
    gateway.link.up("m", Role.MIXED, max_model_len=70_000)
    body = json.dumps(BODY | {"max_tokens": 60_000, "logprobs": 20}).encode()
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = gateway.url.removeprefix("http://").split(":")
        stuck.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        stuck.sendall(head.encode() + body)
        gateway.link.wait_until(lambda: bool(gateway.link.sent(Abort)))
        started = time.monotonic()
        gateway.stop()
        assert time.monotonic() - started < SOON_SECONDS


def test_what_a_worker_says_while_the_link_closes_is_not_answered(start_gateway):
    """The event loop goes on meanwhile, and a closed link may be asked for nothing."""
    gateway = start_gateway(workers="m")
    link, seen = gateway.link, []
    on_events = link._on_events
    link.pause()

    def publish_late():
        while not link._closed:
            time.sleep(0.001)
        link._on_events = lambda events: (seen.extend(events), on_events(events))
        link._deliver(link.workers["mixed-0"], [RowSpec(1, 0, [70])])

    link._tasks.put(publish_late)
    gateway.stop()
    assert len(seen) == 1
    assert link.violations == []
