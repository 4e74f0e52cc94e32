"""Neither side of a door for KV pools ends, spins or stays wrong for what the other one does."""

from __future__ import annotations

import errno
import queue
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton_testing.processes import wait_until
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.engine.kv.sharing import Leases
from baton_worker.handoff import pool_visits, pool_words
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
        self.visits = PoolVisits(owner, self.calls.put)

    def outcome(self, door: PoolDoor) -> str:
        heard: list[str] = []
        self.visits.ask(DecodeTarget("decode-0", "", kv_door=door.name), heard.append)
        while not heard:
            self.calls.get(timeout=20)()
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
        time.sleep(0.5)
    assert 1 <= len(tries) < 20
