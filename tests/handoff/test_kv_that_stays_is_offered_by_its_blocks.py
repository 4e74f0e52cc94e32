"""Between pools that decode has mapped, an offer tells where KV lies; between others it travels."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton_worker.config import ConfigError, CurveConfig, HandoffConfig
from baton_worker.engine.api import BegunBlocks, Handoff, KvFilled, KvInPool, LeaseName
from baton_worker.engine.kv.leases import Leases
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.engine.kv.sharing import PeerPool
from baton_worker.handoff.api import (
    HandoffArrived,
    HandoffDelivered,
    HandoffEvent,
    HandoffFailed,
    HandoffFilled,
    HandoffGranted,
    HandoffWithdrawn,
)
from baton_worker.handoff.frames import (
    HandoffFormatError,
    PoolRef,
    decode_filled,
    decode_offer,
    encode_filled,
    encode_offer,
    is_filled,
)
from baton_worker.handoff.metrics import HandoffMetrics
from baton_worker.handoff.places import PlaceLimits
from baton_worker.handoff.pool_visits import PoolOwner, PoolVisits
from baton_worker.handoff.room import Wish
from baton_worker.handoff.security import kv_security
from baton_worker.handoff.zmq_transport import ZmqKvTransport
from baton_worker.identity import RequestKey
from baton_worker.messages import DecodeTarget
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import ErrorCode

KEY = RequestKey(1 << 40, 0)
SHAPE = KvShape(n_layers=1, kv_heads=1, block_size=4, head_dim=2, n_blocks=8)


class End:
    """One process's transport, with a pool of its own if it shares one in `folder`."""

    def __init__(
        self, folder: Path | None, role: str, require: Any = "any", bind: str = "tcp://127.0.0.1:0"
    ) -> None:
        self.registry = CollectorRegistry()
        self.context: zmq.Context[Any] = zmq.Context()
        self.pool = KvPool(SHAPE, is_shared=folder is not None)
        self.leases = Leases(8)
        takes_offers = role == "decode"
        metrics = HandoffMetrics(MetricFactory(self.registry, "m", role))
        curve = CurveConfig(enabled=False)
        security = kv_security(curve, self.context, lambda why: None, takes_offers=takes_offers)
        self.transport = ZmqKvTransport(
            HandoffConfig(bind=bind, require=require, shared_dir=str(folder or "")),
            metrics,
            context=self.context,
            security=security,
            places=PlaceLimits(16, 1 << 30, 1 << 20, 1024, 600.0) if takes_offers else None,
            owner=folder and PoolOwner(str(folder), self.pool.sharing, SHAPE, self.leases, role),  # type: ignore[arg-type]
        )
        self.role = role
        self.events: queue.Queue[HandoffEvent] = queue.Queue()
        self.transport.start(self.events.put)

    def next(self) -> HandoffEvent:
        return self.events.get(timeout=60)

    def value(self, name: str, **labels: str) -> float:
        labels = {"model": "m", "role": self.role, **labels}
        return self.registry.get_sample_value(name, labels) or 0.0

    @property
    def target(self) -> DecodeTarget:
        return DecodeTarget("decode-0", self.transport.endpoint, kv_door=self.transport.door)

    def ask(self, decode: End) -> HandoffEvent:
        self.transport.ask(decode.target, KEY, Wish(64, 10), 10.0)
        return self.next()

    def close(self) -> None:
        self.transport.close()
        self.context.term()


@pytest.fixture
def end() -> Iterator[Callable[..., End]]:
    ends: list[End] = []

    def make(*arguments: Any) -> End:
        ends.append(End(*arguments))
        return ends[-1]

    yield make
    for one in ends:
        one.close()


def staying(handoff: Handoff, *blocks: int) -> Handoff:
    """Return the handoff with its KV left in a pool."""
    state = msgspec.structs.replace(
        handoff.state,
        n_layers=1,
        kv_heads=1,
        block_size=4,
        head_dim=2,
        n_cached=4 * len(blocks),
        prompt_token_ids=tuple(range(4 * len(blocks))),
        output_token_ids=(),
    )
    return Handoff(state, KvInPool(blocks, LeaseName(1, 7)))


def test_a_place_is_told_with_what_becomes_of_kv(end: Any, tmp_path: Path) -> None:
    decode, prefill = end(tmp_path, "decode"), end(tmp_path, "prefill")
    event = prefill.ask(decode)
    assert isinstance(event, HandoffGranted)
    assert event.kv_stays
    assert decode.value("baton_handoff_mapped_pools") == 1


@pytest.mark.parametrize(("of_decode", "of_prefill"), [(False, True), (True, False)])
def test_kv_travels_where_one_side_shares_nothing(
    end: Any, tmp_path: Path, of_decode: bool, of_prefill: bool
) -> None:
    decode = end(tmp_path if of_decode else None, "decode")
    prefill = end(tmp_path if of_prefill else None, "prefill")
    event = prefill.ask(decode)
    assert isinstance(event, HandoffGranted)
    assert not event.kv_stays


def test_kv_travels_between_hosts(end: Any, tmp_path: Path) -> None:
    """Whose folders are not the same, so that prefill finds no door."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    event = end(tmp_path / "a", "prefill").ask(end(tmp_path / "b", "decode"))
    assert isinstance(event, HandoffGranted)
    assert not event.kv_stays


def test_what_is_required_and_is_not_so_fails_by_name(end: Any, tmp_path: Path) -> None:
    decode, prefill = end(None, "decode"), end(tmp_path, "prefill", "nvlink")
    event = prefill.ask(decode)
    assert isinstance(event, HandoffFailed)
    assert event.code is ErrorCode.HANDOFF_REFUSED
    assert "handoff.require is 'nvlink', and decode-0 has no door" in event.message
    assert prefill.value("baton_handoff_outcomes_total", outcome="handoff_refused") == 1


def test_what_is_required_and_was_never_asked_for_fails_by_name(
    end: Any, tmp_path: Path, make_handoff: Any
) -> None:
    """As towards a decode worker that gives no places: its prompts are computed at once."""
    decode, prefill = end(tmp_path, "decode"), end(tmp_path, "prefill", "nvlink")
    prefill.transport.offer(decode.target, make_handoff(), 10.0)
    event = prefill.next()
    assert isinstance(event, HandoffFailed)
    assert event.code is ErrorCode.HANDOFF_REFUSED
    assert "handoff.require is 'nvlink', and decode-0 gave no place" in event.message
    assert prefill.value("baton_handoff_sent_bytes_total") == 0


def test_kv_that_stays_takes_nothing_of_what_decode_holds_for_kv_that_travels(
    end: Any, tmp_path: Path
) -> None:
    decode, prefill = end(tmp_path, "decode"), end(tmp_path, "prefill")
    prefill.ask(decode)
    assert decode.value("baton_handoff_awaited_bytes") == 64, "nobody knew yet"
    prefill.transport.leave(KEY)
    prefill.transport.ask(decode.target, RequestKey(1 << 40, 1), Wish(1 << 40, 10), 10.0)
    assert isinstance(prefill.next(), HandoffGranted)
    assert decode.value("baton_handoff_awaited_bytes") == 1


def test_kv_that_was_to_stay_does_not_travel_into_memory_that_nobody_promised(
    end: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode lets go of the pool between an ask and its answer."""
    decode, prefill = end(tmp_path, "decode"), end(tmp_path, "prefill")
    prefill.ask(decode)
    monkeypatch.setattr(PoolVisits, "ask", lambda visits, target, then: then("it hung up"))
    event = prefill.ask(decode)
    assert isinstance(event, HandoffFailed)
    assert event.code is ErrorCode.HANDOFF_REFUSED
    assert "no memory for KV that travels, and it hung up" in event.message


def test_an_offer_of_blocks_brings_the_pool_they_lie_in(
    end: Any, tmp_path: Path, make_handoff: Any
) -> None:
    decode, prefill = end(tmp_path, "decode"), end(tmp_path, "prefill")
    prefill.ask(decode)
    prefill.pool.values[0][5] = 7.0
    handoff = staying(make_handoff(), 5, 3, 9)
    prefill.transport.offer(decode.target, handoff, 10.0)
    arrived = decode.next()
    assert isinstance(arrived, HandoffArrived)
    assert arrived.received_bytes == 0
    assert arrived.handoff.state == handoff.state
    kv = arrived.handoff.kv
    assert isinstance(kv, KvInPool)
    assert isinstance(kv.pool, PeerPool)
    assert kv.blocks == (5, 3, 9)
    lease = prefill.leases.begin()
    assert kv.pool.is_lent(lease.slot, lease.serial), "it came with the pool's own"
    assert not kv.pool.is_lent(*kv.lease)
    decode.pool.sharing.begin_pull([2, 3, 4], kv.pool, kv.blocks)
    np.testing.assert_array_equal(decode.pool.values[0][2], prefill.pool.values[0][5])
    decode.transport.acknowledge(KEY)
    outcome = prefill.next()
    assert isinstance(outcome, HandoffDelivered)
    assert (outcome.sent_bytes, outcome.pulled_blocks) == (0, 3)
    read = prefill.value("baton_handoff_delivered_bytes_total", transport="shm")
    assert read == 3 * SHAPE.block_bytes


def test_blocks_of_a_pool_that_is_not_mapped_are_refused(
    end: Any, tmp_path: Path, make_handoff: Any
) -> None:
    decode, prefill = end(tmp_path, "decode"), end(tmp_path, "prefill")
    prefill.transport.offer(decode.target, staying(make_handoff(), 5), 10.0)
    outcome = prefill.next()
    assert isinstance(outcome, HandoffFailed)
    assert outcome.code is ErrorCode.HANDOFF_REFUSED
    assert "not mapped here" in outcome.message
    assert decode.value("baton_handoff_refused_total", reason="handoff_refused") == 1


def frames(make_handoff: Any, ref: Any) -> list[Any]:
    first, state, _ = encode_offer(staying(make_handoff(), 2, 3), bytes(16))
    return [first, state, msgspec.msgpack.encode(ref)]


def test_blocks_come_back_as_they_were_sent(make_handoff: Any) -> None:
    handoff = staying(make_handoff(), 2, 3)
    back = decode_offer([bytes(frame) for frame in encode_offer(handoff, b"i" * 16)])
    assert back.state == handoff.state
    assert isinstance(back.kv, KvInPool)
    assert (back.kv.blocks, back.kv.lease, back.kv.pool) == ((2, 3), (1, 7), b"i" * 16)


@pytest.mark.parametrize(
    ("ref", "told"),
    [
        (PoolRef(bytes(16), (1,), 1, 7), "1 blocks, expected 2"),
        (PoolRef(bytes(16), (1, 2, 3), 1, 7), "3 blocks, expected 2"),
        (PoolRef(bytes(15), (1, 2), 1, 7), "where KV lies"),
        (PoolRef(bytes(16), (1, -2), 1, 7), "where KV lies"),
        (PoolRef(bytes(16), (1, 1 << 40), 1, 7), "where KV lies"),
        (PoolRef(bytes(16), (1, 2), -1, 7), "where KV lies"),
        (PoolRef(bytes(16), (1, 2), 1, 0), "where KV lies"),
        (PoolRef(bytes(16), (1, 2), 1, 1 << 62), "where KV lies"),
        ((bytes(16), "12"), "where KV lies"),
        (3, "where KV lies"),
    ],
)
def test_a_place_that_is_none_is_refused(make_handoff: Any, ref: Any, told: str) -> None:
    with pytest.raises(HandoffFormatError, match=told) as refusal:
        decode_offer(frames(make_handoff, ref))
    assert refusal.value.key == KEY, "prefill can be answered"


def test_one_frame_tells_where_kv_lies(make_handoff: Any) -> None:
    first, state, ref = frames(make_handoff, PoolRef(bytes(16), (1, 2), 1, 7))
    for rest in ([], [ref, ref]):
        with pytest.raises(HandoffFormatError, match="expected 1"):
            decode_offer([first, state, *rest])


@given(st.binary(max_size=100))
def test_any_bytes_are_a_place_or_an_error_that_says_so(ref: bytes) -> None:
    state = msgspec.msgpack.encode({"handle": 1})
    with pytest.raises(HandoffFormatError):
        decode_offer([b"BKP1", state, ref])


def test_a_process_that_cannot_listen_leaves_no_door_behind(end: Any, tmp_path: Path) -> None:
    taken = end(None, "decode")
    one = End.__new__(End)
    with pytest.raises(ConfigError, match=r"handoff\.bind"):
        one.__init__(tmp_path, "decode", "any", taken.transport.endpoint)  # type: ignore[misc]
    one.context.term()
    assert list(tmp_path.iterdir()) == []


OTHER = RequestKey(2 << 40, 0)


WHY = ("place", "blocks", "pool")


def filled_of(key: RequestKey, *blocks: int) -> KvFilled:
    return KvFilled(key, KvInPool(blocks, LeaseName(1, 7)))


def granted(end: Any, folder: Path, make_handoff: Any) -> tuple[End, End]:
    """Return decode and prefill, which has a place for KEY; a request before it has come."""
    decode, prefill = end(folder, "decode"), end(folder, "prefill")
    prefill.transport.ask(decode.target, OTHER, Wish(64, 10), 10.0)
    assert isinstance(prefill.next(), HandoffGranted)
    prefill.transport.offer(decode.target, staying(make_handoff(OTHER.handle), 2), 10.0)
    assert isinstance(decode.next(), HandoffArrived), "so that the connection is there"
    assert isinstance(prefill.ask(decode), HandoffGranted)
    return decode, prefill


def test_what_is_filled_is_told_of_requests_whose_offer_is_awaited_and_of_no_others(
    end: Any, tmp_path: Path, make_handoff: Any
) -> None:
    decode, prefill = granted(end, tmp_path, make_handoff)
    prefill.transport.tell_filled(decode.target, filled_of(OTHER, 2))
    prefill.transport.tell_filled(decode.target, filled_of(RequestKey(3 << 40, 0), 2))
    prefill.transport.tell_filled(decode.target, filled_of(KEY))
    prefill.transport.tell_filled(decode.target, filled_of(KEY, *range(2, 13)))
    prefill.transport.tell_filled(decode.target, filled_of(KEY, 5, 3))
    event = decode.next()
    assert isinstance(event, HandoffFilled)
    assert (event.filled.key, event.n_tokens) == (KEY, 10)
    kv = event.filled.kv
    assert (kv.blocks, kv.lease) == ((5, 3), LeaseName(1, 7))
    assert kv.pool.is_lent(*prefill.leases.begin()[1:]), "it came with the pool's own leases"
    unheeded = {why: decode.value("baton_handoff_unheeded_words_total", reason=why) for why in WHY}
    assert unheeded == {"place": 2, "blocks": 2, "pool": 0}


def test_which_layers_are_filled_is_told_too(end: Any, tmp_path: Path, make_handoff: Any) -> None:
    decode, prefill = granted(end, tmp_path, make_handoff)
    told = filled_of(KEY, 5, 3)._replace(begun=BegunBlocks(1, 7))
    prefill.transport.tell_filled(decode.target, told)
    event = decode.next()
    assert isinstance(event, HandoffFilled)
    assert (event.filled.key, event.filled.begun) == (KEY, BegunBlocks(1, 7))


@pytest.mark.parametrize("way", ["prefill leaves", "decode leaves", "decode refuses"])
def test_who_gives_a_place_back_takes_back_what_was_told(
    end: Any, tmp_path: Path, make_handoff: Any, way: str
) -> None:
    decode, prefill = granted(end, tmp_path, make_handoff)
    prefill.transport.tell_filled(decode.target, filled_of(KEY, 5, 3))
    assert isinstance(decode.next(), HandoffFilled)
    if way == "prefill leaves":
        prefill.transport.leave(KEY)
    elif way == "decode leaves":
        decode.transport.leave(KEY)
    else:
        decode.transport.refuse(KEY, ErrorCode.DRAINING, "so")
    assert decode.next() == HandoffWithdrawn(KEY)


def test_an_offer_that_was_taken_takes_nothing_back(
    end: Any, tmp_path: Path, make_handoff: Any
) -> None:
    decode, prefill = granted(end, tmp_path, make_handoff)
    prefill.transport.tell_filled(decode.target, filled_of(KEY, 5, 3))
    assert isinstance(decode.next(), HandoffFilled)
    prefill.transport.offer(decode.target, staying(make_handoff(), 5, 3, 9), 10.0)
    assert isinstance(decode.next(), HandoffArrived)
    decode.transport.acknowledge(KEY)
    assert isinstance(prefill.next(), HandoffDelivered)
    decode.transport.leave(KEY)
    decode.transport.refuse(OTHER, ErrorCode.DRAINING, "so")
    assert isinstance(prefill.next(), HandoffFailed)
    assert decode.events.empty()


def test_what_is_filled_comes_back_as_it_was_sent() -> None:
    back = decode_filled(encode_filled(filled_of(KEY, 5, 3), b"i" * 16))
    assert back.key == KEY
    assert (back.kv.blocks, back.kv.lease, back.kv.pool) == ((5, 3), (1, 7), b"i" * 16)


@given(begun=st.integers(0, 3), n_layers=st.integers(1, 1024))
def test_which_layers_are_filled_comes_back_as_it_was_sent(begun: int, n_layers: int) -> None:
    told = filled_of(KEY, 5, 3, 9)._replace(begun=BegunBlocks(begun, n_layers if begun else 0))
    frames = encode_filled(told, b"i" * 16)
    assert is_filled(frames)
    assert frames[0] == (b"BKL1" if begun else b"BKF1"), "an older reader takes BKF1 for whole"
    back = decode_filled(frames)
    assert (back.key, back.kv.blocks, back.begun) == (KEY, (5, 3, 9), told.begun)


def test_the_bytes_of_a_word_of_layers_are_these() -> None:
    told = filled_of(RequestKey(7, 2), 5, 3)._replace(begun=BegunBlocks(1, 27))
    assert encode_filled(told, b"i" * 16) == [
        b"BKL1",
        b"\x95\x07\x02\x94\xc4\x10" + b"i" * 16 + b"\x92\x05\x03\x01\x07\x01\x1b",
    ]


def layers_told(n_blocks: int, n_layers: int) -> list[bytes]:
    told = filled_of(KEY, 5, 3)._replace(begun=BegunBlocks(n_blocks, n_layers))
    return encode_filled(told, b"i" * 16)


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([b"BKL1", b""], "what is filled"),
        ([b"BKL1", encode_filled(filled_of(KEY, 5), b"i" * 16)[1]], "what is filled"),
        (layers_told(3, 1), "n_blocks is 3"),
        (layers_told(-1, 1), "n_blocks is -1"),
        (layers_told(1, 0), "n_layers is 0"),
        (layers_told(1, 1025), "n_layers is 1025"),
        ([b"BKF1"], "1 frames tell what is filled"),
        ([b"BKF1", b"", b""], "3 frames tell what is filled"),
        ([b"BKF1", b""], "what is filled"),
        ([b"BKF1", b"\x91" * 5000], "what is filled"),
        (encode_filled(filled_of(RequestKey(0, 0), 2), b"i" * 16), "handle is 0"),
        (encode_filled(filled_of(RequestKey(1, 256), 2), b"i" * 16), "attempt is 256"),
        (encode_filled(filled_of(KEY, -2), b"i" * 16), "what is filled"),
        (encode_filled(filled_of(KEY, 2), b"i" * 15), "what is filled"),
    ],
)
def test_what_tells_of_nothing_is_refused(frames: list[bytes], told: str) -> None:
    with pytest.raises(HandoffFormatError, match=told):
        decode_filled(frames)


@given(st.binary(max_size=100))
def test_any_bytes_are_what_is_filled_or_an_error_that_says_so(message: bytes) -> None:
    with pytest.raises(HandoffFormatError):
        decode_filled([b"BKF1", message])
    with pytest.raises(HandoffFormatError):
        decode_filled([b"BKL1", message])
