"""Who connects and says nothing takes descriptors from everybody else: of many such, the oldest go.

Whoever has said who he is stays, however long he was silent since.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from baton_testing.raw_peers import greeted
from baton_worker.link import switchboard
from baton_worker.link.api import GatewayUp, RowsRefused, WorkerDown
from baton_worker.link.hangup import hang_up, note
from baton_worker.link.strangers import Strangers

MOST = 4


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Yield connections over loopback: their end, our end."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        made = []
        for _ in range(2 * MOST):
            theirs = opened.enter_context(socket.create_connection(listener.getsockname()))
            ours = opened.enter_context(listener.accept()[0])
            made.append((theirs, ours))
        yield made


def is_open(theirs: socket.socket) -> bool:
    theirs.setblocking(False)
    try:
        return theirs.recv(1) != b""
    except BlockingIOError:
        return True


def test_only_the_oldest_go_and_only_when_they_are_too_many_for_too_long(pairs) -> None:
    strangers = Strangers(MOST, patience_seconds=5.0)
    for came_at, (_, ours) in enumerate(pairs):
        strangers.came(ours.fileno(), float(came_at))
    assert strangers.review(4.9) == 0, "none has been silent for so long"
    assert strangers.review(6.0) == 2
    assert strangers.review(1000.0) == 2
    assert strangers.review(2000.0) == 0, "so many may stay"
    assert [is_open(theirs) for theirs, _ in pairs] == [False] * 4 + [True] * 4


def test_who_has_spoken_or_gone_is_no_stranger(pairs) -> None:
    strangers = Strangers(0, patience_seconds=0.0)
    for _, ours in pairs[:2]:
        strangers.came(ours.fileno(), 0.0)
        strangers.went(ours.fileno())
    assert strangers.review(1.0) == 0
    assert all(is_open(theirs) for theirs, _ in pairs)


def test_a_descriptor_that_is_somebody_elses_by_now_is_left_alone(pairs) -> None:
    strangers = Strangers(0, patience_seconds=0.0)
    (first, of_first), (second, of_second) = pairs[:2]
    strangers.came(of_first.fileno(), 0.0)
    os.dup2(of_second.fileno(), of_first.fileno())  # as when the first ends and a next one comes
    assert strangers.review(1.0) == 0
    assert is_open(second)
    assert first.recv(1) == b"", "it had ended by itself"


OUT_OF_DESCRIPTORS = """
import os, resource, socket, sys
from baton_worker.link.hangup import Connection, hang_up, note

pipe, _ = os.pipe()
before = os.listdir("/proc/self/fd")
assert note(pipe) is None, "it is no connection"
assert not hang_up(Connection(pipe, ("127.0.0.1", 1)))
assert note(1 << 20) is None, "there is none"
assert os.listdir("/proc/self/fd") == before, "asking costs descriptors"
listener = socket.create_server(("127.0.0.1", 0))
theirs = socket.create_connection(listener.getsockname())
ours, _ = listener.accept()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
connection = note(ours.fileno())
assert connection is not None, "it cannot be noted"
assert hang_up(connection), "it cannot be ended"
assert theirs.recv(1) == b""
os.fstat(ours.fileno())  # and stays its owner's to close
"""


def test_connections_are_ended_when_no_descriptor_is_left() -> None:
    """For then it matters most."""
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_DESCRIPTORS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_noted_connection_is_ended_once(pairs) -> None:
    theirs, ours = pairs[0]
    connection = note(ours.fileno())
    assert connection is not None
    assert hang_up(connection)
    assert theirs.recv(1) == b""
    theirs.close()


def test_a_gateway_hangs_up_on_them_and_goes_on_with_its_workers(
    monkeypatch: pytest.MonkeyPatch, start_gateway, start_worker, columns, read_metric
) -> None:
    monkeypatch.setattr(switchboard, "Strangers", partial(Strangers, MOST, 0.0))
    gateway = start_gateway()
    worker = start_worker(gateway.link.endpoint)
    worker.log.wait_for(GatewayUp)
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(greeted(gateway.link.endpoint)) for _ in range(3 * MOST)]
        for stranger in silent[: 2 * MOST]:
            assert stranger.recv(1) == b"", "it was not hung up on"
        assert all(is_open(stranger) for stranger in silent[2 * MOST :])
        gateway.log.wait_until(
            lambda: read_metric(gateway.factory, "baton_link_expelled_total") == 2 * MOST
        )
        worker.link.publish(77, columns(77, [4242]), 1)
        gateway.log.wait(lambda log: 4242 in gateway.rows())
    assert worker.log.of(RowsRefused) == gateway.log.of(WorkerDown) == []
