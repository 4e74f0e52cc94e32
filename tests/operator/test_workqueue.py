"""The work queue's promises, on a clock that only the test moves."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from baton_operator.reconciling.work_queue import BACKOFF_CAP_SECONDS, WorkQueue
from baton_testing.clocks import LoopClock


@pytest.fixture
def clock():
    return LoopClock()


@pytest.fixture
def queue(clock):
    return WorkQueue(clock)


async def take(queue):
    """Return the next key, which must be ready."""
    return await asyncio.wait_for(queue.get(), 60)


async def test_a_waiting_key_is_queued_once(queue):
    queue.add("a")
    queue.add("a")
    queue.add("b")
    assert queue.depth == 2
    assert [await take(queue), await take(queue)] == ["a", "b"]


async def test_a_key_added_while_worked_on_runs_once_more_afterwards(queue):
    queue.add("a")
    assert await take(queue) == "a"
    queue.add("a")
    queue.add("a")
    assert queue.depth == 0
    queue.done("a")
    assert queue.depth == 1
    assert await take(queue) == "a"
    queue.done("a")
    assert queue.depth == 0


async def test_a_delayed_key_comes_when_it_is_due(queue, clock):
    queue.add_after("a", 5)
    clock.advance(4.9)
    assert queue.depth == 0
    clock.advance(0.2)
    assert await take(queue) == "a"


async def test_the_earliest_of_several_delays_wins(queue, clock):
    queue.add_after("a", 10)
    queue.add_after("a", 2)
    queue.add_after("a", 30)
    clock.advance(2)
    assert queue.depth == 1
    await take(queue)
    queue.done("a")
    clock.advance(100)
    assert queue.depth == 0


async def test_an_add_replaces_a_delay(queue, clock):
    queue.add_after("a", 2)
    queue.add("a")
    await take(queue)
    queue.done("a")
    clock.advance(10)
    assert queue.depth == 0


def test_failures_back_off_by_key_up_to_a_cap_and_success_forgets_them(queue):
    delays = [queue.failed("a") for _ in range(20)]
    assert delays[:3] == [0.05, 0.1, 0.2]
    assert delays[-1] == BACKOFF_CAP_SECONDS
    assert queue.failed("b") == 0.05
    queue.succeeded("a")
    assert queue.failed("a") == 0.05


async def test_the_age_counts_waiting_and_work(queue, clock):
    assert queue.oldest_seconds == 0
    queue.add("a")
    clock.advance(3)
    await take(queue)
    clock.advance(4)
    assert queue.oldest_seconds == 4
    queue.add("b")
    clock.advance(1)
    assert queue.oldest_seconds == 5
    queue.done("a")
    assert queue.oldest_seconds == 1


async def test_a_waiting_worker_is_woken(clock):
    queue = WorkQueue(clock)
    workers = [asyncio.create_task(queue.get()) for _ in range(2)]
    await asyncio.sleep(0)
    queue.add("a")
    queue.add("b")
    assert sorted(await asyncio.wait_for(asyncio.gather(*workers), 60)) == ["a", "b"]


def test_passes_that_are_asked_for_again_before_their_time_leave_nothing(queue, clock):
    for number in range(5000):
        key = f"k{number % 10}"
        queue.add(key)
        assert take_now(queue) == key
        queue.done(key)
        queue.add_after(key, 1800)
        assert queue.delayed_entries <= 64 + 2 * 10 + 1
        clock.now += 0.01
    clock.advance(2000)
    assert queue.depth == 10
    assert queue.delayed_entries == 0


def test_replaced_entries_are_swept_beyond_64_and_twice_those_that_wait(queue, clock):
    entries = []
    for _ in range(2 * 66 + 3):
        queue.add_after("a", 1800)
        entries.append(queue.delayed_entries)
        queue.add("a")
        queue.done(take_now(queue))
        clock.now += 0.01
    assert entries == [*range(1, 67), *range(1, 67), 1, 2, 3]


def take_now(queue):
    """Return the next key without a loop of its own."""
    getter = queue.get()
    with pytest.raises(StopIteration) as taken:
        getter.send(None)
    return taken.value.value


@pytest.mark.parametrize("delay_seconds", [0.0, -1.0])
def test_what_is_due_now_needs_no_timer(queue, clock, delay_seconds):
    queue.add_after("a", delay_seconds)
    assert queue.depth == 1
    assert (clock.calls, queue.delayed_entries) == ([], 0)


def test_half_a_second_is_a_delay(queue, clock):
    queue.add_after("a", 0.5)
    assert queue.depth == 0
    clock.advance(0.5)
    assert queue.depth == 1, "at its time, and not after it"


def test_the_timer_is_for_the_first_that_is_due(queue, clock):
    for key, delay in (("late", 7.5), ("first", 2.5), ("later", 9.0)):
        queue.add_after(key, delay)
    assert [call[0] for call in clock.calls if call[2]] == [2.5]


async def test_keys_of_one_moment_come_in_the_order_of_asking(queue, clock):
    for key in ("c", "a", "b"):
        queue.add_after(key, 3)
    clock.advance(3)
    assert [await take(queue) for _ in range(3)] == ["c", "a", "b"]


def test_a_delay_that_was_asked_for_already_adds_no_entry(queue, clock):
    queue.add_after("a", 5)
    queue.add_after("a", 5)
    assert queue.delayed_entries == 1


def test_a_minute_is_the_longest_back_off_and_doubling_does_not_overflow(queue):
    waits = [queue.failed("a") for _ in range(2000)]
    assert max(waits) == waits[-1] == BACKOFF_CAP_SECONDS == 60.0
    assert all(later == min(60.0, 2 * first) for first, later in itertools.pairwise(waits))
