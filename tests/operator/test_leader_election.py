"""Two candidates on one Lease, each with a clock of its own."""

from __future__ import annotations

import asyncio

import pytest

from baton_operator.cluster.api import LEASE, ApiError, Conflict
from baton_operator.cluster.leader import Leadership, LeadershipLost, LeaseTimes
from baton_testing.fake_kube import FakeKube

TIMES = LeaseTimes(duration=12, renew=8, retry=2)


class Time:
    """A clock that sleeping moves."""

    def __init__(self, now):
        self.now = now
        self.naps = 0

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds
        self.naps += 1


@pytest.fixture
def kube():
    return FakeKube()


def candidate(kube, name, now=0.0, sleep=None):
    time = Time(now)
    place = ("system", "baton")
    return Leadership(kube, place, name, TIMES, clock=time, sleep=sleep or time.sleep), time


def holder(kube):
    return kube.find(LEASE, "baton", "system")["spec"].get("holderIdentity")


async def test_a_standby_takes_over_when_the_leader_fell_silent_and_not_before(kube):
    first, _ = candidate(kube, "a")
    await first.acquire()
    second, time = candidate(kube, "b", now=5000.0)
    await second.acquire()
    assert 12 <= time.now - 5000 < 20
    assert holder(kube) == "b"


async def test_a_standby_waits_while_the_leader_renews(kube):
    first, _ = candidate(kube, "a")
    await first.acquire()

    async def nap(seconds):
        time.now += seconds
        assert await first.attempt()
        if time.now > 100:
            raise TimeoutError

    second, time = candidate(kube, "b", sleep=nap)
    with pytest.raises(TimeoutError):
        await second.acquire()
    assert holder(kube) == "a"


async def test_a_released_lease_is_taken_at_once(kube):
    first, _ = candidate(kube, "a")
    await first.acquire()
    await first.release()
    second, time = candidate(kube, "b")
    await second.acquire()
    assert time.naps == 0


async def test_a_leader_renews_with_one_write_and_no_read(kube):
    leader, _ = candidate(kube, "a")
    await leader.acquire()
    kube.reads.clear()
    before = kube.find(LEASE, "baton", "system")["metadata"]["resourceVersion"]
    for _ in range(3):
        assert await leader.attempt()
    assert kube.reads == {}
    assert kube.find(LEASE, "baton", "system")["metadata"]["resourceVersion"] != before


async def test_a_leader_survives_an_edit_and_a_deletion_of_its_lease(kube):
    leader, _ = candidate(kube, "a")
    await leader.acquire()
    labels = {"metadata": {"labels": {"a": "b"}}}
    kube.edit(LEASE, "baton", labels, "kubectl", namespace="system")
    assert await leader.attempt()
    kube.remove(LEASE, "baton", "system")
    attempts = [await leader.attempt() for _ in range(2)]
    assert attempts[-1] is True
    assert holder(kube) == "a"


async def test_a_leader_that_cannot_renew_stops_before_its_lease_expires(kube):
    leader, time = candidate(kube, "a")
    await leader.acquire()

    async def unreachable(*args, **kwargs):
        raise ApiError(0, "Unreachable", "x")

    kube.get = kube.merge = unreachable
    started = time.now
    with pytest.raises(LeadershipLost):
        await leader.hold()
    assert time.now - started <= TIMES.renew < TIMES.duration


async def test_a_leader_that_stood_still_stops_before_it_asks_whether_it_still_leads(kube):
    """A process that was paused writes on while it waits for the answer: it must not ask."""

    asked = []

    async def paused(seconds):
        time.now += 30

    async def merge(*args, **kwargs):
        asked.append(args)

    leader, time = candidate(kube, "a", sleep=paused)
    await leader.acquire()
    kube.merge = merge
    with pytest.raises(LeadershipLost):
        await leader.hold()
    assert asked == []


async def test_a_last_attempt_ends_when_the_leader_must_whatever_an_attempt_may_take(kube):
    """Refused at once, then never answered: a whole attempt more could outlast the Lease."""

    time = Time(0.0)
    times = LeaseTimes(duration=8001.0, renew=8000.0, retry=3000.0)
    leader = Leadership(kube, ("system", "baton"), "a", times, clock=time, sleep=time.sleep)
    await leader.acquire()

    async def refused_then_silent(*args, **kwargs):
        if time.naps == 1:
            time.now = 4999.99
            raise ApiError(500, "InternalError", "no")
        await asyncio.Event().wait()

    kube.merge = kube.get = refused_then_silent
    with pytest.raises(LeadershipLost):
        async with asyncio.timeout(60):
            await leader.hold()


async def test_a_lease_counts_from_when_its_renewal_was_sent(kube):
    """An answer that takes its time says nothing of when the others saw the renewal."""

    leader, time = candidate(kube, "a")
    await leader.acquire()
    merge, sent_at = kube.merge, []

    async def slow(*args, **kwargs):
        if sent_at:
            return await unreachable()
        sent_at.append(time.now)
        answer = await merge(*args, **kwargs)
        time.now += 1.9
        return answer

    async def unreachable(*args, **kwargs):
        time.now += 0.5
        raise ApiError(0, "Unreachable", "x")

    kube.merge, kube.get = slow, unreachable
    with pytest.raises(LeadershipLost):
        await leader.hold()
    assert time.now - sent_at[0] <= TIMES.renew


async def test_an_answer_that_is_no_lease_is_a_failed_attempt(kube):
    leader, _ = candidate(kube, "a")

    async def page(*args, **kwargs):
        return b"<html>"

    kube.create = page
    assert not await leader.attempt()


async def test_a_leader_whose_lease_was_taken_stops(kube):
    leader, _ = candidate(kube, "a")
    await leader.acquire()
    kube.edit(LEASE, "baton", {"spec": {"holderIdentity": "b"}}, "b", namespace="system")
    with pytest.raises(LeadershipLost):
        await leader.hold()
    await leader.release()
    assert holder(kube) == "b"


async def test_a_renewal_on_its_way_neither_stops_a_release_nor_undoes_it(kube):
    leader, _ = candidate(kube, "a")
    merge, is_on_its_way = kube.merge, asyncio.Event()

    async def arrives_late(*args, **kwargs):
        is_on_its_way.set()
        try:
            await asyncio.Event().wait()
        finally:
            # The server works on what it was sent, whoever waits for the answer.
            await merge(*args, **kwargs)

    async with asyncio.TaskGroup() as group, leader.led(group):
        kube.merge = arrives_late
        await is_on_its_way.wait()
        kube.merge = merge
    assert holder(kube) is None


async def test_a_release_that_meets_another_write_is_tried_again(kube):
    leader, _ = candidate(kube, "a")
    await leader.acquire()
    kube.fault("patch", LEASE, Conflict(409, "Conflict", "the object has been modified"))
    await leader.release()
    assert holder(kube) is None


async def test_who_leaves_has_ended_its_renewing(kube):
    leader, _ = candidate(kube, "a")
    async with asyncio.TaskGroup() as group, leader.led(group):
        holding = [t for t in asyncio.all_tasks() if t.get_name() == "lease"]
        assert len(holding) == 1
    assert holding[0].cancelled()
    assert holder(kube) is None


async def test_a_leader_that_lost_its_lease_ends_the_group(kube):
    leader, _ = candidate(kube, "a")

    async def lead():
        async with asyncio.TaskGroup() as group, leader.led(group):
            kube.edit(LEASE, "baton", {"spec": {"holderIdentity": "b"}}, "b", namespace="system")
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as ended:
        await lead()
    assert [type(error) for error in ended.value.exceptions] == [LeadershipLost]
    assert holder(kube) == "b"
