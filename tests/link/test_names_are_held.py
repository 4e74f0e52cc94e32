"""A worker's name, key, connection and KV endpoint are its own as long as it lives."""

from __future__ import annotations

import msgspec
import pytest

from baton_worker.identity import GatewayIdentity
from baton_worker.link.api import GatewayUp, WorkerDown, WorkerUp
from baton_worker.link.gateway_end import GatewaySettings
from baton_worker.link.inbox import InboxPolicy
from baton_worker.link.metrics import GatewayLinkMetrics
from baton_worker.link.outbox import OutboxLimits
from baton_worker.link.worker_table import WorkerTable
from baton_worker.records.control import ErrorNotice, Hello

KV = {"kv_endpoint": "tcp://10.0.0.1:7000"}


class Bench:
    def __init__(self, new_info, new_factory) -> None:
        self.new_info = new_info
        settings = GatewaySettings(
            GatewayIdentity(77), InboxPolicy(), 1.0, 3.0, 0.5, OutboxLimits(1 << 20, 64)
        )
        self.table = WorkerTable(settings, GatewayLinkMetrics(new_factory("gateway")))

    def hello(
        self, worker_id: str, epoch: int, route: bytes, *, key: str = "", now: float = 0.0, **info
    ) -> list[object]:
        """Return events; a refusal's reason stands for what is said instead of a welcome."""
        body = msgspec.msgpack.encode(self.new_info(worker_id, **info))
        events = self.table.hello(route, key, Hello(epoch, 1, 1, 1, 0, body), now)
        said = [message.reason for _, message in self.table.out if isinstance(message, ErrorNotice)]
        self.table.out.clear()
        return [*events, *said]


@pytest.fixture
def bench(new_info, new_factory) -> Bench:
    return Bench(new_info, new_factory)


def test_a_newcomer_is_refused_while_the_holder_of_its_name_lives(bench: Bench) -> None:
    bench.hello("decode-0", 5, b"r1")
    for now in (0.0, 1.0, 2.9):
        assert bench.hello("decode-0", 6, b"r2", now=now) == ["name_taken"]
    assert bench.table.ends["decode-0"].epoch == 5
    assert bench.table.end_of(b"r1") is not None, "the holder keeps its connection"


def test_a_restarted_process_takes_over_as_soon_as_the_old_connection_is_closed(
    bench: Bench,
) -> None:
    bench.hello("decode-0", 5, b"r1")
    bench.table.cut_off(b"r1", 1.0)
    down, up = bench.hello("decode-0", 6, b"r2", now=1.0)
    assert (down.reason, up.epoch) == ("replaced", 6)


def test_a_name_whose_host_vanished_is_free_after_the_dead_time(bench: Bench) -> None:
    bench.hello("decode-0", 5, b"r1")
    assert bench.hello("decode-0", 6, b"r2", now=2.9) == ["name_taken"]
    bench.table.tick(3.0, judge_silence=True)
    *_, up = bench.hello("decode-0", 6, b"r2", now=3.1)
    assert isinstance(up, WorkerUp)


def test_a_process_that_starts_over_on_its_own_connection_is_no_newcomer(bench: Bench) -> None:
    bench.hello("decode-0", 5, b"r1")
    down, up = bench.hello("decode-0", 6, b"r1")
    assert (down.reason, up.epoch) == ("replaced", 6)


@pytest.mark.parametrize("is_cut", [False, True], ids=["connected", "cut-off"])
@pytest.mark.parametrize("epoch", [5, 6], ids=["same-epoch", "other-epoch"])
def test_another_key_cannot_take_a_living_workers_name(
    bench: Bench, is_cut: bool, epoch: int
) -> None:
    bench.hello("decode-0", 5, b"r1", key="its own")
    if is_cut:
        bench.table.cut_off(b"r1", 1.0)
    assert bench.hello("decode-0", epoch, b"r2", key="another", now=1.0) == ["key_bound"]
    bench.table.cut_off(b"r1", 1.0)
    bench.table.tick(2.0, judge_silence=True)
    assert bench.hello("decode-0", 7, b"r2", key="another", now=2.1) != ["key_bound"]


def test_nobody_can_claim_where_a_living_worker_takes_kv(bench: Bench) -> None:
    bench.hello("decode-0", 5, b"r1", **KV)
    assert bench.hello("decode-1", 6, b"r2", **KV) == ["kv_endpoint_taken"]
    bench.table.cut_off(b"r1", 1.0)
    *_, up = bench.hello("decode-1", 6, b"r2", now=1.0, **KV)
    assert up.worker_id == "decode-1", "a successor under another name gets its port back"


def test_one_connection_cannot_speak_for_two_workers(bench: Bench) -> None:
    bench.hello("decode-0", 5, b"r1")
    down, reason = bench.hello("decode-1", 6, b"r1")
    assert (down, reason) == (WorkerDown("decode-0", 5, "renamed"), "renamed")
    assert list(bench.table.expelled) == [b"r1"]


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"kv_endpoint": "ipc:///tmp/x"}, "kv_endpoint"),
        ({"kv_endpoint": "tcp://a:1;tcp://b:2"}, "kv_endpoint"),
        ({"kv_public_key": "short"}, "kv_public_key"),
    ],
)
def test_a_worker_cannot_send_others_to_no_address(bench: Bench, info, reason: str) -> None:
    assert bench.hello("decode-0", 5, b"r1", **info) == [reason]


def test_of_two_workers_of_one_name_the_second_says_why_it_is_not_linked(
    start_gateway, start_worker, read_metric
) -> None:
    gateway = start_gateway()
    first = start_worker(gateway.link.endpoint)
    first.log.wait_for(GatewayUp)
    second = start_worker(gateway.link.endpoint)
    name, labels = "baton_link_rejections_total", {"reason": "name_taken"}
    second.log.wait_until(lambda: read_metric(second.factory, name, **labels) >= 2)
    assert second.link.refusals() == {gateway.link.endpoint: "name_taken"}
    assert second.link.linked_gateways() == 0
    assert read_metric(gateway.factory, "baton_link_rejected_hellos_total", **labels) >= 2
    assert gateway.log.of(WorkerDown) == [], "and the first never notices"
    first.link.close(0.0)
    second.log.wait_for(GatewayUp)
    assert second.link.refusals() == {}
