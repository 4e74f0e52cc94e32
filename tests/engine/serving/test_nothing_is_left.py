"""After many mixed endings every map is empty and every block is free (R20)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton_worker.identity import RequestKey
from baton_worker.records.columns import ErrorCode, Finish

ENGINES = ("paddle", "device")


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_500_mixed_requests_leave_no_trace(
    make_bench: Any, make_prompts: Any, overlap: bool
) -> None:
    rng = np.random.default_rng(11)
    bench = make_bench(
        n_draft=2,
        max_model_len=96,
        block_size=8,
        n_blocks=60,
        max_running=12,
        prefill_tokens=64,
        overlap=overlap,
    )
    prompts = make_prompts(500, seed=12, longest=30)
    open_keys: list[RequestKey] = []
    offered: list[RequestKey] = []
    for number, prompt in enumerate(prompts):
        open_keys.append(
            bench.submit(
                number,
                prompt,
                temperature=float(rng.choice([0.0, 0.9])),
                seed=number,
                max_tokens=int(rng.integers(1, 20)),
                frequency_penalty=0.3 * (number % 5 == 0),
                logprobs_k=int(rng.integers(-1, 4)),
                hand_over=bool(rng.random() < 0.2),
            )
        )
        if rng.random() < 0.5:
            result = bench.step()
            offered += [RequestKey(h.state.handle, h.state.attempt) for h in result.handoffs]
        if rng.random() < 0.15:
            bench.engine.abort(open_keys[int(rng.integers(len(open_keys)))])
        if rng.random() < 0.1:
            victim = open_keys[int(rng.integers(len(open_keys)))]
            bench.engine.fail(victim, ErrorCode.LINK_STALLED, "test")
        if offered and rng.random() < 0.3:
            bench.engine.release_handoff(offered.pop())
    for result in bench.drain():
        offered += [RequestKey(h.state.handle, h.state.attempt) for h in result.handoffs]
    while offered:
        bench.engine.release_handoff(offered.pop())
        for result in bench.drain():
            offered += [RequestKey(h.state.handle, h.state.attempt) for h in result.handoffs]
    bench.check_nothing_is_left()
    endings = {bench.reader[key].finish for key in open_keys}
    assert endings == {Finish.NONE, Finish.STOP, Finish.LENGTH, Finish.ABORT, Finish.ERROR} - {
        Finish.STOP
    }
    for key in open_keys:
        handed_over = bench.reader[key].finish is Finish.NONE
        assert handed_over == (key not in bench.reader.ended)
