"""Names and addresses of pods come and go for ever; what prefill knows of them does not grow so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from baton_worker.engine.kv.leases import Leases
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.handoff.nixl_visits import AGAIN_SECONDS, PATIENCE_SECONDS, NixlVisits
from baton_worker.handoff.ways import MOST_TOLD, KvWays
from baton_worker.messages import HANDOFF_NIXL, DecodeTarget

SHAPE = KvShape(n_layers=1, kv_heads=1, block_size=4, head_dim=2, n_blocks=8)


class Agent:
    """Of nobody who reads."""

    def register(self, region: Any) -> None:
        pass

    def metadata(self) -> bytes:
        return b"x"


def pods(count: int) -> Iterator[DecodeTarget]:
    for n in range(count):
        address = f"tcp://10.1.{n // 250}.{n % 250}:5000"
        yield DecodeTarget(f"decode-{n}", address, features=(HANDOFF_NIXL,))


def test_decode_workers_that_never_answered() -> None:
    pool, heard = KvPool(SHAPE, is_shared=True), []
    assert pool.sharing is not None
    visits = NixlVisits(Agent(), bytes(16), "p", SHAPE, pool.sharing, Leases(8))  # type: ignore[arg-type]
    now = 0.0
    for target in pods(100):
        visits.ask(target, heard.append, now)
        visits.end_overdue(now + PATIENCE_SECONDS)
        now += PATIENCE_SECONDS + AGAIN_SECONDS + 1.0
    assert len(heard) == 100
    assert len(visits._visits) <= 2


def test_ways_to_decode_workers() -> None:
    ways = KvWays("shm", "any", None, None)
    for target in pods(MOST_TOLD + 50):
        ways.ask(target, lambda why_not: None)
    assert len(ways.told()) == MOST_TOLD
    assert f"decode-{MOST_TOLD + 49}" in ways.told()
    assert "decode-0" not in ways.told()
