"""NIXL reads KV of tensor-parallel ranks, each into its own part: bit for bit, or with why not."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Pipe
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from baton_testing.engine_bench import Bench, Reader
from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_testing.numpy_rank import COMMAND, TOTAL
from baton_testing.pool_pair import LONG, Pair, alone, said
from baton_testing.processes import stand_still, wait_until
from baton_testing.ranked_engines import benches, options, over
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import (
    ConfigError,
    EngineConfig,
    HandoffConfig,
    ModelConfig,
    ProcessConfig,
    SpeculativeConfig,
)
from baton_worker.engine.api import RankDiedError
from baton_worker.engine.backends.device.engine import DeviceEngine
from baton_worker.engine.backends.ranked.start import start_over_ranks
from baton_worker.engine.kv.sharing import GivenAwayError, PullLostError

pytest.importorskip("nixl_cu13")
from baton_testing.nixl_reader import NixlReader, ended
from baton_worker.handoff import nixl_pulls, nixl_rank, nixl_ranks
from baton_worker.handoff.nixl_agent import NixlAgent, NixlError
from baton_worker.handoff.nixl_agents import NixlAgents, agents_of
from baton_worker.handoff.nixl_pulls import NixlPool
from baton_worker.handoff.nixl_ranks import far_ranks
from baton_worker.handoff.nixl_visits import NixlVisits
from baton_worker.handoff.nixl_words import Introduction
from baton_worker.handoff.rank_words import Begun, RankChannel

THEIRS, OURS = [5, 6, 3, 9], [2, 3, 8, 7]
UNTOUCHED = [4, 5, 6]


class Prefill:
    """Prefill's side: an engine over ranks, each of which has an agent."""

    def __init__(self, engine: DeviceEngine) -> None:
        sharing, leases, pool_id = engine.kv.sharing, engine.leases, os.urandom(16)
        assert sharing is not None
        assert leases is not None
        agents = agents_of(HandoffConfig(nixl="any"), pool_id, sharing)
        assert agents is not None
        self.agents: NixlAgents = agents
        self.leases = leases
        facts = ("prefill-0", engine.kv.shape, sharing, leases)
        others = [rank.part for rank in agents.others]
        self.words: Introduction = NixlVisits(agents.own, pool_id, *facts, others).words


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def engine_over(stack: contextlib.ExitStack) -> Callable[..., DeviceEngine]:
    """Make an engine over so many NumPy ranks, whose pool is read by address alone."""

    def make(ranks: int, folder: Any = TINY_MODEL) -> DeviceEngine:
        model = stack.enter_context(over(ranks, folder, runs_by_itself=True))
        engine = DeviceEngine(model, options(share_kv=True, map_kv=False), time.monotonic)
        return stack.enter_context(contextlib.closing(engine))

    return make


@pytest.fixture
def prefill_of(stack: contextlib.ExitStack) -> Callable[[DeviceEngine], Prefill]:
    def make(engine: DeviceEngine) -> Prefill:
        prefill = Prefill(engine)
        stack.callback(prefill.agents.close)
        return prefill

    return make


@pytest.fixture
def reader_of(stack: contextlib.ExitStack) -> Callable[..., NixlReader]:
    def make(engine: DeviceEngine, **given: float) -> NixlReader:
        assert engine.kv.sharing is not None
        reader = NixlReader(engine.kv.sharing, **given)
        stack.callback(reader.close)
        return reader

    return make


def filled(engine: DeviceEngine, blocks: list[int], seed: int) -> np.ndarray[Any, Any]:
    """Return what blocks hold from now on, on every rank."""
    (form,) = engine.pool.shape.arrays(len(blocks))
    values = np.random.default_rng(seed).normal(size=form.shape).astype(form.dtype)
    engine.pool.import_blocks(blocks, [values])
    engine.pool.begin_export(blocks, len(blocks) * form.shape[-2])()  # it has come
    return values


def held(engine: DeviceEngine, blocks: list[int]) -> np.ndarray[Any, Any]:
    (found,) = engine.pool.begin_export(blocks, len(blocks) * engine.pool.shape.block_size)()
    return found.view(np.uint32).copy()


def pull(engine: DeviceEngine, pool: NixlPool, lease: tuple[int, int] | None = None) -> Any:
    assert engine.kv.sharing is not None
    return pool.pull(engine.kv.sharing, OURS, THEIRS, lease)


GROUPS = [(2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (4, 4), (1, 4), (4, 1)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("prefill", "decode"), GROUPS)
@pytest.mark.parametrize("form", ["heads", "compressed"])
def test_the_same_bits_arrive_whoever_holds_the_heads(
    make_checkpoint: Callable[..., Any],
    engine_over: Callable[..., DeviceEngine],
    prefill_of: Callable[[DeviceEngine], Prefill],
    reader_of: Callable[..., NixlReader],
    prefill: int,
    decode: int,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model has two KV heads, so that of four ranks two have the same one."""
    monkeypatch.setattr(nixl_pulls, "_MOST_PIECES", 5)
    folder = make_checkpoint("deepseek_v3").path if form == "compressed" else TINY_MODEL
    source, target = engine_over(prefill, folder), engine_over(decode, folder)
    reader, owner = reader_of(target), prefill_of(source)
    assert len(owner.words.parts) == prefill
    pool = reader.known(owner.words)
    before = held(target, UNTOUCHED)
    for seed in (1, 2):
        values = filled(source, THEIRS, seed)
        ended(pull(target, pool, owner.leases.begin()[1:])).check()
        np.testing.assert_array_equal(held(target, OURS), values.view(np.uint32))
    np.testing.assert_array_equal(held(target, UNTOUCHED), before)
    n_bytes = 2 * len(OURS) * source.pool.shape.block_bytes
    labels = {"transport": "nixl", "prefill": "prefill-0"}
    assert reader.value("baton_handoff_pulled_bytes_total", **labels) == n_bytes
    assert pool.rates.measured > 0
    assert pool.rates.expected > 0


def test_what_was_given_away_meanwhile_is_refused(
    engine_over: Callable[..., DeviceEngine],
    prefill_of: Callable[[DeviceEngine], Prefill],
    reader_of: Callable[..., NixlReader],
) -> None:
    target, owner = engine_over(2), prefill_of(engine_over(2))
    pool = reader_of(target).known(owner.words)
    lease = owner.leases.begin()
    lease.end()
    with pytest.raises(GivenAwayError):
        ended(pull(target, pool, lease[1:])).check()
    ended(pull(target, pool, owner.leases.begin()[1:])).check()
    assert not pool.why_lost, "the pool is as good as before"


@pytest.mark.slow
def test_each_rank_forgets_the_agents_of_who_is_gone(
    engine_over: Callable[..., DeviceEngine],
    prefill_of: Callable[[DeviceEngine], Prefill],
    reader_of: Callable[..., NixlReader],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefill workers come and go for ever: it does so before it learns of the next one."""
    forgotten: list[tuple[str, str]] = []
    remove = NixlAgent.remove

    def removing(agent: NixlAgent, name: str) -> None:
        remove(agent, name)
        forgotten.append((agent.name, name))

    monkeypatch.setattr(NixlAgent, "remove", removing)
    reader, source = reader_of(engine_over(2)), engine_over(2)
    gone = prefill_of(source).words
    reader.known(gone)
    reader.pools.ended(1)
    gc.collect()  # nobody knows its pool any more
    reader.known(prefill_of(source).words)
    ours = reader.agents.own.name
    assert sorted(forgotten) == [(ours, gone.agent), (f"{ours}-1", f"{gone.agent}-1")]


def test_what_was_sent_and_given_up_does_not_land_on_what_is_read(
    engine_over: Callable[..., DeviceEngine],
    prefill_of: Callable[[DeviceEngine], Prefill],
    reader_of: Callable[..., NixlReader],
) -> None:
    """Other ranks write what is sent beside their steps: a read into the same blocks waits."""
    target, source = engine_over(2), engine_over(2)
    pool = reader_of(target).known(prefill_of(source).words)
    values = filled(source, THEIRS, 1)
    (member,) = target.model.team.followers._members  # type: ignore[union-attr]
    may_go_on = threading.Event()
    member.model.device.launch(lambda: may_go_on.wait(60))
    (form,) = target.pool.shape.arrays(len(OURS))
    target.pool.import_blocks(OURS, [np.zeros(form.shape, form.dtype)])
    followers = target._followers
    assert followers is not None
    meet = followers.meet
    followers.meet = lambda: (may_go_on.set(), meet())[1]  # type: ignore[method-assign]
    ended(pull(target, pool)).check()
    may_go_on.set()
    np.testing.assert_array_equal(held(target, OURS), values.view(np.uint32))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("decode", [1, 2])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"metadata": b"nixl"}, "take another agent's metadata"),
        ({"address": 4096}, "cannot read"),
        ({"n_bytes": 4096}, "it has 4096 bytes"),
    ],
)
def test_what_is_not_true_of_one_rank_is_refused_and_the_truth_is_not(
    engine_over: Callable[..., DeviceEngine],
    prefill_of: Callable[[DeviceEngine], Prefill],
    reader_of: Callable[..., NixlReader],
    decode: int,
    changes: dict[str, Any],
    told: str,
) -> None:
    """Of a prefill worker of two ranks the second one's part is said wrongly."""
    target, owner = engine_over(decode), prefill_of(engine_over(2))
    reader = reader_of(target)
    (other,) = owner.words.parts[1:]
    wrong = msgspec.structs.replace(other, **changes)
    said_so = reader.introduced(msgspec.structs.replace(owner.words, others=(wrong,)))
    assert told in said_so.why_not
    assert ("rank 1: " in said_so.why_not) == (decode == 2 and "n_bytes" not in changes)
    ended(pull(target, reader.known(owner.words))).check()


def test_a_rank_that_cannot_have_an_agent_leaves_the_worker_without(
    engine_over: Callable[..., DeviceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing = engine_over(2).kv.sharing
    assert sharing is not None

    def broken(*arguments: Any, **options: Any) -> None:
        raise NixlError("no device")

    monkeypatch.setattr(nixl_rank, "NixlAgent", broken)
    assert agents_of(HandoffConfig(nixl="any"), bytes(16), sharing) is None
    demanded = HandoffConfig(nixl="any", require="rdma")
    with pytest.raises(ConfigError, match=r"handoff\.require is 'rdma'.*rank 1: no device"):
        agents_of(demanded, bytes(16), sharing)


def test_a_rank_whose_agent_is_not_there_yet_obeys_orders(
    engine_over: Callable[..., DeviceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX may take long to find its ways, and rank 0 goes on without."""
    engine, may_go_on, over_at_last = engine_over(2), threading.Event(), threading.Event()
    came_to_be: list[str] = []

    def slow(name: str, **_: Any) -> None:
        may_go_on.wait(60)
        came_to_be.append(name)
        over_at_last.set()
        raise NixlError("too late")

    monkeypatch.setattr(nixl_rank, "NixlAgent", slow)
    monkeypatch.setattr(nixl_ranks, "_BEGIN_SECONDS", 0.0)
    assert agents_of(HandoffConfig(nixl="any"), bytes(16), engine.kv.sharing) is None
    values = filled(engine, OURS, 1)
    np.testing.assert_array_equal(held(engine, OURS), values.view(np.uint32))
    assert not came_to_be, "each rank has had its part, and gave it back"
    may_go_on.set()
    assert over_at_last.wait(60)


def test_ranks_have_one_deadline_together_to_have_their_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three that take 25 s each are too slow for 60, though none of them is."""
    now, asked = [100.0], list[float]()

    def heard(channel: RankChannel, most_seconds: float) -> bool:
        asked.append(most_seconds)
        now[0] += min(25.0, most_seconds)
        return most_seconds >= 25.0

    begun = Begun(b"m", 4096, 4096, None)
    monkeypatch.setattr(nixl_ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(RankChannel, "has_heard", heard)
    monkeypatch.setattr(RankChannel, "answer", lambda channel: begun)
    ways = [Pipe() for _ in range(3)]
    with pytest.raises(NixlError, match="rank 3 of this worker is gone, or has no agent yet"):
        far_ranks([near for near, _ in ways], "agent", is_rdma_only=False)
    assert asked == [60.0, 35.0, 10.0]


class NixlPair(Pair):
    """See `Pair`: what it reads, NIXL reads."""

    def __init__(self, make: Callable[..., Any], stack: contextlib.ExitStack, **given: Any) -> None:
        self._stack = stack
        super().__init__(make, **given)

    def introduced(self) -> NixlPool:
        owner = Prefill(self.prefill.engine)
        self._stack.callback(owner.agents.close)
        reader = NixlReader(self.decode.engine.kv.sharing)
        self._stack.callback(reader.close)
        return reader.known(owner.words)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (1, 2), (4, 2), (2, 1)])
def test_what_is_read_while_it_is_computed_says_the_same(
    stack: contextlib.ExitStack, prefill: int, decode: int
) -> None:
    """In groups that are alike bit for bit what one worker says, else to the rounding of sums."""
    limits = {"n_draft": 3}
    models = [stack.enter_context(over(n, runs_by_itself=True)) for n in (prefill, decode)]
    make = benches(*models)
    pair = NixlPair(make, stack, **limits)
    keys = [pair.submit(number, LONG[: 150 - number]) for number in (1, 2, 3)]
    while pair.prefill.engine.has_work():
        for handoff in pair.compute():
            pair.offer(handoff)
    pair.finish()
    assert sum(pair.pulled()) == 3 * 10
    pair.check_nothing_is_left()
    for number, key in zip((1, 2, 3), keys, strict=True):
        ours = said(pair.decode, key)
        theirs = alone(make, number, LONG[: 150 - number], **limits)
        assert ours[0] == theirs[0]
        if prefill == decode:
            assert ours == theirs
        np.testing.assert_allclose(ours[1], theirs[1], rtol=0, atol=5e-5)


@pytest.fixture
def processes(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., DeviceEngine]:
    """Make an engine over two ranks, of which the second is a process. Nothing moves out of one
    that stands still.
    """
    monkeypatch.setenv("UCX_TLS", "tcp")
    chosen = ProcessConfig(
        model=ModelConfig(str(TINY_MODEL)),
        speculative=SpeculativeConfig("none", 0),
        engine=EngineConfig(
            device="gpu",
            dtype="float32",
            tensor_parallel_size=2,
            max_model_len=96,
            max_running=2,
            kv_blocks=30,
        ),
        handoff=HandoffConfig(nixl="any"),
    )

    def opened() -> tuple[NumpyDevice, NumpyKernels]:
        device = stack.enter_context(contextlib.closing(NumpyDevice(TOTAL, runs_by_itself=True)))
        return device, NumpyKernels(device)

    def make(on_death: Callable[[RankDiedError], None] = lambda error: None) -> DeviceEngine:
        given = (time.monotonic, on_death, lambda rank: NumpyDevice(), COMMAND)
        engine = start_over_ranks(chosen, opened, *given)
        return stack.enter_context(contextlib.closing(engine))

    return make


@pytest.mark.e2e
def test_kv_goes_from_the_processes_of_one_worker_into_those_of_another(
    processes: Callable[..., DeviceEngine], stack: contextlib.ExitStack
) -> None:
    """What is read while prompts are computed says what one worker of two ranks says."""

    def make(reader: Reader | None = None, **_: Any) -> Bench:
        return Bench(processes(), reader or Reader())

    pair = NixlPair(make, stack)
    keys = [pair.submit(number, LONG[number:70]) for number in (1, 2)]
    while pair.prefill.engine.has_work():
        for handoff in pair.compute():
            pair.offer(handoff)
    pair.finish()
    assert sum(pair.pulled()) == 2 * 5
    pair.check_nothing_is_left()
    by_itself = benches(stack.enter_context(over(2)))
    for number, key in zip((1, 2), keys, strict=True):
        assert said(pair.decode, key) == alone(by_itself, number, LONG[number:70])


def second_rank(engine: DeviceEngine) -> int:
    (pid,) = engine.model.team.followers.pids  # type: ignore[union-attr]
    return int(pid)


@pytest.mark.slow
def test_a_prefill_rank_that_stands_still_delays_and_one_that_dies_ends_a_read(
    processes: Callable[..., DeviceEngine],
    engine_over: Callable[..., DeviceEngine],
    prefill_of: Callable[[DeviceEngine], Prefill],
    reader_of: Callable[..., NixlReader],
) -> None:
    source, target = processes(), engine_over(2)
    reader = reader_of(target, deadline_seconds=0.05)
    owner = prefill_of(source)
    pool = reader.known(owner.words)
    values = filled(source, THEIRS, 1)
    stand_still(second_rank(source))
    begun = pull(target, pool)
    wait_until("it is too late", begun.is_lost, bool)
    with pytest.raises(PullLostError, match="has not come"):
        begun.check()
    assert not begun.has_come(), "what comes late is still written, on one rank of two"
    os.kill(second_rank(source), signal.SIGCONT)
    ended(begun)
    np.testing.assert_array_equal(held(target, OURS), values.view(np.uint32))
    assert not pool.why_lost
    stand_still(second_rank(source))
    begun = pull(target, pool)
    os.kill(second_rank(source), signal.SIGKILL)
    assert reader.hears_of_a_loss()
    with pytest.raises(PullLostError, match="prefill-0"):
        ended(begun).check()
    assert reader.value("baton_handoff_pools_lost_total") == 1


@pytest.mark.slow
def test_a_decode_rank_that_dies_ends_its_reads(
    processes: Callable[..., DeviceEngine],
    engine_over: Callable[..., DeviceEngine],
    prefill_of: Callable[[DeviceEngine], Prefill],
    reader_of: Callable[..., NixlReader],
) -> None:
    """The worker ends with it; until then nobody takes for here what is not."""
    source, target = engine_over(2), processes()
    reader = reader_of(target)
    pool = reader.known(prefill_of(source).words)
    stand_still(second_rank(target))
    begun = pull(target, pool)
    os.kill(second_rank(target), signal.SIGKILL)
    with pytest.raises(PullLostError, match="rank 1 of this worker is gone"):
        ended(begun).check()
    assert "rank 1 of this worker is gone" in reader.hears_of_a_loss()


@pytest.mark.slow
def test_a_rank_whose_thread_dies_is_a_rank_that_dies(
    processes: Callable[..., DeviceEngine], prefill_of: Callable[[DeviceEngine], Prefill]
) -> None:
    """Else its reads would neither come nor fail, and their blocks would be nobody's for ever."""
    told: queue.SimpleQueue[RankDiedError] = queue.SimpleQueue()
    prefill = prefill_of(processes(told.put))
    prefill.agents.others[0]._channel._connection.send_bytes(b"no message")
    assert "ended with code 70" in str(told.get(timeout=60))
