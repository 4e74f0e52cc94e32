"""Which way KV goes: mapped before read by NIXL before sent, and never another than is required."""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry

from baton_testing.processes import wait_until
from baton_testing.ranked_engines import options, over
from baton_worker.config import ConfigError, CurveConfig, HandoffConfig, ProcessConfig
from baton_worker.engine.backends.device.engine import DeviceEngine
from baton_worker.engine.kv.leases import Leases
from baton_worker.engine.kv.memory import Region
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.engine.kv.sharing import KvSharing
from baton_worker.handoff import nixl_agent, nixl_agents, nixl_rank, nixl_visits, pool_visits
from baton_worker.handoff.api import HandoffEvent, HandoffFailed, HandoffGranted
from baton_worker.handoff.metrics import HandoffMetrics
from baton_worker.handoff.nixl_agent import NixlAgent, NixlError, check_environment
from baton_worker.handoff.nixl_agents import agents_of
from baton_worker.handoff.places import PlaceLimits
from baton_worker.handoff.pool_visits import PoolOwner
from baton_worker.handoff.rank_words import Remove
from baton_worker.handoff.room import Wish
from baton_worker.handoff.security import kv_security
from baton_worker.handoff.zmq_transport import ZmqKvTransport
from baton_worker.identity import RequestKey
from baton_worker.messages import HANDOFF_NIXL, HANDOFF_NIXL_RANKS, DecodeTarget
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import ErrorCode
from baton_worker.roles import process

SHAPE = KvShape(n_layers=1, kv_heads=1, block_size=4, head_dim=2, n_blocks=8)


def sharing() -> KvSharing:
    found = KvPool(SHAPE, is_shared=True).sharing
    assert found is not None
    return found


def rank_listeners() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("kv-rank-")]


class End:
    """One process's transport over a pool that it shares.

    Args:
        pool: of a worker of several ranks, say.
    """

    def __init__(self, role: str, pool: Any = None, **config: Any) -> None:
        self.registry = CollectorRegistry()
        self.context: zmq.Context[Any] = zmq.Context()
        pool, takes_offers = pool or KvPool(SHAPE, is_shared=True), role == "decode"
        metrics = HandoffMetrics(MetricFactory(self.registry, "m", role))
        curve = CurveConfig(enabled=False)
        security = kv_security(curve, self.context, lambda why: None, takes_offers=takes_offers)
        asked = HandoffConfig(**config)
        try:
            self.transport = ZmqKvTransport(
                asked,
                metrics,
                context=self.context,
                security=security,
                places=PlaceLimits(16, 1 << 30, 1 << 20, 1024, 600.0) if takes_offers else None,
                owner=PoolOwner(asked.shared_dir, pool.sharing, pool.shape, Leases(8), role),
            )
        except ConfigError:
            self.context.term()
            raise
        self.events: queue.Queue[HandoffEvent] = queue.Queue()
        self.transport.start(self.events.put)
        self.n_asked = 0

    def ask(self, decode: End, features: tuple[str, ...] | None = None) -> HandoffEvent:
        self.n_asked += 1
        transport = decode.transport
        told = transport.features if features is None else features
        target = DecodeTarget("decode-0", transport.endpoint, features=told, kv_door=transport.door)
        self.transport.ask(target, RequestKey(1 << 40 | self.n_asked, 0), Wish(64, 10), 60.0)
        return self.events.get(timeout=60)

    def way(self, decode: End, features: tuple[str, ...] | None = None) -> str:
        """Return the way that a place is told with, by a decode worker of other features if so."""
        event = self.ask(decode, features)
        assert isinstance(event, HandoffGranted)
        told = self.transport.ways()["decode-0"]
        assert event.kv_stays == (not told.startswith("zmq"))
        return told

    def value(self, name: str, **labels: str) -> float:
        role = "decode" if self.transport.endpoint else "prefill"
        return self.registry.get_sample_value(name, {"model": "m", "role": role, **labels}) or 0.0

    def close(self) -> None:
        self.transport.close()
        self.context.term()


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., End]]:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    for module in (pool_visits, nixl_visits):
        monkeypatch.setattr(module, "PATIENCE_SECONDS", 60.0)
    ends: list[End] = []

    def make(role: str, pool: Any = None, **config: Any) -> End:
        ends.append(End(role, pool, **config))
        return ends[-1]

    yield make
    for one in ends:
        one.close()


@pytest.fixture
def nixl() -> None:
    pytest.importorskip("nixl_cu13")


@pytest.mark.usefixtures("nixl")
def test_kv_stays_where_both_have_nixl(end: Callable[..., End]) -> None:
    decode, prefill = end("decode", nixl="any"), end("prefill", nixl="any")
    assert decode.transport.features == (HANDOFF_NIXL, HANDOFF_NIXL_RANKS)
    assert prefill.way(decode) == "nixl"
    assert prefill.way(decode) == "nixl"
    assert decode.value("baton_handoff_mapped_pools") == 1, "introduced once"
    assert prefill.transport.rates()["decode-0"]["measured_bytes_per_second"] > 0


@pytest.fixture
def ranked() -> Iterator[Callable[[], Any]]:
    """Make the pool of a worker of two ranks, which is read by address alone."""
    with ExitStack() as stack:

        def make() -> Any:
            model = stack.enter_context(over(2, runs_by_itself=True))
            engine = DeviceEngine(model, options(share_kv=True, map_kv=False), time.monotonic)
            return stack.enter_context(closing(engine)).pool

        yield make


@pytest.mark.usefixtures("nixl")
def test_kv_of_ranks_stays_where_both_have_nixl(
    ranked: Callable[[], Any], end: Callable[..., End]
) -> None:
    decode = end("decode", ranked(), nixl="any")
    prefill = end("prefill", ranked(), nixl="any")
    assert prefill.way(decode) == "nixl"
    assert decode.value("baton_handoff_mapped_pools") == 1
    assert prefill.transport.rates()["decode-0"]["measured_bytes_per_second"] > 0


@pytest.mark.usefixtures("nixl")
def test_a_worker_closes_though_a_rank_takes_nothing(
    ranked: Callable[[], Any], end: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still once it has its agent, and the thread of the pulls waits to tell it more."""
    may_end, is_told = threading.Event(), threading.Event()
    monkeypatch.setattr(nixl_rank._Rank, "serve", lambda rank: may_end.wait(60))
    transport = end("decode", ranked(), nixl="any").transport
    assert transport._agents is not None
    (rank,) = transport._agents.others
    pools, was_waiting = transport._pools.nixl, list[bool]()
    assert pools is not None

    def tell() -> Iterator[None]:
        is_told.set()
        while rank._channel.send(Remove("a" * 4096)):
            pass
        yield from ()

    pools._pulls.order(tell)
    assert is_told.wait(60)
    close, thread = pools.close, pools._pulls._turns._thread
    monkeypatch.setattr(pools, "close", lambda: (close(), was_waiting.append(thread.is_alive())))
    transport.close()
    may_end.set()
    assert was_waiting == [False]


@pytest.mark.usefixtures("nixl")
def test_a_decode_worker_of_before_is_sent_kv_of_ranks_and_not_waited_for(
    ranked: Callable[[], Any], end: Callable[..., End]
) -> None:
    decode = end("decode", ranked(), nixl="any")
    prefill = end("prefill", ranked(), nixl="any")
    told = prefill.way(decode, features=(HANDOFF_NIXL,))
    assert told == "zmq: decode-0 is old: it reads no pool that ranks have parts of"
    assert decode.value("baton_handoff_mapped_pools") == 0


@pytest.mark.usefixtures("nixl")
def test_parts_are_no_pool_of_the_hosts_form(
    ranked: Callable[[], Any], end: Callable[..., End]
) -> None:
    told = end("prefill", ranked(), nixl="any").way(end("decode", nixl="any"))
    assert told == "zmq: it is in 2 parts, one of each rank"


@pytest.mark.usefixtures("nixl")
def test_a_pool_that_can_be_mapped_is_mapped(end: Callable[..., End], tmp_path: Path) -> None:
    both = {"nixl": "any", "shared_dir": str(tmp_path)}
    decode, prefill = end("decode", **both), end("prefill", **both)
    assert prefill.way(decode) == "shm"
    assert prefill.transport.rates() == {}, "nobody was introduced for nothing"


@pytest.mark.usefixtures("nixl")
def test_nixl_is_the_way_where_there_is_no_door(end: Callable[..., End], tmp_path: Path) -> None:
    decode, prefill = (
        end("decode", nixl="any"),
        end("prefill", nixl="any", shared_dir=str(tmp_path)),
    )
    assert prefill.way(decode) == "nixl"


@pytest.mark.usefixtures("nixl")
@pytest.mark.parametrize("who", ["decode", "prefill"])
def test_without_nixl_at_one_side_kv_is_sent_and_why_is_told(
    end: Callable[..., End], who: str
) -> None:
    decode = end("decode", nixl="off" if who == "decode" else "any")
    prefill = end("prefill", nixl="off" if who == "prefill" else "any")
    told = prefill.way(decode)
    assert told.startswith("zmq: ")
    assert ("handoff.nixl is off" if who == "decode" else "not used here") in told
    assert ("several ranks" in told) == (who == "decode"), "such a worker reads nothing either"


def test_what_is_required_to_go_by_rdma_fails_where_it_would_not(end: Callable[..., End]) -> None:
    decode, prefill = end("decode"), end("prefill", require="rdma")
    event = prefill.ask(decode)
    assert isinstance(event, HandoffFailed)
    assert event.code is ErrorCode.HANDOFF_REFUSED
    assert "handoff.require is 'rdma'" in event.message


def test_rdma_is_not_served_by_a_door(end: Callable[..., End], tmp_path: Path) -> None:
    decode = end("decode", shared_dir=str(tmp_path))
    prefill = end("prefill", shared_dir=str(tmp_path), require="rdma")
    assert isinstance(prefill.ask(decode), HandoffFailed)


@pytest.mark.usefixtures("nixl")
def test_nvlink_is_not_served_by_nixl(end: Callable[..., End]) -> None:
    decode, prefill = end("decode", nixl="any"), end("prefill", nixl="any", require="nvlink")
    event = prefill.ask(decode)
    assert isinstance(event, HandoffFailed)
    assert "'nvlink'" in event.message


@pytest.mark.usefixtures("nixl")
def test_a_decode_worker_that_comes_back_is_introduced_anew(end: Callable[..., End]) -> None:
    prefill = end("prefill", nixl="any")
    for _ in range(2):
        decode = end("decode", nixl="any")
        assert prefill.way(decode) == "nixl"
        decode.transport.close()


@pytest.mark.usefixtures("nixl")
def test_a_decode_worker_that_answers_no_introduction_is_sent_kv(
    end: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_visits, "PATIENCE_SECONDS", 0.01)
    decode, prefill = end("decode", nixl="any"), end("prefill", nixl="any")
    monkeypatch.setattr(decode.transport._pools.nixl, "introduced", lambda *words: None)
    assert "has not answered" in prefill.way(decode)


def test_what_is_no_introduction_is_counted_and_costs_nobody_anything(
    end: Callable[..., End],
) -> None:
    decode, prefill = end("decode"), end("prefill")
    stranger = prefill.context.socket(zmq.DEALER)
    stranger.connect(decode.transport.endpoint)
    for words in (b"", b"\xc1", bytes(100)):
        stranger.send_multipart([b"BKI1", words])
    malformed = "baton_handoff_malformed_total"
    wait_until("all are counted", lambda: decode.value(malformed), lambda count: count == 3)
    assert isinstance(prefill.ask(decode), HandoffGranted)
    stranger.close(linger=0)


def test_nixl_that_is_missing_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in nixl_agent._PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"handoff\.nixl is 'any'.*baton-worker\[nixl\]"):
        agents_of(HandoffConfig(nixl="any"), bytes(16), sharing())


def test_what_nixl_cannot_do_is_an_error_only_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch, end: Callable[..., End]
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise NixlError("no device")

    monkeypatch.setattr(nixl_agents, "NixlAgent", broken)
    with pytest.raises(ConfigError, match=r"handoff\.require is 'rdma'.*no device"):
        agents_of(HandoffConfig(nixl="rdma", require="rdma"), bytes(16), sharing())
    decode, prefill = end("decode"), end("prefill", nixl="rdma")
    assert prefill.way(decode).startswith("zmq")


@pytest.mark.fast_cases(2)
@pytest.mark.usefixtures("nixl")
@pytest.mark.parametrize("n_registered", [0, 1], ids=["pool", "beside it"])
@pytest.mark.parametrize("who", ["decode", "prefill"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_that_nixl_cannot_register_is_an_error_only_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch,
    ranked: Callable[[], Any],
    end: Callable[..., End],
    who: str,
    ranks: int,
    n_registered: int,
) -> None:
    """Of rank 0: its pool, or what it registers beside it (the leases, where their words come)."""
    pools = [ranked() if ranks == 2 else None for _ in range(3)]
    other = end("prefill" if who == "decode" else "decode", pools[0], nixl="any")
    register, count = NixlAgent.register, itertools.count()

    def broken(agent: NixlAgent, region: Region) -> None:
        if "-" not in agent.name and next(count) >= n_registered:
            raise NixlError("cannot register so many bytes")
        register(agent, region)

    monkeypatch.setattr(NixlAgent, "register", broken)
    one = end(who, pools[1], nixl="any")
    prefill, decode = (other, one) if who == "decode" else (one, other)
    told = prefill.way(decode)
    assert told.startswith("zmq: ")
    if who == "decode":
        assert "NIXL cannot be had there (see its log)" in told
        features = (HANDOFF_NIXL, HANDOFF_NIXL_RANKS)  # as of one that had it before
        assert "NIXL cannot be had there (see its log)" in prefill.way(decode, features)
    count = itertools.count()
    with pytest.raises(ConfigError, match=r"handoff\.require is 'rdma'.*so many bytes"):
        end(who, pools[2], nixl="any", require="rdma")


@pytest.mark.usefixtures("nixl")
@pytest.mark.parametrize(
    ("who", "config"),
    [
        ("prefill", {}),
        ("prefill", {"require": "rdma"}),
        ("decode", {}),
        ("decode", {"require": "rdma"}),
        ("decode", {"shared_dir": "/nowhere"}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value) or "any",
)
def test_no_rank_is_left_waiting_by_a_worker_that_asks_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
    ranked: Callable[[], Any],
    end: Callable[..., End],
    who: str,
    config: dict[str, str],
) -> None:
    """Its agent is there already when what rank 0 has beside the pool cannot be had, or no door."""
    register, registered = NixlAgent.register, list[NixlAgent]()

    def broken(agent: NixlAgent, region: Region) -> None:
        if "-" not in agent.name and registered and "shared_dir" not in config:
            raise NixlError("cannot register so many bytes")
        registered.append(agent)
        register(agent, region)

    monkeypatch.setattr(NixlAgent, "register", broken)
    pool = ranked()
    if config:
        with pytest.raises(ConfigError):
            end(who, pool, nixl="any", **config)
    else:
        assert end(who, pool, nixl="any").transport._agents is None
    assert len(registered) > 1, "those of both ranks"
    wait_until("nobody hears the other rank", rank_listeners, lambda now: not now)


@pytest.mark.parametrize("nixl", ["off", "any"])
def test_rdma_cannot_be_required_with_less(nixl: Any) -> None:
    config = ProcessConfig(
        model=None,  # type: ignore[arg-type]
        handoff=HandoffConfig(require="rdma", nixl=nixl),
    )
    with pytest.raises(ConfigError, match=rf"handoff\.nixl is '{nixl}'"):
        process._check_sharing(config)


@pytest.mark.parametrize("value", ["tcp", "rc,tcp", "all", "^rc"])
def test_an_environment_that_lets_ucx_use_tcp_is_refused(value: str) -> None:
    with pytest.raises(NixlError, match="UCX_TLS is"):
        check_environment({"UCX_TLS": value})


@pytest.mark.parametrize("value", ["", "rc,cuda_copy", "^tcp", "^tcp,shm"])
def test_one_that_does_not_is_not(value: str) -> None:
    check_environment({"UCX_TLS": value} if value else {})
