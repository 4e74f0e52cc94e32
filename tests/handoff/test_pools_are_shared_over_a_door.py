"""Prefill's pool is mapped by decode over a Unix socket; whoever says anything else is refused."""

from __future__ import annotations

import array
import contextlib
import os
import queue
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton_testing.processes import wait_until
from baton_worker.config import ConfigError
from baton_worker.engine.kv.leases import Leases
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.handoff import pool_door, pool_words
from baton_worker.handoff.metrics import PoolMetrics
from baton_worker.handoff.pool_door import PoolDoor
from baton_worker.handoff.pool_visits import PoolOwner, PoolVisits
from baton_worker.handoff.pool_words import Introduction, PoolWordsError, Welcome
from baton_worker.handoff.ways import KvWays
from baton_worker.messages import DecodeTarget
from baton_worker.metrics import MetricFactory

SHAPE = KvShape(n_layers=2, kv_heads=2, block_size=4, head_dim=8, n_blocks=6)


class Door:
    """Decode's side, with its metrics."""

    def __init__(self, folder: Path) -> None:
        self.registry = CollectorRegistry()
        self.pool = KvPool(SHAPE, is_shared=True)
        metrics = PoolMetrics(MetricFactory(self.registry, "m", "decode"))
        self.door = PoolDoor(str(folder), self.pool.sharing, metrics)  # type: ignore[arg-type]
        self.path = folder / self.door.name
        self.door.start()

    def value(self, name: str, **labels: str) -> float:
        labels = {"model": "m", "role": "decode", **labels}
        return self.registry.get_sample_value(name, labels) or 0.0

    def wait(self, name: str, want: float, **labels: str) -> None:
        wait_until(name, lambda: self.value(name, **labels), lambda value: value == want)

    @property
    def target(self) -> DecodeTarget:
        return DecodeTarget("decode-0", "", kv_door=self.door.name)


class Prefill:
    """Prefill's side; what is called on its thread runs in `outcome`."""

    def __init__(self, folder: Path, pool: KvPool | None = None) -> None:
        self.pool = pool or KvPool(SHAPE, is_shared=True)
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self.leases = Leases(4)
        sharing = self.pool.sharing
        assert sharing is not None
        owner = PoolOwner(str(folder), sharing, self.pool.shape, self.leases, "prefill-0")
        self.visits = PoolVisits(owner, self.calls.put, os.urandom(16))
        self.ways = KvWays("shm", "any", self.visits, None)
        self.heard: list[str] = []

    def outcome(self, target: DecodeTarget) -> str:
        """Return why the pool is not mapped there, "" when it is."""
        count = len(self.heard)
        self.ways.ask(target, self.heard.append)
        while len(self.heard) == count:
            self.calls.get(timeout=60)()
        return self.heard[-1]


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    door = Door(tmp_path)
    yield door
    door.door.close()


@pytest.fixture
def prefill(tmp_path: Path) -> Iterator[Prefill]:
    prefill = Prefill(tmp_path)
    yield prefill
    prefill.visits.close()


def words(**changes: Any) -> Introduction:
    said = pool_words.introduction_of(SHAPE, bytes(16), "prefill-9", "shm", 1 << 20, 4096)
    return msgspec.structs.replace(said, **changes)


def say(door: Door, message: bytes, descriptors: list[int]) -> tuple[socket.socket, bytes]:
    """Say something at the door and return what is answered."""
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.settimeout(60)
    caller.connect(str(door.path))
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    caller.sendmsg([message], beside if descriptors else [])
    return caller, caller.recv(pool_words.MOST_BYTES)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_pool_that_was_introduced_is_read(door: Door, prefill: Prefill) -> None:
    assert prefill.outcome(door.target) == ""
    peer = door.door.find(prefill.visits.pool_id)
    assert peer is not None
    prefill.pool.keys[1][3] = np.arange(64, dtype=np.float32).reshape(2, 4, 8)
    door.pool.sharing.begin_pull([5], peer, [3])  # type: ignore[union-attr]
    np.testing.assert_array_equal(door.pool.keys[1][5], prefill.pool.keys[1][3])
    assert door.value("baton_handoff_mapped_pools") == 1
    assert prefill.ways.told() == {"decode-0": "shm"}


def test_the_rate_of_a_mapped_pool_is_known_as_long_as_its_owner_is(
    door: Door, prefill: Prefill
) -> None:
    assert prefill.outcome(door.target) == ""
    peer = door.door.find(prefill.visits.pool_id)
    assert peer is not None
    peer.pull(door.pool.sharing, [5, 4], [3, 2], None).check()  # type: ignore[arg-type]
    labels = {"transport": "shm", "prefill": "prefill-0"}
    assert door.value("baton_handoff_pulled_bytes_total", **labels) == 2 * SHAPE.block_bytes
    assert door.value("baton_handoff_pulling_seconds_total", **labels) > 0
    prefill.visits.close()
    door.wait("baton_handoff_mapped_pools", 0)
    door.wait("baton_handoff_pulled_bytes_total", 0, **labels)


def test_what_comes_after_its_owner_has_gone_is_no_new_series(door: Door, prefill: Prefill) -> None:
    """A handoff keeps the pool mapped; its last pull may be looked at when the owner is gone."""
    assert prefill.outcome(door.target) == ""
    peer = door.door.find(prefill.visits.pool_id)
    assert peer is not None
    pull = peer.pull(door.pool.sharing, [5, 4], [3, 2], None)  # type: ignore[arg-type]
    prefill.visits.close()
    door.wait("baton_handoff_mapped_pools", 0)
    pull.check()
    labels = {"transport": "shm", "prefill": "prefill-0"}
    assert not door.value("baton_handoff_pulled_bytes_total", **labels)


def test_who_sees_a_pool_less_finds_nothing_more_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    metrics = PoolMetrics(MetricFactory(registry, "m", "decode"))
    metrics.found("shm", "prefill-0")
    metrics.pulled("shm", "prefill-0", 100, 0.1)
    labels = {"model": "m", "role": "decode", "transport": "shm", "prefill": "prefill-0"}
    left: list[float | None] = []

    def look() -> None:
        left.append(registry.get_sample_value("baton_handoff_pulled_bytes_total", labels))

    look()
    monkeypatch.setattr(metrics.mapped, "dec", look)
    metrics.forget("shm", "prefill-0")
    assert left == [100, None]


def test_a_second_request_makes_no_second_visit(door: Door, prefill: Prefill) -> None:
    for _ in range(3):
        assert prefill.outcome(door.target) == ""
    assert prefill.calls.empty()
    assert door.value("baton_handoff_mapped_pools") == 1


def test_all_who_ask_during_a_visit_hear_of_its_end(door: Door, prefill: Prefill) -> None:
    for _ in range(5):
        prefill.visits.ask(door.target, prefill.heard.append)
    prefill.calls.get(timeout=60)()
    assert prefill.heard == [""] * 5


def test_a_pool_is_forgotten_with_its_owner(door: Door, prefill: Prefill) -> None:
    assert prefill.outcome(door.target) == ""
    peer = door.door.find(prefill.visits.pool_id)
    prefill.visits.close()
    door.wait("baton_handoff_mapped_pools", 0)
    assert door.door.find(prefill.visits.pool_id) is None
    assert peer is not None, "who is about to pull from it still can"
    door.pool.sharing.begin_pull([5], peer, [3])  # type: ignore[union-attr]


def test_a_new_decode_worker_is_visited_anew(tmp_path: Path, prefill: Prefill) -> None:
    for _ in range(2):
        door = Door(tmp_path)
        assert prefill.outcome(door.target) == ""
        door.door.close()
        assert not door.path.exists()
    assert len(prefill.visits._visits) == 1, "what is over is not kept"


def test_a_worker_without_a_door_is_told_by_name(prefill: Prefill) -> None:
    told = prefill.outcome(DecodeTarget("decode-7", ""))
    assert "decode-7 has no door" in told
    assert "several ranks" in told, "such a worker has none, whatever its handoff.shared_dir"
    assert prefill.ways.told()["decode-7"].startswith("zmq: decode-7 has no door")


@pytest.mark.parametrize("name", ["../other/sock", "/etc/passwd", "..", "no-such.kv", "x\0y"])
def test_a_door_that_is_none_is_a_reason_and_no_crash(prefill: Prefill, name: str) -> None:
    assert prefill.outcome(DecodeTarget("decode-0", "", kv_door=name))


def test_what_kept_a_pool_out_is_taken_for_granted_for_a_while(
    tmp_path: Path, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Door(tmp_path)
    door.door.close()
    assert "FileNotFoundError" in prefill.outcome(door.target)
    prefill.outcome(door.target)
    assert prefill.calls.empty(), "no second visit"
    monkeypatch.setattr("baton_worker.handoff.pool_visits.AGAIN_SECONDS", -1.0)
    prefill.visits.ask(door.target, prefill.heard.append)
    prefill.calls.get(timeout=60)()


def test_a_pool_of_another_form_is_refused_by_what_differs(tmp_path: Path, door: Door) -> None:
    shape = KvShape(n_layers=2, kv_heads=2, block_size=8, head_dim=8, n_blocks=6)
    other = Prefill(tmp_path, KvPool(shape, is_shared=True))
    assert "block_size is 8" in other.outcome(door.target)
    assert door.value("baton_handoff_pools_refused_total", reason="unfit") == 1


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (b"\xc1", "no Introduction"),
        (b"x" * pool_words.MOST_BYTES, "no Introduction"),
        (msgspec.msgpack.encode({"pool_id": b"short"}), "no Introduction"),
        (pool_words.encode(words(version=2)), "version 2"),
        (pool_words.encode(words(transport="nvlink")), "transport is nvlink"),
        (pool_words.encode(words(n_bytes=100)), "100 bytes"),
        (pool_words.encode(words(n_blocks=1 << 32)), "blocks"),
        (pool_words.encode(words(n_bytes=1 << 48)), "were told"),
        (pool_words.encode(words(dtype="bfloat16")), "form is 'bfloat16'"),
        (pool_words.encode(words()), "it has 0 bytes"),
    ],
)
def test_what_is_no_introduction_is_refused(door: Door, message: bytes, told: str) -> None:
    nothing = os.open("/dev/null", os.O_RDONLY)
    caller, answer = say(door, message, [nothing, Leases(4).descriptor])
    os.close(nothing)
    assert told in pool_words.decode(answer, Welcome).why_not
    assert door.value("baton_handoff_mapped_pools") == 0
    caller.close()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_two_descriptors_are_needed_and_all_are_closed(door: Door, count: int) -> None:
    before = open_descriptors()
    pool = KvPool(SHAPE, is_shared=True)
    assert pool.sharing is not None
    caller, answer = say(door, pool_words.encode(words()), [*pool.sharing.descriptors] * count)
    assert f"{count} descriptors" in pool_words.decode(answer, Welcome).why_not
    caller.close()
    del pool
    door.wait("baton_handoff_pools_refused_total", 1, reason="unfit")
    wait_until("all are closed", open_descriptors, lambda count: count <= before)


@pytest.mark.parametrize(
    ("ranks", "count", "told"),
    [
        (2, 1, "2 descriptors came with it, 3 are needed"),
        (2, 2, "it is in 2 parts, one of each rank"),
        (pool_words.MOST_RANKS, pool_words.MOST_RANKS, "it is in 64 parts"),
        (pool_words.MOST_RANKS + 1, 1, "no Introduction"),
        (0, 1, "no Introduction"),
    ],
)
def test_a_pool_that_ranks_have_parts_of_has_a_descriptor_of_each(
    door: Door, ranks: int, count: int, told: str
) -> None:
    """This worker's is in one piece of the host's memory, which pulls out of no parts."""
    before = open_descriptors()
    pool, leases = KvPool(SHAPE, is_shared=True), Leases(4)
    assert pool.sharing is not None
    said = pool_words.encode(words(n_bytes=pool.sharing.n_bytes, ranks=ranks))
    given = [*pool.sharing.descriptors] * count
    caller, answer = say(door, said, [*given, leases.descriptor])
    assert told in pool_words.decode(answer, Welcome).why_not
    caller.close()
    del pool, leases
    wait_until("all are closed", open_descriptors, lambda count: count <= before)


def test_who_says_more_than_one_thing_is_cut_off(door: Door) -> None:
    pool = KvPool(SHAPE, is_shared=True)
    assert pool.sharing is not None
    said = pool_words.encode(words(n_bytes=pool.sharing.n_bytes))
    leases = Leases(4)
    caller, answer = say(door, said, [*pool.sharing.descriptors, leases.descriptor])
    assert pool_words.decode(answer, Welcome).why_not == ""
    caller.send(b"and another thing")
    assert caller.recv(1) == b""
    door.wait("baton_handoff_mapped_pools", 0)
    caller.close()


def test_a_name_that_is_taken_is_refused(door: Door, prefill: Prefill) -> None:
    assert prefill.outcome(door.target) == ""
    sharing = prefill.pool.sharing
    assert sharing is not None
    said = pool_words.encode(words(pool_id=prefill.visits.pool_id, n_bytes=sharing.n_bytes))
    leases = prefill.leases
    caller, answer = say(door, said, [*sharing.descriptors, leases.descriptor])
    assert "is mapped" in pool_words.decode(answer, Welcome).why_not
    caller.close()
    assert door.door.find(prefill.visits.pool_id) is not None


def test_another_user_is_not_heard(
    door: Door, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = struct.pack("3i", 1, os.getuid() + 1, 0)
    monkeypatch.setattr(pool_door, "_credentials", lambda connection: theirs)
    assert prefill.outcome(door.target)
    door.wait("baton_handoff_pools_refused_total", 1, reason="stranger")


def test_too_many_callers_are_turned_away(
    door: Door, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_door, "MOST_CONNECTIONS", 2)
    callers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for caller in callers:
        caller.connect(str(door.path))
    wait_until("both are in", lambda: len(door.door._callers), lambda count: count == 2)
    assert prefill.outcome(door.target)
    for caller in callers:
        caller.close()
    wait_until("both are out", lambda: len(door.door._callers), lambda count: count == 0)


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"handoff\.shared_dir is .*nowhere.*No such file"):
        Door(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"handoff\.shared_dir is .*file'.*Not a directory"):
        Door(file)
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match="longer than the 107"):
        Door(deep)


@given(st.binary(max_size=200))
def test_any_bytes_are_words_or_an_error_that_says_so(message: bytes) -> None:
    for kind in (Introduction, Welcome):
        with contextlib.suppress(PoolWordsError):
            assert isinstance(pool_words.decode(message, kind), kind)
