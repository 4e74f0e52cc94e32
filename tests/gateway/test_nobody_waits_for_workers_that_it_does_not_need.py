"""A request that waits for the few workers that it fits holds up nobody whom others could serve,
and is not passed at its own: what becomes free there is for it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton_testing.scripted_link import RowSpec, worker_info
from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.metrics import GatewayMetrics
from baton_worker.gateway.request import Endpoint, GenerationRequest
from baton_worker.gateway.serving.assignment import choose_all
from baton_worker.gateway.serving.balance import Needs, WorkerLoad
from baton_worker.gateway.serving.capacity import has_room, to_keep
from baton_worker.gateway.serving.dispatch import Dispatcher, DispatchLimits
from baton_worker.gateway.serving.live_requests import LiveRequests
from baton_worker.gateway.serving.parts import ServingParts
from baton_worker.gateway.serving.retry import Retrier
from baton_worker.gateway.serving.slots import Slots, Ticket
from baton_worker.gateway.serving.workers import LinkedWorkers
from baton_worker.identity import GatewayIdentity, Role
from baton_worker.messages import Submit
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import Finish
from baton_worker.sampling import LogprobParams, RequestParams, SamplingParams

BODY = {"model": "tiny", "max_tokens": 4}
LONG, SHORT = [70] * 100, [71]


class Poster(threading.Thread):
    """Posts a completion and keeps the answer."""

    def __init__(self, gateway, prompt):
        super().__init__()
        self.gateway, self.prompt = gateway, prompt
        self.start()

    def run(self):
        with self.gateway.http() as client:
            self.answer = client.post("/v1/completions", json=BODY | {"prompt": self.prompt})

    def status(self):
        self.join(60)
        assert not self.is_alive()
        return self.answer.status_code


def test_a_long_request_holds_up_no_short_one_and_is_next_at_the_worker_it_fits(start_gateway):
    info = {"max_running": 1, "max_waiting": 0}
    gateway = start_gateway(workers="m", info=info, max_wait_seconds=3600)
    gateway.link.up("small-0", Role.MIXED, max_model_len=64, **info)
    link, dispatcher = gateway.link, gateway.service.dispatcher
    link.pause()

    def submits():
        return [(worker, c) for worker, c in link.commands if isinstance(c, Submit)]

    def in_line(n):
        while dispatcher.n_waiting != n:
            pass

    posters = [Poster(gateway, LONG)]
    link.wait_until(lambda: len(submits()) == 1)
    posters.append(Poster(gateway, LONG))
    in_line(1)
    posters.append(Poster(gateway, SHORT))
    link.wait_until(lambda: len(submits()) == 2)
    posters.append(Poster(gateway, SHORT))
    in_line(2)
    first = submits()[0][1]
    link.publish("mixed-0", RowSpec(first.handle, 0, [70, 1], Finish.STOP))
    link.wait_until(lambda: len(submits()) == 3)
    told = [(worker, len(submit.prompt_token_ids)) for worker, submit in submits()]
    assert told == [("mixed-0", 100), ("small-0", 1), ("mixed-0", 100)]
    assert dispatcher.n_waiting == 1, "the second short one fits both, which are full"
    link.resume()
    assert [poster.status() for poster in posters] == [200] * 4


# What is kept.


def load(name, room, role=Role.MIXED, **facts):
    info = worker_info(name, role, max_running=room, max_waiting=0, **facts)
    return WorkerLoad(info, 1)


def needs(*sizes):
    return [Needs(size, 1, -1) for size in sizes]


def test_as_many_places_are_kept_as_choices_that_only_these_workers_can_take():
    loads = [load("big", 2, max_model_len=256), load("small", 9)]
    loads[1].info = worker_info("small", Role.MIXED, max_model_len=64, max_waiting=0)
    assert to_keep(loads, needs(100)) == frozenset(), "a place is left over"
    assert to_keep(loads, needs(100, 100)) == {"big"}
    assert to_keep(loads, needs(10, 10)) == frozenset()
    assert to_keep(loads, needs(10, 100, 100)) == {"big"}
    assert [pair.worker_ids for pair in choose_all(loads, needs(10), kept={"big"})] == [("small",)]
    assert choose_all(loads, needs(100), kept={"big"}) is None
    assert has_room(loads, {"big"})
    assert not has_room(loads, {"big", "small"})


def test_of_a_pair_only_what_is_scarce_is_kept():
    loads = [
        load("prefill", 9, Role.PREFILL),
        load("big", 0, Role.DECODE),
        load("small", 9, Role.DECODE, max_model_len=64),
    ]
    assert to_keep(loads, needs(100)) == {"big"}
    assert has_room(loads, {"big"})
    loads[0].outstanding_requests = 8
    assert to_keep(loads, needs(100)) == {"big", "prefill"}, "its last place, too"
    assert not has_room(loads, {"big", "prefill"})


def test_slots_of_who_is_passed_are_kept_for_it():
    slots = Slots(16, 9)
    slots.take("a", 8)
    wide, own, other = Ticket("b", 4, None), Ticket("b", 1, None), Ticket("a", 5, None)
    for one in (wide, own, other):
        slots.join(one)
    slots.let_pass(wide, is_kept_for=True)
    slots.let_pass(wide, is_kept_for=True)
    assert slots.next() is own
    slots.let_pass(own, is_kept_for=False)
    assert slots.next() is None, "five of the eight that are left, of which four are kept"
    assert slots.is_open_to("c", 4) is False
    slots.leave(wide)
    assert slots.next() is other
    assert slots.used == 8


def test_who_is_passed_keeps_no_slots_that_others_have():
    slots = Slots(16, 9)
    slots.take("a", 14)
    wide, other = Ticket("b", 4, None), Ticket("c", 2, None)
    for one in (wide, other):
        slots.join(one)
    slots.let_pass(wide, is_kept_for=True)
    assert not wide.is_kept_for
    assert slots.next() is other


# The whole line, on made-up fleets.


class Link:
    """Takes every command, and tells of each request that begins."""

    def __init__(self, told):
        self.told = told

    def send(self, worker_id, command):
        if isinstance(command, Submit):
            self.told(worker_id, command.handle)
        return True


class Fleet:
    """A dispatcher over workers that serve until they are told to end."""

    def __init__(self, vocabulary, workers, n_slots=1000):
        factory = MetricFactory(CollectorRegistry(), "tiny", "gateway")
        metrics, link = GatewayMetrics(factory), Link(self.told)
        self.table = LinkedWorkers("tiny")
        self.contexts = {}
        for n, (context, room) in enumerate(workers):
            name = f"mixed-{n}"
            facts = {"max_model_len": context, "max_running": room, "max_waiting": 0}
            self.contexts[name] = context
            self.table.up(name, 1, worker_info(name, Role.MIXED, **facts))
        self.requests = LiveRequests(link, self.table, metrics)
        limits = DispatchLimits(n_slots, 3600, 1000, 100, 1000, 3600)
        clock = time.monotonic
        parts = ServingParts(link, self.table, self.requests, metrics, clock, clock)
        retrier = Retrier(parts, max_retries=0, max_wait_seconds=3600, reserve_seconds=3600)
        self.dispatcher = Dispatcher(parts, retrier, vocabulary, limits, GatewayIdentity(1))
        self.tasks, self.begun, self.passed = [], [], []

    def told(self, worker_id, handle):
        """Note it, and whom it passed at a worker that would have served that one, too."""
        request = self.requests.get(handle).generation.request
        if request not in self.begun:
            self.begun.append(request)
        for other, task in self.tasks:
            if other is request:
                break
            waits = not task.done() and other not in self.begun and len(other.prompts) == 1
            if waits and len(other.prompts[0]) < self.contexts[worker_id]:
                self.passed.append((other, request, worker_id))

    async def start(self, sizes, prompt_k=-1):
        request = GenerationRequest(
            Endpoint.COMPLETION, tuple((len(self.tasks) % 300,) * size for size in sizes), n=1,
            params=RequestParams(
                sampling=SamplingParams(max_tokens=1), cache_salt=b"%d" % len(self.tasks),
                logprobs=LogprobParams(prompt_k=prompt_k),
            ),
            stops=(), stream=False, include_usage=False, return_token_ids=False,
        )  # fmt: skip
        start = self.dispatcher.start(request, 0.0, client="one")
        self.tasks.append((request, asyncio.ensure_future(start)))
        await self.settle()
        return request

    async def end_oldest(self, of=None):
        """End the request that has run longest, of those; False when none runs."""
        for generation in self.requests.generations():
            if of is not None and generation.request not in of:
                continue
            for live in tuple(generation.live.values()):
                self.requests.finish(live, None)
            await self.settle()
            return True
        return False

    async def settle(self):
        for _ in range(12):
            await asyncio.sleep(0)

    async def end_all(self):
        while await self.end_oldest():
            pass
        results = await asyncio.gather(*(task for _, task in self.tasks), return_exceptions=True)
        refused = Counter(
            error.status if isinstance(error, ApiError) else repr(error)
            for error in results
            if isinstance(error, BaseException)
        )
        assert set(refused) <= {400, 503}, "only what no worker could ever serve"
        assert len(self.begun) == len(results) - refused.total()
        assert self.dispatcher.n_waiting == 0
        assert all(load.outstanding_requests == 0 for load in self.table.loads())


WORKERS = st.lists(
    st.tuples(st.sampled_from([64, 128, 256]), st.integers(1, 3)), min_size=1, max_size=4
)
SIZES = st.sampled_from([10, 100, 200])
STEPS = st.lists(st.none() | st.lists(SIZES, min_size=1, max_size=3), max_size=30)


@settings(max_examples=60, deadline=None)
@given(workers=WORKERS, steps=STEPS)
async def test_requests_that_compete_for_a_worker_keep_their_order(tokenizer, workers, steps):
    """And nothing is left in line, nor accounted, when all that could be served was."""

    fleet = Fleet(tokenizer.vocabulary, workers)
    for step in steps:
        if step is None:
            await fleet.end_oldest()
        else:
            await fleet.start(step)
    await fleet.end_all()
    assert fleet.passed == []


@settings(max_examples=60, deadline=None)
@example(  # several of the flood at once
    workers=[(64, 3), (64, 2), (128, 1), (128, 1)],
    before=[10] * 6 + [100] * 2,
    wide=[100, 10, 10, 10],
    flood=[10],
)
@given(
    workers=WORKERS,
    before=st.lists(SIZES, max_size=8),
    wide=st.lists(SIZES, min_size=1, max_size=4),
    flood=st.lists(SIZES, min_size=1, max_size=4),
)
async def test_a_flood_of_later_ones_never_starves_who_waits(
    tokenizer, workers, before, wide, flood
):
    """It begins when what was there before it has ended, at the latest."""

    fleet = Fleet(tokenizer.vocabulary, workers)
    earlier = [await fleet.start([size]) for size in before]
    waiting = await fleet.start(wide)
    _, begins = fleet.tasks[-1]
    for _ in range(len(before)):
        for size in flood:
            await fleet.start([size])
        await fleet.end_oldest(earlier)
    assert begins.done(), "nothing of before it is left"
    assert (waiting in fleet.begun) != (begins.exception() is not None)
    await fleet.end_all()


@pytest.mark.parametrize("n_long", [1, 17, 200])
async def test_short_requests_are_served_however_many_wait_for_the_one_large_worker(
    tokenizer, n_long
):
    fleet = Fleet(tokenizer.vocabulary, [(256, 1), (64, 2)])
    for n in range(1 + n_long):
        await fleet.start([200 - n % 50])
    short = [await fleet.start([10]) for _ in range(2)]
    assert [one in fleet.begun for one in short] == [True, True]
    await fleet.end_all()
    assert fleet.passed == []


@pytest.mark.parametrize(("n_kinds", "is_served"), [(16, True), (17, False)])
async def test_beyond_sixteen_kinds_that_wait_for_few_workers_the_others_wait_as_well(
    tokenizer, n_kinds, is_served
):
    """So that looking at the line has a bound: of each kind one is tried."""

    fleet = Fleet(tokenizer.vocabulary, [(256, 20), (64, 2)])
    await fleet.start([200] * 20)
    for n in range(1, 1 + n_kinds):
        await fleet.start([200] * n)
    short = await fleet.start([10])
    assert (short in fleet.begun) is is_served
    await fleet.end_all()


async def test_a_look_at_the_line_tries_one_of_each_kind(tokenizer):
    fleet = Fleet(tokenizer.vocabulary, [(256, 1), (64, 2)])
    await fleet.start([200])
    short = await fleet.start([10])
    for n in range(100):
        await fleet.start([150 + n % 50])
        await fleet.start([100, 10])
    tried, assign_all = [], fleet.table.assign_all

    def counted(needs, *args, **kwargs):
        tried.append(len(needs))
        return assign_all(needs, *args, **kwargs)

    fleet.table.assign_all = counted
    await fleet.end_oldest([short])
    assert sorted(set(tried)) == [1, 2]
    assert len(tried) <= 2 * 2, "of two hundred, in two looks at most"
    await fleet.end_all()


async def test_as_many_choices_begin_in_one_turn_as_leave_the_loop_to_others(tokenizer):
    fleet = Fleet(tokenizer.vocabulary, [(256, 2000)])
    for _ in range(8 + 8):
        await fleet.start([10] * 100)
    assert len(fleet.begun) == 8, "of a thousand slots one client has seven eighths"
    for live in fleet.requests.live():
        fleet.requests.finish(live, None)
    begun = [len(fleet.requests.generations())]
    while begun[-1] < 8:
        await asyncio.sleep(0)
        begun.append(len(fleet.requests.generations()))
    assert max(after - before for before, after in itertools.pairwise(begun)) == 2
    await fleet.end_all()


@pytest.mark.parametrize("n_slots", [8, 24])
@pytest.mark.parametrize("n_long", [3, 20])
async def test_a_flood_starves_none_of_many_that_wait_for_one_worker_though_slots_are_few(
    tokenizer, n_slots, n_long
):
    """Their slots are kept for them as far as there are any, or are waited for in their turn."""

    fleet = Fleet(tokenizer.vocabulary, [(256, 1), (64, 50)], n_slots)
    for _ in range(n_slots):
        await fleet.start([10])
    long = [await fleet.start([200]) for _ in range(n_long)]
    n_rounds = 0
    while not all(one in fleet.begun for one in long):
        assert n_rounds <= (n_slots + 1) * (n_long + 1), "each ends the one that runs longest"
        n_rounds += 1
        await fleet.start([10])
        await fleet.end_oldest()
        if long[0] in fleet.begun:
            running = [one.generation.request for one in fleet.requests.live()]
            assert any(one in running for one in long), "the next begins when one ends"
    assert [one for one in fleet.begun if one in long] == long
    await fleet.end_all()
    assert fleet.passed == []


async def test_who_stands_behind_those_that_are_passed_is_tried_though_something_comes_in_each_turn(
    tokenizer,
):
    fleet = Fleet(tokenizer.vocabulary, [(256, 12), (64, 1)])
    await fleet.start([200] * 12)
    for n in range(1, 1 + 12):  # more kinds than are tried in one turn
        await fleet.start([200] * n)
    begun = await fleet.start([10])
    waits = await fleet.start([10])
    assert (begun in fleet.begun, waits in fleet.begun) == (True, False)
    (live,) = (one for one in fleet.requests.live() if one.generation.request is begun)
    fleet.requests.finish(live, None)
    for _ in range(50):
        fleet.table.on_room()
        await asyncio.sleep(0)
    assert waits in fleet.begun
    await fleet.end_all()


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([10, 100, 100], "3 choices at once: of those of 101 tokens or more the most is 1"),
        ([10, 10, 10, 100], "4 choices at once: of those of 11 tokens or more the most is 3"),
        ([10, 10, 10, 10], "4 choices at once: the most is 3"),
    ],
)
async def test_more_long_choices_than_could_ever_run_are_refused_at_once(tokenizer, sizes, told):
    fleet = Fleet(tokenizer.vocabulary, [(64, 2), (128, 1)])
    await fleet.start(sizes)
    _, task = fleet.tasks[0]
    error = task.exception()
    assert (error.status, error.message) == (400, told)


async def test_more_choices_than_workers_hold_that_are_left_while_one_restarts_are_a_503(tokenizer):
    """The same request is served a moment later: it is not the client's fault."""
    fleet = Fleet(tokenizer.vocabulary, [(64, 2), (64, 2)])
    fleet.table.down("mixed-1")
    for sizes in ([10] * 4, [10] * 5):
        await fleet.start(sizes)
    back, never = (task.exception() for _, task in fleet.tasks)
    assert (back.status, back.code, never.status) == (503, "too_few_workers", 400)
    assert back.message == "4 choices at once: the most is 2 while workers are not back"
    assert back.retry_after_seconds


async def test_alternatives_of_prompts_are_asked_of_workers_that_give_so_many(tokenizer):
    fleet = Fleet(tokenizer.vocabulary, [(64, 9)])
    fleet.table.up("few", 1, worker_info("few", Role.MIXED, max_model_len=64, max_top_k=2))
    for _ in range(4):
        await fleet.start([10], prompt_k=3)
    told = {live.holders for live in fleet.requests.live()}
    assert told == {("mixed-0",)}
    await fleet.end_all()


async def test_the_longest_choice_of_a_request_is_given_its_worker_first(tokenizer):
    """However they stand in it: the short ones would fill the worker that the long one needs."""

    fleet = Fleet(tokenizer.vocabulary, [(64, 2), (128, 2)])
    wide = await fleet.start([10, 10, 10, 100])
    assert fleet.begun == [wide]
    prompts = [live.choice.params.prompt_token_ids for live in fleet.requests.live()]
    assert list(map(len, prompts)) == [10, 10, 10, 100]
    await fleet.end_all()
