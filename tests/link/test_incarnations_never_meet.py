"""Two gateways that drew the same incarnation are never given each other's rows or commands."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.identity import GatewayIdentity, incarnation_of, make_handle
from baton_worker.link.api import CommandReceived, GatewayLost, GatewayUp
from baton_worker.link.claims import Claims
from baton_worker.link.inbox import InboxPolicy
from baton_worker.link.metrics import WorkerLinkMetrics
from baton_worker.link.outbox import OutboxLimits
from baton_worker.link.worker_end import EndSettings, State, WorkerEnd
from baton_worker.messages import Abort, GatewayInfo
from baton_worker.records.control import ErrorNotice, Hello, Welcome

SETTINGS = EndSettings(OutboxLimits(1 << 16, 64), InboxPolicy(), 1.0, 3.0, lost_seconds=30.0)
EPOCHS = itertools.count(5)


class Bench:
    """A worker's ends towards two gateways."""

    def __init__(self, new_factory) -> None:
        claims, metrics = Claims(), WorkerLinkMetrics(new_factory())
        self.first, self.second = (
            WorkerEnd(
                endpoint,
                SETTINGS,
                metrics,
                lambda: next(EPOCHS),
                lambda epoch, seq: b"",
                0.0,
                claims,
            )
            for endpoint in ("tcp://a:1", "tcp://b:1")
        )
        for end in (self.first, self.second):
            end.connected(0.0)

    @staticmethod
    def welcome(end: WorkerEnd, incarnation: int, instance: str, now: float = 0.0) -> list[object]:
        body = msgspec.msgpack.encode(GatewayInfo(instance)) if instance else b""
        end.out.clear()
        return end.receive(Welcome(end.epoch, 1, 1, 1, 8, 1 << 20, incarnation, body), now)


@pytest.fixture
def bench(new_factory) -> Bench:
    return Bench(new_factory)


def test_a_second_gateway_of_one_incarnation_is_refused_and_told_why(bench: Bench) -> None:
    assert bench.welcome(bench.first, 77, "a") == [GatewayUp(77, "tcp://a:1")]
    epoch = bench.second.epoch
    assert bench.welcome(bench.second, 77, "b") == []
    assert list(bench.second.out) == [ErrorNotice(epoch, 1, 0, 0, "incarnation_taken")]
    assert bench.second.state is State.TURNED_AWAY
    assert bench.second.refusal == "incarnation_taken"
    bench.second.tick(1.0)
    assert isinstance(bench.second.out[-1], Hello), "it asks again soon"
    assert bench.welcome(bench.second, 78, "b", 1.0) == [GatewayUp(78, "tcp://b:1")]


def test_an_incarnation_is_free_once_its_holder_is_lost(bench: Bench) -> None:
    bench.welcome(bench.first, 77, "a")
    assert bench.first.lose("silent", 1.0) == [GatewayLost(77, "silent")]
    assert bench.welcome(bench.second, 77, "b", 1.0) == [GatewayUp(77, "tcp://b:1")]


def test_a_restarted_gateway_that_drew_its_predecessors_incarnation_is_refused_once(
    bench: Bench,
) -> None:
    bench.welcome(bench.first, 77, "a")
    epoch = bench.first.epoch
    assert bench.welcome(bench.first, 77, "b") == [GatewayLost(77, "incarnation_taken")]
    assert list(bench.first.out) == [ErrorNotice(epoch, 1, 0, 0, "incarnation_taken")]
    assert bench.first.epoch != epoch, "rows of its predecessor's requests are gone"


def test_gateways_that_tell_no_instance_are_told_apart_by_their_address(bench: Bench) -> None:
    assert bench.welcome(bench.first, 77, "") == [GatewayUp(77, "tcp://a:1")]
    assert bench.welcome(bench.first, 77, "") == [], "the same one again"
    assert bench.welcome(bench.second, 77, "") == []
    assert bench.second.state is State.TURNED_AWAY


def test_of_two_real_gateways_of_one_incarnation_the_second_takes_another(
    start_gateway, start_worker, columns, read_metric
) -> None:
    first, second = start_gateway(77), start_gateway(77)
    worker = start_worker(first.link.endpoint, second.link.endpoint)
    ups = worker.log.wait_for(GatewayUp, 2)
    taken = {up.incarnation: up.endpoint for up in ups}
    assert len(taken) == 2
    assert 77 in taken
    redrawn = first if taken[77] == second.link.endpoint else second
    assert redrawn.identity.incarnation == next(i for i in taken if i != 77)
    name = "baton_link_refusals_total"
    assert read_metric(redrawn.factory, name, reason="incarnation_taken") == 1
    for n, gateway in enumerate((first, second)):
        incarnation = gateway.identity.incarnation
        worker.link.publish(incarnation, columns(incarnation, [n + 1]), n)
        gateway.log.wait(lambda log, g=gateway, n=n: g.rows() == [n + 1])


def test_a_gateway_that_gave_out_a_handle_keeps_its_incarnation() -> None:
    identity = GatewayIdentity(77)
    assert identity.redraw()
    drawn = identity.incarnation
    assert drawn != 77
    assert incarnation_of(identity.new_handle()) == drawn
    assert not identity.redraw()
    assert identity.incarnation == drawn


def test_liars_cannot_make_a_gateway_draw_for_ever() -> None:
    identity = GatewayIdentity(77)
    assert 0 < sum(identity.redraw() for _ in range(1000)) < 100


@given(st.integers(1, 2000))
def test_handles_of_one_process_are_all_different_and_its_own(n: int) -> None:
    identity = GatewayIdentity(77)
    handles = [identity.new_handle() for _ in range(n)]
    assert len(set(handles)) == n
    assert {incarnation_of(handle) for handle in handles} == {77}


def test_who_knows_one_handle_cannot_tell_the_next() -> None:
    gaps = set()
    for _ in range(50):
        identity = GatewayIdentity(77)
        gaps.add(identity.new_handle() - identity.new_handle())
    assert len(gaps) == 50


def test_a_command_for_another_gateways_request_ends_the_connection(
    start_gateway, start_worker, read_metric
) -> None:
    gateway = start_gateway()
    worker = start_worker(gateway.link.endpoint)
    worker.log.wait_for(GatewayUp)
    assert gateway.link.send("decode-0", Abort(make_handle(76, 5), 0))
    worker.log.wait_for(GatewayLost)
    assert worker.log.of(CommandReceived) == []
    assert read_metric(worker.factory, "baton_link_expelled_total") == 1
