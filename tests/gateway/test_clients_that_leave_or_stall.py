"""A client that goes away frees its workers at once; one that does not read harms only itself."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from baton_worker.gateway.server import server
from baton_worker.identity import Role
from baton_worker.messages import Abort, Submit

LONG = 60_000


def long_script(submit):
    return [70 + i % 100 for i in range(submit.sampling.max_tokens)]


def open_stream(gateway, body, receive_bytes=None):
    """A raw connection with the request sent, so that nothing reads unless the test does."""
    data = json.dumps({"model": "tiny", "prompt": [70], "stream": True} | body).encode()
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    host, port = gateway.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def server_end_is_open(connection):
    """Whether the kernel still has the accepted end of a loopback connection."""
    ports = [f":{connection.getpeername()[1]:04X}", f":{connection.getsockname()[1]:04X}"]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any([row[1][-5:], row[2][-5:], row[3]] == [*ports, "01"] for row in rows)


def aborted_workers(gateway):
    return {worker for worker, _ in gateway.link.sent(Abort)}


def test_a_client_that_leaves_aborts_on_every_worker(start_gateway):
    gateway = start_gateway(long_script)
    link = gateway.link
    link.pause()
    connection = open_stream(gateway, {"max_tokens": 400})
    link.wait_until(lambda: len(link.commands) == 2)
    connection.close()
    link.wait_until(lambda: len(link.commands) == 4)
    assert aborted_workers(gateway) == {"prefill-0", "decode-0"}
    link.do(lambda: None)
    assert link.held() == 0
    assert gateway.metric("baton_gateway_client_aborts_total", reason="client_gone") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_though_it_sent_requests_ahead(start_gateway, stream):
    """None of them is begun; without an abort the first would run to its end for nobody."""
    gateway = start_gateway(long_script)
    link = gateway.link
    link.pause()
    connection = open_stream(gateway, {"max_tokens": 400, "stream": stream})
    data = b'{"model": "tiny", "prompt": [71], "max_tokens": 400}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
    connection.sendall((head + data) * 3)
    link.wait_until(lambda: len(link.commands) == 2)
    connection.close()
    link.wait_until(lambda: len(link.commands) == 4)
    assert aborted_workers(gateway) == {"prefill-0", "decode-0"}
    link.do(lambda: None)
    assert link.held() == 0
    assert gateway.metric("baton_gateway_client_aborts_total", reason="client_gone") == 1


def test_a_client_that_leaves_in_mid_stream_aborts_too(start_gateway):
    gateway = start_gateway(long_script)
    link = gateway.link
    link.pauses_at = 20
    connection = open_stream(gateway, {"max_tokens": 400, "logprobs": 0})
    assert b"200 OK" in connection.recv(4096)
    link.wait_until(lambda: link.is_paused)
    assert link.held() == 1, "decode's"
    connection.close()
    link.wait_until(lambda: len(link.commands) == 4)
    assert aborted_workers(gateway) == {"prefill-0", "decode-0"}


@pytest.mark.parametrize("leave", [socket.socket.close, lambda it: it.shutdown(socket.SHUT_WR)])
def test_a_waiting_client_that_leaves_a_plain_request_aborts_too(start_gateway, leave):
    gateway = start_gateway(long_script)
    gateway.link.pause()
    with open_stream(gateway, {"max_tokens": 400, "stream": False}) as connection:
        gateway.link.wait_until(lambda: len(gateway.link.commands) == 2)
        leave(connection)
        gateway.link.wait_until(lambda: len(gateway.link.commands) == 4)


def test_a_client_that_does_not_read_is_cut_and_others_are_not(start_gateway):
    gateway = start_gateway(long_script, per_step=8, workers="", client_queue_tokens=256)
    link = gateway.link
    link.up("m", Role.MIXED, max_model_len=2 * LONG)
    stuck = open_stream(gateway, {"max_tokens": LONG, "logprobs": 20}, receive_bytes=4096)
    link.wait_until(lambda: len(link.commands) >= 1)
    answers = []

    def read_normally():
        with gateway.http() as client:
            body = {"model": "tiny", "prompt": [70], "max_tokens": 2000}
            answers.append(client.post("/v1/completions", json=body).json())

    reader = threading.Thread(target=read_normally)
    reader.start()
    link.wait_until(lambda: bool(link.sent(Abort)))
    reader.join()
    cut = link.sent(Submit)[0][1].handle
    assert [c.handle for _, c in link.sent(Abort)] == [cut]
    assert answers[0]["usage"]["completion_tokens"] == 2000
    assert gateway.metric("baton_gateway_client_aborts_total", reason="slow_client") == 1
    stuck.close()


@pytest.mark.slow
def test_a_client_that_never_reads_loses_its_connection(start_gateway, monkeypatch):
    monkeypatch.setattr(server, "STALLED_CLIENT_SECONDS", 2)
    gateway = start_gateway(long_script, per_step=8, workers="", client_queue_tokens=256)
    gateway.link.up("m", Role.MIXED, max_model_len=2 * LONG)
    request = {"max_tokens": LONG, "logprobs": 20}
    with open_stream(gateway, request, receive_bytes=4096) as stuck:
        gateway.link.wait_until(lambda: bool(gateway.link.commands))
        assert server_end_is_open(stuck)
        gateway.link.wait_until(lambda: bool(gateway.link.sent(Abort)))
        deadline = time.monotonic() + 60
        while server_end_is_open(stuck):
            assert time.monotonic() < deadline
            time.sleep(0.05)
