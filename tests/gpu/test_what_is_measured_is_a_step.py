"""The benchmark's made-up steps run through the runner's own programs, on NumPy here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

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


steps, plots = module("bench_steps"), module("plots")
page, cases = module("page"), module("bench_cases")
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


def test_pictures_hold_every_line_and_are_well_formed() -> None:
    record = {"us": 5000.0, "roof_us": 4000.0, "context": 1024, "drafts": 0, "makes_drafts": False}
    cases = [record | {"kind": "batch", "batch": n, "us": 3000.0 + 10 * n} for n in (1, 8, 64)]
    cases += [record | {"kind": "context", "batch": 1, "context": n} for n in (1024, 4096)]
    cases += [record | {"kind": "drafts", "batch": 8, "drafts": k} for k in range(6)]
    for draw, lines in ((plots.by_batch, 2), (plots.by_context, 2), (plots.by_drafts, 1)):
        root = ElementTree.fromstring(draw(cases))
        names = [e.text for e in root.iter() if e.tag.endswith("text")]
        strokes = [e for e in root.iter() if e.get("stroke-width") == "2" and e.get("fill")]
        assert len(strokes) == lines
        assert any("decode step" in (name or "") for name in names)


def test_the_page_tells_each_number_of_a_run_and_which_goals_are_missed() -> None:
    plain = {"us": 5000.0, "roof_us": 4500.0, "eager_us": 9000.0, "context": 2048, "drafts": 0,
             "makes_drafts": False, "choice": "GREEDY", "top": -1, "prefill": 0}  # fmt: skip
    made = [
        plain | {"kind": "goal", "batch": 64},
        plain | {"kind": "goal", "batch": 128, "us": 6e3},
    ]
    made += [plain | {"kind": "drafts", "batch": 64, "drafts": k, "us": 5e3 + k} for k in (0, 3)]
    made += [plain | {"kind": "logprobs", "batch": 64, "top": k, "us": 5e3 + k} for k in (-1, 0)]
    made += [plain | {"kind": "sampler", "batch": 64, "choice": c} for c in ("GREEDY", "SAMPLED")]
    made += [plain | {"kind": "prefill", "batch": 1, "prefill": 2048, "tflops": 590.0}]
    made += [plain | {"kind": "context", "batch": 8, "error": "OutOfMemoryError: no"}]
    phase = {"rows": 64, "k": 0, "top": 0, "overlap": True, "tokens_per_s": 6543.2,
             "step_ms": 9.9, "idle_share": 0.02}  # fmt: skip
    machine = dict.fromkeys(("gpu", "driver", "cuda", "torch", "python"), "x")
    baseline = {"batch": 64, "rows": 1, "context": 2048, "us": 6000.0}
    record = {"machine": machine, "commit": "abc", "roof": {"read": 4.5e12, "copy": 4e12},
              "repeats": 9, "steps": made, "baselines": [baseline], "phases": [phase]}  # fmt: skip
    text = page.page(record, "results/x.json")
    assert "| 64 | 5.00 | 4.50 | 90.0 % | 88.0 %: met | 6.00 | 1.20 | 9.00 |" in text
    assert "| 128 | 6.00 | 4.50 | 75.0 % | 90.0 %: missed | - | - | 9.00 |" in text
    assert "cost 1.00 times one (goal: 1.2, met)" in text
    assert "| 6543 | 9.90 | 2.0 %: met |" in text
    assert "goal 600 |" in text
    assert "| missed |" in text
    assert "context, batch 8: OutOfMemoryError: no" in text
