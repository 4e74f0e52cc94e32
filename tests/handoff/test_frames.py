"""An offer survives the wire bit for bit; anything else is refused with one error type."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.handoff.frames import (
    MAGIC,
    Answer,
    AnswerKind,
    HandoffFormatError,
    decode_answer,
    decode_offer,
    encode_answer,
    encode_offer,
)
from baton_worker.messages import HandoffState
from baton_worker.records.columns import ErrorCode
from baton_worker.sampling import SamplingParams


def wire(frames: list) -> list[bytes]:
    return [bytes(memoryview(frame)) for frame in frames]


def test_an_offer_round_trips_bit_for_bit(make_handoff):
    handoff = make_handoff()
    got = decode_offer(wire(encode_offer(handoff)))
    assert got.state == handoff.state
    assert len(got.kv) == 6
    assert all(np.array_equal(a, b) for a, b in zip(got.kv, handoff.kv, strict=True))


def test_received_arrays_cannot_be_written(make_handoff):
    got = decode_offer(wire(encode_offer(make_handoff())))
    with pytest.raises(ValueError, match="read-only"):
        got.kv[0][0] = 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_layers", 0, "n_layers is 0"),
        ("n_layers", 10**9, "n_layers"),
        ("n_cached", 21, "prompt tokens"),
        ("dtype", "int8", "dtype 'int8'"),
        ("block_size", -1, "block_size"),
        ("width", 2, "width 2"),
        ("handle", 0, "handle"),
        ("attempt", 300, "attempt"),
    ],
)
def test_a_state_out_of_range_is_refused_by_name(make_handoff, field, value, message):
    handoff = make_handoff()
    state = msgspec.structs.replace(handoff.state, **{field: value})
    frames = [MAGIC, msgspec.msgpack.encode(state), *wire(list(handoff.kv))]
    with pytest.raises(HandoffFormatError, match=message):
        decode_offer(frames)


def test_a_short_or_missing_kv_frame_is_refused(make_handoff):
    frames = wire(encode_offer(make_handoff()))
    with pytest.raises(HandoffFormatError, match="KV frame 1 has"):
        decode_offer([*frames[:3], frames[3][:-4], *frames[4:]])
    with pytest.raises(HandoffFormatError, match="5 KV frames, expected 6"):
        decode_offer(frames[:-1])


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_random_frames_only_ever_raise_the_declared_error(frames):
    for parse in (decode_offer, decode_answer):
        for candidate in (frames, [MAGIC, *frames]):
            try:
                parse(candidate)
            except HandoffFormatError:
                continue


@given(st.data())
def test_a_mutated_state_only_ever_raises_the_declared_error(data):
    state = HandoffState(
        handle=1 << 40,
        attempt=0,
        model_fingerprint="f",
        dtype="float32",
        n_layers=1,
        kv_heads=1,
        block_size=8,
        head_dim=1,
        n_cached=1,
        prompt_token_ids=(1,),
        sampling=SamplingParams(),
        logprobs_k=-1,
        first_token=1,
    )
    raw = bytearray(msgspec.msgpack.encode(state))
    decode_offer([MAGIC, bytes(raw), b"\0" * 32, b"\0" * 32])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_offer([MAGIC, bytes(raw), b"\0" * 32, b"\0" * 32])
    except HandoffFormatError:
        return


@given(
    st.integers(1, 2**64 - 1),
    st.integers(0, 255),
    st.sampled_from(AnswerKind),
    st.text(max_size=50),
)
def test_an_answer_round_trips(handle, attempt, kind, text):
    answer = Answer(handle, attempt, int(kind), int(ErrorCode.DECODE_FULL), text)
    assert decode_answer(encode_answer(answer)) == answer


def test_an_unknown_refusal_code_still_counts_as_refused():
    assert Answer(1, 0, int(AnswerKind.REFUSED), code=250).error is ErrorCode.HANDOFF_REFUSED


def test_a_refusal_of_what_is_over_is_a_plain_one_to_workers_that_know_no_better():
    over = Answer(1, 0, int(AnswerKind.REFUSED), message="the request is over")
    assert over.is_over
    assert over.error is ErrorCode.HANDOFF_REFUSED
    for kind, code in ((AnswerKind.QUEUED, 0), (AnswerKind.REFUSED, 250), (AnswerKind.REFUSED, 5)):
        assert not Answer(1, 0, int(kind), code).is_over
