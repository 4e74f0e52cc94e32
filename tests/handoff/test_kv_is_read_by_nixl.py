"""Another process's KV pool is read by NIXL: bit for bit, or with the reason why not."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.engine.kv.sharing import GivenAwayError, PullLostError, UnfitKvError

pytest.importorskip("nixl_cu13")
from baton_testing.nixl_owner import Owner, values
from baton_testing.nixl_reader import NixlReader, ended
from baton_testing.processes import wait_until
from baton_worker.handoff.nixl_agent import NixlAgent
from baton_worker.handoff.nixl_pulls import _SCRATCH_WORDS, NixlPool, NixlPull

SHAPE = KvShape(n_layers=2, kv_heads=2, block_size=16, head_dim=32, n_blocks=40)
THEIRS, OURS = [3, 4, 5, 9, 30, 31, 2], [20, 21, 22, 7, 6, 5, 39]
APART = ("unshare", "--pid", "--ipc", "--fork", "--kill-child")


class Decode(NixlReader):
    """Decode's side: its pool, and what it knows of others'."""

    def __init__(self, deadline_seconds: float = 60.0) -> None:
        self.pool = KvPool(SHAPE, is_shared=True)
        assert self.pool.sharing is not None
        super().__init__(self.pool.sharing, deadline_seconds)

    def pull(self, pool: NixlPool, lease: tuple[int, int] | None = None) -> NixlPull:
        assert self.pool.sharing is not None
        return pool.pull(self.pool.sharing, OURS, THEIRS, lease)

    def holds(self, seed: int) -> bool:
        arrays = values(SHAPE, seed)
        both = (self.pool.keys, arrays[::2]), (self.pool.values, arrays[1::2])
        pairs = [pair for own, some in both for pair in zip(own, some, strict=True)]
        return all(np.array_equal(own[OURS], theirs[THEIRS]) for own, theirs in pairs)


@pytest.fixture(params=["", "tcp"], ids=["any way", "tcp alone"])
def ucx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    if request.param:
        monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way on which nothing moves while the owner stands still."""
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def owners() -> Iterator[Callable[..., Owner]]:
    made: list[Owner] = []

    def make(under: tuple[str, ...] = ()) -> Owner:
        made.append(Owner(SHAPE, under))
        return made[-1]

    yield make
    for owner in made:
        if owner.process.poll() is None:
            owner.kill()


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    """One that lives through all tests that kill none."""
    owner = Owner(SHAPE, environment={"UCX_NET_DEVICES": "lo"})
    yield owner
    owner.kill()


@pytest.fixture
def decode(request: pytest.FixtureRequest) -> Iterator[Decode]:
    for name in ("ucx", "tcp"):  # before the agent is made, which reads the environment
        if name in request.fixturenames:
            request.getfixturevalue(name)
    decode = Decode()
    yield decode
    decode.close()


@pytest.mark.usefixtures("ucx")
def test_blocks_are_those_of_the_owner_bit_for_bit(decode: Decode, owner: Owner) -> None:
    pool = decode.known(owner.words)
    for seed in (1, 2):
        owner.say("fill", seed)
        ended(decode.pull(pool, owner.lend())).check()
        assert decode.holds(seed)
    labels = {"transport": "nixl", "prefill": "prefill-0"}
    n_bytes = 2 * len(OURS) * SHAPE.block_bytes
    assert decode.value("baton_handoff_pulled_bytes_total", **labels) == n_bytes
    assert decode.value("baton_handoff_pulling_seconds_total", **labels) > 0
    assert decode.value("baton_handoff_mapped_pools") == 1
    assert pool.rates.expected > 0
    assert pool.rates.measured > 0


@pytest.mark.usefixtures("ucx")
def test_what_was_given_away_meanwhile_is_refused(decode: Decode, owner: Owner) -> None:
    pool = decode.known(owner.words)
    slot, serial = owner.lend()
    owner.say("end", slot)
    with pytest.raises(GivenAwayError):
        ended(decode.pull(pool, (slot, serial))).check()
    assert owner.lend() == (slot, serial + 1)
    with pytest.raises(GivenAwayError):
        ended(decode.pull(pool, (slot, serial))).check()
    with pytest.raises(GivenAwayError, match="no lease 512"):
        ended(decode.pull(pool, (512, 1))).check()
    ended(decode.pull(pool, (slot, serial + 1))).check()
    assert not pool.why_lost, "the pool is as good as before"


@pytest.mark.usefixtures("ucx")
def test_a_lease_is_looked_at_where_all_blocks_came_before(decode: Decode, owner: Owner) -> None:
    pool = decode.known(owner.words)
    lease = owner.lend()
    assert decode.pool.sharing is not None
    ended(pool.pull(decode.pool.sharing, [], [], lease)).check()
    owner.say("end", lease[0])
    with pytest.raises(GivenAwayError):
        ended(pool.pull(decode.pool.sharing, [], [], lease)).check()


@pytest.mark.fast_cases(1)
@pytest.mark.usefixtures("ucx")
def test_values_that_no_pool_may_hold_are_refused(
    decode: Decode, owners: Callable[..., Owner]
) -> None:
    owner = owners()
    pool = decode.known(owner.words)
    owner.say("fill", 1)
    owner.say("spoil", THEIRS[-1])
    with pytest.raises(UnfitKvError, match="NaN"):
        ended(decode.pull(pool)).check()


@pytest.mark.slow
@pytest.mark.usefixtures("tcp")
def test_an_owner_that_is_killed_during_a_transfer_ends_it_with_the_reason(
    decode: Decode, owners: Callable[..., Owner]
) -> None:
    owner = owners()
    pool = decode.known(owner.words)
    lease = owner.lend()
    owner.freeze()
    pulls = [decode.pull(pool, lease) for _ in range(3)]
    assert not any(pull.has_come() for pull in pulls)
    owner.kill()
    assert decode.hears_of_a_loss()
    for pull in pulls:
        with pytest.raises(PullLostError, match="prefill-0"):
            ended(pull).check()
    assert decode.pools.find(owner.words.pool_id) is None
    assert decode.value("baton_handoff_mapped_pools") == 0
    assert decode.value("baton_handoff_pools_lost_total") == 1
    with pytest.raises(PullLostError):
        ended(decode.pull(pool, lease)).check()
    another = owners()
    another.say("fill", 7)
    ended(decode.pull(decode.known(another.words), another.lend())).check()
    assert decode.holds(7)


@pytest.mark.usefixtures("tcp")
def test_a_pull_that_takes_too_long_is_lost_and_its_blocks_are_not_free_before_it_is_over(
    owners: Callable[..., Owner],
) -> None:
    decode, owner = Decode(deadline_seconds=0.05), owners()
    owner.say("fill", 3)
    pool = decode.known(owner.words)
    owner.freeze()
    pull = decode.pull(pool)
    wait_until("it is too late", pull.is_lost, bool)
    with pytest.raises(PullLostError, match="has not come"):
        pull.check()
    assert not pull.has_come(), "what comes late is still written"
    owner.thaw()
    ended(pull)
    assert decode.holds(3), "it was"
    assert not pool.why_lost
    decode.close()


@pytest.mark.usefixtures("ucx")
def test_an_owner_that_introduces_itself_again_is_the_same(decode: Decode, owner: Owner) -> None:
    pool = decode.known(owner.words)
    decode.pools.ended(1)
    assert decode.pools.find(owner.words.pool_id) is None
    assert decode.value("baton_handoff_mapped_pools") == 0
    assert not decode.value(
        "baton_handoff_pulled_bytes_total", transport="nixl", prefill="prefill-0"
    )
    ended(decode.pull(pool, owner.lend())).check()  # of a handoff that was under way
    assert decode.introduced(owner.words, connection=2).why_not == ""
    assert decode.pools.find(owner.words.pool_id) is pool
    decode.pools.ended(1)
    assert decode.pools.find(owner.words.pool_id) is pool, "that was another connection"
    owner.say("fill", 4)
    ended(decode.pull(pool, owner.lend())).check()
    assert decode.holds(4)


@pytest.mark.usefixtures("tcp")
def test_two_introductions_at_once_have_the_same_end(decode: Decode, owner: Owner) -> None:
    for connection in (1, 2):
        decode.pools.introduced(owner.words, connection, decode.told.append)
    while decode.value("baton_handoff_mapped_pools") == 0:
        decode.calls.get(timeout=60)()
    pool = decode.pools.find(owner.words.pool_id)
    assert pool is not None
    assert pool.rates.measured > 0
    decode.pools.ended(1)
    assert decode.pools.find(owner.words.pool_id) is pool, "it was said over the second, too"
    ended(decode.pull(pool, owner.lend())).check()


@pytest.mark.slow
@pytest.mark.usefixtures("ucx")
def test_agents_of_pools_that_nobody_knows_any_more_are_forgotten(
    decode: Decode, owners: Callable[..., Owner]
) -> None:
    for connection in range(3):
        owner = owners()
        assert decode.introduced(owner.words, connection).why_not == ""
        owner.kill()
        decode.pools.ended(connection)
    last = owners()
    decode.known(last.words)
    assert set(decode.pools._loaded) == {last.words.agent}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"metadata": b"nixl"}, "take another agent's metadata"),
        ({"pool_id": bytes(16)}, "not named by its pool"),
        ({"block_size": 8}, "block_size is 8"),
        ({"n_bytes": 4096}, "it has 4096 bytes"),
        ({"lease_address": 4096}, "cannot read 1 pieces"),
        ({"address": 4096}, "cannot read 1 pieces"),
        ({"dtype": "bfloat16"}, "form is 'bfloat16'"),
    ],
)
def test_an_introduction_that_is_not_true_is_refused(
    decode: Decode, owner: Owner, changes: dict[str, Any], told: str
) -> None:
    said = decode.introduced(msgspec.structs.replace(owner.words, **changes))
    assert told in said.why_not
    assert decode.value("baton_handoff_pools_refused_total", reason="unfit") == 1
    assert decode.value("baton_handoff_mapped_pools") == 0
    decode.known(owner.words)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("seconds", "n_kept"), [(3600.0, 1), (0.0, 0)])
def test_a_word_that_a_failed_read_may_still_write_is_nobodys_for_a_while(
    decode: Decode, owner: Owner, monkeypatch: pytest.MonkeyPatch, seconds: float, n_kept: int
) -> None:
    monkeypatch.setattr("baton_worker.handoff.nixl_pulls._SETTLING_SECONDS", seconds)
    free = decode.pools._pulls._free_words
    decode.introduced(msgspec.structs.replace(owner.words, lease_address=4096))
    decode.known(owner.words)
    wait_until("it rests", lambda: len(free), lambda count: count == _SCRATCH_WORDS - n_kept)


@pytest.mark.slow
@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("unshare"), reason="namespaces need root and unshare"
)
def test_an_owner_in_a_process_namespace_of_its_own_is_read_and_the_worse_way_is_told(
    monkeypatch: pytest.MonkeyPatch, owners: Callable[..., Owner]
) -> None:
    """UCX says nothing of it: what it expects of the way that it has chosen does."""
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    if subprocess.run([*APART, "true"], check=False).returncode:
        pytest.skip("no namespaces may be made here")
    decode = Decode()
    beside, apart = owners(), owners(APART)
    rates = {}
    for owner in (beside, apart):
        owner.say("fill", 5)
        pool = decode.known(owner.words)
        ended(decode.pull(pool, owner.lend())).check()
        assert decode.holds(5)
        rates[owner] = pool.rates.expected
    assert 0 < rates[apart] < rates[beside] / 10
    decode.close()


@pytest.mark.slow
def test_no_agent_for_rdma_alone_is_made_where_there_is_none() -> None:
    from baton_worker.handoff.nixl_agent import NixlError

    if Path("/sys/class/infiniband").exists():
        pytest.skip("this machine has RDMA")
    with pytest.raises(NixlError, match="cannot make an agent"):
        NixlAgent("rdma", is_rdma_only=True)
