"""With any number of draft layers the graphs of steady decoding are there before the first request.

A sequence shorter than its draft layers are many takes other steps than a longer one, without
drafts: what is captured of such steps serves nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

from baton_testing.engine_bench import Bench, Clock, Reader, key
from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.backends.device.engine import DeviceEngine
from baton_worker.engine.backends.device.start import start_engine
from baton_worker.engine.options import MAX_DRAFTS

KINDS = 6
"""Steps of a size: greedy and sampled, without logprobs, with a token's own, with alternatives."""

Start = Callable[..., DeviceEngine]
Method = Literal["mtp", "ngram", "mtp_ngram"]


@pytest.fixture
def start(make_checkpoint: Callable[..., Any]) -> Start:
    def started(n_layers: int, method: Method = "mtp", **limits: int) -> DeviceEngine:
        made = make_checkpoint("ernie4_5", num_nextn_predict_layers=n_layers)
        sizes = {"max_model_len": 96, "max_running": 3, "prefill_chunk_tokens": 16, "kv_blocks": 40}
        config = ProcessConfig(
            model=ModelConfig(path=str(made.path)),
            speculative=SpeculativeConfig(method, num_speculative_tokens=2),
            engine=EngineConfig(device="gpu", dtype="float32", **(sizes | limits)),
        )
        device = NumpyDevice()
        return start_engine(config, device, NumpyKernels(device), Clock())

    return started


@pytest.mark.slow
@pytest.mark.parametrize("n_layers", range(1, MAX_DRAFTS + 1))
def test_each_size_has_its_graphs_and_no_others(start: Start, n_layers: int) -> None:
    launches = start(n_layers).runner.launches
    assert launches.kept == {1: KINDS, 2: KINDS, 3: KINDS}
    assert launches.captured == 3 * KINDS


@pytest.mark.slow
@pytest.mark.parametrize("n_layers", range(1, MAX_DRAFTS + 1))
def test_no_step_is_captured_while_requests_are_served(start: Start, n_layers: int) -> None:
    engine = start(n_layers)
    before = engine.runner.launches.captured
    bench = Bench(engine, Reader())
    for number in (1, 2, 3):
        bench.submit(number, tuple(range(5, 15)), max_tokens=10, ignore_eos=True)
    bench.drain()
    assert engine.runner.launches.captured == before


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "mtp_ngram"])
def test_steps_with_drafts_of_lookup_and_without_have_their_graphs(
    start: Start, method: Method
) -> None:
    engine = start(1, method, kv_blocks=80)
    launches = engine.runner.launches
    assert launches.kept == {1: 2 * KINDS, 2: 2 * KINDS, 3: 2 * KINDS}
    before, bench = launches.captured, Bench(engine, Reader())
    for number in (1, 2, 3):
        bench.submit(number, (5, 6, 7), max_tokens=2, ignore_eos=True)
    bench.drain()
    assert launches.captured == before


@pytest.mark.slow
def test_chunks_that_hold_a_prompt_and_a_half_leave_no_size_out(start: Start) -> None:
    launches = start(4, max_running=12, prefill_chunk_tokens=6).runner.launches
    assert launches.kept == dict.fromkeys((1, 2, 4, 8, 12), KINDS)


@pytest.mark.parametrize("max_model_len", [2, 3, 4, 5])
def test_requests_no_longer_than_layers_are_many_are_served(
    start: Start, max_model_len: int
) -> None:
    """A prompt must leave room for a token of output."""
    bench = Bench(start(5, max_model_len=max_model_len), Reader())
    bench.submit(1, (5,), max_tokens=max_model_len - 1, ignore_eos=True)
    bench.drain()
    assert len(bench.reader[key(1)].tokens) == max_model_len - 1
