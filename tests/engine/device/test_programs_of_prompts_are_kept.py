"""A step with prompts is made once: what it takes to make one is time that the device waits."""

from __future__ import annotations

import time
from typing import Any

import pytest

from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig
from baton_worker.engine.backends.device import program
from baton_worker.engine.backends.device.engine import DeviceEngine
from baton_worker.engine.backends.device.start import start_engine
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams


def started() -> DeviceEngine:
    config = ProcessConfig(
        model=ModelConfig(path=str(TINY_MODEL)),
        engine=EngineConfig(
            device="gpu",
            dtype="float32",
            max_model_len=96,
            max_running=2,
            prefill_chunk_tokens=16,
            prefix_caching=False,
        ),
    )
    device = NumpyDevice(64 << 20)
    return start_engine(config, device, NumpyKernels(device), time.monotonic)


def served(engine: DeviceEngine, n_prompt: int, first: int = 5) -> list[Any]:
    """Return a prompt's tokens and logprobs."""
    prompt = tuple(first + (7 * index) % 60 for index in range(n_prompt))
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    engine.submit(Submit(1, 0, prompt_token_ids=prompt, sampling=sampling, logprobs_k=0))
    said: list[Any] = []
    while engine.has_work():
        columns = engine.step().columns
        said += [*columns.token.tolist(), *columns.logprob.tolist()]
    return said


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the shapes that programs are made for from now on."""
    shapes: list[Any] = []

    class Counted(program.Program):
        def __init__(self, shape: Any, *more: Any) -> None:
            shapes.append(shape)
            super().__init__(shape, *more)

    monkeypatch.setattr(program, "Program", Counted)
    return shapes


@pytest.mark.slow
def test_a_prompt_as_long_as_one_before_makes_no_program(made: list[Any]) -> None:
    engine = started()
    served(engine, 40)
    assert any(shape.chunks for shape in made)
    made.clear()
    again = served(engine, 40, first=6)
    assert not made
    assert again == served(started(), 40, first=6)


@pytest.mark.slow
def test_prompts_of_any_length_cost_no_decoding_step_its_graph(
    monkeypatch: pytest.MonkeyPatch, made: list[Any]
) -> None:
    monkeypatch.setattr(program, "_MOST_PROMPTS", 2)
    engine = started()
    served(engine, 1)
    before = engine.load().device
    made.clear()
    for n_prompt in (3, 5, 7, 9, 3):
        served(engine, n_prompt)
    lengths = [shape.chunks for shape in made if shape.chunks]
    assert lengths == [(3,), (5,), (7,), (9,), (3,)], "the oldest went"
    after = engine.load().device
    assert before is not None
    assert after is not None
    assert (after.graphs_captured, after.graphs_kept) == (
        before.graphs_captured,
        before.graphs_kept,
    )


@pytest.mark.slow
def test_what_was_made_over_memory_that_was_too_small_is_made_anew(made: list[Any]) -> None:
    engine = started()
    served(engine, 40)
    prompt = next(shape for shape in reversed(made) if shape.chunks)
    programs = engine.runner._programs
    kept = programs.of(prompt)
    programs.of(prompt._replace(n_rules=1 << 16))
    assert programs.of(prompt) is not kept
    assert served(engine, 40, first=6) == served(started(), 40, first=6)
