"""FP8 folders on a device say what a float64 oracle says: on a GPU, and on the tests' own device.

In float32, so that half of all logprobs are the oracle's to its error; the others are within what
an activation is worth that float32 and float64 round to two sides of a step of e4m3.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from baton_testing.engine_bench import LoadedModel, Reader
from baton_testing.exactness.small_models import write_small_model
from baton_testing.fp8_folder import Scheme, quantise_folder
from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.backends.device.start import start_engine
from baton_worker.engine.build import build_engine
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import load_weights
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

TOLERANCE, STEP = 5e-5, 0.25
TOKENS, PROMPTS = 16, 24


def started(folder: Path, where: str, has_drafts: bool) -> Any:
    method: Literal["mtp", "none"] = "mtp" if has_drafts else "none"
    config = ProcessConfig(
        model=ModelConfig(path=str(folder)),
        speculative=SpeculativeConfig(method, 2 if has_drafts else 0),
        engine=EngineConfig(
            device="gpu",
            dtype="float32",
            max_model_len=128,
            max_running=8,
            prefill_chunk_tokens=33,
            gpu_memory_utilization=0.95,  # others share the GPU meanwhile
            kv_blocks=200,
        ),
    )
    if where == "gpu":
        torch = pytest.importorskip("torch", reason="PyTorch, which allocates, is absent")
        if not torch.cuda.is_available():
            pytest.skip("this machine has no CUDA device")
        return build_engine(config)
    device = NumpyDevice()
    return start_engine(config, device, NumpyKernels(device), time.monotonic)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["numpy", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("qwen2", "fp8"),
        pytest.param("mimo", "channel", marks=pytest.mark.slow),
        pytest.param("glm4_moe", "fp8", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "fp8", marks=pytest.mark.slow),
    ],
)
def test_logprobs_and_drafts(tmp_path: Path, family: str, scheme: Scheme, where: str) -> None:
    """Greedy, in batches and chunks, with drafts where the family has some."""
    folder = write_small_model(tmp_path, family)
    quantise_folder(folder, scheme, with_drafts=True)
    shape = load_shape(folder)
    model = LoadedModel(shape, load_weights(folder, shape))
    engine, reader = started(folder, where, shape.n_mtp_layers > 0), Reader()
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(2, 500, rng.integers(1, 60)).tolist()) for _ in range(PROMPTS)]
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    asked = [
        Submit(n, 0, prompt_token_ids=prompt, sampling=sampling, logprobs_k=1)
        for n, prompt in enumerate(prompts, 1)
    ]
    for request in asked:
        engine.submit(request)
    accepted = 0
    while engine.has_work():
        result = engine.step()
        accepted += int(result.stats.accepted_by_position.sum())
        reader.read(result)
    engine.close()
    misses: list[float] = []
    for request, prompt in zip(asked, prompts, strict=True):
        stream = reader[request.key]
        expected = model.logprobs([*prompt, *stream.tokens])[len(prompt) - 1 : -1]
        chosen = expected[np.arange(TOKENS), stream.tokens]
        misses += np.abs(np.array(stream.logprobs) - chosen).tolist()
    print(f"{family} on {where}: median {np.median(misses):.2g}, largest {max(misses):.2g}")
    assert np.median(misses) < TOLERANCE
    assert max(misses) < STEP
    assert accepted > 0 or not shape.n_mtp_layers
