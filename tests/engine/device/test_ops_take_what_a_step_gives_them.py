"""Each op takes the sizes, dtypes and strides that a step on a device calls it with.

Needs a library with CUDA code, and no driver: `make ops-cuda-fat` builds one anywhere.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import pytest

from baton_testing.claimed_tensors import CheckedKernels, need_code_and_no_driver
from baton_testing.exactness.small_models import write_small_model
from baton_testing.numpy_device import NumpyDevice
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.backends.device.start import start_engine
from baton_worker.engine.backends.kernels import OpsKernels
from baton_worker.engine.backends.latent import OpsLatentKernels
from baton_worker.engine.engine import StepEngine
from baton_worker.messages import Submit
from baton_worker.sampling import LogprobParams, SamplingParams

WAYS = (
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1},
    {
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "logit_bias": ((7, 1.0),),
        "bad_words": ((5,),),
    },
)
TOLD = ((-1, -1), (0, -1), (2, 2))


@pytest.fixture(autouse=True)
def needs_code_and_no_driver() -> None:
    need_code_and_no_driver("cuda_embed")


def serve(engine: StepEngine) -> None:
    """Have every way to choose tokens and to tell logprobs, in chunks, with drafts and without."""
    for number, (way, told) in enumerate((way, told) for way in WAYS for told in TOLD):
        for i in (1, 2):
            request = Submit(
                10 * number + i,
                0,
                prompt_token_ids=tuple(range(5, 5 + 21 * i)),
                sampling=SamplingParams(max_tokens=5, ignore_eos=True, **way),  # type: ignore[arg-type]
                logprobs_k=told[0],
                logprobs=LogprobParams(prompt_k=told[1]),
            )
            engine.submit(request)
        while engine.has_work():
            engine.step()


def shown(path: Path, dtype: Literal["float32", "bfloat16"], n_drafts: int) -> CheckedKernels:
    """Serve a folder's model; return what the ops said of it."""
    method: Literal["mtp_ngram", "none"] = "mtp_ngram" if n_drafts else "none"
    config = ProcessConfig(
        model=ModelConfig(path=str(path)),
        speculative=SpeculativeConfig(method=method, num_speculative_tokens=n_drafts),
        engine=EngineConfig(
            device="gpu", dtype=dtype, max_model_len=96, max_running=3, prefill_chunk_tokens=32
        ),
    )
    device = NumpyDevice(64 << 20)
    kernels = CheckedKernels(device)
    engine = start_engine(config, device, kernels, time.monotonic)
    serve(engine)
    return kernels


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n_drafts", [0, 1, 5])
def test_no_op_refuses_an_argument(dtype: Literal["float32", "bfloat16"], n_drafts: int) -> None:
    kernels = shown(TINY_MODEL, dtype, n_drafts)
    assert not kernels.refused
    unused = {"seed_drafts", "scatter_tokens", "look_up"} if not n_drafts else set()
    unused |= {"look_up"} if n_drafts == 1 else set()  # that one is the layer's
    ops = {name for name in vars(OpsKernels) if not name.startswith("_")}
    asked = {name for name in ops if not name.endswith("_bytes")}
    # test_every_call_fits_the_cuda_ops has several ranks
    of_ranks = {"rank_sum", "rank_sum_norm", "rank_gather", "rank_errors"}
    of_mixtures = {
        "expert_limits", "norm_route", "expert_gate_up_silu", "expert_matmul", "combine",
        "combine_norm",
    }  # fmt: skip
    of_fp8 = {name for name in asked if name.startswith(("scaled_", "quantise"))}
    others = of_ranks | of_mixtures | of_fp8 | {"advance", "latent"}
    assert asked - set(kernels.passed) <= unused | others


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_op_of_compressed_rows_refuses_an_argument(
    tmp_path: Path, dtype: Literal["float32", "bfloat16"]
) -> None:
    kernels = shown(write_small_model(tmp_path, "deepseek_v3"), dtype, n_drafts=1)
    assert not kernels.refused
    of_rows = {f"latent.{name}" for name in vars(OpsLatentKernels) if not name.startswith("_")}
    assert of_rows <= set(kernels.passed)
