"""After thousands of requests that finish, abort, fail, are preempted or handed over, all is empty.

R20. A small random model: what is counted here is bookkeeping, not arithmetic.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from baton_testing.lengths import length
from baton_worker.identity import RequestKey
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.sampling import LogprobParams

N_REQUESTS = length(10_000, 2_000)
AT_LEAST = N_REQUESTS // 200  # of each way to end, of which some are drawn for one in twenty
_NEVER = (Finish.NONE, Finish.PREEMPTED)


class Load:
    """Draws requests and misfortunes for a prefill and a decode engine."""

    def __init__(self, prefill: Any, decode: Any, prompts: Any) -> None:
        self.prefill, self.decode, self.prompts = prefill, decode, prompts
        self.rng = np.random.default_rng(20)
        self.ended: dict[Finish, int] = dict.fromkeys(Finish, 0)
        self.preempted = 0

    def submit(self, number: int) -> None:
        rng = self.rng
        self.prefill.submit(
            number,
            self.prompts[number % len(self.prompts)],
            temperature=float(rng.choice([0.0, 0.9])),
            seed=number,
            max_tokens=int(rng.integers(1, 20)),
            frequency_penalty=0.3 * (number % 5 == 0),
            ignore_eos=False,
            logprobs_k=int(rng.integers(-1, 4)),
            logprobs=LogprobParams(draft_ids=number % 3 == 0, prompt_k=number % 2 - 1),
            bad_words=((3, 4), (5,)) if number % 7 == 0 else (),
            hand_over=bool(rng.random() < 0.3),
        )

    def misfortune(self) -> None:
        for bench in (self.prefill, self.decode):
            held = bench.known()
            if held and self.rng.random() < 0.05:
                bench.engine.abort(held[int(self.rng.integers(len(held)))])
            if held and self.rng.random() < 0.05:
                key = held[int(self.rng.integers(len(held)))]
                bench.engine.fail(key, ErrorCode.LINK_STALLED, "test")

    def step(self) -> None:
        result = self._step(self.prefill)
        for handoff in result.handoffs if result else ():
            self.decode.engine.admit_handoff(handoff)
            state = handoff.state
            self.prefill.engine.release_handoff(RequestKey(state.handle, state.attempt))
        self._step(self.decode)

    def _step(self, bench: Any) -> Any:
        if not bench.engine.has_work():
            return None
        result = bench.step()
        self.preempted += result.stats.preempted
        for key in bench.reader.ended:
            self.ended[bench.reader.streams.pop(key).finish] += 1
        bench.reader.ended.clear()
        return result

    def run(self, numbers: range) -> None:
        for number in numbers:
            self.submit(number)
            if number % 4 == 0:
                self.step()
                self.misfortune()
            while self.prefill.engine.load().waiting > 30:
                self.step()
        while self.prefill.engine.has_work() or self.decode.engine.has_work():
            self.step()


def _objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.slow
def test_thousands_of_mixed_requests_leave_no_entry_and_no_object(
    make_bench: Any, make_model: Any, make_prompts: Any
) -> None:
    model = make_model(n_layers=1)
    options = {"max_model_len": 64, "block_size": 8, "n_blocks": 16, "max_running": 12}
    options["overlap"] = True
    prefill = make_bench(model, n_draft=2, prefill_tokens=64, **options)
    decode = make_bench(model, n_draft=2, reader=prefill.reader, **options)
    load = Load(prefill, decode, make_prompts(200, seed=12, longest=30, vocab_size=64))
    load.run(range(500))
    after_500 = _objects()
    load.run(range(500, N_REQUESTS))
    assert sum(load.ended.values()) == N_REQUESTS
    assert min(load.ended[finish] for finish in Finish if finish not in _NEVER) > AT_LEAST
    assert load.preempted > AT_LEAST
    for bench in (prefill, decode):
        bench.check_nothing_is_left()
        assert not bench.reader.streams
    assert _objects() - after_500 < N_REQUESTS / 100, "something grows with the requests served"
