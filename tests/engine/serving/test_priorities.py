"""Urgent requests run first and lose their blocks last; what is said does not depend on it."""

from __future__ import annotations

from typing import Any

import pytest

from baton_worker.engine.scheduling.waiting_queue import MAX_OVERTAKEN

ENGINES = ("paddle", "device")


def order_of_ends(bench: Any) -> list[Any]:
    ended: list[Any] = []
    while bench.engine.has_work():
        bench.step()
        ended += [key for key in bench.reader.ended if key not in ended]
    return ended


def test_the_urgent_overtake_those_in_line(make_bench: Any) -> None:
    bench = make_bench(max_running=1)
    keys = [
        bench.submit(n, range(5, 9), temperature=0.0, max_tokens=3, priority=priority)
        for n, priority in enumerate((0, 0, 7, -2))
    ]
    assert order_of_ends(bench) == [keys[3], keys[0], keys[1], keys[2]]


@pytest.mark.parametrize("max_running", [1, 4])
def test_a_prompt_that_was_held_up_is_computed_before_those_given_out_after_it(
    make_bench: Any, max_running: int
) -> None:
    """Whether those wait in line, or have left it and their prompts are not computed yet."""
    bench = make_bench(max_running=max_running, prefill_tokens=8)
    keys = {
        turn: bench.submit(turn, range(5, 21), temperature=0.0, max_tokens=1, turn=turn)
        for turn in (1, 4, 3)
    }
    bench.step()
    keys[2] = bench.submit(2, range(5, 21), temperature=0.0, max_tokens=1, turn=2)
    assert order_of_ends(bench) == [keys[turn] for turn in (1, 2, 3, 4)]


def test_the_least_urgent_is_preempted_although_it_is_older(make_bench: Any) -> None:
    bench = make_bench(max_model_len=64, block_size=8, n_blocks=8, prefix_caching=False)
    options = {"temperature": 0.0, "max_tokens": 30}
    old = bench.submit(1, range(5, 25), priority=1, **options)
    bench.step()
    urgent = bench.submit(2, range(30, 50), priority=0, **options)
    preempted = 0
    while urgent not in bench.reader.ended:
        preempted += bench.step().stats.preempted
    assert preempted == 1
    assert old not in bench.reader.ended
    alone = make_bench(max_model_len=64)
    expected = alone.submit(1, range(5, 25), **options)
    alone.drain()
    bench.drain()
    assert bench.reader[old].tokens == alone.reader[expected].tokens


def test_decode_serves_by_the_priority_that_prefill_was_given(
    make_bench: Any, hand_over: Any
) -> None:
    prefill = make_bench(n_draft=1)
    decode = make_bench(n_draft=1, max_running=1, reader=prefill.reader)
    keys = [
        prefill.submit(
            n, range(5, 30), temperature=0.0, max_tokens=4, priority=priority, hand_over=True
        )
        for n, priority in enumerate((3, 1, 2))
    ]
    hand_over(prefill, decode, sorted(prefill.handoffs(), key=lambda h: h.state.handle))
    assert order_of_ends(decode) == [keys[1], keys[2], keys[0]]


@pytest.mark.parametrize("n_blocks", [4, 64])
def test_a_stream_of_urgent_requests_starves_nobody(make_bench: Any, n_blocks: int) -> None:
    """Overtaken as often as is allowed, it runs to its end, also where blocks are short."""
    bench = make_bench(max_running=2, max_model_len=64, block_size=16, n_blocks=n_blocks)
    patient = bench.submit(0, range(5, 30), temperature=0.0, max_tokens=20, priority=100)
    n_urgent = 0
    while patient not in bench.reader.ended:
        load = bench.engine.load()
        while load.waiting < 4:
            n_urgent += 1
            bench.submit(n_urgent, range(5, 30), temperature=0.0, max_tokens=2, priority=-5)
            load = bench.engine.load()
        bench.step()
        assert n_urgent < 4 * MAX_OVERTAKEN
    assert n_urgent >= MAX_OVERTAKEN


@pytest.mark.slow
def test_priorities_change_the_order_and_nothing_that_is_said(
    make_bench: Any, make_prompts: Any
) -> None:
    prompts = make_prompts(14, seed=4, longest=30)
    options = {"max_model_len": 128, "block_size": 8, "n_blocks": 18, "n_draft": 2}
    said = []
    for priorities in ([0] * 14, [(7 * n) % 5 - 2 for n in range(14)]):
        bench = make_bench(**options)
        keys = [
            bench.submit(
                n, p, temperature=0.6, seed=n, max_tokens=40, logprobs_k=1, priority=priorities[n]
            )
            for n, p in enumerate(prompts)
        ]
        assert sum(result.stats.preempted for result in bench.drain()) > 0
        streams = [bench.reader[key] for key in keys]
        said.append([(s.tokens, s.ranks, s.finish) for s in streams])
    assert said[0] == said[1]


def test_urgent_prompts_do_not_starve_one_that_is_half_computed(make_bench: Any) -> None:
    """The step's prompt tokens go to the urgent first, so what runs can be overtaken too."""
    bench = make_bench(max_running=4, prefill_tokens=16, prefix_caching=False)
    patient = bench.submit(0, range(5, 45), temperature=0.0, max_tokens=2, priority=9)
    n_urgent = 0
    while patient not in bench.reader.ended:
        bench.step()
        n_urgent += 1
        bench.submit(n_urgent, range(5, 21), temperature=0.0, max_tokens=1, priority=-9)
        assert n_urgent < 2 * MAX_OVERTAKEN
    assert n_urgent > MAX_OVERTAKEN
