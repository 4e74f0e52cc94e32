"""From a configuration to an engine on a device: memory is measured, graphs are made, it serves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from baton_testing.fp8_folder import quantise_folder
from baton_testing.numpy_device import SECONDS_PER_LAUNCH, NumpyDevice, on_device
from baton_testing.numpy_kernels import NumpyKernels
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import (
    EngineConfig,
    ModelConfig,
    ProcessConfig,
    SpeculativeConfig,
)
from baton_worker.engine.api import DeviceError, LaunchKind
from baton_worker.engine.backends.device import program, start
from baton_worker.engine.backends.device.engine import DeviceEngine
from baton_worker.engine.backends.device.expert_kernels import ExpertLimits
from baton_worker.engine.backends.device.loading import load_device_weights
from baton_worker.engine.backends.device.scaled_kernels import Scaled
from baton_worker.engine.backends.device.start import start_engine
from baton_worker.engine.build import build_engine
from baton_worker.engine.metrics import SEQUENCE_LABELS, EngineMetrics
from baton_worker.messages import Submit
from baton_worker.metrics import MetricFactory
from baton_worker.sampling import SamplingParams

MIB = 1 << 20
KINDS = ("graph", "decode", "mixed")
PROMPT = (5, 6, 7, 8, 9, 10, 11)


def config(k: int = 1, **engine: Any) -> ProcessConfig:
    limits = {"max_model_len": 96, "max_running": 3, "prefill_chunk_tokens": 32} | engine
    return ProcessConfig(
        model=ModelConfig(path=str(TINY_MODEL)),
        speculative=SpeculativeConfig(num_speculative_tokens=k),
        engine=EngineConfig(**limits),
    )


def started(total: int = 64 * MIB, **engine: Any) -> DeviceEngine:
    device = NumpyDevice(total)
    chosen = config(**({"device": "gpu", "dtype": "float32"} | engine))
    return start_engine(chosen, device, NumpyKernels(device), time.monotonic)


def served(engine: Any, **options: Any) -> list[Any]:
    sampling = SamplingParams(max_tokens=9, ignore_eos=True, **options)
    engine.submit(Submit(1, 0, prompt_token_ids=PROMPT, sampling=sampling, logprobs_k=2))
    columns = []
    while engine.has_work():
        columns.append(engine.step().columns)
    return [
        np.concatenate([getattr(part, name) for part in columns])
        for name in ("token", "logprob", "rank", "topk_token", "topk_logprob")
    ]


def value(registry: CollectorRegistry, name: str, kind: str = "", **more: str) -> float:
    labels = {"model": "m", "role": "mixed"} | ({"kind": kind} if kind else {}) | more
    found = registry.get_sample_value(name, labels)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def engine() -> DeviceEngine:
    return started()


@pytest.mark.slow
def test_the_pool_takes_what_the_share_leaves(engine: DeviceEngine) -> None:
    use = engine.model.device.memory()
    taken, block_bytes = use.total - use.free, engine.pool.shape.block_bytes
    assert taken <= 0.9 * use.total
    assert taken + 2 * block_bytes > 0.9 * use.total, "and no block less"
    assert engine.load().kv_blocks_total == engine.options.n_blocks


@pytest.mark.slow
def test_a_smaller_share_makes_a_smaller_pool(engine: DeviceEngine) -> None:
    smaller = started(gpu_memory_utilization=0.5)
    missing = engine.options.n_blocks - smaller.options.n_blocks
    assert missing * engine.pool.shape.block_bytes == pytest.approx(0.4 * 64 * MIB, rel=0.01)


@pytest.mark.slow
def test_blocks_that_were_asked_for_are_not_measured() -> None:
    assert started(kv_blocks=20).options.n_blocks == 20


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_says_what_the_engine_on_the_host_says(engine: DeviceEngine, temperature: float) -> None:
    ours = served(engine, temperature=temperature, seed=3)
    theirs = served(build_engine(config()), temperature=temperature, seed=3)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=5e-5)


def test_the_shortest_requests_are_served() -> None:
    shortest = started(max_model_len=2)
    shortest.submit(Submit(1, 0, prompt_token_ids=(5,), sampling=SamplingParams(max_tokens=1)))
    emitted = 0
    while shortest.has_work():
        emitted += shortest.step().stats.emitted_tokens
    assert emitted == 1


def test_weights_that_are_no_numbers_are_told_before_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_numbers(*arguments: Any) -> Any:
        weights = load_device_weights(*arguments)
        on_device(weights.final_norm)[:] = np.nan
        return weights

    monkeypatch.setattr(start, "load_device_weights", without_numbers)
    with pytest.raises(DeviceError, match=r"are not finite numbers.*the checkpoint may be broken"):
        started(kv_blocks=20)


@pytest.mark.slow
def test_what_starting_took_is_given_back(engine: DeviceEngine) -> None:
    load = started().load()
    assert (load.running, load.waiting, load.kv_blocks_used, load.kv_blocks_cached) == (0, 0, 0, 0)


@pytest.mark.slow
def test_no_step_is_captured_while_requests_are_served() -> None:
    fresh = started()
    device: Any = fresh.model.device
    captured = device.n_captures
    assert captured
    served(fresh, temperature=0.0)
    assert device.n_captures == captured


@pytest.mark.slow
def test_what_a_load_tells_of_launches_and_graphs_stays_as_it_was() -> None:
    fresh = started()
    before = fresh.load().device
    assert before is not None
    launched, kept = dict(before.launched), dict(before.graphs_kept)
    served(fresh, temperature=0.8, frequency_penalty=0.5)
    after = fresh.load().device
    assert after is not None
    assert (before.launched, before.graphs_kept) == (launched, kept)
    assert after.launched[LaunchKind.GRAPH].steps > before.launched[LaunchKind.GRAPH].steps
    assert after.graphs_kept != before.graphs_kept, "those with penalties are others"


@pytest.mark.slow
def test_chunks_that_hold_few_prompts_leave_no_size_out() -> None:
    few, many = (started(max_running=12, prefill_chunk_tokens=n) for n in (2, 32))
    assert few.runner.launches.captured == many.runner.launches.captured


@pytest.mark.slow
def test_a_pool_too_small_for_all_at_once_does_not_hold_up_the_start() -> None:
    small, large = (
        sum(way.steps for way in launches.by_kind.values())
        for launches in (
            started(kv_blocks=blocks, max_running=12).runner.launches for blocks in (8, 200)
        )
    )
    assert small <= large


@pytest.mark.parametrize(
    ("total", "engine", "message"),
    [
        (MIB // 4, {}, r"weights take 736\.0 KiB, the device has 256\.0 KiB free of 256\.0 KiB"),
        (MIB, {}, r"engine\.max_running 3 and engine\.prefill_chunk_tokens 32"),
        (16 * MIB, {"gpu_memory_utilization": 0.1}, r"gpu_memory_utilization 0\.1 of .*96 needs"),
        (64 * MIB, {"kv_blocks": 100_000}, r"no room for 100000 KV blocks.*engine\.kv_blocks"),
    ],
)
def test_too_little_memory_names_what_to_change(
    total: int, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        started(total, **engine)


@pytest.mark.slow
def test_the_devices_time_is_counted_where_its_steps_are() -> None:
    fresh = started()
    device: Any = fresh.model.device
    registry = CollectorRegistry()
    metrics = EngineMetrics(MetricFactory(registry, "m", "mixed"))
    metrics.observe_load(fresh.load())
    counted = {kind: value(registry, "baton_device_seconds_total", kind) for kind in KINDS}
    done = device.n_done
    served(fresh, temperature=0.0)
    metrics.observe_load(fresh.load())
    grown = {
        kind: value(registry, "baton_device_seconds_total", kind) - counted[kind] for kind in KINDS
    }
    assert grown["graph"] > grown["mixed"] > 0.0
    spent = (device.n_done - done) * SECONDS_PER_LAUNCH
    assert 0.9 * spent < sum(grown.values()) <= spent, "all but what lies between two steps"


@pytest.mark.slow
def test_the_graphs_at_hand_are_told_by_their_size() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(MetricFactory(registry, "m", "mixed"))
    fresh = started(max_running=12)
    metrics.observe_load(fresh.load())
    kept = [
        value(registry, "baton_device_graphs_kept", sequences=label) for label in SEQUENCE_LABELS
    ]
    assert sum(kept) == fresh.runner.launches.captured
    assert kept[0] > kept[1] > 0
    assert kept[2:] == [0, 0]


@pytest.mark.slow
def test_a_graph_that_went_for_another_is_not_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_MOST_GRAPHS", 3)
    fresh = started(max_running=12)
    load = fresh.load().device
    assert load is not None
    assert 0 < sum(load.graphs_kept.values()) <= 3 < load.graphs_captured


@pytest.mark.slow
def test_graphs_that_go_at_the_start_are_those_with_logprobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With lookup 256 sequences have 276: each size greedy and sampled, with its drafts and not."""
    monkeypatch.setattr(program, "_MOST_GRAPHS", 12)
    chosen = msgspec.structs.replace(
        config(device="gpu", dtype="float32"),
        speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=2),
    )
    device = NumpyDevice(64 * MIB)
    fresh = start_engine(chosen, device, NumpyKernels(device), time.monotonic)
    kept = list(fresh.runner._programs._repeated)
    assert {(shape.most_top, shape.q_len) for shape in kept} == {(-1, 1), (-1, 3)}
    assert len(kept) == 12 < fresh.runner.launches.captured


@pytest.mark.slow
def test_what_the_device_does_is_counted() -> None:
    fresh = started()
    registry = CollectorRegistry()
    metrics = EngineMetrics(MetricFactory(registry, "m", "mixed"))
    metrics.observe_load(fresh.load())
    counted = {kind: value(registry, "baton_device_steps_total", kind) for kind in KINDS}
    served(fresh, temperature=0.0)
    metrics.observe_load(fresh.load())
    grown = {
        kind: value(registry, "baton_device_steps_total", kind) - counted[kind] for kind in KINDS
    }
    assert grown["mixed"] == 1, "the prompt"
    assert grown["graph"] >= 4
    assert grown["decode"] <= 1, "the last token's, which verifies no draft"
    assert value(registry, "baton_device_graphs_total") == fresh.runner.launches.captured
    use = fresh.model.device.memory()
    assert value(registry, "baton_device_memory_bytes") == use.total
    assert value(registry, "baton_device_memory_used_bytes") == use.total - use.free
    assert value(registry, "baton_device_memory_peak_bytes") == use.peak


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (ExpertLimits(7, 32, 32), r"glm4_moe\) has 8 experts in a layer, .* at most 7"),
        (ExpertLimits(512, 2, 32), r"glm4_moe\) has 3 experts a token, .* at most 2"),
        (ExpertLimits(512, 32, 3), r"glm4_moe\) has 4 groups of experts, .* at most 3"),
    ],
)
def test_a_mixture_larger_than_kernels_take_is_refused_before_it_is_loaded(
    make_checkpoint: Callable[..., Any], limits: ExpertLimits, message: str
) -> None:
    path, device = make_checkpoint("glm4_moe").path, NumpyDevice()
    chosen = msgspec.structs.replace(config(), model=ModelConfig(path=str(path)))
    kernels = NumpyKernels(device)
    kernels.expert_limits = limits
    with pytest.raises(DeviceError, match=f"{message}: only engine.device 'cpu' computes it"):
        start_engine(chosen, device, kernels, time.monotonic)
    assert device.memory().peak == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ernie4_5_moe", "glm4_moe", "deepseek_v3"])
def test_a_mixture_is_loaded_sized_and_served(
    make_checkpoint: Callable[..., Any], family: str
) -> None:
    path, device = make_checkpoint(family).path, NumpyDevice(64 * MIB)
    chosen = msgspec.structs.replace(
        config(device="gpu", dtype="float32"), model=ModelConfig(path=str(path))
    )
    engine = start_engine(chosen, device, NumpyKernels(device), time.monotonic)
    assert len(served(engine)[0]) == 9


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mimo", "glm4_moe", "deepseek_v3"])
def test_a_quantised_model_is_loaded_sized_and_served(
    make_checkpoint: Callable[..., Any], family: str
) -> None:
    """Captured steps and drafts among them; its matrices take a byte an element."""
    path = make_checkpoint(family, tie_word_embeddings=False).path
    device = NumpyDevice(64 * MIB)
    quantise_folder(path, with_drafts=True)
    chosen = msgspec.structs.replace(
        config(device="gpu", dtype="float32"), model=ModelConfig(path=str(path))
    )
    engine = start_engine(chosen, device, NumpyKernels(device), time.monotonic)
    assert len(served(engine)[0]) == 9
    assert device.n_captures
    assert isinstance(engine.model.weights.layers[0].qkv, Scaled)
    assert isinstance(engine.model.weights.mtp[0].proj, Scaled)
