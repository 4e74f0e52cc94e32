"""A worker counts each request once, by how it left: what was aborted or failed is not finished."""

from __future__ import annotations

import numpy as np
import pytest

from baton_worker.engine.step.runner import Runner
from baton_worker.identity import make_handle
from baton_worker.messages import Abort, DecodeTarget, Reserve, Submit
from baton_worker.records.columns import Finish
from baton_worker.roles.metrics import Outcome
from baton_worker.sampling import SamplingParams

PROMPT = tuple(range(20, 60))
HANDLE = make_handle(77, 1)


def submit(decode: str | None, max_tokens: int = 8) -> Submit:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=max_tokens, min_tokens=max_tokens)
    target = None if decode is None else DecodeTarget(decode, "memory")
    return Submit(HANDLE, 0, prompt_token_ids=PROMPT, sampling=params, logprobs_k=-1, decode=target)


def left(worker) -> dict[str, float | None]:
    """Return the counts of all outcomes, none of which needs an event to be there."""
    labels = {"model": "tiny", "role": "mixed"}
    found = {
        outcome: worker.registry.get_sample_value(
            "baton_worker_requests_total", {**labels, "outcome": outcome}
        )
        for outcome in Outcome
    }
    assert None not in found.values(), found
    return {outcome: count for outcome, count in found.items() if count}


def test_the_last_token_finishes_it(make_worker):
    worker = make_worker("mixed-0")
    worker.command(submit(None))
    worker.run()
    assert worker.finish(HANDLE) is Finish.LENGTH
    assert left(worker) == {"finished": 1}


def test_prefill_hands_over_what_decode_finishes(make_worker):
    prefill, decode = make_worker("prefill-0"), make_worker("decode-0")
    decode.command(Reserve(HANDLE, 0, len(PROMPT), 8, 60.0))
    prefill.command(submit("decode-0"))
    for _ in range(40):
        prefill.turn()
        decode.turn()
    assert (left(prefill), left(decode)) == ({"handed_over": 1}, {"finished": 1})


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("turns", [0, 3], ids=["in line", "while it runs"])
def test_an_abort_is_one_also_where_the_engine_ends_it(make_worker, overlap, turns):
    worker = make_worker("mixed-0", overlap=overlap)
    worker.command(submit(None, max_tokens=200))
    worker.turn(turns)
    worker.command(Abort(HANDLE, 0))
    worker.run()
    assert left(worker) == {"aborted": 1}


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_what_a_step_breaks_has_failed(make_worker, monkeypatch, overlap):
    def broken(self, batch, hidden):
        return np.full_like(real(self, batch, hidden), np.nan)

    real = Runner._raw_logits
    worker = make_worker("mixed-0", overlap=overlap)
    worker.command(submit(None))
    monkeypatch.setattr(Runner, "_raw_logits", broken)
    worker.run()
    assert worker.finish(HANDLE) is Finish.ERROR
    assert left(worker) == {"failed": 1}
