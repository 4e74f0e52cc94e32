"""The subjects by name: which model, on which device, tried how hard.

Owns how each is loaded, once, and what a machine must have for it; frameworks are imported only
for a subject that needs them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import pytest

from baton_testing.engine_bench import Clock
from baton_testing.exactness.subjects import Sizes, Subject
from baton_testing.exactness.trace import EagerDevice, TracingKernels
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.engine.backends.device.engine import DeviceEngine, LoadedModel
from baton_worker.engine.engine import StepEngine
from baton_worker.engine.model.shape import ModelShape, load_shape
from baton_worker.engine.options import EngineOptions

DeviceName = Literal["numpy", "gpu"]
Wrong = Callable[[Any, Any], Any]
"""`wrong(device, kernels)`: kernels to try in their place."""

SMOKE = Sizes(
    asks=22,
    tokens=10,
    longest=70,
    batches=(3, 8),
    chunks=(19,),
    drafts=(3,),
    scored=(4, 12),
    scored_chunks=(16, 500),
)
BRIEF = replace(SMOKE, asks=11, tokens=6, longest=40, scored=(2, 8))
"""For models whose drafts are seldom right: each token costs a step. And for four ranks, of which
each step is four threads' on two processors.
"""
TINY = Sizes(
    asks=77,
    tokens=32,
    longest=600,
    batches=(2, 3, 8, 9, 17, 64, 100, 128, 256),
    chunks=(64, 100, 257, 512),
    drafts=(1, 2, 3, 4, 5),
    scored=(256, 400),
    scored_chunks=(64, 333, 1024),
)
LARGE = Sizes(
    asks=22,
    tokens=16,
    longest=1500,
    batches=(2, 7, 8, 33, 64, 128, 256),
    chunks=(64, 256, 1000),
    drafts=(1, 3, 5),
    scored=(256, 400),
    scored_chunks=(128, 2048),
)


FEWER = replace(LARGE, batches=(2, 33, 256), chunks=(64, 1000), scored_chunks=(128,))
WHOLE = replace(LARGE, batches=(2, 33, 128))
"""For all layers of a real shape: a pool for 256 requests would leave an H100 nothing."""
SHORTER = replace(FEWER, longest=600, batches=(2, 33), chunks=(64, 257))
"""For what the kernels of any shape compute, which take longer."""


FP8 = "-fp8"
"""How names of models end whose matrices are quantised, in groups of 128."""


class Known(NamedTuple):
    """A subject before it is loaded. `dtype`: E. `ranks`: that share it, each on a device."""

    device: DeviceName
    model: Literal[
        "tiny",
        "small-mimo",
        "small-mimo-2",
        "small-qwen2",
        "small-glm4_moe",
        "small-deepseek_v3",
        "small-qwen2-fp8",
        "small-glm4_moe-fp8",
        "small-deepseek_v3-fp8",
        "qwen3-8b",
        "qwen3-8b-fp8",
        "mimo-7b",
        "qwen3-30b-a3b",
        "deepseek-v3",
        "qwen3-30b-a3b-fp8",
    ]
    dtype: Literal["float32", "bfloat16"]
    sizes: Sizes
    n_layers: int = 0
    ranks: int = 1


KNOWN = {
    "numpy-tiny": Known("numpy", "tiny", "float32", SMOKE),
    "numpy-tiny-2-ranks": Known("numpy", "tiny", "float32", SMOKE, ranks=2),
    "numpy-tiny-4-ranks": Known("numpy", "tiny", "float32", BRIEF, ranks=4),
    "numpy-tiny-bfloat16": Known("numpy", "tiny", "bfloat16", SMOKE),
    "numpy-small-mimo": Known("numpy", "small-mimo", "float32", SMOKE),
    "numpy-small-mimo-2-drafts": Known("numpy", "small-mimo-2", "float32", BRIEF),
    "numpy-small-qwen2": Known("numpy", "small-qwen2", "float32", BRIEF),
    "numpy-small-glm4_moe": Known("numpy", "small-glm4_moe", "float32", BRIEF),
    "numpy-small-deepseek_v3": Known("numpy", "small-deepseek_v3", "float32", BRIEF),
    "numpy-small-qwen2-fp8": Known("numpy", "small-qwen2-fp8", "float32", BRIEF),
    "numpy-small-glm4_moe-fp8": Known("numpy", "small-glm4_moe-fp8", "float32", BRIEF),
    "numpy-small-deepseek_v3-fp8": Known("numpy", "small-deepseek_v3-fp8", "float32", BRIEF),
    "gpu-tiny": Known("gpu", "tiny", "bfloat16", TINY),
    "gpu-tiny-float32": Known("gpu", "tiny", "float32", TINY),
    "gpu-small-mimo": Known("gpu", "small-mimo", "bfloat16", SMOKE),
    "gpu-small-mimo-2-drafts": Known("gpu", "small-mimo-2", "bfloat16", SMOKE),
    "gpu-small-qwen2": Known("gpu", "small-qwen2", "bfloat16", SMOKE),
    "gpu-small-glm4_moe": Known("gpu", "small-glm4_moe", "bfloat16", SMOKE),
    "gpu-small-deepseek_v3": Known("gpu", "small-deepseek_v3", "bfloat16", SMOKE),
    "gpu-small-deepseek_v3-float32": Known("gpu", "small-deepseek_v3", "float32", SMOKE),
    "gpu-small-qwen2-fp8": Known("gpu", "small-qwen2-fp8", "bfloat16", SMOKE),
    "gpu-small-glm4_moe-fp8": Known("gpu", "small-glm4_moe-fp8", "bfloat16", SMOKE),
    "gpu-small-deepseek_v3-fp8": Known("gpu", "small-deepseek_v3-fp8", "bfloat16", SMOKE),
    "gpu-qwen3-8b-12": Known("gpu", "qwen3-8b", "bfloat16", LARGE, 12),
    "gpu-qwen3-8b-12-2-ranks": Known("gpu", "qwen3-8b", "bfloat16", FEWER, 12, ranks=2),
    "gpu-qwen3-8b-4-4-ranks": Known("gpu", "qwen3-8b", "bfloat16", SHORTER, 4, ranks=4),
    "gpu-qwen3-8b": Known("gpu", "qwen3-8b", "bfloat16", WHOLE, 36),
    "gpu-mimo-7b-12": Known("gpu", "mimo-7b", "bfloat16", LARGE, 12),
    "gpu-qwen3-30b-a3b-8": Known("gpu", "qwen3-30b-a3b", "bfloat16", FEWER, 8),
    "gpu-deepseek-v3-4": Known("gpu", "deepseek-v3", "bfloat16", SHORTER, 4),
    "gpu-qwen3-8b-fp8-12": Known("gpu", "qwen3-8b-fp8", "bfloat16", FEWER, 12),
    "gpu-qwen3-30b-a3b-fp8-8": Known("gpu", "qwen3-30b-a3b-fp8", "bfloat16", FEWER, 8),
}
EXACT = tuple(name for name in KNOWN if name != "numpy-tiny-bfloat16")
"""Which are held to the promise; the other one tells how far bfloat16 is from float64."""
CONTROLLED = (
    "numpy-tiny",
    "numpy-small-deepseek_v3",
    "numpy-small-qwen2-fp8",
    "gpu-qwen3-8b-12",
)
"""On which kernels that are not exact are found."""
LIKE_OTHERS = frozenset(
    {"numpy-tiny-2-ranks", "numpy-small-mimo", "numpy-small-qwen2", "numpy-small-glm4_moe"}
)
"""Of whose kind another is: more ranks, more drafts, or the family in FP8. So they are long."""


def parameters(names: Sequence[str]) -> list[Any]:
    """Return the names as parameters of a test, those that need a GPU or time marked so."""
    return [pytest.param(name, id=name, marks=_marks(name)) for name in names]


def _marks(name: str) -> list[Any]:
    known = KNOWN[name]
    if known.device == "gpu":
        return [pytest.mark.gpu]
    is_fast = known.model == "tiny" and known.ranks == 1
    if is_fast:
        return []
    return [pytest.mark.slow, pytest.mark.long] if name in LIKE_OTHERS else [pytest.mark.slow]


def of_model(model: str) -> list[Any]:
    """Return the subjects of a model, as parameters of a test."""
    return parameters([name for name, known in KNOWN.items() if known.model == model])


@contextmanager
def subject(name: str, wrong: Wrong | None = None, traced: bool = False) -> Iterator[Subject]:
    """Give the subject of this name, or skip the test with what the machine lacks.

    Args:
        wrong: makes kernels that are tried in place of the device's own.
        traced: nothing is captured as a graph, and `tracing` of the subject takes notes.
    """
    found = _loaded(name, wrong, traced)
    try:
        yield found
    finally:
        team = found.loaded.team
        if team is not None:
            team.followers.close()
        _forget()


def _loaded(name: str, wrong: Wrong | None, traced: bool) -> Subject:
    known = KNOWN[name]
    loaded = _on_numpy(known) if known.device == "numpy" else _on_gpu(known)
    if wrong is not None:
        loaded = loaded._replace(kernels=wrong(loaded.device, loaded.kernels))
    tracing = None
    if traced:
        tracing = TracingKernels(loaded.kernels, _peek_of(known.device, loaded.device))
        loaded = loaded._replace(device=EagerDevice(loaded.device), kernels=tracing)
    model_shape = loaded.model_shape
    return Subject(
        name=name,
        vocab_size=model_shape.vocab_size,
        has_mtp=bool(loaded.weights.mtp),
        max_model_len=model_shape.max_position_embeddings,
        sizes=known.sizes,
        make=lambda options: engine_of(loaded, options),
        over=engine_of,
        tracing=tracing,
        loaded=loaded,
    )


def engine_of(loaded: LoadedModel, options: EngineOptions) -> StepEngine:
    """Return an engine over what is loaded, with a pool and graphs of its own."""
    _forget()  # the engine before has graphs and a pool, and others share the GPU
    return DeviceEngine(loaded, options, Clock())


def _on_numpy(known: Known) -> LoadedModel:
    from baton_testing.exactness import oracle
    from baton_testing.exactness.rounding import RoundingKernels
    from baton_testing.numpy_device import NumpyDevice
    from baton_testing.numpy_engine import uploaded
    from baton_testing.numpy_kernels import NumpyKernels
    from baton_worker.engine.model.weights import load_weights

    if known.ranks > 1:
        from baton_testing.numpy_team import team_of

        return team_of(TINY_MODEL, known.ranks)
    device = NumpyDevice()
    kernels = NumpyKernels(device)
    if known.dtype == "float32":
        return LoadedModel(device, kernels, *_of_a_folder(known, device))
    model_shape = load_shape(TINY_MODEL)
    host = oracle.rounded(load_weights(TINY_MODEL, model_shape))
    weights = uploaded(device, host, 1, model_shape)
    return LoadedModel(
        device, RoundingKernels(device, kernels, model_shape.vocab_size), model_shape, weights
    )


def _on_gpu(known: Known) -> LoadedModel:
    torch = pytest.importorskip("torch", reason="PyTorch, which allocates on the GPU, is absent")
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    from baton_worker.engine.backends.kernels import OpsKernels
    from baton_worker.engine.backends.torch.device import TorchDevice

    if known.ranks > 1:
        from baton_testing import random_rank

        if torch.cuda.device_count() < known.ranks:
            pytest.skip(f"this machine has {torch.cuda.device_count()} CUDA devices")
        name = f"{known.model}/{known.n_layers}"
        chosen = random_rank.config(name, known.ranks, max_running=256, prefill_chunk_tokens=4096)
        return random_rank.over_ranks("gpu", "cut", chosen)
    device = TorchDevice()
    device.synchronise()  # its stream is this thread's from here on
    if known.model == "tiny" or known.model.startswith("small-"):
        return LoadedModel(device, OpsKernels(device), *_of_a_folder(known, device))
    from baton_testing.exactness import random_fp8, random_model

    shapes = {
        "qwen3-8b": random_model.qwen3_8b,
        "mimo-7b": random_model.mimo_7b,
        "qwen3-30b-a3b": random_model.qwen3_30b_a3b,
        "deepseek-v3": partial(random_model.deepseek_v3, n_experts=32),
    }
    model_shape, kernels = shapes[known.model.removesuffix(FP8)](known.n_layers), OpsKernels(device)
    weights = random_model.random_weights(torch, model_shape)
    if not known.model.endswith(FP8):
        return LoadedModel(device, kernels, model_shape, weights)
    model_shape = replace(model_shape, quantisation=random_fp8.IN_GROUPS)
    weights = random_fp8.quantised(device, kernels, model_shape, weights)
    return LoadedModel(device, kernels, model_shape, weights)


def _of_a_folder(known: Known, device: Any) -> tuple[ModelShape, Any]:
    from baton_testing.exactness.small_models import write_small_model
    from baton_testing.fp8_folder import quantise_folder
    from baton_worker.engine.backends.device.loading import load_device_weights
    from baton_worker.engine.model.checkpoint import open_checkpoint

    with TemporaryDirectory() as folder:
        path = TINY_MODEL
        if known.model != "tiny":
            of_fp8 = known.model.endswith(FP8)
            name = known.model.removeprefix("small-").removesuffix(FP8)
            family, _, n_mtp = name.partition("-")
            path = write_small_model(Path(folder), family, n_mtp=int(n_mtp or 1))
            if of_fp8:
                quantise_folder(path, with_drafts=True)
        model_shape = load_shape(path)
        weights = load_device_weights(
            device,
            open_checkpoint(path),
            model_shape,
            known.dtype,
            model_shape.n_mtp_layers,
        )
        device.synchronise()
    return model_shape, weights


def _peek_of(name: DeviceName, device: Any) -> Callable[[Any], Any]:
    if name == "numpy":
        from baton_testing.numpy_device import on_device

        def read(tensor: Any) -> Any:
            device.synchronise()
            return on_device(tensor).copy()

        return read
    import torch

    def copied(tensor: Any) -> Any:
        is_bfloat16 = tensor.dtype == torch.bfloat16
        return (tensor.float() if is_bfloat16 else tensor).cpu().numpy()

    return copied


def _forget() -> None:
    """Give back what nothing holds any more, to the GPU too."""
    gc.collect()
    torch = sys.modules.get("torch")  # absent where the test was skipped for its lack
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
