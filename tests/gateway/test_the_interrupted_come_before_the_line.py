"""Who was interrupted has room before who waits to begin, however many were, and no line starves.

The queue and the line of the interrupted are real; places are the test's. Each of those ahead can
use places of its own kind alone, the line any. A place that nobody takes stays.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton_worker.gateway.metrics import GatewayMetrics
from baton_worker.gateway.serving.admission_queue import AdmissionQueue, Lack
from baton_worker.gateway.serving.slots import Slots
from baton_worker.gateway.serving.waiting_retries import Tried, WaitingRetries
from baton_worker.metrics import MetricFactory

TRIES, GLANCES, STARTS = 16, 256, 8
IN_LINE = 24


class One(NamedTuple):
    """An interrupted request, which only a place of its kind is of use to."""

    number: int
    kind: int


class Ahead:
    """Those who were interrupted.

    `n_looks`: how often each was looked at. `unseen`: who has not been since a place came.
    """

    def __init__(self, places):
        self.line, self.places = WaitingRetries(), places
        self.waiting, self.n_looks, self.unseen, self.served = {}, Counter(), set(), []
        self.n_tries = self.n_glances = 0
        self.lacking = set()

    def __len__(self):
        return len(self.line)

    def join(self, kind):
        one = One(len(self.waiting) + len(self.served), kind)
        self.waiting[one.number] = one
        self.line.join(one)

    def serve(self):
        self.n_tries = self.n_glances = 0
        self.lacking.clear()
        return self.line.serve(self.begin)

    def begin(self, one):
        self.n_looks[one.number] += 1
        self.unseen.discard(one.number)
        if one.kind in self.lacking:
            self.n_glances += 1
            return Tried.NOT
        self.n_tries += 1
        if not self.places[one.kind]:
            self.lacking.add(one.kind)
            return Tried.IN_VAIN
        self.places[one.kind] -= 1
        self.served.append(self.waiting.pop(one.number))
        self.lacking.clear()
        return Tried.OVER


class World:
    """A line that never ends behind those who were interrupted.

    `looks`: the turns in which the line looked. `lost`: for each of those ahead, at which turns the
    line took a place that it had not been looked at for, and how often all had been by then.
    """

    def __init__(self, kinds):
        self.places = Counter()
        self.ahead = Ahead(self.places)
        metrics = GatewayMetrics(MetricFactory(CollectorRegistry(), "tiny", "gateway"))
        slots = Slots(10_000, 10_000)
        clock = asyncio.get_running_loop().time
        self.queue = AdmissionQueue(slots, metrics, 1000.0, clock, self.ahead)
        self.turn, self.looks, self.lost, self.n_starts = 0, [], {}, Counter()
        self.tasks = []
        for kind in kinds:
            self.ahead.join(kind)

    async def begin(self):
        """Fill the line; all have looked when this is over."""
        await self.turns(2 * len(self.ahead) + 4)
        self.looks.clear()
        self.turn = 0

    def take(self, kept):
        """Begin one of the line: with a place that is new to somebody ahead, if there is one."""
        self.looks.append(self.turn)
        self.n_starts[self.turn] += 1
        found = [kind for kind, n in self.places.items() if n]
        if not found:
            return Lack(is_for_all=True)
        unseen = {number: self.ahead.waiting[number].kind for number in self.ahead.unseen}
        place = max(found, key=lambda kind: kind in unseen.values())
        self.places[place] -= 1
        for number, kind in unseen.items():
            if kind == place:
                looks = {one: self.ahead.n_looks[one] for one in self.ahead.waiting}
                self.lost.setdefault(number, {})[self.turn] = looks
        return "made"

    def give(self, kind):
        self.places[kind] += 1
        self.ahead.unseen |= set(self.ahead.waiting)
        self.queue.room()

    async def turns(self, n=1):
        for _ in range(n):
            while len(self.queue) + self.n_new() < IN_LINE:
                asked = self.queue.begin("c", 1, self.take, lambda made: None, lambda: "any")
                self.tasks.append(asyncio.create_task(asked))
            self.turn += 1
            self.ahead.n_tries = self.ahead.n_glances = 0
            await asyncio.sleep(0)
            assert self.ahead.n_tries <= TRIES
            assert self.ahead.n_glances <= GLANCES
            assert self.n_starts[self.turn] <= STARTS + 1, "one that comes may begin at once"

    def n_new(self):
        return sum(not task.done() for task in self.tasks) - len(self.queue)

    async def end(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def replay(kinds, gifts, n_turns):
    """Return a world after as many turns, in which `gifts[turn]` came just before that turn."""
    world = World(kinds)
    await world.begin()
    for turn in range(1, n_turns + 1):
        for kind in gifts.get(turn, ()):
            world.give(kind)
        await world.turns()
    await world.end()
    return world


@pytest.mark.parametrize("n_ahead", [1, 16, 17, 33, 64])
async def test_the_last_of_them_has_room_that_comes_just_before_each_turn_of_the_line(n_ahead):
    """Whoever gives the room knows when the line will look: it has seen the same before."""
    kinds, gifts = list(range(n_ahead)), {1: [-1]}  # the first is of no use to any of them
    for n_gifts in range(12):
        world = await replay(kinds, gifts, 40 * (n_gifts + 1))
        if world.ahead.served:
            break
        next_look = next(turn for turn in world.looks if turn > max(gifts))
        gifts[next_look] = [n_ahead - 1]
    assert [one.number for one in world.ahead.served] == [n_ahead - 1]
    assert world.lost == {}


def n_parts(n_ahead):
    return -(-n_ahead // TRIES)


@given(st.integers(1, 70), st.integers(0, 69), st.integers(1, 3))
@settings(max_examples=40)
async def test_whoever_of_them_can_use_room_has_it_though_some_comes_all_the_time(n, at, period):
    """Something that none of them can use comes in every turn or two, and what one of them can use
    just before the line looks, and never else.
    """
    wants = at % n
    gifts = {turn: [-1] for turn in range(1, 2000, period)}
    for n_given in range(n_parts(n) + 1):
        world = await replay(list(range(n)), gifts, (n_given + 1) * (3 * n_parts(n) + 2))
        if world.ahead.served:
            break
        last = max((turn for turn, given_then in gifts.items() if wants in given_then), default=0)
        look = next(turn for turn in world.looks if turn > last)
        gifts[look] = [*gifts.get(look, ()), wants]
    assert [one.number for one in world.ahead.served] == [wants]
    n_lost = len(world.lost.get(wants, ()))
    assert n_lost < n_parts(n), "a part of them is looked at in the same turn, another each time"


@given(st.integers(1, 70), st.integers(0, 69), st.integers(1, 7))
@example(40, 20, 2)  # it comes behind this one's part, in the pass that the first room began
@settings(max_examples=100)
async def test_room_that_comes_while_they_are_looked_at_is_for_each_of_them(n, at, after):
    wants = at % n
    gifts = {1: [-1], 1 + after: [wants]}
    world = await replay(list(range(n)), gifts, after + 2 * n_parts(n) + 1)
    assert [one.number for one in world.ahead.served] == [wants]
    assert world.lost == {}


@given(
    st.integers(1, 80),
    st.lists(st.integers(0, 79), min_size=1, max_size=3),
    st.lists(st.lists(st.integers(0, 2), max_size=2), max_size=60),
)
@settings(max_examples=100)
async def test_nobody_ahead_loses_room_twice_in_a_pass_and_the_line_looks_all_the_same(
    n, wanted, gifts
):
    """A few want what comes, in every turn or now and then; the others wait for what does not."""
    by_turn = {
        turn: [wanted[one % len(wanted)] % n for one in given_then]
        for turn, given_then in enumerate(gifts, 1)
    }
    patience = 2 * n_parts(n) + 1
    world = await replay(list(range(n)), by_turn, len(gifts) + patience)
    for losses in world.lost.values():
        for before, after in pairwise(losses.values()):
            assert all(after[one] > before[one] for one in after), "each was looked at between"
    for turn, came in by_turn.items():
        if came:
            within = range(turn, turn + patience)
            assert any(look in within for look in world.looks), "the line has its look"
