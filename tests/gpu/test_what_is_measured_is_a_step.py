"""The benchmark's made-up steps run through the runner's own programs, on NumPy here."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton_testing.engine_bench import Clock
from baton_testing.exactness import devices
from baton_testing.exactness.random_model import qwen3_8b
from baton_testing.stub_device import JudgedKernels, StubDevice, has_cuda_code, stub_weights
from baton_worker.engine.backends.device.engine import DeviceEngine, LoadedModel
from baton_worker.engine.backends.device.shapes import Choice
from baton_worker.engine.options import DraftSources

HERE = Path(__file__).parent
BLOCKS = 64


def module(name: str) -> ModuleType:
    """Import a script that lies beside this test."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made  # dataclasses look their own module up
    spec.loader.exec_module(made)
    return made


steps, cases, profile = module("bench_steps"), module("bench_cases"), module("bench_profile")
CASES = {
    "decode": {"batch": 3, "context": 40},
    "verify": {"batch": 2, "context": 50, "drafts": 3},
    "draft": {"batch": 2, "context": 50, "drafts": 2, "makes_drafts": True},
    "sampled": {"batch": 4, "context": 33, "choice": Choice.SAMPLED, "top": 0},
    "processed": {"batch": 4, "context": 33, "choice": Choice.PROCESSED, "top": 5},
    "prompt": {"batch": 1, "context": 48, "prefill": 48},
}


@pytest.mark.parametrize("name", CASES)
def test_a_made_up_step_runs_twice_and_tells_tokens(name: str) -> None:
    case = steps.Case(**CASES[name])
    with devices.subject("numpy-tiny") as subject:
        mtp: dict[str, Any] = {"n_draft": 3, "drafts": DraftSources()} if case.makes_drafts else {}
        with subject.engine(max_running=4, n_blocks=BLOCKS, max_model_len=128, **mtp) as engine:
            sizes = SimpleNamespace(block_size=16, n_blocks=BLOCKS, vocab_size=subject.vocab_size)
            programs: Any = engine._parts.runner._programs  # type: ignore[attr-defined]
            with steps.launched(programs, case, sizes) as program:
                steps.back(program, subject.loaded.device)()
                told = program.told(steps.LANE)
    assert not np.concatenate([told.flags.hidden, told.flags.logits]).any()
    chosen = told.results.token[:, 0]
    assert len(chosen) == case.batch
    assert ((chosen >= 0) & (chosen < subject.vocab_size)).all()
    assert program.shape.n_rows == (1 if case.prefill else case.batch * (1 + case.drafts))


@pytest.mark.skipif(not has_cuda_code(), reason="needs baton_ops with CUDA code and no GPU")
@pytest.mark.parametrize("use_mtp", [False, True])
def test_every_step_that_is_measured_fits_the_cuda_ops(use_mtp: bool) -> None:
    """Of the benchmark's own shapes and pool, but for fewer layers, on a device that is none."""
    spec = qwen3_8b(2)
    device = StubDevice()
    loaded = LoadedModel(device, JudgedKernels(), spec, stub_weights(device, spec, "bfloat16"))
    options = cases.options(use_mtp)
    engine = DeviceEngine(loaded, options, Clock())
    programs: Any = engine.runner._programs
    sizes = SimpleNamespace(block_size=16, n_blocks=options.n_blocks, vocab_size=spec.vocab_size)
    some = [case for _, case in cases.CASES if case.makes_drafts is use_mtp]
    for case in some:
        with steps.launched(programs, cases.fitting(case), sizes) as program:
            assert program.shape.n_sampled == case.batch


def test_steps_that_take_turns_are_each_given_their_own_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the turns in the other order, the ratio always of the case over the plain one."""
    plain = steps.Case(batch=3, context=40)
    case = steps.Case(batch=4, context=33, choice=Choice.SAMPLED, top=5)
    told: dict[Any, list[bytes]] = {}

    def timed(run: Any, *_: Any, **__: Any) -> Any:
        shape, tokens = run
        told.setdefault(shape, []).append(tokens)
        us = 200.0 if shape.n_sampled == case.batch else 100.0
        return steps.Spread(us, us, us)

    def launch_of(program: Any) -> Any:
        return program.shape, program.told(steps.LANE).results.token.tobytes()

    monkeypatch.setattr(steps, "timed", timed)
    monkeypatch.setattr(steps, "alone", launch_of)
    with (
        devices.subject("numpy-tiny") as subject,
        subject.engine(max_running=4, n_blocks=BLOCKS, max_model_len=128) as engine,
    ):
        sizes = SimpleNamespace(block_size=16, n_blocks=BLOCKS, vocab_size=subject.vocab_size)
        programs: Any = engine._parts.runner._programs  # type: ignore[attr-defined]
        found = steps.in_turns(programs, case, plain, sizes, subject.loaded.device)
    assert found == (2.0, 2.0, 2.0)
    assert {len(tokens) for tokens in told.values()} == {steps.TURNS}
    assert len(told) == len({tokens for each in told.values() for tokens in each}) == 2


def test_a_middle_lies_between_two_of_the_ratios() -> None:
    drawn = np.random.default_rng(3).lognormal(0.0, 0.1, size=(2_000, 40))
    found = [steps.middle(row) for row in drawn]
    covered = sum(one.low <= 1.0 <= one.high for one in found) / len(found)
    assert 0.93 <= covered <= 0.99
    assert steps.middle([3.0, 1.0]) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize("n", [6, 8, 11, 16, 21, 39, 40, 41, 100, 200])
def test_a_median_lies_in_its_middle_19_times_in_20_at_any_number_of_draws(n: int) -> None:
    found = steps.middle(range(n))
    above_low, below_high = int(found.low) + 1, n - int(found.high)
    assert above_low == below_high, "as many are left out on each side"

    def held(aside: int) -> float:
        return 1 - 2 * sum(math.comb(n, below) for below in range(aside)) / 2**n

    assert held(above_low) >= 0.95 > held(above_low + 1)


def test_costs_are_told_over_the_same_step_without() -> None:
    costly = [c for k, c in cases.FEW if (p := cases.plain_of(k, c)) is not None and p in
              [one for kind, one in cases.FEW if kind == k]]  # fmt: skip
    assert {(c.batch, c.top) for c in costly if c.choice is Choice.GREEDY} == {
        (64, 0), (64, 20), (256, 0), (256, 20)
    }  # fmt: skip
    assert {c.choice for c in costly} == set(Choice)


def test_a_kernel_that_waits_for_another_counts_from_its_end() -> None:
    found = [("void space::A<int>(float*)", 0.0, 4.0), ("void B()", 1.0, 6.0), ("B", 9.0, 10.0)]
    assert profile.summed(found, 1) == [("A<int>", 1.0, 4.0), ("B", 2.0, 3.0)]
