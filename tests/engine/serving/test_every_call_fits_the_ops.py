"""Every call that the runner makes is one that the CUDA ops take: dtypes, sizes, strides, order.

Tried without a GPU: the ops check their arguments before they ask for one (`cuda_stubs`). Needs a
library that was built with CUDA; `BATON_OPS_CUDA_LIBRARY` names one that is not installed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import baton_ops
from baton_ops import _library, cuda, decoder, logprob, sampling
from baton_testing import numpy_engine
from baton_testing.cuda_stubs import CudaStub, has_gpu, stub
from baton_testing.numpy_device import on_device
from baton_testing.numpy_kernels import NumpyKernels
from baton_worker.engine.backends.kernels import OpsKernels
from baton_worker.sampling import LogprobParams

ENGINES = ("device",)

SIZES = ("attention_scratch_bytes", "logprob_workspace_bytes")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.3, "bad_words": ((5,), (3, 4))},
    {"temperature": 0.0, "logit_bias": ((4, 1.0),), "min_tokens": 3},
)


class _NoDevice:
    def empty(self, shape: tuple[int, ...], _: str) -> CudaStub:
        return CudaStub(np.empty(shape, np.float32))


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> OpsKernels:
    if has_gpu():
        pytest.skip("a GPU would run the ops over the host's addresses")
    library = _library.library()
    if (path := os.environ.get("BATON_OPS_CUDA_LIBRARY")) is not None:
        library = tvm_ffi.load_module(path)
        for module in (_library, cuda, decoder, logprob, sampling):
            if hasattr(module, "library"):
                monkeypatch.setattr(module, "library", lambda: library)
        monkeypatch.setattr(_library, "_function", lambda name, _: library.get_function(name))
    if not hasattr(library, "cuda_embed"):
        pytest.skip("baton-ops was built without CUDA")
    kernels = OpsKernels.__new__(OpsKernels)
    kernels._device = _NoDevice()  # type: ignore[assignment]
    return kernels


@pytest.fixture
def refused(ops: OpsKernels, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the ops say of the calls that the runner makes, "" of those that they would take."""
    said: Counter[str] = Counter()

    def tried(name: str) -> Callable[..., None]:
        plain = getattr(NumpyKernels, name)

        def call(self: NumpyKernels, *given: Any) -> None:
            try:
                getattr(ops, name)(*(stub(on_device(argument)) for argument in given))
                said[f"{name}: ran"] += 1
            except RuntimeError as error:
                said["" if "CUDA Runtime Error" in str(error) else f"{name}: {error}"] += 1
            except (TypeError, ValueError) as error:
                said[f"{name}: {error}"] += 1
            plain(self, *given)

        return call

    class Tried(NumpyKernels):
        pass

    for name in [name for name in vars(NumpyKernels) if not name.startswith("_")]:
        setattr(Tried, name, getattr(ops, name) if name in SIZES else tried(name))
    for name in SIZES:
        setattr(Tried, name, staticmethod(getattr(ops, name)))
    monkeypatch.setattr(numpy_engine, "NumpyKernels", Tried)
    return said


@pytest.mark.parametrize("n_draft", [0, 1, 5])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("n_samplings", [1, 2, 4], ids=["greedy", "sampled", "processed"])
def test_the_ops_take_what_they_are_given(
    refused: Counter[str],
    make_bench: Any,
    make_prompts: Any,
    n_draft: int,
    overlap: bool,
    n_samplings: int,
) -> None:
    for k in (-1, 0, 5):
        bench = make_bench(n_draft=n_draft, overlap=overlap, prefill_tokens=24, max_running=6)
        for n, prompt in enumerate(make_prompts(8, seed=96)):
            told = LogprobParams(
                draft_logprobs=k >= 0,
                processed=n % 2 == 1,
                top_p_normalized=n % 3 == 1,
                prompt_k=2 if n % 4 == 0 and k >= 0 else -1,
            )
            options = SAMPLINGS[n % n_samplings]
            bench.submit(n, prompt, seed=n, max_tokens=7, logprobs_k=k, logprobs=told, **options)
        bench.drain()
    assert refused.pop("", 0) > 100
    assert not refused


def test_a_wrong_call_is_refused_by_name(ops: OpsKernels) -> None:
    table, tokens = np.zeros((4, 8), np.float32), np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="out"):
        ops.embed(*map(CudaStub, (table, tokens, np.zeros((2, 8), np.float32))))
    with pytest.raises(TypeError, match="tokens"):
        ops.embed(*map(CudaStub, (table, tokens.astype(np.int64), np.zeros((3, 8), np.float32))))
    assert baton_ops.workspace_bytes(CudaStub(table), 4) > 0
