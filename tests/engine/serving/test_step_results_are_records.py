"""A step's result is a snapshot that the record takes as it is, free of earlier bytes (R6, R16)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from baton_worker.identity import RequestKey, Role
from baton_worker.records.columns import ErrorCode, StepColumns
from baton_worker.records.decode import decode_step
from baton_worker.records.encode import encode_step
from baton_worker.records.header import StepHeader
from baton_worker.records.layout import Limits
from baton_worker.records.scored import ScoredTokens
from baton_worker.sampling import LogprobParams

ENGINES = ("paddle", "device")

HEADER = StepHeader(epoch=1, seq=1, step_id=1, role=Role.MIXED, semantic_hash=1, sent_unix_ns=1)


def _busy(bench: Any, decode: Any, prompts: Any, hand_over: Any) -> list[Any]:
    """Run every kind of row: chunks, drafts, echoes, logprobs of any width, aborts, errors."""
    results = []
    for number, prompt in enumerate(prompts):
        bench.submit(
            number,
            prompt,
            temperature=0.8 * (number % 2),
            seed=number,
            max_tokens=4 + number % 9,
            logprobs_k=(-1, 0, 3, 20)[number % 4],
            logprobs=LogprobParams(draft_ids=number % 2 == 0, draft_logprobs=number % 4 > 1),
            hand_over=number % 3 == 0,
        )
        results.append(bench.step())
        hand_over(bench, decode, results[-1].handoffs)
        if decode.engine.has_work():
            results.append(decode.step())
        if number % 5 == 4:
            held = bench.known()
            bench.engine.abort(held[0])
            bench.engine.fail(held[-1], ErrorCode.INTERNAL, "test")
    for left in bench.drain():
        results.append(left)
        hand_over(bench, decode, left.handoffs)
    return results + decode.drain()


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def run(make_bench: Any, make_prompts: Any, hand_over: Any, overlap: bool) -> Any:
    def busy() -> list[Any]:
        bench = make_bench(n_draft=3, prefill_tokens=40, max_running=8, overlap=overlap)
        decode = make_bench(n_draft=2, max_running=8, overlap=overlap, reader=bench.reader)
        return _busy(bench, decode, make_prompts(20, seed=17, longest=50), hand_over)

    return busy


def _bytes_of(columns: StepColumns) -> list[bytes]:
    found = []
    for field in fields(columns):
        value = getattr(columns, field.name)
        if isinstance(value, ScoredTokens):
            found += [getattr(value, part.name).tobytes() for part in fields(value)]
        elif field.name != "errors":
            found.append(value.tobytes())
    return found


def test_later_steps_never_change_an_earlier_result(
    make_bench: Any, make_prompts: Any, overlap: bool
) -> None:
    bench = make_bench(n_draft=3, prefill_tokens=40, max_running=8, overlap=overlap)
    for n, prompt in enumerate(make_prompts(12, seed=18)):
        bench.submit(
            n, prompt, temperature=0.0, max_tokens=12, logprobs_k=n % 4, hand_over=n % 4 == 0
        )
    seen = []
    while bench.engine.has_work():
        result = bench.step()
        kv = [array.tobytes() for handoff in result.handoffs for array in handoff.kv]
        seen.append((result, _bytes_of(result.columns), kv))
        for handoff in result.handoffs:
            state = handoff.state
            bench.engine.release_handoff(RequestKey(state.handle, state.attempt))
    assert any(kv for _, _, kv in seen)
    for result, before, kv_before in seen:
        assert _bytes_of(result.columns) == before
        assert [a.tobytes() for h in result.handoffs for a in h.kv] == kv_before


@pytest.mark.slow
def test_every_step_of_the_engine_is_accepted_and_returned_by_the_codec(
    run: Any, tiny: Any
) -> None:
    limits = Limits(vocab_size=tiny.shape.vocab_size)
    results = run()
    assert any(result.columns.errors for result in results)
    assert any(len(result.columns.draft) for result in results)
    assert any(len(result.columns.n_accepted) for result in results)
    assert any(result.columns.verified_drafts.n_rows for result in results)
    for result in results:
        frame = encode_step(result.columns, HEADER, limits=limits)
        assert _bytes_of(decode_step(frame, limits)[1]) == _bytes_of(result.columns)


@pytest.mark.slow
def test_memory_that_nobody_wrote_reaches_no_record(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays that NumPy leaves as they are get a pattern; frames must not depend on it."""
    empty, empty_like = np.empty, np.empty_like
    poison = 0

    def filled(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if array.dtype != object and array.flags.c_contiguous:
            array.reshape(-1).view(np.uint8)[:] = poison
        return array

    monkeypatch.setattr(np, "empty", lambda *a, **k: filled(empty(*a, **k)))
    monkeypatch.setattr(np, "empty_like", lambda *a, **k: filled(empty_like(*a, **k)))
    frames = []
    for poison in (0x00, 0x5A):
        assert (np.empty(3, np.uint8) == poison).all()
        frames.append([encode_step(result.columns, HEADER) for result in run()])
    assert frames[0] == frames[1]
