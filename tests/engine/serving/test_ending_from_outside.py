"""Abort and failure end any request with exactly one row, running rows or not (R18, R19)."""

from __future__ import annotations

from typing import Any

import pytest

from baton_worker.engine.api import EngineRefusedError
from baton_worker.records.columns import ErrorCode, Finish

ENGINES = ("paddle", "device")

OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20}


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding", "held"])
def test_abort_yields_one_terminal_row_and_frees_everything(make_bench: Any, phase: str) -> None:
    bench = make_bench(n_draft=1, prefill_tokens=8, max_running=1)
    prompt = range(5, 25)
    if phase == "waiting":
        bench.submit(9, prompt, **OPTIONS)
    key = bench.submit(1, prompt, hand_over=phase == "held", **OPTIONS)
    for _ in range({"waiting": 1, "prefilling": 1, "decoding": 5, "held": 3}[phase]):
        bench.step()
    emitted = len(bench.reader[key].tokens)
    assert bool(emitted) == (phase in ("decoding", "held"))
    assert bench.engine.abort(key)
    assert not bench.engine.abort(key), "it is gone"
    if phase != "waiting":
        assert bench.engine.load().kv_blocks_used == 0
    assert bench.engine.has_work()
    bench.step()
    assert bench.reader[key].finish is Finish.ABORT
    assert len(bench.reader[key].tokens) == emitted
    bench.drain()


def test_failure_carries_code_and_message(make_bench: Any) -> None:
    bench = make_bench()
    keys = [bench.submit(n, range(5, 10), **OPTIONS) for n in range(3)]
    bench.step()
    bench.engine.fail(keys[2], ErrorCode.HANDOFF_TIMEOUT, "no acknowledgement in 10 s")
    bench.engine.abort(keys[0])
    bench.step()
    assert bench.reader[keys[2]].finish is Finish.ERROR
    assert bench.reader[keys[2]].error == (ErrorCode.HANDOFF_TIMEOUT, "no acknowledgement in 10 s")
    assert bench.reader[keys[0]].finish is Finish.ABORT
    assert bench.reader[keys[0]].error is None
    assert bench.reader[keys[1]].finish is Finish.NONE
    bench.drain()
    assert bench.reader[keys[1]].finish is Finish.LENGTH


def test_ending_an_unknown_request_is_false_and_says_nothing(make_bench: Any, key: Any) -> None:
    bench = make_bench()
    assert not bench.engine.abort(key(1))
    assert not bench.engine.fail(key(1), ErrorCode.INTERNAL, "x")
    assert not bench.engine.has_work()
    assert bench.step().columns.n_rows == 0


def test_a_key_is_refused_while_held_and_while_its_end_is_unsaid(make_bench: Any) -> None:
    bench = make_bench()
    key = bench.submit(1, range(5, 10), **OPTIONS)
    for _ in range(2):
        with pytest.raises(EngineRefusedError, match="already held") as refusal:
            bench.submit(1, range(5, 10), **OPTIONS)
        assert refusal.value.code is ErrorCode.INVALID_REQUEST
        bench.engine.abort(key)
    bench.drain()
    assert bench.submit(1, range(5, 10), **OPTIONS) == key, "its name is free again"
    assert bench.engine.load().waiting == 1


def test_a_full_line_refuses_and_recovers(make_bench: Any) -> None:
    bench = make_bench(max_waiting=2, max_running=1)
    first, *_ = [bench.submit(number, range(5, 10), **OPTIONS) for number in range(3)]
    for number in (3, 4):
        with pytest.raises(EngineRefusedError) as refusal:
            bench.submit(number, range(5, 10), **OPTIONS)
        assert refusal.value.code is ErrorCode.QUEUE_FULL
        bench.step()  # whether it runs or is about to: one slot and two places in line
    assert bench.engine.abort(first)
    bench.step()
    bench.submit(5, range(5, 10), **OPTIONS)
    bench.drain()


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ((), {}, "prompt_token_ids is empty"),
        ((5, 512), {}, "holds 512"),
        ((-1,), {}, "holds -1"),
        (tuple([5] * 256), {}, "leaves no room"),
        ((5,), {"temperature": float("nan")}, "temperature is nan"),
        ((5,), {"temperature": float("inf")}, "temperature is inf"),
        ((5,), {"temperature": -0.1}, "temperature is -0.1"),
        ((5,), {"top_p": 0.0}, "top_p is 0.0"),
        ((5,), {"top_k": -1}, "top_k is -1"),
        ((5,), {"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ((5,), {"presence_penalty": float("inf")}, "presence_penalty is inf"),
        ((5,), {"max_tokens": 0}, "max_tokens is 0"),
        ((5,), {"stop_token_ids": (9999,)}, "stop_token_ids holds 9999"),
        ((5,), {"min_tokens": 1, "stop_token_ids": tuple(range(512))}, "every token is a stop"),
    ],
)
def test_what_cannot_be_served_is_refused_by_field(
    make_bench: Any, prompt: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    bench = make_bench()
    with pytest.raises(EngineRefusedError, match=message) as refusal:
        bench.submit(1, prompt, **options)
    assert refusal.value.code is ErrorCode.INVALID_REQUEST
    assert not bench.engine.has_work()
