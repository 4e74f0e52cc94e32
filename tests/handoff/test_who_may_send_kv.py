"""KV goes to the process that it is meant for, and comes from prefill workers that may send it."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry

from baton_testing.raw_peers import greeted
from baton_worker import logs
from baton_worker.config import CurveConfig, HandoffConfig
from baton_worker.handoff import senders
from baton_worker.handoff.api import (
    HandoffArrived,
    HandoffDelivered,
    HandoffEvent,
    HandoffFailed,
)
from baton_worker.handoff.frames import (
    MAX_OFFER_FRAMES,
    Answer,
    AnswerKind,
    Withdrawal,
    encode_answer,
    encode_ask,
)
from baton_worker.handoff.metrics import HandoffMetrics
from baton_worker.handoff.places import PlaceLimits
from baton_worker.handoff.security import kv_security
from baton_worker.handoff.zmq_transport import ZmqKvTransport
from baton_worker.identity import RequestKey
from baton_worker.link.curve import generate_key_files
from baton_worker.link.pace import Pace
from baton_worker.link.strangers import Strangers
from baton_worker.messages import DecodeTarget
from baton_worker.metrics import MetricFactory

NAMES = ("gateway", "prefill", "decode")


class Keys:
    """Role keys in a folder, and the list that says who may be what."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._list = folder / "allowed"
        self.public = {
            name: generate_key_files(folder / f"{name}.pub", folder / f"{name}.sec").public.decode()
            for name in NAMES
        }
        self.allow("prefill", "decode")

    def allow(self, *names: str) -> None:
        fresh = self._list.with_suffix(".new")
        fresh.write_text("".join(f"{self.public[name]} role={name}\n" for name in names))
        fresh.rename(self._list)

    def config(self, name: str) -> CurveConfig:
        return CurveConfig(
            public_key_file=str(self._folder / f"{name}.pub"),
            secret_key_file=str(self._folder / f"{name}.sec"),
            gateway_public_key_file=str(self._folder / "gateway.pub"),
            allowed_keys_file=str(self._list),
        )


class End:
    """One process's transport under a role's keys."""

    def __init__(self, curve: CurveConfig, *, takes_offers: bool) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.refusals: queue.Queue[str] = queue.Queue()
        metrics = HandoffMetrics(MetricFactory(CollectorRegistry(), "m", "decode"))
        metrics.handshake_refused = self.refusals.put
        self.security = kv_security(
            curve, self.context, self.refusals.put, takes_offers=takes_offers
        )
        self.transport = ZmqKvTransport(
            HandoffConfig(),
            metrics,
            context=self.context,
            security=self.security,
            places=PlaceLimits(16, 1 << 30, 1 << 20, 64, 600.0) if takes_offers else None,
        )
        self.events: queue.Queue[HandoffEvent] = queue.Queue()
        self.transport.start(self.events.put)

    @property
    def target(self) -> DecodeTarget:
        return DecodeTarget("decode-0", self.transport.endpoint, self.security.public_key)

    def close(self) -> None:
        self.transport.close()
        self.context.term()


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def start(keys: Keys) -> Iterator[Callable[..., End]]:
    ends: list[End] = []

    def build(name: str, *, takes_offers: bool = False) -> End:
        ends.append(End(keys.config(name), takes_offers=takes_offers))
        return ends[-1]

    yield build
    for end in ends:
        end.close()


def test_each_decode_process_takes_kv_under_a_key_of_its_own(start, keys, make_handoff) -> None:
    prefill = start("prefill")
    first, second = (start("decode", takes_offers=True) for _ in range(2))
    assert len({first.security.public_key, second.security.public_key, *keys.public.values()}) == 5
    prefill.transport.offer(first.target, make_handoff(), 60.0)
    assert isinstance(first.events.get(timeout=60), HandoffArrived)


def test_kv_is_not_sent_to_another_process_at_the_same_address(start, make_handoff) -> None:
    prefill = start("prefill")
    meant, impostor = (start("decode", takes_offers=True) for _ in range(2))
    target = DecodeTarget("decode-0", impostor.transport.endpoint, meant.security.public_key)
    prefill.transport.offer(target, make_handoff(), 2.0)
    assert isinstance(prefill.events.get(timeout=60), HandoffFailed)
    assert impostor.events.empty()


def test_a_decode_worker_cannot_hand_over_to_another(start, make_handoff) -> None:
    decode = start("decode", takes_offers=True)
    posing = start("decode")
    posing.transport.offer(decode.target, make_handoff(), 600.0)
    assert decode.refusals.get(timeout=60) == "role_not_allowed"
    assert decode.events.empty()


def test_a_revoked_key_ends_a_live_kv_connection(start, keys: Keys, make_handoff) -> None:
    decode, prefill = start("decode", takes_offers=True), start("prefill")
    prefill.transport.offer(decode.target, make_handoff(), 600.0)
    assert isinstance(decode.events.get(timeout=60), HandoffArrived)
    keys.allow("decode")
    assert decode.refusals.get(timeout=60) == "key_revoked", "an idle connection is ended, too"
    assert decode.refusals.get(timeout=60) == "unknown_key", "and cannot be made again"
    assert decode.events.empty()


def test_a_decode_worker_cannot_answer_for_another(make_handoff) -> None:
    off = CurveConfig(enabled=False)
    prefill, decode = End(off, takes_offers=False), End(off, takes_offers=True)
    context = zmq.Context()
    meddler = context.socket(zmq.ROUTER)
    meddler.linger = 0
    port = meddler.bind_to_random_port("tcp://127.0.0.1")
    theirs, its_own = make_handoff(handle=(1 << 40) + 1), make_handoff(handle=(1 << 40) + 2)
    try:
        prefill.transport.offer(decode.target, theirs, 600.0)
        prefill.transport.offer(DecodeTarget("m", f"tcp://127.0.0.1:{port}"), its_own, 600.0)
        assert isinstance(decode.events.get(timeout=60), HandoffArrived)
        assert meddler.poll(60_000)
        route = meddler.recv_multipart()[0]
        for state in (theirs.state, its_own.state):
            answer = Answer(state.handle, state.attempt, AnswerKind.IMPORTED)
            meddler.send_multipart([route, *encode_answer(answer)])
        delivered = prefill.events.get(timeout=60)
        assert isinstance(delivered, HandoffDelivered)
        assert delivered.key.handle == its_own.state.handle, "its own, and nothing before it"
    finally:
        meddler.close()
        context.term()
        prefill.close()
        decode.close()


@pytest.mark.parametrize(
    ("message", "n_messages"),
    [(encode_ask(Withdrawal(1 << 40, 0)), 2000), ([b""] * (MAX_OFFER_FRAMES + 1), 1)],
    ids=["of messages", "of frames in one"],
)
def test_a_flood_on_the_kv_port_ends_its_connection_alone(
    make_handoff, monkeypatch: pytest.MonkeyPatch, message: list[bytes], n_messages: int
) -> None:
    monkeypatch.setattr(senders, "Pace", partial(Pace, burst=500, per_second=0.0))
    off = CurveConfig(enabled=False)
    prefill, decode = End(off, takes_offers=False), End(off, takes_offers=True)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.sndtimeo = 100
    monitoring = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(decode.transport.endpoint)
    try:
        for _ in range(n_messages):
            if monitoring.poll(0):
                break
            with contextlib.suppress(zmq.Again):
                stranger.send_multipart(message)
        assert monitoring.poll(60_000), "the connection was not ended"
        assert decode.refusals.get(timeout=60) == "flood"
        prefill.transport.offer(decode.target, make_handoff(), 600.0)
        assert isinstance(decode.events.get(timeout=60), HandoffArrived)
    finally:
        stranger.disable_monitor()
        monitoring.close(linger=0)
        stranger.close()
        context.term()
        prefill.close()
        decode.close()


def test_many_that_say_nothing_on_the_kv_port_are_hung_up_on_and_a_sender_is_not(
    make_handoff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(senders, "Strangers", partial(Strangers, 4, 0.0))
    handoff = make_handoff()
    off = CurveConfig(enabled=False)
    prefill, decode = End(off, takes_offers=False), End(off, takes_offers=True)
    try:
        prefill.transport.offer(decode.target, handoff, 600.0)
        assert isinstance(decode.events.get(timeout=60), HandoffArrived)
        with contextlib.ExitStack() as opened:
            silent = [opened.enter_context(greeted(decode.transport.endpoint)) for _ in range(6)]
            assert [decode.refusals.get(timeout=60) for _ in range(2)] == ["silent", "silent"]
            assert [stranger.recv(1) for stranger in silent[:2]] == [b"", b""]
        decode.transport.acknowledge(RequestKey(handoff.state.handle, handoff.state.attempt))
        assert isinstance(prefill.events.get(timeout=60), HandoffDelivered)
    finally:
        prefill.close()
        decode.close()


class GoneFrame:
    """Of a connection that has ended by the time that what it carried is read."""

    def get(self, name: object) -> int:
        return 1 << 20


def test_ended_connections_are_counted_each_time_and_logged_once_in_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOG_SECONDS", 1e9)
    refused: list[str] = []
    each = senders.Senders(lambda key: "", refused.append)
    for n in range(50):
        assert not each.admit(b"%d" % n, GoneFrame(), 0.0, is_endless=True)
    assert refused == ["flood"] * 50
    assert len([r for r in caplog.records if r.message == "KV connection ended"]) == 1


def test_what_is_no_message_is_counted_each_time_and_logged_once_in_a_while(
    handoff_end: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "LOG_SECONDS", 1e9)
    decode = handoff_end()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(decode.transport.endpoint)
        for n in range(100):
            stranger.send(b"%d" % n)
        deadline = time.monotonic() + 60.0
        while decode.value("baton_handoff_malformed_total") < 100:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    lines = [r for r in caplog.records if r.message == "malformed message on the KV port"]
    assert len(lines) == 1
