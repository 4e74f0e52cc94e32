"""A request whose worker is lost while the others are full goes on at the first that has room."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton_testing.scripted_link import RowSpec
from baton_worker.gateway.metrics import GatewayMetrics
from baton_worker.gateway.serving.admission_queue import AdmissionQueue, Lack
from baton_worker.gateway.serving.slots import Slots
from baton_worker.gateway.serving.waiting_retries import Tried, WaitingRetries
from baton_worker.identity import Role
from baton_worker.messages import Submit
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import ErrorCode, Finish

OUTPUT = [100 + n for n in range(6)]
BODY = {"model": "tiny", "max_tokens": len(OUTPUT), "return_token_ids": True}
ONE_PLACE = {"max_running": 1, "max_waiting": 0}
WAITING = "baton_gateway_waiting_retries"


def ask(gateway, prompt):
    return gateway.ask(BODY | {"prompt": [prompt]})


def submits(gateway):
    return [(w, c) for w, c in gateway.link.commands if isinstance(c, Submit)]


def wait_for(gateway, value):
    """Two requests were begun: one that ends instead of waiting makes them fewer."""
    gateway.wait_metric(WAITING, value, n_live=2 if value else 0)


@pytest.fixture
def full(start_gateway):
    """`full(**options)`: two workers of one place with a request each, and these requests."""

    def make(**options):
        options = {"max_wait_seconds": 600.0} | options
        gateway = start_gateway(lambda submit: OUTPUT, workers="m", info=ONE_PLACE, **options)
        gateway.link.up("mixed-1", Role.MIXED, **ONE_PLACE)
        gateway.link.pause()
        posters = {}
        for n, prompt in enumerate((70, 71), 1):
            poster = ask(gateway, prompt)
            gateway.link.wait_told(lambda n=n: len(submits(gateway)) == n)
            worker, submit = submits(gateway)[-1]
            posters[worker] = poster, submit
        return gateway, posters["mixed-0"], posters["mixed-1"]

    return make


def end(gateway, worker, submit):
    row = RowSpec(submit.handle, 0, [*OUTPUT[:1], 1], Finish.STOP)
    gateway.link.publish(worker, row)


def test_it_goes_before_all_who_wait_to_begin(full):
    gateway, (lost, first), (other, busy) = full()
    gateway.link.publish("mixed-0", RowSpec(first.handle, 0, OUTPUT[:2]))
    newcomer = ask(gateway, 72)
    gateway.wait_metric("baton_gateway_line_requests", 1, n_live=2)
    gateway.link.down("mixed-0", "disconnected")
    wait_for(gateway, 1)
    assert len(submits(gateway)) == 2
    end(gateway, "mixed-1", busy)
    gateway.link.wait_told(lambda: len(submits(gateway)) == 3)
    worker, again = submits(gateway)[2]
    assert (worker, again.handle, again.attempt) == ("mixed-1", first.handle, 1)
    assert again.output_token_ids == tuple(OUTPUT[:2])
    wait_for(gateway, 0)
    gateway.link.resume()
    assert lost.choices() == [OUTPUT]
    assert (other.result().status_code, newcomer.choices()) == (200, [OUTPUT])
    assert gateway.metric("baton_gateway_retries_total", how="from_token") == 1


def test_a_worker_that_comes_takes_it(full):
    gateway, (lost, _), (other, _) = full()
    gateway.link.down("mixed-0", "disconnected")
    wait_for(gateway, 1)
    gateway.link.up("mixed-2", Role.MIXED, **ONE_PLACE)
    gateway.link.wait_told(lambda: len(submits(gateway)) == 3)
    assert submits(gateway)[2][0] == "mixed-2"
    gateway.link.resume()
    assert (lost.choices(), other.choices()) == ([OUTPUT], [OUTPUT])


def test_it_waits_no_longer_than_any_request(full):
    gateway, (lost, _), (other, _) = full(max_wait_seconds=0.2)
    gateway.link.down("mixed-0", "disconnected")
    answer = lost.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")
    assert gateway.metric("baton_gateway_retries_refused_total", reason="no_workers") == 1
    assert gateway.metric(WAITING) == 0
    gateway.link.resume()
    assert other.choices() == [OUTPUT]


def test_where_nobody_waits_it_ends_at_once(full):
    gateway, (lost, _), _ = full(max_wait_seconds=0)
    gateway.link.down("mixed-0", "disconnected")
    assert lost.result().json()["error"]["code"] == "worker_lost"
    gateway.link.resume()


def test_it_ends_when_the_last_worker_is_gone_that_it_could_wait_for(full):
    gateway, (lost, _), (other, _) = full()
    gateway.link.down("mixed-0", "disconnected")
    wait_for(gateway, 1)
    gateway.link.down("mixed-1", "bye")
    for poster in (lost, other):
        assert poster.result().json()["error"]["code"] == "worker_lost"
    assert gateway.metric("baton_gateway_retries_refused_total", reason="no_workers") == 2
    wait_for(gateway, 0)


def test_one_whose_client_leaves_is_forgotten(full):
    """A comment brings the stream's head, behind which the test can tell the first token."""
    gateway, _, (other, busy) = full(sse_comment_seconds=0.05)
    end(gateway, "mixed-1", busy)
    other.result()
    with (
        gateway.http() as client,
        client.stream("POST", "/v1/completions", json=BODY | {"prompt": [80], "stream": True}) as s,
    ):
        lines = s.iter_lines()
        gateway.link.wait_told(lambda: len(submits(gateway)) == 3)
        _, submit = submits(gateway)[2]
        gateway.link.publish("mixed-1", RowSpec(submit.handle, 0, OUTPUT[:1]))
        assert any(f'"token_ids":[{OUTPUT[0]}]' in line for line in lines), "it ends at the first"
        gateway.link.down("mixed-1", "disconnected")
        wait_for(gateway, 1)
    wait_for(gateway, 0)
    gateway.link.resume()
    assert len(submits(gateway)) == 3


def test_it_leaves_to_others_the_room_that_it_can_make_no_use_of(full):
    """The worker that refused it has room, and the one that it waits for has none."""
    gateway, (lost, first), (other, _) = full()
    error = (ErrorCode.HANDOFF_REFUSED, "not here")
    row = RowSpec(first.handle, 0, finish=Finish.ERROR, error=error)
    gateway.link.publish("mixed-0", row)
    wait_for(gateway, 1)
    newcomer = ask(gateway, 72)
    gateway.link.wait_told(lambda: len(submits(gateway)) == 3)
    assert submits(gateway)[2][0] == "mixed-0"
    gateway.link.resume()
    assert [each.choices() for each in (newcomer, other, lost)] == [[OUTPUT]] * 3


@given(
    st.lists(st.integers(0, 400), max_size=4),
    st.lists(st.sampled_from(Tried), max_size=60),
    st.sampled_from([Tried.IN_VAIN, Tried.NOT]),
)
def test_all_are_tried_in_their_order_and_none_is_lost(arrivals, answers, otherwise):
    line, expected, numbers = WaitingRetries(), deque(), iter(range(10_000))
    outcome = deque(answers)

    def begin(one):
        tried.append(one)
        became = outcome.popleft() if outcome else otherwise
        costs.append(became is not Tried.NOT)
        if became is Tried.OVER:
            expected.remove(one)
        return became

    for n in arrivals:
        for _ in range(n):
            one = next(numbers)
            line.join(one)
            expected.append(one)
        tried, costs, before = [], [], list(expected)
        while not line.serve(begin):
            assert sum(costs) == 16 or len(costs) == 256, "the loop has its turn"
            costs.clear()
        assert sum(costs) <= 16
        assert len(costs) <= 256
        assert tried == before
        assert len(line) == len(expected)
    assert line.take(lambda one: True) == list(expected)
    assert len(line) == 0


class Many:
    """Choices that wait for a place, more than are tried in one turn."""

    def __init__(self, n):
        self.line, self.places, self.n_looks, self.n_passes = WaitingRetries(), 0, 0, 0
        for one in range(n):
            self.line.join(one)

    def __len__(self):
        return len(self.line)

    def serve(self):
        self.n_looks += 1
        is_done = self.line.serve(self.begin)
        self.n_passes += is_done
        return is_done

    def begin(self, one):
        self.places -= 1
        return Tried.OVER if self.places >= 0 else Tried.IN_VAIN


@pytest.mark.parametrize("n_turns", [0, 1, 2])
async def test_room_that_comes_while_a_part_of_them_was_tried_is_for_these_too(n_turns):
    ahead = Many(100)
    metrics = GatewayMetrics(MetricFactory(CollectorRegistry(), "tiny", "gateway"))
    line = AdmissionQueue(Slots(16, 16), metrics, 10.0, asyncio.get_running_loop().time, ahead)
    line.room()
    for _ in range(n_turns):
        await asyncio.sleep(0)
    assert ahead.n_looks == n_turns
    ahead.places = 100
    line.room()
    for _ in range(30):
        await asyncio.sleep(0)
    assert len(ahead) == 0
    assert ahead.n_looks <= n_turns + 14, "and then nobody looks any more"


async def test_they_stand_before_the_line_again_after_all_of_them_had_room():
    """The line's turn behind theirs is not owed to it when nobody was in it."""
    ahead, order = Many(1), []
    metrics = GatewayMetrics(MetricFactory(CollectorRegistry(), "tiny", "gateway"))
    slots = Slots(16, 16)
    line = AdmissionQueue(slots, metrics, 10.0, asyncio.get_running_loop().time, ahead)
    ahead.places = 1
    line.room()
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(ahead) == 0

    def begin(kept):
        order.append("line")
        return "made" if len(order) > 1 else Lack(is_for_all=True)

    waiting = asyncio.create_task(line.begin("c", 1, begin, lambda made: None, lambda: "any"))
    await asyncio.sleep(0)
    assert order == ["line"], "it has asked once, in vain, and waits"
    ahead.line.join(1)
    ahead.begin = lambda one: order.append("ahead") or Tried.OVER
    line.room()
    assert await waiting == "made"
    assert order == ["line", "ahead", "line"]


@pytest.fixture
def waiting_behind():
    """`waiting_behind(n)`: the line, `n` ahead of one request in it, and who had each place."""
    tasks = []

    async def make(n):
        ahead, order = Many(n), []
        metrics = GatewayMetrics(MetricFactory(CollectorRegistry(), "tiny", "gateway"))
        line = AdmissionQueue(Slots(16, 16), metrics, 10.0, asyncio.get_running_loop().time, ahead)

        def take(who):
            ahead.places -= ahead.places > 0
            order.append(who)
            return "made"

        def begin(kept):
            return take("line") if ahead.places else Lack(is_for_all=True)

        def begin_ahead(one):
            return Tried.OVER if ahead.places and take("ahead") else Tried.IN_VAIN

        ahead.begin = begin_ahead
        asked = line.begin("c", 1, begin, lambda made: None, lambda: "any")
        tasks.append(asyncio.create_task(asked))
        await asyncio.sleep(0)
        line.room()
        return line, ahead, order

    yield make
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("n_ahead", [1, 16, 100])
async def test_room_that_comes_between_their_turn_and_the_lines_is_theirs(waiting_behind, n_ahead):
    line, ahead, order = await waiting_behind(n_ahead)
    n_turns = -(-n_ahead // 16)  # behind the last of them the line would look in the same turn
    for _ in range(n_turns - 1):
        await asyncio.sleep(0)
    assert (ahead.n_passes, order) == (0, [])
    ahead.places = 1
    line.room()
    for _ in range(2 * n_turns):
        await asyncio.sleep(0)
    assert order == ["ahead"]


@pytest.mark.parametrize("n_ahead", [1, 16, 100])
async def test_who_can_use_no_room_ahead_keeps_nobody_from_what_comes_in_each_turn(
    waiting_behind, n_ahead
):
    line, ahead, order = await waiting_behind(n_ahead)
    ahead.begin = lambda one: Tried.IN_VAIN
    ahead.places = 1
    for _ in range(20):
        line.room()
        await asyncio.sleep(0)
    assert order == ["line"]
