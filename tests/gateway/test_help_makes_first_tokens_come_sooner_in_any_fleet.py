"""What help does to first tokens, by simulation, where there is no single pair: pools of several,
pods whose two roles pair with each other alone, few decodes that help, unequal pods; at four loads.

Prefill and decode compute prompts one after the other, decode grants its places in the order of
asking and keeps each until the output ends, and the clock is the events'.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import deque
from typing import NamedTuple

import pytest

from baton_testing.scripted_link import worker_info
from baton_worker.gateway.serving.balance import Needs
from baton_worker.gateway.serving.helping import NO_HELP, HelpRule
from baton_worker.gateway.serving.workers import LinkedWorkers
from baton_worker.identity import Role
from baton_worker.messages import DECODE_PROMPTS, FEATURES

WILLING = {"features": (*FEATURES, DECODE_PROMPTS)}
RULE = HelpRule(8192, 2.0)
LENGTHS = (1024, 4096, 8192, 16384)
TOKEN_SECONDS = {Role.PREFILL: 0.251 / 8192, Role.DECODE: 0.464 / 8192}
OUTPUT_TOKENS, OUTPUT_SECONDS, SLOTS = 256, 4.0, 32
LOADS = (0.5, 0.7, 0.85, 0.95)
"""Of what all prefill workers could compute."""

MOST_LOSS = 1.01


class Part(NamedTuple):
    """Workers that may pair: how many prefill, how many decode, and how many of these help."""

    prefills: int
    decodes: int
    helping: int


FLEETS = {
    "1P1D": [Part(1, 1, 1)],
    "2P2D": [Part(2, 2, 2)],
    "2P4D, one helps": [Part(2, 4, 1)],
    "4P4D, one helps": [Part(4, 4, 1)],
    "2 pods": [Part(1, 1, 1)] * 2,
    "4 pods": [Part(1, 1, 1)] * 4,
    "4 pods, one helps": [Part(1, 1, 1)] + [Part(1, 1, 0)] * 3,
    "a pod of 1P1D that helps, one of 2P2D": [Part(1, 1, 1), Part(2, 2, 0)],
    "pods of 1P1D and 3P1D": [Part(1, 1, 1), Part(3, 1, 1)],
}
SHORT_OF_PLACES = [Part(3, 1, 1)]
"""Decode's slots are what prompts wait for, so that help can bring nothing."""


class Request(NamedTuple):
    arrived: float
    needs: Needs
    ids: tuple[str, ...]


class Fleet:
    """Workers that serve what they are given, and when first tokens came."""

    def __init__(self, parts: list[Part], rule: HelpRule) -> None:
        self.now = 0.0
        self.workers = LinkedWorkers("tiny", help_rule=rule, clock=lambda: self.now)
        self.waits: list[float] = []
        self.n_helped = 0
        self._order = itertools.count()
        self._events: list[tuple[float, int, object, tuple[object, ...]]] = []
        self._lines: dict[str, deque[Request]] = {}
        self._asks: dict[str, deque[Request]] = {}
        self._busy: set[str] = set()
        self._free: dict[str, int] = {}
        for group, part in enumerate(parts):
            self._link(part, "" if len(parts) == 1 else f"pod{group}")

    def _link(self, part: Part, group: str) -> None:
        many = {"max_model_len": 1 << 20, "kv_capacity_tokens": 1 << 40, "max_waiting": 1 << 20}
        many["pair_group"] = group
        for role, count in ((Role.PREFILL, part.prefills), (Role.DECODE, part.decodes)):
            for i in range(count):
                name = f"{role.label}{i}{group}"
                helps = WILLING if role is Role.DECODE and i < part.helping else {}
                info = worker_info(name, role, max_running=SLOTS, **(many | helps))
                self.workers.up(name, len(self._lines) + 1, info)
                self._lines[name], self._asks[name], self._free[name] = deque(), deque(), SLOTS

    def at(self, when: float, call: object, *facts: object) -> None:
        heapq.heappush(self._events, (when, next(self._order), call, facts))

    def run(self) -> None:
        while self._events:
            self.now, _, call, facts = heapq.heappop(self._events)
            call(*facts)

    def arrive(self, n_tokens: int) -> None:
        needs = Needs(n_tokens, OUTPUT_TOKENS, 0)
        request = Request(self.now, needs, self.workers.assign(needs).worker_ids)
        self.n_helped += len(request.ids) == 1
        self._asks[request.ids[-1]].append(request)
        self._grant(request.ids[-1])

    def _grant(self, decode: str) -> None:
        while self._asks[decode] and self._free[decode]:
            self._free[decode] -= 1
            request = self._asks[decode].popleft()
            self._lines[request.ids[0]].append(request)
            self._compute(request.ids[0])

    def _compute(self, name: str) -> None:
        if self._lines[name] and name not in self._busy:
            self._busy.add(name)
            request = self._lines[name].popleft()
            seconds = request.needs.prompt_tokens * TOKEN_SECONDS[self.workers.role(name)]
            self.at(self.now + seconds, self._computed, name, request)

    def _computed(self, name: str, request: Request) -> None:
        self._busy.discard(name)
        self.waits.append(self.now - request.arrived)
        self.workers.prompt_computed(name, request.needs)
        if len(request.ids) > 1:
            self.workers.release(name, request.needs)
        self.at(self.now + OUTPUT_SECONDS, self._end, request)
        self._compute(name)

    def _end(self, request: Request) -> None:
        decode = request.ids[-1]
        self.workers.release(decode, request.needs)
        self._free[decode] += 1
        self._grant(decode)


def served(parts: list[Part], load: float, rule: HelpRule, seed: int, count: int = 300) -> Fleet:
    """Return a fleet that has served prompts of several lengths, which came by chance."""
    fleet, rng, when = Fleet(parts, rule), random.Random(seed), 0.0
    per_prompt = statistics.mean(LENGTHS) * TOKEN_SECONDS[Role.PREFILL]
    rate = load * sum(part.prefills for part in parts) / per_prompt
    for _ in range(count):
        when += rng.expovariate(rate)
        fleet.at(when, fleet.arrive, rng.choice(LENGTHS))
    fleet.run()
    assert len(fleet.waits) == count
    assert all(not (one.line_tokens or one.outstanding_requests) for one in fleet.workers.loads())
    return fleet


def compared(parts: list[Part], load: float) -> float:
    """Return the mean wait for first tokens with help, in those without: of the same arrivals."""
    waits = {rule: [] for rule in (NO_HELP, RULE)}
    for rule, seed in itertools.product(waits, range(2)):
        fleet = served(parts, load, rule, seed)
        assert rule is RULE or not fleet.n_helped
        waits[rule] += fleet.waits
    return statistics.mean(waits[RULE]) / statistics.mean(waits[NO_HELP])


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("parts", FLEETS.values(), ids=FLEETS)
def test_help_is_no_loss_at_any_load_and_a_gain_at_high_ones(parts):
    ratios = [compared(parts, load) for load in LOADS]
    assert max(ratios) <= MOST_LOSS
    assert max(ratios[-2:]) < 0.9


def test_where_decodes_places_are_what_is_short_help_costs_nothing():
    assert max(compared(SHORT_OF_PLACES, load) for load in LOADS) <= MOST_LOSS
