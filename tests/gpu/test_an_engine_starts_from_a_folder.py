"""From a configuration to a serving engine on this machine's GPU: its memory and its graphs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from baton_testing.engine_bench import Reader
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.api import DeviceError, LaunchKind
from baton_worker.engine.build import build_engine
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

pytestmark = pytest.mark.gpu

PROMPT = (5, 6, 7, 8, 9, 10, 11)


@pytest.fixture(scope="module", autouse=True)
def _a_gpu() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch, which allocates on the GPU, is absent")
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")


def built(**engine: Any) -> Any:
    limits = {"device": "gpu", "max_model_len": 1024, "max_running": 64} | engine
    return build_engine(
        ProcessConfig(
            model=ModelConfig(path=str(TINY_MODEL)),
            speculative=SpeculativeConfig(num_speculative_tokens=3),
            engine=EngineConfig(**limits),
        )
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    engine = built(gpu_memory_utilization=0.3)
    yield engine
    engine.close()


def served(engine: Any, count: int) -> list[Any]:
    reader, keys = Reader(), []
    for number in range(1, count + 1):
        sampling = SamplingParams(
            max_tokens=24, temperature=0.8 * (number % 2), seed=number, ignore_eos=True
        )
        request = Submit(number, 0, prompt_token_ids=PROMPT, sampling=sampling, logprobs_k=3)
        keys.append(request.key)
        engine.submit(request)
    while engine.has_work():
        reader.read(engine.step())
    return [(reader[k].tokens, reader[k].logprobs, reader[k].ranks, reader[k].topk) for k in keys]


def test_its_memory_stays_within_the_share(engine: Any) -> None:
    use = engine.model.device.memory()
    assert engine.pool.shape.dtype == "bfloat16", "as the checkpoint is"
    assert use.total - use.free <= 0.31 * use.total
    assert engine.load().kv_blocks_total == engine.options.n_blocks


def test_what_is_alike_is_told_alike_and_replayed(engine: Any) -> None:
    before = engine.load().device
    first, second = served(engine, 8), served(engine, 8)
    after = engine.load().device
    assert first == second
    replayed = [load.launched[LaunchKind.GRAPH].steps for load in (before, after)]
    assert replayed[1] - replayed[0] >= 8
    assert after.graphs_captured - before.graphs_captured <= 8, "those of other draft counts only"


def test_a_batch_says_what_one_says(engine: Any) -> None:
    assert served(engine, 40)[:3] == served(engine, 3)


def test_a_start_takes_seconds(engine: Any) -> None:
    started = time.monotonic()
    built(kv_blocks=4096).close()
    assert time.monotonic() - started < 30


def test_too_little_memory_is_told_by_field(engine: Any) -> None:
    with pytest.raises(DeviceError, match=r"no room for 67108864 KV blocks.*engine\.kv_blocks"):
        built(kv_blocks=1 << 26)
    assert served(engine, 2), "the device goes on"
