"""Contexts of 128 k tokens on a GPU: told and refused in numbers, and the same bits by any chunks.

Two layers of published shapes, whose rotation is scaled as published for such lengths: a layer's
KV of 128 k tokens is 512 MiB, as in the whole model.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_testing.engine_bench import Reader, Stream
from baton_testing.random_checkpoint import LLAMA_31_8B, QWEN3_8B, write_checkpoint
from baton_worker.config import (
    ConfigError,
    EngineConfig,
    ModelConfig,
    ProcessConfig,
    SpeculativeConfig,
)
from baton_worker.engine.api import DeviceError
from baton_worker.engine.build import build_engine
from baton_worker.identity import RequestKey
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

pytestmark = pytest.mark.gpu

LONGEST, LAYERS, TOKENS = 131_072, 2, 40
BLOCK = 16
KV_BYTES = LONGEST * LAYERS * 2 * 8 * 128 * 2
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
SHAPES = {
    "llama-3.1-8b": (LLAMA_31_8B, {"rope_theta": 500_000.0, "rope_scaling": LLAMA3}),
    "qwen3-8b-yarn": (QWEN3_8B, {"rope_scaling": YARN}),
}


@pytest.fixture(scope="module", autouse=True)
def _a_gpu() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch, which allocates on the GPU, is absent")
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    """A checkpoint of a shape's first layers."""
    sizes, fields = SHAPES[request.param]
    place: Path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(place, sizes, LAYERS, **fields)
    return place


@contextmanager
def built(folder: Path, **engine: Any) -> Iterator[Any]:
    """Give an engine, of which nothing is left on the device behind it."""
    limits = {"device": "gpu", "max_model_len": LONGEST, "max_running": 8, "block_size": BLOCK}
    made: Any = build_engine(
        ProcessConfig(
            model=ModelConfig(path=str(folder)),
            speculative=SpeculativeConfig(method="none", num_speculative_tokens=0),
            engine=EngineConfig(**(limits | {"gpu_memory_utilization": 0.4} | engine)),
        )
    )
    try:
        yield made
    finally:
        made.close()
        vars(made).clear()
        gc.collect()


@pytest.fixture(scope="module")
def whole_chunks(folder: Path) -> Iterator[Any]:
    """An engine that takes prompts by 8,192 tokens."""
    with built(folder, prefill_chunk_tokens=8192) as engine:
        yield engine


def a_prompt(n_tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(2, 128_000, n_tokens).tolist())


PROMPT = a_prompt(LONGEST - TOKENS, 0)


def submitted(engine: Any, number: int, prompt: tuple[int, ...], seed: int) -> RequestKey:
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=seed, ignore_eos=True)
    request = Submit(number, 0, prompt_token_ids=prompt, sampling=sampling, logprobs_k=3)
    engine.submit(request)
    return request.key


def served(engine: Any, first: int, beside: int = 0) -> Stream:
    """Serve the long prompt, beside so many short ones; return what it is told."""
    reader = Reader()
    for number in range(beside):
        submitted(engine, first + 1 + number, a_prompt(50 + number, number), number)
    key = submitted(engine, first, PROMPT, 7)
    while engine.has_work():
        reader.read(engine.step())
    return reader[key]


def told(stream: Stream) -> tuple[Any, ...]:
    return stream.tokens, stream.logprobs, stream.ranks, stream.topk


def test_a_start_tells_memory_in_numbers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "baton_worker"), built(folder) as engine:
        n_blocks = engine.load().kv_blocks_total
    (line,) = (record for record in caplog.records if record.msg.startswith("memory:"))
    facts: dict[str, Any] = line.__dict__
    assert facts["max_model_len"] == LONGEST
    assert facts["longest_requests"] == facts["kv_tokens"] // LONGEST >= 1
    assert facts["kv_bytes"] >= facts["longest_requests"] * KV_BYTES
    assert facts["kv_blocks"] == n_blocks
    assert f"which is {facts['kv_tokens']} tokens" in line.getMessage()


def test_128_k_tokens_are_told_the_same_by_any_chunks(folder: Path, whole_chunks: Any) -> None:
    first = served(whole_chunks, 1)
    assert len(first.tokens) == TOKENS
    assert len(set(first.tokens)) > TOKENS // 4, "text that says something of its context"
    cached = served(whole_chunks, 2)
    assert sum(cached.reused) >= LONGEST - TOKENS - BLOCK
    assert told(cached) == told(first)
    with built(folder, prefill_chunk_tokens=5000, gpu_memory_utilization=0.8) as engine:
        assert told(served(engine, 1, beside=6)) == told(first)


def test_a_token_far_back_counts(whole_chunks: Any) -> None:
    """Or equal bits would say nothing of the first chunks."""
    changed = (PROMPT[0] ^ 1, *PROMPT[1:])
    reader = Reader()
    key = submitted(whole_chunks, 100, changed, 7)
    while whole_chunks.has_work():
        reader.read(whole_chunks.step())
    assert reader[key].reused in ([], [0]), "nothing is cached behind another first token"
    assert reader[key].logprobs != told(served(whole_chunks, 101))[1]


def test_what_does_not_fit_is_refused_in_numbers(folder: Path) -> None:
    too_few = r"max_model_len 131072 needs 8192 blocks of 16"
    with pytest.raises(ConfigError, match=too_few), built(folder, kv_blocks=8191):
        pass
    from baton_worker.engine.backends.torch.device import TorchDevice

    device = TorchDevice()
    others = device.empty((8 << 30,), "uint8")  # the smallest share of all is 5 % of the device
    use = device.memory()
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    share = (use.total - use.free + weights + KV_BYTES // 2) / use.total
    needed = r"one request of engine\.max_model_len 131072 needs 1\.0 GiB: lower it to \d+ at most"
    with pytest.raises(DeviceError, match=needed), built(folder, gpu_memory_utilization=share):
        pass
    del others
