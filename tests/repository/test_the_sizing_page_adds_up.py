"""The sums of `docs/sizing.md` are what the code would come to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton_worker.config import EngineConfig, HandoffConfig, ModelConfig, ProcessConfig
from baton_worker.handoff.places import PlaceLimits, Places
from baton_worker.handoff.room import Wish
from baton_worker.identity import RequestKey

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sizing.md").read_text()
TOKEN_BYTES = 2 * 36 * 8 * 128 * 2
"""Of KV of Qwen3-8B in bfloat16."""


def number(pattern: str) -> float:
    (found,) = re.findall(pattern, PAGE)
    return float(str(found).replace(",", ""))


def test_the_example_adds_up() -> None:
    assert number(r"2 x 36 x 8 x 128 x 2 = ([\d,]+)\.") == TOKEN_BYTES
    share = EngineConfig().gpu_memory_utilization * 80
    weights = number(r"\| weights \|[^|]*\| ([\d.]+) \|")
    assert weights == pytest.approx(8.19 * 2, abs=0.05)
    left = share - weights - number(r"\| a step[^|]*\| \| ([\d.]+) \|")
    assert number(r"\| KV \|[^|]*\| ([\d.]+) \|") == pytest.approx(left)
    tokens = left * 1e9 / TOKEN_BYTES
    assert number(r"KV of ([\d,]+) tokens") == pytest.approx(tokens, rel=0.005)
    assert number(r"one such request \|[^|]*\| ([\d.]+) \|") == pytest.approx(
        32768 * TOKEN_BYTES / 1e9, abs=0.005
    )
    assert tokens // 32768 == 10
    assert "ten such requests at once" in PAGE
    assert number(r"256 where [a-z ]+ have ([\d,]+) tokens") == pytest.approx(
        tokens / 256, rel=0.02
    )


def granted(n_prompt: int, n_senders: int, handoff: HandoffConfig) -> list[int]:
    """Return how many prompts of each sender get a place at once."""
    engine = EngineConfig(max_running=256)
    config = ProcessConfig(ModelConfig("folder"), engine=engine, handoff=handoff)
    places = Places(PlaceLimits.of(config, 336_000 // engine.block_size))
    for n in range(12):
        wish = Wish(n_prompt * TOKEN_BYTES, n_prompt)
        places.ask(RequestKey(n, 0), wish, 0.0, f"prefill-{n % n_senders}")
    found = [key.handle % n_senders for key in places.grant(0.0)]
    return [found.count(sender) for sender in range(n_senders)]


@pytest.mark.parametrize("n_prompt", [8192, 32768])
def test_of_sent_kv_one_prompt_is_on_its_way_or_two_of_two_senders(n_prompt: int) -> None:
    for n_senders, n_granted in ((1, 1), (2, 2), (3, 2)):
        assert sum(granted(n_prompt, n_senders, HandoffConfig())) == n_granted


def test_more_room_is_for_as_many_prompts_as_the_page_says() -> None:
    assert "with `receiveBytes: 4Gi` it is three such prompts, one of each of three" in PAGE
    assert "with `8Gi` six, two of each" in PAGE
    for gib, n, of_each in ((4, 3, 1), (8, 6, 2)):
        handoff = HandoffConfig(receive_bytes=gib << 30)
        assert granted(8192, 1, handoff) == [n]
        assert granted(8192, 3, handoff) == [of_each] * 3
