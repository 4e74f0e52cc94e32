"""The worker's own edge: whatever a gateway may send is refused by name, or every step survives it.

A gateway may be older or hostile, so nothing of its checks is relied on. Fields come from the
message types themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from baton_testing import numeric_edges
from baton_worker.engine.api import EngineRefusedError
from baton_worker.identity import RequestKey, make_handle
from baton_worker.messages import Submit
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.sampling import SAMPLING_BOUNDS

ENGINES = ("paddle", "device")

HANDLE = make_handle(1, 2)
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 5, "seed": 1}
LOGPROBS = {"processed": True, "temp_scaled": True, "top_p_normalized": True, "prompt_k": 1}
OF_THE_KEY = {"handle", "attempt"}
"""What no row could answer: the link drops such commands (tests/link)."""


def _submits() -> list[tuple[str, Any, Submit]]:
    """Every number of SUBMIT at its edges, as bytes bring it in."""
    base = {
        "type": "submit",
        "handle": HANDLE,
        "attempt": 0,
        "prompt_token_ids": [7, 8, 9, 7, 8],
        "sampling": SAMPLING,
        "logprobs_k": 2,
        "logprobs": LOGPROBS,
    }
    values = (*numeric_edges.FLOATS, *numeric_edges.NOT_FINITE, *numeric_edges.INTEGERS)
    cases = []
    for field in numeric_edges.numeric_fields(Submit):
        if field.path in OF_THE_KEY:
            continue
        for value in numeric_edges.INTEGERS if field.is_integer else values:
            name, placed = field.place(value)
            if isinstance(base.get(name), dict):
                placed = base[name] | placed
            body = msgspec.msgpack.encode(base | {name: placed})
            try:
                cases.append((field.path, value, msgspec.msgpack.decode(body, type=Submit)))
            except msgspec.ValidationError:
                continue  # refused with the whole command
    return cases


@pytest.mark.parametrize(
    ("engine", "overlap"), [pytest.param("paddle", False, marks=pytest.mark.slow), ("sim", True)]
)
@pytest.mark.fast_cases(1)  # a simulated engine is the same beside either bench
def test_every_number_of_a_submit_is_refused_or_survived(
    make_bench: Callable[..., Any], make_sim_bench: Callable[..., Any], engine: str, overlap: bool
) -> None:
    make = make_bench if engine == "paddle" else make_sim_bench
    bench = make(n_draft=2, overlap=overlap, max_model_len=64, max_running=32)
    neighbour = {"temperature": 0.9, "seed": 3, "logprobs_k": 1, "max_tokens": 5}
    alone = make(n_draft=2, max_model_len=64)
    wanted = alone.submit(1, (3, 4, 5), **neighbour)
    alone.drain()
    refused: set[tuple[str, ErrorCode]] = set()
    for batch in _batches(_submits(), 30):
        beside = bench.submit(1, (3, 4, 5), **neighbour)
        admitted = {}
        for number, (path, value, submit) in enumerate(batch, 10):
            try:
                admitted[_submit(bench, number, submit)] = (path, value)
            except EngineRefusedError as refusal:
                refused.add((path, refusal.code))
        bench.drain()
        for key, case in admitted.items():
            stream = bench.reader[key]
            assert stream.finish in (Finish.STOP, Finish.LENGTH), (case, stream.error)
            assert np.isfinite(stream.logprobs).all(), case
        assert bench.reader[beside].tokens == alone.reader[wanted].tokens, batch
        bench.reader.streams.clear()
        bench.reader.ended.clear()
    assert {code for _, code in refused} == {ErrorCode.INVALID_REQUEST}
    paths = {path for path, _ in refused}
    assert {f"sampling.{name}" for name in SAMPLING_BOUNDS} <= paths
    assert {"priority", "logprobs_k", "logprobs.prompt_k", "sampling.logit_bias[][1]"} < paths


def _batches(cases: list[Any], size: int) -> list[list[Any]]:
    return [cases[start : start + size] for start in range(0, len(cases), size)]


def _submit(bench: Any, number: int, submit: Submit) -> RequestKey:
    key = RequestKey(make_handle(1, number), 0)
    own = {"handle": key.handle, "attempt": key.attempt, "decode": None}
    bench.engine.submit(msgspec.structs.replace(submit, **own))
    bench.reader[key].tokens.extend(submit.output_token_ids)
    return key
