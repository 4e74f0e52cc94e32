"""What one device prefilled another decodes bit for bit, and only what is of its own form."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from baton_testing.engine_bench import Reader
from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.api import EngineRefusedError, Handoff
from baton_worker.engine.backends.device.start import start_engine
from baton_worker.engine.build import build_engine
from baton_worker.engine.engine import StepEngine
from baton_worker.handoff.frames import decode_offer, encode_offer
from baton_worker.messages import DecodeTarget, Submit
from baton_worker.records.columns import ErrorCode
from baton_worker.sampling import SamplingParams

PROMPTS = [tuple(5 + (7 * i + j) % 60 for j in range(3 + 21 * i)) for i in range(4)]


def config(**engine: Any) -> ProcessConfig:
    limits = {"max_model_len": 128, "max_running": 4, "prefill_chunk_tokens": 32} | engine
    return ProcessConfig(
        model=ModelConfig(path=str(TINY_MODEL)),
        speculative=SpeculativeConfig(num_speculative_tokens=2),
        engine=EngineConfig(**limits),
    )


def on_device(**engine: Any) -> StepEngine:
    chosen = config(**({"device": "gpu", "dtype": "float32", "kv_blocks": 40} | engine))
    device = NumpyDevice(64 << 20)
    return start_engine(chosen, device, NumpyKernels(device), time.monotonic)


def request(number: int, hand_over: bool) -> Submit:
    sampling = SamplingParams(
        max_tokens=12, temperature=0.9 * (number % 2), seed=number, ignore_eos=True
    )
    return Submit(
        1 + number,
        0,
        prompt_token_ids=PROMPTS[number],
        sampling=sampling,
        logprobs_k=2,
        decode=DecodeTarget("decode", "tcp://decode:1") if hand_over else None,
    )


def drained(engine: StepEngine, reader: Reader) -> list[Handoff]:
    handoffs: list[Handoff] = []
    while engine.has_work():
        result = engine.step()
        reader.read(result)
        handoffs += result.handoffs
    return handoffs


def prefilled(engine: StepEngine) -> list[Handoff]:
    for number in range(len(PROMPTS)):
        engine.submit(request(number, hand_over=True))
    return drained(engine, Reader())


@pytest.fixture(scope="module")
def handoffs() -> list[Handoff]:
    return prefilled(on_device())


def over_the_wire(handoff: Handoff) -> Handoff:
    return decode_offer([bytes(frame) for frame in encode_offer(handoff)])


def texts(reader: Reader) -> list[Any]:
    keys = [request(number, hand_over=False).key for number in range(len(PROMPTS))]
    streams = [reader[key] for key in keys]
    return [(s.tokens, s.logprobs, s.ranks, s.topk) for s in streams]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_decode_goes_on_as_one_worker_would(handoffs: list[Handoff], overlap: bool) -> None:
    mixed, decode = Reader(), Reader()
    engine = on_device(overlap=overlap)
    for number in range(len(PROMPTS)):
        engine.submit(request(number, hand_over=False))
    drained(engine, mixed)
    second = on_device(overlap=overlap)
    for handoff in handoffs:
        second.admit_handoff(over_the_wire(handoff))
    drained(second, decode)
    assert texts(decode) == texts(mixed)
    assert second.load().kv_blocks_used == 0


def test_the_payload_is_one_array_of_whole_blocks(handoffs: list[Handoff]) -> None:
    for handoff, prompt in zip(handoffs, PROMPTS, strict=True):
        (array,) = handoff.kv
        assert array.shape == (-(-len(prompt) // 16), 3, 2, 2, 16, 16)
        assert handoff.state.dtype == "float32-by-block"
        assert not array[-1, ..., len(prompt) % 16 or 16 :, :].any()
        (frame,) = encode_offer(handoff)[2:]
        assert frame.nbytes == array.nbytes


@pytest.mark.slow
def test_the_two_forms_refuse_each_other_by_name(handoffs: list[Handoff]) -> None:
    host, device = build_engine(config()), on_device()
    with pytest.raises(
        EngineRefusedError, match=r"dtype is 'float32-by-block', this worker has 'float32'"
    ) as refused:
        host.admit_handoff(handoffs[0])
    assert refused.value.code is ErrorCode.INCOMPATIBLE
    with pytest.raises(
        EngineRefusedError, match=r"dtype is 'float32', this worker has 'float32-by-block'"
    ):
        device.admit_handoff(prefilled(host)[0])


@pytest.mark.slow
def test_dtypes_refuse_each_other_by_name(handoffs: list[Handoff]) -> None:
    wider = handoffs[0]
    narrow = Handoff(
        type(wider.state)(**_fields(wider) | {"dtype": "bfloat16-by-block"}),
        tuple((array.view(np.uint32) >> 16).astype(np.uint16) for array in wider.kv),
    )
    assert over_the_wire(narrow).kv[0].dtype == np.uint16
    with pytest.raises(EngineRefusedError, match=r"dtype is 'bfloat16-by-block'"):
        on_device().admit_handoff(narrow)


def _fields(handoff: Handoff) -> dict[str, Any]:
    return {name: getattr(handoff.state, name) for name in handoff.state.__struct_fields__}


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [np.nan, np.inf, -2e15])
def test_values_that_would_spoil_a_block_end_their_request_alone(
    handoffs: list[Handoff], spoil: float
) -> None:
    engine, emitted = on_device(), 0
    bad, good = (over_the_wire(handoff) for handoff in handoffs[2:])
    array = bad.kv[0].copy()
    array[1, 2, 1, 1, 3, 4] = spoil
    engine.admit_handoff(Handoff(bad.state, (array,)))
    engine.admit_handoff(good)
    failed = []
    while engine.has_work():
        result = engine.step()
        failed += result.failed
        emitted += result.stats.emitted_tokens
    assert [(f.key, f.code) for f in failed] == [(bad.state.key, ErrorCode.INCOMPATIBLE)]
    assert "NaN" in failed[0].message
    assert emitted >= 11, "the other one is served in full"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("blocks_per_step", [1, 2, 100])
def test_however_few_blocks_a_step_moves_the_kv_is_the_same(
    handoffs: list[Handoff], blocks_per_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton_worker.engine.backends.device import start

    block_bytes = handoffs[0].kv[0][0].nbytes
    monkeypatch.setattr(start, "_KV_BYTES_PER_STEP", blocks_per_step * block_bytes)
    for ours, theirs in zip(prefilled(on_device()), handoffs, strict=True):
        assert np.array_equal(ours.kv[0], theirs.kv[0])


@pytest.mark.slow
def test_a_request_that_ends_while_its_kv_is_under_way_leaves_nothing() -> None:
    engine, reader = on_device(), Reader()
    engine.submit(request(3, hand_over=True))
    while not engine.load().held_handoffs:
        reader.read(engine.step())
    engine.abort(request(3, hand_over=True).key)
    assert drained(engine, reader) == []
    load = engine.load()
    assert (load.held_handoffs, load.kv_blocks_used) == (0, 0)
    engine.check_integrity()
