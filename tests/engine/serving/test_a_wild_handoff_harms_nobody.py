"""A handoff with any number at its edges is refused by name, or admitted without harm to others.

It comes as bytes from a prefill worker that may be broken or hostile. Fields come from the message
type, so a new one is covered by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from baton_testing import numeric_edges
from baton_worker.engine.api import EngineRefusedError, Handoff
from baton_worker.handoff.frames import HandoffFormatError, decode_offer, encode_offer
from baton_worker.identity import RequestKey, Role, make_handle
from baton_worker.link.parts import FrameWriter, StepPart
from baton_worker.messages import HandoffState
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.records.layout import Limits
from baton_worker.sampling import LogprobParams

ENGINES = ("paddle", "device")

PARAMS = LogprobParams(draft_ids=True, draft_logprobs=True, processed=True, prompt_k=1)
SAMPLING: dict[str, Any] = {
    "temperature": 0.8, "seed": 5, "max_tokens": 8, "repetition_penalty": 1.1, "top_p": 0.9,
    "logit_bias": ((4, 1.0),), "bad_words": ((6, 7),), "stop_token_ids": (3,),
}  # fmt: skip
WILD = {
    "first_logprob": [float("nan"), float("inf"), 0.5, -1e39],
    "first_rank": [0, -1, 1 << 31],
    "topk_tokens[]": [-1, 512, 1 << 31],
    "topk_logprobs[]": [float("nan"), 1.0, -1e39],
    "drafts[]": [-1, 512, 1 << 40],
    "draft_scores.logprobs[]": [float("nan"), float("inf"), -1e39],
    "draft_scores.ranks[]": [0, 1 << 31],
    "draft_scores.topk_tokens[]": [-1, 1 << 31],
    "draft_scores.topk_logprobs[]": [float("nan"), 2.0],
    "n_cached": [0, 39, 41],
    "n_reused": [-1, 41, 1 << 32],
    "width": [0, 1, 4],
    "prompt_token_ids[]": [-1, 512, 1 << 31],
    "first_token": [-1, 512],
    "logprobs.prompt_k": [21, 8191, 1 << 62, -2],
    "sampling.temperature": [1e-50, float("nan")],
    "sampling.top_k": [1 << 63],
    "priority": [1 << 62],
}
"""Values that must be refused, whatever else is."""


def _merged(base: Any, placed: Any) -> Any:
    """Put a placed value into what was there: one field of a structure, one item of a list."""
    if isinstance(base, dict) and isinstance(placed, dict):
        return base | {name: _merged(base.get(name), value) for name, value in placed.items()}
    if isinstance(base, list) and isinstance(placed, list) and base:
        return [_merged(base[0], placed[0]), *base[1:]]
    return placed


def _offers(good: Handoff) -> Iterator[tuple[str, Any, Handoff | None]]:
    """Yield every number of the state at each edge, as it comes from the wire; None: refused."""
    base = msgspec.msgpack.decode(msgspec.msgpack.encode(good.state))
    decode_offer(encode_offer(good))  # what is refused below is so for the value that is placed
    floats = (*numeric_edges.FLOATS, *numeric_edges.NOT_FINITE, *numeric_edges.INTEGERS)
    number = 100
    for field in numeric_edges.numeric_fields(HandoffState):
        values = numeric_edges.INTEGERS if field.is_integer else floats
        for value in (*values, *WILD.get(field.path, ())):
            name, placed = field.place(value)
            number += 1
            body = base | {"handle": make_handle(1, number), name: _merged(base.get(name), placed)}
            state, *kv = encode_offer(good)[1:]
            state = msgspec.msgpack.encode(body)
            frames = [b"BKV1", state, *(bytes(memoryview(array)) for array in kv)]
            try:
                yield field.path, value, decode_offer(frames)
            except HandoffFormatError:
                yield field.path, value, None


@pytest.fixture
def offered(
    make_bench: Callable[..., Any], make_sim_bench: Callable[..., Any], request: Any
) -> Any:
    """`(decode bench, a good handoff, the record writer)` of one kind of engine."""
    make = make_bench if request.param == "paddle" else make_sim_bench
    prefill = make(n_draft=3, max_model_len=64)
    prefill.submit(1, tuple(range(10, 50)), hand_over=True, logprobs_k=2, logprobs=PARAMS,
                   ignore_eos=True, **SAMPLING)  # fmt: skip
    good = prefill.handoffs()[0]
    assert len(good.state.drafts) == len(good.state.draft_scores.logprobs) == 3
    decode = make(n_draft=3, max_model_len=64, max_running=32, prefix_caching=False)
    vocab_size = decode.engine.shape.vocab_size
    return decode, good, FrameWriter(Role.DECODE, 1, limits=Limits(vocab_size=vocab_size))


def _serve(decode: Any, writer: FrameWriter, handoffs: list[Handoff]) -> dict[RequestKey, Any]:
    """Run what was admitted beside a request of this engine's own, the batch after each other."""
    decode.reader.streams.clear()
    decode.reader.ended.clear()
    own = decode.submit(1, (5, 6, 7), temperature=0.9, seed=1, logprobs_k=1, max_tokens=6)
    for handoff in handoffs:
        state = handoff.state
        key = RequestKey(state.handle, state.attempt)
        decode.reader[key].tokens.extend(state.output_token_ids)
    for result in decode.drain():
        assert result.failed == ()
        writer.write([StepPart(result.columns, 1)], 1, 1, 0)
    return {own: decode.reader[own]} | dict(decode.reader.streams)


@pytest.mark.slow
@pytest.mark.parametrize("offered", ["paddle", "sim"], indirect=True)
def test_every_number_of_a_handoff_is_refused_or_harmless(offered: Any) -> None:
    decode, good, writer = offered
    alone = _serve(decode, writer, [])
    own, expected = next(iter(alone.items()))
    refused: set[tuple[str, Any]] = set()
    batch: list[Handoff] = []
    n_admitted = 0
    cases = list(_offers(good))
    for index, (path, value, handoff) in enumerate(cases):
        try:
            if handoff is None:
                raise EngineRefusedError(ErrorCode.HANDOFF_REFUSED, "not an offer")
            decode.engine.admit_handoff(handoff)
            batch.append(handoff)
            n_admitted += 1
        except EngineRefusedError:
            refused.add((path, str(value)))
        if len(batch) == 30 or index == len(cases) - 1:
            streams = _serve(decode, writer, batch)
            assert dataclasses.astuple(streams[own]) == dataclasses.astuple(expected)
            for admitted in batch:
                key = RequestKey(admitted.state.handle, admitted.state.attempt)
                assert streams[key].finish in (Finish.LENGTH, Finish.STOP), admitted.state
                assert np.isfinite(streams[key].logprobs).all()
            batch = []
    for path, values in WILD.items():
        for value in values:
            assert (path, str(value)) in refused, (path, value)
    assert n_admitted > len(cases) // 10, "some numbers are as good as others"
    assert decode.engine.load().kv_blocks_used == 0
