"""A device's memory is scarce: what a closed engine had is free at once, without the collector.

An engine that a cycle keeps has its pool, its tensors and its graphs until the collector of garbage
comes, which looks at how many objects there are and not at how large they are.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from baton_testing.engine_bench import Bench, Clock, Reader
from baton_testing.exactness.asks import mixture, serve, submit
from baton_testing.exactness.devices import SMOKE
from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_testing.numpy_team import team_of
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.engine.backends.device.engine import DeviceEngine, LoadedModel
from baton_worker.engine.backends.device.loading import load_device_weights
from baton_worker.engine.model.checkpoint import open_checkpoint
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.options import DraftSources, EngineOptions


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def options(overlap: bool) -> EngineOptions:
    return EngineOptions(
        block_size=16,
        n_blocks=64,
        max_running=5,
        max_waiting=64,
        max_model_len=128,
        prefill_tokens=48,
        n_draft=1,
        use_mtp=True,
        drafts=DraftSources(),
        max_top_k=20,
        overlap=overlap,
    )


def served(model: LoadedModel, overlap: bool) -> DeviceEngine:
    """Return an engine that has had requests of every kind, closed in the middle of some."""
    asks = mixture(SMOKE.asks, model.model_shape.vocab_size, 60, 10, seed=1, max_top_k=20)
    engine = DeviceEngine(model, options(overlap), Clock())
    serve(engine, asks, arriving=3)
    bench = Bench(engine, Reader())
    for number, ask in enumerate(asks[:2]):
        submit(bench, 1000 + number, ask)
    engine.step()
    engine.close()
    return engine


def referred(engine: DeviceEngine) -> dict[str, Any]:
    parts = {"engine": engine, "runner": engine.runner, "pool": engine.pool}
    return {name: weakref.ref(part) for name, part in parts.items()}


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_all_but_the_weights_is_free_at_once(no_collector: None, overlap: bool) -> None:
    shape, device = load_shape(TINY_MODEL), NumpyDevice()
    weights = load_device_weights(device, open_checkpoint(TINY_MODEL), shape, "float32", 1)
    model = LoadedModel(device, NumpyKernels(device), shape, weights)
    before = device.memory().free
    engine = served(model, overlap)
    assert device.memory().free < before
    parts = referred(engine)
    del engine
    assert {name: part() for name, part in parts.items()} == dict.fromkeys(parts)
    assert device.memory().free == before


def test_rank_0_of_several_keeps_nothing_either(no_collector: None) -> None:
    model = team_of(TINY_MODEL, 2, 1)
    assert model.team is not None
    try:
        before = model.device.memory().free
        engine = served(model, overlap=True)
        parts = referred(engine)
        del engine
        assert {name: part() for name, part in parts.items()} == dict.fromkeys(parts)
        assert model.device.memory().free == before
    finally:
        model.team.followers.close()  # type: ignore[union-attr]
