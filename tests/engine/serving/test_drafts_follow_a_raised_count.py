"""K raised while a prompt is half computed: drafts and their logprobs are those of a run at that K.

Blocks for the drafting behind a prompt were taken at its admission, for the K of that moment; what
a larger K writes behind them went to the trash block, and the draft layer read zeros back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton_worker.records.columns import Finish
from baton_worker.sampling import LogprobParams

ENGINES = ("paddle", "device")

PARAMS = LogprobParams(draft_ids=True, draft_logprobs=True)
BLOCK = 16
FINAL_K = 5


def _told(bench: Any, key: Any) -> Any:
    stream = bench.reader[key]
    return stream.tokens, stream.logprobs, stream.proposed, stream.shown


def _bench(make_bench: Callable[..., Any], n_draft: int, **options: Any) -> Any:
    options = {"prefill_tokens": BLOCK, "block_size": BLOCK} | options
    return make_bench(n_draft=n_draft, use_mtp=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("first_k", [0, 1, 3])
@pytest.mark.parametrize("length", [3 * BLOCK - 2, 3 * BLOCK, 3 * BLOCK + 1])
def test_in_one_process(
    make_bench: Callable[..., Any],
    make_prompts: Callable[..., Any],
    overlap: bool,
    first_k: int,
    length: int,
) -> None:
    prompt = (make_prompts(1, seed=3, longest=80)[0] * 20)[:length]
    options = {"temperature": 0.0, "max_tokens": 20, "logprobs_k": 2, "logprobs": PARAMS}
    final = _bench(make_bench, FINAL_K)
    wanted = final.submit(1, prompt, **options)
    final.drain()
    bench = _bench(make_bench, first_k, overlap=overlap)
    key = bench.submit(1, prompt, **options)
    bench.step()
    bench.engine.set_num_speculative_tokens(FINAL_K)
    bench.drain()
    assert _told(bench, key) == _told(final, wanted)
    assert any(row is not None and row.logprobs for row in bench.reader[key].shown)


@pytest.mark.parametrize("first_k", [0, 2])
@pytest.mark.parametrize("length", [3 * BLOCK - 2, 3 * BLOCK])
def test_in_what_prefill_hands_over(
    make_bench: Callable[..., Any],
    make_prompts: Callable[..., Any],
    hand_over: Callable[..., None],
    first_k: int,
    length: int,
) -> None:
    prompt = (make_prompts(1, seed=5, longest=80)[0] * 20)[:length]
    options = {"temperature": 0.0, "max_tokens": 12, "logprobs_k": 2, "logprobs": PARAMS}
    mixed = _bench(make_bench, FINAL_K)
    wanted = mixed.submit(1, prompt, **options)
    mixed.drain()
    final = _bench(make_bench, FINAL_K)
    final.submit(1, prompt, hand_over=True, **options)
    (expected,) = final.handoffs()
    bench = _bench(make_bench, first_k)
    key = bench.submit(1, prompt, hand_over=True, **options)
    bench.step()
    bench.engine.set_num_speculative_tokens(FINAL_K)
    (handoff,) = bench.handoffs()
    assert handoff.state.drafts == expected.state.drafts
    assert len(handoff.state.drafts) == FINAL_K
    assert handoff.state.draft_scores == expected.state.draft_scores
    decode = _bench(make_bench, first_k, reader=bench.reader)
    decode.engine.set_num_speculative_tokens(FINAL_K)
    hand_over(bench, decode, [handoff])
    decode.drain()
    assert _told(decode, key)[0] == _told(mixed, wanted)[0]
    assert _told(decode, key)[2:] == _told(mixed, wanted)[2:]


def test_without_a_block_to_spare_the_least_urgent_makes_room(
    make_bench: Callable[..., Any], make_prompts: Callable[..., Any]
) -> None:
    """Two prompts fill every block; the larger K asks for one more, which one of them gives."""
    prompts = [(p * 20)[: 3 * BLOCK] for p in make_prompts(2, seed=6, longest=80)]
    options = {"temperature": 0.0, "max_tokens": 8, "logprobs_k": 1, "logprobs": PARAMS}
    limits = {"n_blocks": 7, "max_model_len": 6 * BLOCK, "prefix_caching": False}
    final = _bench(make_bench, FINAL_K, max_model_len=6 * BLOCK)
    wanted = [final.submit(n, p, **options) for n, p in enumerate(prompts)]
    final.drain()
    bench = _bench(make_bench, 0, **limits)
    keys = [bench.submit(n, p, **options) for n, p in enumerate(prompts)]
    bench.step()
    bench.engine.set_num_speculative_tokens(FINAL_K)
    results = bench.drain()
    assert sum(result.stats.preempted for result in results) > 0
    for key, expected in zip(keys, wanted, strict=True):
        assert bench.reader[key].finish is Finish.LENGTH
        assert bench.reader[key].tokens == final.reader[expected].tokens
    assert _told(bench, keys[0]) == _told(final, wanted[0])
