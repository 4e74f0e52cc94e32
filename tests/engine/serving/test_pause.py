"""Requests of a backed-up gateway are held back in place; others go on."""

from __future__ import annotations

from typing import Any

from baton_worker.messages import Submit
from baton_worker.records.columns import Finish
from baton_worker.sampling import SamplingParams

ENGINES = ("paddle", "device")


def _submit(bench: Any, key: Any, max_tokens: int = 8) -> Any:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    bench.engine.submit(Submit(*key, prompt_token_ids=tuple(range(5, 25)), sampling=sampling))
    return key


def test_paused_requests_keep_place_and_blocks_and_continue_exactly(
    make_bench: Any, key: Any
) -> None:
    bench = make_bench(n_draft=1, max_running=2)
    slow, quick = _submit(bench, key(1, 7)), _submit(bench, key(1, 8))
    bench.step()
    used = bench.engine.load().kv_blocks_used
    bench.engine.set_paused(frozenset({7}))
    emitted = list(bench.reader[slow].tokens)
    bench.drain()
    assert bench.reader[quick].finish is Finish.LENGTH
    assert bench.reader[slow].tokens == emitted
    assert bench.engine.load().kv_blocks_used == used // 2
    assert not bench.engine.has_work()
    bench.engine.set_paused(frozenset())
    bench.drain()
    assert bench.reader[slow].tokens == bench.reader[quick].tokens


def test_a_paused_line_lets_others_pass_and_keeps_its_order(make_bench: Any, key: Any) -> None:
    bench = make_bench(max_running=1)
    bench.engine.set_paused(frozenset({7}))
    first, second = _submit(bench, key(1, 7)), _submit(bench, key(2, 7))
    other = _submit(bench, key(1, 8))
    bench.drain()
    assert bench.reader.ended == {other}
    bench.engine.set_paused(frozenset())
    bench.step()
    assert bench.reader[first].tokens
    assert not bench.reader[second].tokens
    bench.drain()


def test_aborting_a_paused_request_works(make_bench: Any, key: Any) -> None:
    bench = make_bench()
    held = _submit(bench, key(1, 7))
    bench.step()
    bench.engine.set_paused(frozenset({7}))
    assert not bench.engine.has_work()
    bench.engine.abort(held)
    assert bench.engine.has_work()
    bench.drain()
    assert bench.reader[held].finish is Finish.ABORT
    assert bench.engine.load().kv_blocks_used == 0


def test_a_paused_request_is_never_preempted(make_bench: Any, key: Any) -> None:
    bench = make_bench(max_model_len=64, block_size=8, n_blocks=8)
    running = _submit(bench, key(1, 8), max_tokens=40)
    paused = _submit(bench, key(2, 7), max_tokens=40)
    bench.step()
    bench.engine.set_paused(frozenset({7}))
    results = bench.drain()
    assert sum(r.stats.preempted for r in results) >= 1, "the only other request gives way"
    assert len(bench.reader[paused].tokens) == 1
    assert bench.reader[running].finish is Finish.NONE
    bench.engine.set_paused(frozenset())
    bench.drain()
    assert bench.reader[paused].tokens == bench.reader[running].tokens
