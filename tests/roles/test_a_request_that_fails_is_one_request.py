"""What breaks a step's numbers for one request ends it there, typed and counted; the worker serves.

The fault sits in the engine's logits, where a broken weight or an overflow would put it.
"""

from __future__ import annotations

import numpy as np
import pytest

from baton_worker.engine.step.runner import Runner
from baton_worker.identity import RequestKey, make_handle
from baton_worker.messages import Abort, DecodeTarget, Reserve, Submit
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.sampling import SamplingParams

GATEWAY = 77
PROMPT = tuple(range(20, 60))
LENGTH = 12


def handle(n: int) -> int:
    return make_handle(GATEWAY, n)


def submit(n: int, decode: str | None, **sampling) -> Submit:
    params = SamplingParams(**{"temperature": 0.8, "seed": n, "max_tokens": LENGTH} | sampling)
    target = None if decode is None else DecodeTarget(decode, "memory")
    return Submit(
        handle(n), 0, prompt_token_ids=PROMPT, sampling=params, logprobs_k=2, decode=target
    )


def counted(worker, reason: str) -> float:
    registry = worker.registry
    labels = {"model": "tiny", "role": "mixed", "reason": reason}
    return registry.get_sample_value("baton_worker_refused_total", labels) or 0.0


@pytest.fixture
def broken_from(monkeypatch):
    """`broken_from(n, position)`: request n's logits are NaN from this output position on."""

    def set_up(n: int, position: int) -> None:
        real = Runner._raw_logits

        def raw_logits(self, batch, hidden):
            logits = real(self, batch, hidden)
            for first, sequence in zip(batch.first_rows, batch.sampled, strict=True):
                request = sequence.request
                if request.key.handle == handle(n) and request.n_output >= position:
                    logits[first] = np.nan
            return logits

        monkeypatch.setattr(Runner, "_raw_logits", raw_logits)

    return set_up


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("position", [0, 4], ids=["at prefill", "at decode"])
def test_it_is_counted_and_the_others_are_served(make_worker, broken_from, overlap, k, position):
    prefill = make_worker("prefill-0", k=k, overlap=overlap)
    decode = make_worker("decode-0", k=k, overlap=overlap)
    broken_from(2, position)
    for n in (1, 2, 3):
        decode.command(Reserve(handle(n), 0, len(PROMPT), LENGTH, 60.0))
        prefill.command(submit(n, "decode-0"))
    for _ in range(60):
        prefill.turn()
        decode.turn()
    at_fault = prefill if position == 0 else decode
    assert at_fault.finish(handle(2)) is Finish.ERROR
    error = at_fault.rows(handle(2))[-1].error
    assert error.code is ErrorCode.ARITHMETIC
    assert "not finite" in error.message
    assert counted(at_fault, "arithmetic") == 1
    for n in (1, 3):
        assert decode.finish(handle(n)) in (Finish.LENGTH, Finish.STOP)
    for n in (1, 2, 3):  # as a gateway does when a request is over
        prefill.command(Abort(handle(n), 0))
        decode.command(Abort(handle(n), 0))
    prefill.run()
    decode.run()
    assert prefill.is_clean()
    assert decode.is_clean()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1e-50),
        ("temperature", float("nan")),
        ("repetition_penalty", 1e-38),
        ("frequency_penalty", 1e39),
        ("top_k", 1 << 63),
        ("min_p", 1e-50),
    ],
)
def test_what_a_step_would_not_survive_is_refused_with_the_fields_name(make_worker, field, value):
    worker = make_worker("mixed-0")
    worker.command(submit(1, None))
    worker.command(submit(2, None, **{field: value}))
    worker.run()
    assert worker.finish(handle(1)) in (Finish.LENGTH, Finish.STOP)
    error = worker.rows(handle(2))[-1].error
    assert error.code is ErrorCode.INVALID_REQUEST
    assert field in error.message
    assert counted(worker, "invalid_request") == 1
    assert worker.is_clean()


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_unfit_kv_is_refused_to_prefill_and_ends_the_request_on_both_sides(make_worker, overlap):
    """Its values are looked at when they are imported, so decode has taken the request by then."""
    prefill, decode = make_worker("prefill-0"), make_worker("decode-0", overlap=overlap)
    decode.transport.is_deaf = True
    for n in (1, 2):
        decode.command(Reserve(handle(n), 0, len(PROMPT), LENGTH, 60.0))
        prefill.command(submit(n, "decode-0"))
    prefill.run()
    decode.transport.is_deaf = False
    spoiled = RequestKey(handle(1), 0)
    for _, handoff in prefill.transport.open.values():
        if handoff.state.handle == spoiled.handle:
            handoff.kv[-1][1, 0, 2, 0] = np.inf
    for key in tuple(prefill.transport.open):
        prefill.transport.send(key)
    decode.run()
    prefill.run()
    good = RequestKey(handle(2), 0)
    assert set(decode.transport.answers) == {(spoiled, "INCOMPATIBLE"), (good, "imported")}
    assert len(decode.transport.answers) == 2
    for worker in (prefill, decode):
        assert worker.rows(handle(1))[-1].error.code is ErrorCode.INCOMPATIBLE
        assert counted(worker, "incompatible") == 1
        assert worker.is_clean()
    assert decode.finish(handle(2)) in (Finish.LENGTH, Finish.STOP)
