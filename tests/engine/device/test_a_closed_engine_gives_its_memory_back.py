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
from baton_testing.pool_pair import LONG, Pair
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


def options(overlap: bool, **others: Any) -> EngineOptions:
    limits: dict[str, Any] = dict(
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
    return EngineOptions(**limits | others)


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


@pytest.mark.fast_cases(1)
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


@pytest.mark.slow
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_into_its_pool_have_ended_before_it_is_given_back(ranks: int) -> None:
    """Else they would write to what somebody else has by then."""
    models = [team_of(TINY_MODEL, ranks, 1) for _ in range(2)]
    free = iter(models)

    def make_bench(reader: Any = None, **limits: Any) -> Bench:
        told = options(overlap=True, **{"max_model_len": 256} | limits)
        return Bench(DeviceEngine(next(free), told, Clock()), reader or Reader())

    try:
        pair = Pair(make_bench)
        pair.submit(1, LONG)
        for filled in pair.prefill.step().filled:
            pair.tell(filled)
        bets = pair.decode.engine._pulls._bets.values()
        pulls = [timed.copied for b in bets for g in b.pulls for timed in g.pull.copy.parts]  # type: ignore[attr-defined]
        assert pulls
        assert not any(pull._has_come for pull in pulls)
        pair.decode.engine.close()
        assert all(pull._has_come for pull in pulls)
        pair.prefill.engine.close()
    finally:
        for model in models:
            assert model.team is not None
            model.team.followers.close()  # type: ignore[union-attr]
