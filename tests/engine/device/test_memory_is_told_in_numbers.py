"""What a device's memory goes to, and what does not fit, is told in numbers at the start."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device import sizing, start
from baton_worker.engine.backends.device.budget import Budget, told
from baton_worker.engine.backends.device.engine import DeviceEngine
from baton_worker.engine.backends.device.pool_sharing import RESERVED_BLOCKS
from baton_worker.engine.backends.device.seam import MemoryUse
from baton_worker.engine.backends.device.start import start_engine
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

KIB, MIB = 1 << 10, 1 << 20


class Shared(NumpyDevice):
    """A device of which others have taken a part."""

    def __init__(self, total: int, others: int) -> None:
        super().__init__(total)
        self.others = self.empty((others,), "uint8")


def started(device: NumpyDevice, path: Path = TINY_MODEL, **engine: Any) -> DeviceEngine:
    limits = {"max_model_len": 96, "max_running": 3, "prefill_chunk_tokens": 32} | engine
    config = ProcessConfig(
        model=ModelConfig(path=str(path)),
        speculative=SpeculativeConfig(num_speculative_tokens=1),
        engine=EngineConfig(device="gpu", dtype="float32", **limits),
    )
    return start_engine(config, device, NumpyKernels(device), time.monotonic)


def budget(**fields: int) -> Budget:
    known: dict[str, Any] = {
        "total": 80 << 30,
        "share": 0.9,
        "others": 1 << 30,
        "weights": 15 << 30,
        "working": 2 << 30,
        "block_bytes": 16 * 128 * KIB,
        "block_size": 16,
        "max_model_len": 131_072,
        "chunk_field": "engine.decode_prompt_chunk_tokens",
    }
    return Budget(**(known | fields))


def test_a_card_of_80_gib_holds_an_8b_model_and_several_requests_of_128k_tokens() -> None:
    assert budget().is_enough
    assert budget().told() == (
        "engine.gpu_memory_utilization 0.9 of 80.0 GiB is 72.0 GiB, of which 15.0 GiB are weights, "
        "2.0 GiB a step's working memory and 1.0 GiB were in use before: 54.0 GiB are left for "
        "KV, which is 442336 tokens of 128.0 KiB"
    )
    assert budget().facts()["longest_requests"] == 3


def test_the_fullest_of_all_ranks_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [20 << 30, 12 << 30, 16 << 30]
    uses = [MemoryUse(free=each, total=80 << 30, peak=0) for each in free]
    monkeypatch.setattr(sizing, "_measured", lambda *_: (uses, 16_000))
    known = budget(working=None)
    nobody: Any = None
    found = sizing.measured_budget(nobody, nobody, known)
    probed = (16_000 + RESERVED_BLOCKS) * known.block_bytes
    assert found.working == (80 << 30) - (12 << 30) - probed - known.others - known.weights


def test_an_engine_that_cannot_take_the_largest_step_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close = Mock()
    monkeypatch.setattr(DeviceEngine, "close", close)
    monkeypatch.setattr(DeviceEngine, "step", Mock(side_effect=DeviceError("out of memory")))
    with pytest.raises(DeviceError, match=r"out of memory: no room for a step of"):
        started(NumpyDevice(32 * MIB))
    close.assert_called_once_with()


def test_what_does_not_fit_is_refused_with_the_tokens_that_would() -> None:
    assert (
        budget(weights=60 << 30)
        .refusal()
        .endswith(
            "9.0 GiB are left for KV, which is 73696 tokens of 128.0 KiB; one request of "
            "engine.max_model_len 131072 needs 16.0 GiB: lower it to 73696 at most, or "
            "engine.max_running or engine.decode_prompt_chunk_tokens, or raise the share or "
            "engine.tensor_parallel_size"
        )
    )
    assert "needs 16.0 GiB: lower it, engine.max_running or" in budget(weights=75 << 30).refusal()


@given(
    weights=st.integers(0, 100 << 30),
    working=st.none() | st.integers(0, 20 << 30),
    others=st.integers(0, 80 << 30),
    block_bytes=st.integers(1 << 10, 1 << 24),
)
def test_nothing_is_promised_beyond_the_share_and_no_block_is_left_out(
    weights: int, working: int | None, others: int, block_bytes: int
) -> None:
    known = budget(weights=weights, working=working, others=others, block_bytes=block_bytes)
    taken = weights + (working or 0) + others
    allowed = int(0.9 * (80 << 30))
    if known.n_blocks:
        assert taken + (known.n_blocks + RESERVED_BLOCKS) * block_bytes <= allowed
    assert taken + (known.n_blocks + 1 + RESERVED_BLOCKS) * block_bytes > allowed or (
        known.n_blocks == 1 << 20
    )


@pytest.mark.parametrize(
    ("n_bytes", "words"),
    [(0, "0 bytes"), (1536, "1.5 KiB"), (3 * MIB // 2, "1.50 MiB"), (79 << 30, "79.0 GiB")],
)
def test_bytes_are_told_in_their_unit(n_bytes: int, words: str) -> None:
    assert told(n_bytes) == words


@pytest.mark.slow
def test_a_start_tells_where_its_memory_goes(caplog: pytest.LogCaptureFixture) -> None:
    device = Shared(32 * MIB, 3 * MIB)
    with caplog.at_level("INFO", logger=start.__name__):
        engine = started(device)
    (line,) = [line for line in caplog.records if line.message.startswith("memory: ")]
    facts = vars(line)
    assert (facts["total_bytes"], facts["other_bytes"]) == (32 * MIB, 3 * MIB)
    assert facts["kv_blocks"] == engine.options.n_blocks
    assert facts["kv_tokens"] == engine.options.n_blocks * engine.options.block_size
    assert min(facts["weight_bytes"], facts["working_bytes"]) > 100 * KIB
    parts = sum(facts[f"{name}_bytes"] for name in ("other", "weight", "working", "kv"))
    assert parts == int(0.9 * 32 * MIB)
    assert "3.00 MiB were in use before" in line.message


@pytest.mark.slow
def test_the_length_that_a_refusal_names_fits_and_no_block_more() -> None:
    def refused(max_model_len: int) -> DeviceError:
        with pytest.raises(DeviceError, match=r"one request of engine\.max_model_len") as error:
            started(NumpyDevice(4 * MIB), gpu_memory_utilization=0.4, max_model_len=max_model_len)
        return error.value

    named = re.search(r"lower it to (\d+) at most", str(refused(96)))
    assert named is not None
    engine = started(NumpyDevice(4 * MIB), gpu_memory_utilization=0.4, max_model_len=int(named[1]))
    assert engine.options.n_blocks * engine.options.block_size == int(named[1])


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            {"gpu_memory_utilization": 0.05},
            r"0\.05 of 16\.00 MiB is 819\.2 KiB, of which 736\.0 KiB are weights and 0 bytes were "
            r"in use before: 83\.2 KiB are left .*96 needs .*working memory comes on top",
        ),
        (
            {"kv_blocks": 5000},
            r"no room for 5000 KV blocks of 12\.0 KiB, 58\.62 MiB: the device has 16\.00 MiB free "
            r"of 16\.00 MiB, and the model's weights take 736\.0 KiB: lower engine\.kv_blocks to "
            r"less than 1302, or set it to 0",
        ),
        (
            {"kv_blocks": 5000, "total": 800 * KIB},
            r"one request of engine\.max_model_len 96 needs 6, less than 3 fit: lower "
            r"engine\.max_model_len to 32 at most and set engine\.kv_blocks to 0, or choose engine",
        ),
        (
            {"kv_blocks": 6, "total": 760 * KIB},
            r"one request of engine\.max_model_len 96 needs 6, none fits: choose engine\.dtype",
        ),
    ],
)
def test_what_cannot_fit_is_refused_before_weights_are_copied(
    engine: dict[str, Any], message: str
) -> None:
    device = NumpyDevice(engine.pop("total", 16 * MIB))
    with pytest.raises(DeviceError, match=message):
        started(device, **engine)
    assert device.memory().peak == 0


@pytest.mark.parametrize("spare", [0, 7], ids=["whole", "last block in part"])
@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize("most", range(9))
def test_what_a_refused_pool_is_lowered_to_is_not_refused_for_the_longest_request(
    most: int, block_size: int, spare: int
) -> None:
    longest, block_bytes, weights = 6 * block_size - spare, 12 * KIB, 736 * KIB
    free = weights + (most + RESERVED_BLOCKS) * block_bytes
    known = budget(
        total=free, weights=weights, working=None, others=0, block_bytes=block_bytes,
        block_size=block_size, max_model_len=longest,
    )  # fmt: skip
    with pytest.raises(DeviceError) as refused:
        sizing.check_memory(known, free, 5000)
    blocks = re.search(r"lower engine\.kv_blocks to less than (\d+)", str(refused.value))
    tokens = re.search(r"lower engine\.max_model_len to (\d+) at most", str(refused.value))
    assert (blocks is not None) == (most > 6)
    assert blocks is None or (int(blocks[1]) - 1) * block_size >= longest
    assert tokens is None or 2 <= int(tokens[1]) < longest
    assert tokens is None or -(-int(tokens[1]) // block_size) < most
    assert blocks or tokens or (most < 2 and "none fits" in str(refused.value))


@pytest.mark.parametrize(
    ("total", "engine", "message"),
    [
        (16 * MIB, {"kv_blocks": 1240}, r"lower engine\.kv_blocks \(.*max_model_len 96 needs 6\)"),
        (MIB, {"kv_blocks": 6}, r"max_model_len 96 needs 6: lower that, and engine\.kv_blocks, or"),
    ],
)
def test_a_pool_that_leaves_no_room_for_a_step_is_told_with_the_longest_request(
    total: int, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        started(NumpyDevice(total), **engine)


def test_a_pool_that_fitted_and_does_no_more_is_no_fault_of_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "measured_budget", lambda *_: budget(block_bytes=12 * KIB))
    with pytest.raises(DeviceError, match=r"others have .*: lower engine\.gpu_memory_utilization"):
        started(NumpyDevice(16 * MIB))


def test_weights_that_leave_no_room_while_they_are_copied_are_told_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Norms are not counted, and others may take memory meanwhile."""
    monkeypatch.setattr(start, "check_memory", lambda *_: None)
    with pytest.raises(DeviceError, match=r"bytes, .* are free: no room for .*: choose engine\."):
        started(NumpyDevice(512 * KIB))


@pytest.mark.slow
def test_a_request_may_be_as_long_as_the_model_can_with_kv_of_128k_tokens(
    make_checkpoint: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    made = make_checkpoint("qwen3", max_position_embeddings=131_072)
    with caplog.at_level("INFO", logger=start.__name__):
        engine = started(NumpyDevice(96 * MIB), made.path, max_model_len=0, max_running=2)
    assert engine.options.max_model_len == 131_072
    assert engine.options.n_blocks * engine.options.block_size >= 131_072
    engine.submit(Submit(1, 0, prompt_token_ids=(5, 6), sampling=SamplingParams(max_tokens=2)))
    while engine.has_work():
        engine.step()
    with pytest.raises(DeviceError, match=r"one request of engine\.max_model_len 131072 needs"):
        started(NumpyDevice(32 * MIB), made.path, max_model_len=0, max_running=2)
