"""Fixtures for the running engine: models, engines over them, and a strict reader of their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_testing.engine_bench import Bench, Clock, LoadedModel, Reader, key, random_weights
from baton_testing.numpy_engine import NumpyEngine
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import SimConfig
from baton_worker.engine.api import Handoff
from baton_worker.engine.backends.paddle.engine import PaddleEngine
from baton_worker.engine.backends.sim.engine import SimEngine, sim_shape
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import load_weights
from baton_worker.engine.options import NO_DRAFTS, DraftSources, EngineOptions
from baton_worker.identity import RequestKey

INSTANT = SimConfig(prefill_token_seconds=0.0, decode_step_seconds=0.0, decode_row_seconds=0.0)


@pytest.fixture(name="key")
def key_fixture() -> Callable[..., RequestKey]:
    return key


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    """The committed model: trained, so its drafts are accepted about half the time."""
    shape = load_shape(TINY_MODEL)
    return LoadedModel(shape, load_weights(TINY_MODEL, shape))


@pytest.fixture(scope="session")
def load_model() -> Callable[[Path], LoadedModel]:
    """`load(folder)`: a Hugging Face folder's model."""

    def load(folder: Path) -> LoadedModel:
        shape = load_shape(folder)
        return LoadedModel(shape, load_weights(folder, shape))

    return load


@pytest.fixture(scope="session")
def make_model(tiny: LoadedModel) -> Callable[..., LoadedModel]:
    """`make(seed=0, **fields)`: random weights over a small shape."""

    def make(seed: int = 0, **fields: Any) -> LoadedModel:
        small: dict[str, Any] = {
            "vocab_size": 64,
            "hidden_size": 32,
            "n_heads": 4,
            "n_kv_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "eos_token_ids": (1,),
        }
        shape = dataclasses.replace(tiny.shape, **(small | fields))
        return LoadedModel(shape, random_weights(shape, np.random.default_rng(seed)))

    return make


ENGINES = {"paddle": PaddleEngine, "device": NumpyEngine}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a module's tests over each of the engines that it names in `ENGINES`; else Paddle's."""
    names = getattr(metafunc.module, "ENGINES", None)
    if names is not None and "make_bench" in metafunc.fixturenames:
        metafunc.parametrize("make_bench", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def make_bench(tiny: LoadedModel, request: pytest.FixtureRequest) -> Callable[..., Bench]:
    """`make(model=tiny, reader=None, **options)`: an engine with K=`n_draft` (0: no MTP at all)."""
    engine_class = ENGINES[getattr(request, "param", "paddle")]

    def make(
        model: LoadedModel | None = None, reader: Reader | None = None, **options: Any
    ) -> Bench:
        model = model or tiny
        options = {"n_draft": 0, "max_model_len": 256, "max_running": 32} | options
        options.setdefault("use_mtp", options["n_draft"] > 0)
        options.setdefault("n_draft_layers", max(model.shape.n_mtp_layers, 1))
        options.setdefault("drafts", DraftSources() if options["use_mtp"] else NO_DRAFTS)
        options.setdefault("block_size", 16)
        per_request = -(-options["max_model_len"] // options["block_size"])
        options.setdefault("n_blocks", options["max_running"] * per_request)
        defaults = {"max_waiting": 1024, "prefill_tokens": 512, "max_top_k": 20, "overlap": False}
        engine = engine_class(
            model.shape, model.weights, EngineOptions(**(defaults | options)), Clock()
        )
        return Bench(engine, reader or Reader())

    return make


@pytest.fixture(scope="session")
def make_sim_bench(tiny: LoadedModel) -> Callable[..., Bench]:
    """`make(sim=SimConfig(...), **options)`: a simulated engine that takes no time."""

    def make(sim: SimConfig = INSTANT, reader: Reader | None = None, **options: Any) -> Bench:
        options = {"n_draft": 0, "max_model_len": 256, "max_running": 32} | options
        options.setdefault("n_blocks", options["max_running"] * 16)
        defaults = {"max_waiting": 1024, "prefill_tokens": 512, "max_top_k": 20}
        sizes = {"block_size": 16, "use_mtp": True, "drafts": DraftSources(), "overlap": False}
        resolved = EngineOptions(**(defaults | sizes | options))
        clock = Clock()
        engine = SimEngine(sim, sim_shape(sim, tiny.shape), resolved, clock, clock.sleep)
        return Bench(engine, reader or Reader())

    return make


@pytest.fixture(scope="session")
def bench_of() -> Callable[..., Bench]:
    """`bench_of(engine, reader=None)`: a bench around an engine that was built elsewhere."""

    def make(engine: Any, reader: Reader | None = None) -> Bench:
        return Bench(engine, reader or Reader())

    return make


@pytest.fixture(scope="session")
def hand_over() -> Callable[[Bench, Bench, Iterable[Handoff]], None]:
    """Admit handoffs at decode and release them at prefill, as the roles do."""

    def move(prefill: Bench, decode: Bench, handoffs: Iterable[Handoff]) -> None:
        for handoff in handoffs:
            decode.engine.admit_handoff(handoff)
            state = handoff.state
            prefill.engine.release_handoff(RequestKey(state.handle, state.attempt))

    return move


@pytest.fixture(scope="session")
def make_prompts(tiny: LoadedModel) -> Callable[..., list[tuple[int, ...]]]:
    """`make(count, seed=0, longest=40)`: random prompts of 1..longest tokens."""

    def make(
        count: int, seed: int = 0, longest: int = 40, vocab_size: int | None = None
    ) -> list[tuple[int, ...]]:
        rng = np.random.default_rng(seed)
        top = vocab_size or tiny.shape.vocab_size
        return [
            tuple(rng.integers(2, top, rng.integers(1, longest + 1)).tolist()) for _ in range(count)
        ]

    return make
