"""A steady load on simulated processes while a test breaks them, judged when it is over."""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton_faults import records
from baton_faults.fleet import MODEL, Fleet, Start, fleet, sim_text
from baton_faults.history import WHOLE, endings, told, violations
from baton_faults.load import Ask, Clients, Load, Log
from baton_worker.config import EngineConfig, SimConfig

N_OPEN = 16
PACE = SimConfig(prefill_token_seconds=20e-6, decode_step_seconds=0.02)
ENGINE = EngineConfig(device="sim", sim=PACE)


def mixed_ask(number: int) -> Ask:
    """Return the n-th request: prompts and outputs of many lengths, no two alike."""
    rng = random.Random(number)
    prompt = tuple(rng.randrange(8, 512) for _ in range(rng.choice([6, 20, 60])))
    return Ask(prompt, rng.choice([1, 10, 30, 80]))


def journal_of(folder: Path) -> Path:
    """Return where the gateway's records are written down."""
    return folder / "journal"


@contextlib.contextmanager
def recorded_fleet(folder: Path, **options: Any) -> Iterator[Fleet]:
    """Start two prefills, two decodes and a gateway whose records are written down."""

    def recorded(name: str, start: Start) -> Start:
        if name != "gateway":
            return start
        return replace(start, program=("-m", "baton_faults.records", str(journal_of(folder))))

    plain = {"prefill": 2, "decode": 2, "num_speculative_tokens": 2, "engine": ENGINE}
    with fleet(folder, recorded, **{**plain, **options}) as running:
        yield running


def clients_of(running: Fleet, url: str = "") -> Clients:
    """Return clients of simulated workers, who know what they must be told.

    `url`: of another gateway than the first.
    """
    text = sim_text()
    said = functools.cache(lambda ask: text.after(ask.prompt, ask.n_tokens))
    return Clients(url or running.url, MODEL.name, said, Log())


def assert_right(running: Fleet, log: Log) -> None:
    """Judge what clients saw."""
    found = violations(log.events, log.wanted)
    assert not found, f"{told(found)}\n{running.logs()}"


@contextlib.contextmanager
def steady(running: Fleet, at_least: int, n_open: int = N_OPEN, first: int = 0) -> Iterator[Load]:
    """Run a load; when the test is done with its faults, let it end and judge what clients saw.

    `first`: number of the first request, so that a second load says something else.
    """
    clients = clients_of(running)
    load = Load(clients, lambda number: mixed_ask(first + number), n_open, at_least)
    load.start()
    yield load
    try:
        load.finish()
    except AssertionError as problem:
        problem.add_note(f"ended: {running.ended()}\n{running.logs()}")
        raise
    assert_right(running, load.log)


def wait_served(load: Load, more: int) -> None:
    """Wait until so many more requests were served, and all that are open now: the load goes on.

    A request is tried on two workers and no more, so the one that had the last fault must be over
    before the next comes.
    """
    wanted, before = load.served + more, load.open
    while load.served < wanted or load.open & before:
        assert load.error is None, repr(load.error)
        time.sleep(0.02)


def ends_of(load: Load) -> Counter[str]:
    """Return how often each way to end occurred."""
    return endings(load.log.events)


def assert_whole_at_once(load: Load | Clients) -> None:
    """No client was told an error or had to ask again."""
    ends = endings(load.log.events)
    assert set(ends) == {WHOLE}, (ends, list(load.log.problems.items())[:10])


def assert_records_are_right(running: Fleet, *loads: Load) -> None:
    """Judge what the gateway's link gave it."""
    texts = [text for load in loads for text in load.log.wanted.values()]
    taken = records.read(journal_of(running.folder))
    assert len(taken) > len(texts), "each request has a first token and more"
    found = records.check(taken, texts)
    assert not found, told(found)


@dataclass(frozen=True)
class Footprint:
    """What a process holds while it has nothing to do, and the most memory that it ever had."""

    descriptors: int
    resident_bytes: int
    peak_bytes: int


def footprint(running: Fleet, name: str) -> Footprint:
    """Return what an idle process holds."""
    running.wait_empty()
    process = running[name]
    return Footprint(process.n_descriptors(), process.resident_bytes(), process.peak_bytes())


def assert_flat(before: Footprint, after: Footprint, spare_bytes: int = 48 << 20) -> None:
    """A process holds no more than before and never did, but for the allocator's slack."""
    assert after.descriptors <= before.descriptors + 4, (before, after)
    assert after.resident_bytes <= before.resident_bytes + spare_bytes, (before, after)
    assert after.peak_bytes <= before.peak_bytes + spare_bytes, (before, after)
