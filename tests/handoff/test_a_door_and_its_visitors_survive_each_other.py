"""Neither side of a door for KV pools ends, spins or stays wrong for what the other one does."""

from __future__ import annotations

import errno
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton_testing.processes import wait_until
from baton_worker.engine.kv.leases import Leases
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.handoff import pool_door, pool_visits, pool_words
from baton_worker.handoff.metrics import PoolMetrics
from baton_worker.handoff.pool_door import PoolDoor
from baton_worker.handoff.pool_visits import PoolOwner, PoolVisits
from baton_worker.handoff.pool_words import Introduction, PoolWordsError, Welcome
from baton_worker.messages import DecodeTarget
from baton_worker.metrics import MetricFactory

SHAPE = KvShape(n_layers=2, kv_heads=2, block_size=4, head_dim=8, n_blocks=6)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[PoolDoor]:
    pool = KvPool(SHAPE, is_shared=True)
    metrics = PoolMetrics(MetricFactory(CollectorRegistry(), "m", "decode"))
    door = PoolDoor(str(tmp_path), pool.sharing, metrics)  # type: ignore[arg-type]
    door.start()
    yield door
    door.close()


class Prefill:
    """A prefill worker's visits, whose outcomes are heard in order."""

    def __init__(self, folder: Path) -> None:
        self.pool = KvPool(SHAPE, is_shared=True)
        owner = PoolOwner(str(folder), self.pool.sharing, SHAPE, Leases(4), "prefill-0")  # type: ignore[arg-type]
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self.visits = PoolVisits(owner, self.calls.put, os.urandom(16))

    def outcome(self, door: PoolDoor) -> str:
        heard: list[str] = []
        self.visits.ask(DecodeTarget("decode-0", "", kv_door=door.name), heard.append)
        while not heard:
            self.calls.get(timeout=300)()
        return heard[0]


@pytest.fixture
def prefill(tmp_path: Path) -> Iterator[Prefill]:
    prefill = Prefill(tmp_path)
    yield prefill
    prefill.visits.close()


@pytest.mark.parametrize("kind", [Introduction, Welcome])
def test_words_nested_too_deeply_are_an_error_that_says_so(kind: Any) -> None:
    deep = b"\x81\xa3foo" + b"\x91" * (pool_words.MOST_BYTES - 16) + b"\xc0"
    with pytest.raises(PoolWordsError, match=f"no {kind.__name__}"):
        pool_words.decode(deep, kind)


def test_a_door_that_hung_up_is_visited_anew(door: PoolDoor, prefill: Prefill) -> None:
    """Else each offer to it would be refused, for as long as both processes live."""
    assert prefill.outcome(door) == ""
    (caller,) = door._callers
    caller.socket.shutdown(socket.SHUT_RDWR)
    wait_until("it is forgotten", lambda: door.find(prefill.visits.pool_id), lambda p: p is None)
    assert prefill.outcome(door) == ""
    assert door.find(prefill.visits.pool_id) is not None


def test_a_visit_for_which_no_descriptor_is_left_ends_with_a_reason(
    door: PoolDoor, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its thread, and with it the process, would die of it."""

    def none_left(*arguments: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(pool_visits.socket, "socket", none_left)
    assert "Too many open files" in prefill.outcome(door)


def test_a_door_for_whose_callers_no_descriptor_is_left_does_not_spin(door: PoolDoor) -> None:
    tries: list[float] = []

    class Full:
        def __init__(self, listener: socket.socket) -> None:
            self._listener = listener

        def fileno(self) -> int:
            return self._listener.fileno()

        def accept(self) -> Any:
            tries.append(time.monotonic())
            raise OSError(errno.EMFILE, "Too many open files")

        def close(self) -> None:
            self._listener.close()

    listener = door._listener
    door._selector.unregister(listener)
    door._listener = Full(listener)  # type: ignore[assignment]
    door._selector.register(door._listener, 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.connect(str(door._path))
        wait_until("it was tried thrice", lambda: len(tries), lambda n: n >= 3)
    assert tries[2] - tries[0] >= 0.15


def test_a_caller_that_says_nothing_loses_its_place_and_owners_of_pools_keep_theirs(
    door: PoolDoor, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prefill.outcome(door) == ""
    monkeypatch.setattr(pool_door, "SILENCE_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.settimeout(60)
        caller.connect(str(door._path))
        assert caller.recv(1) == b"", "it was cut off"
    assert door.find(prefill.visits.pool_id) is not None


def test_a_door_sweeps_out_those_of_the_dead_and_no_others(tmp_path: Path, door: PoolDoor) -> None:
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(str(tmp_path / "dead.kv"))
    dead.close()
    (tmp_path / "other.txt").touch()
    pool = KvPool(SHAPE, is_shared=True)
    metrics = PoolMetrics(MetricFactory(CollectorRegistry(), "m", "decode"))
    another = PoolDoor(str(tmp_path), pool.sharing, metrics)  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir()} == {door.name, another.name, "other.txt"}
    another.close()
    assert {path.name for path in tmp_path.iterdir()} == {door.name, "other.txt"}


def test_a_dead_workers_socket_that_cannot_be_removed_keeps_nobody_from_starting(
    tmp_path: Path, door: PoolDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(tmp_path / "dead.kv"))

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        another = PoolDoor(str(tmp_path), door._sharing, door._metrics)
    assert (tmp_path / another.name).exists()
    another.close()


def test_doors_that_were_never_found_are_forgotten(
    tmp_path: Path, door: PoolDoor, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = PoolDoor(str(tmp_path), door._sharing, door._metrics)
    gone.close()
    assert prefill.outcome(gone)
    monkeypatch.setattr(pool_visits, "AGAIN_SECONDS", -1.0)
    assert prefill.outcome(door) == ""
    assert list(prefill.visits._visits) == [door.name]


class SlowDoor:
    """Somebody who has a door's name, and answers when he is told to, or never."""

    def __init__(self, folder: Path) -> None:
        self.name = "slow.kv"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(folder / self.name))
        self._listener.listen(1)
        self._listener.settimeout(60)

    def called(self) -> socket.socket:
        connection, _ = self._listener.accept()
        connection.settimeout(60)
        assert connection.recv(pool_words.MOST_BYTES)
        return connection

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowDoor]:
    slow = SlowDoor(tmp_path)
    yield slow
    slow.close()


def test_a_visit_has_one_time_for_all_of_it(
    slow: SlowDoor, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_visits, "PATIENCE_SECONDS", 0.2)
    assert "TimeoutError" in prefill.outcome(slow)  # type: ignore[arg-type]
    with socket.socket() as connection, pytest.raises(TimeoutError, match=r"took 0\.2 s"):
        pool_visits._allow_until(time.monotonic(), connection)


def test_a_visit_that_comes_to_something_behind_the_end_holds_nothing(
    slow: SlowDoor, prefill: Prefill
) -> None:
    """Decode would take a process for living that has closed all it knew of."""
    prefill.visits.ask(DecodeTarget("decode-0", "", kv_door=slow.name), [].append)
    connection = slow.called()
    prefill.visits.close()
    connection.send(pool_words.encode(Welcome()))
    assert connection.recv(1) == b"", "it is told that nobody is there"
    connection.close()
