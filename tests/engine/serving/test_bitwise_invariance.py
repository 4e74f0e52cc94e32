"""A token's logits are the same bits whatever shares its step.

Tokens must never depend on the batch; on the CPU type where the product's row classes were measured
not even the last bit of a logprob does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.mla import Mla

ENGINES = ("paddle", "device")

CPUINFO = Path("/proc/cpuinfo")

pytestmark = pytest.mark.skipif(
    not CPUINFO.exists() or not {"AuthenticAMD", "GenuineIntel"} & set(CPUINFO.read_text().split()),
    reason="row classes of the matrix product were measured on AMD and Intel server CPUs only",
)


@pytest.fixture(scope="module")
def prompts(make_prompts: Any) -> Any:
    return make_prompts(24, seed=3, longest=150)


def _run(bench: Any, prompts: Any) -> list[Any]:
    return _run_with_results(bench, prompts)[0]


def _run_with_results(bench: Any, prompts: Any) -> tuple[list[Any], list[Any]]:
    keys = [
        bench.submit(n, p, temperature=0.9 * (n % 2), seed=n, max_tokens=16, logprobs_k=2)
        for n, p in enumerate(prompts, start=1)
    ]
    results = bench.drain()
    streams = [bench.reader[key] for key in keys]
    return [(s.tokens, s.logprobs, s.ranks, s.topk) for s in streams], results


@pytest.fixture(scope="module")
def alone(make_bench: Any, prompts: Any) -> list[Any]:
    return _run(make_bench(max_running=1), prompts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_running": 24}, id="one-batch"),
        pytest.param({"max_running": 7, "n_draft": 3}, id="odd-batch-3-drafts"),
        pytest.param(
            {"n_draft": 5, "prefill_tokens": 33}, id="chunks-5-drafts", marks=pytest.mark.slow
        ),
        pytest.param({"n_draft": 1, "n_blocks": 20}, id="preempted"),
        pytest.param({"n_draft": 2, "block_size": 8}, id="small-blocks"),
        pytest.param({"block_size": 64}, id="large-blocks"),
        pytest.param({"n_draft": 2, "prefix_caching": False}, id="no-prefix-cache"),
    ],
)
def test_logprobs_are_bitwise_those_of_a_solo_run(
    make_bench: Any, prompts: Any, alone: list[Any], options: dict[str, Any]
) -> None:
    assert _run(make_bench(**options), prompts) == alone


@pytest.mark.parametrize("n_draft", [0, 3])
@pytest.mark.fast_cases(1)
def test_cached_prefixes_give_the_same_bits(
    make_bench: Any, prompts: Any, alone: list[Any], n_draft: int
) -> None:
    """Every prompt again, its full blocks now in the cache, left there by another batch."""
    bench = make_bench(n_draft=n_draft, max_running=9)
    _run(bench, prompts)
    bench.reader.streams.clear()
    bench.reader.ended.clear()
    assert _run(bench, prompts) == alone


@pytest.fixture(scope="module")
def long_prompts() -> list[tuple[int, ...]]:
    """Beyond the keys that one product sums over, and each with longer ones beside it."""
    rng = np.random.default_rng(4)
    return [tuple(rng.integers(2, 64, n).tolist()) for n in (250, 257, 300, 511, 513, 700, 1000)]


@pytest.fixture(scope="module")
def long_alone(make_bench: Any, long_prompts: Any) -> list[Any]:
    return _run(make_bench(max_running=1, max_model_len=1024), long_prompts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_running": 7}, id="one-batch"),
        pytest.param({"n_draft": 3, "prefill_tokens": 272}, id="chunks-3-drafts"),
        pytest.param({"max_running": 1, "prefill_tokens": 96}, id="alone-in-small-chunks"),
    ],
)
def test_long_prompts_give_the_same_bits_beside_longer_ones(
    make_bench: Any, long_prompts: Any, long_alone: list[Any], options: dict[str, Any]
) -> None:
    """Twice, so that the second time much of each prompt is known from another batch."""
    bench = make_bench(max_model_len=1024, **options)
    assert _run(bench, long_prompts) == long_alone
    bench.reader.streams.clear()
    bench.reader.ended.clear()
    assert _run(bench, long_prompts) == long_alone


@pytest.mark.slow
def test_a_long_prompt_that_is_computed_again_gives_the_same_bits(
    make_bench: Any, long_prompts: Any, long_alone: list[Any]
) -> None:
    bench = make_bench(max_model_len=1024, n_draft=1, n_blocks=87, max_running=7)
    said, results = _run_with_results(bench, long_prompts)
    assert sum(result.stats.preempted for result in results) > 0
    assert said == long_alone


@pytest.mark.slow
def test_normed_heads_are_the_same_bits_in_any_batch(make_model: Any, make_bench: Any) -> None:
    """Qwen3's norms of query and key heads add rows of their own."""
    model = make_model(has_qk_norm=True, rope_style="half", head_dim=12)
    prompts = [tuple(range(2, 4 + 3 * n)) for n in range(12)]
    alone = _run(make_bench(model, max_running=1), prompts)
    assert _run(make_bench(model, n_draft=3, prefill_tokens=33), prompts) == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "mla",
    [
        Mla(q_rank=20, kv_rank=16, nope_size=8, rope_size=6, value_size=10, score_scale=0.3),
        Mla(q_rank=0, kv_rank=6, nope_size=3, rope_size=2, value_size=5, score_scale=0.4),
        Mla(q_rank=13, kv_rank=21, nope_size=7, rope_size=6, value_size=7, score_scale=0.3),
    ],
    ids=["compressed", "whole-queries", "odd"],
)
def test_compressed_rows_are_the_same_bits_in_any_batch(
    make_model: Any, make_bench: Any, mla: Mla
) -> None:
    """Products by heads, and values that are a part of their keys; beyond one product's keys."""
    model = make_model(mla=mla, n_heads=3, n_kv_heads=1, head_dim=mla.row_size)
    rng = np.random.default_rng(6)
    sizes = (1, 2, 3, 5, 9, 17, 41, 130, 257)
    prompts = [tuple(rng.integers(2, 64, n).tolist()) for n in sizes]
    alone = _run(make_bench(model, max_running=1, max_model_len=288, prefill_tokens=50), prompts)
    for options in (
        {"n_draft": 3, "prefill_tokens": 65},
        {"max_running": 9},
        {"n_draft": 1, "n_blocks": 24, "max_running": 7},
    ):
        bench = make_bench(model, max_model_len=288, **options)
        assert _run(bench, prompts) == alone
        bench.reader.streams.clear()
        bench.reader.ended.clear()
        assert _run(bench, prompts) == alone, "rows that another batch left in the cache"


@pytest.mark.slow
@pytest.mark.parametrize(("scores", "width"), [("softmax", 24), ("sigmoid", 27), ("sigmoid", 7)])
def test_who_shares_an_expert_changes_no_bit(
    make_model: Any, make_bench: Any, scores: Any, width: int
) -> None:
    """Alone a token's experts are fed one row each, among others some dozens."""
    experts = Experts(
        6, 2, width, (0, 1), shared_size=40, scores=scores, has_choice_bias=True, has_mtp=True
    )
    model = make_model(experts=experts)
    prompts = [tuple(range(2, 4 + 3 * n)) for n in range(16)]
    alone = _run(make_bench(model, max_running=1, prefill_tokens=7), prompts)
    assert _run(make_bench(model, n_draft=3, prefill_tokens=65), prompts) == alone
    assert _run(make_bench(model, max_running=16), prompts) == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"intermediate_size": 27},
        {"hidden_size": 38},
        {"vocab_size": 69},
        {"vocab_size": 71},
    ],
    ids=lambda sizes: "-".join(f"{name}-{size}" for name, size in sizes.items()),
)
def test_no_width_makes_bits_depend_on_company(
    make_model: Any, make_bench: Any, sizes: dict[str, int]
) -> None:
    """Where some columns are left over, a row's place among four would tell."""
    model = make_model(**sizes)
    prompts = [tuple(range(2, 4 + 3 * n)) for n in range(16)]
    alone = _run(make_bench(model, max_running=1, prefill_tokens=7), prompts)
    assert _run(make_bench(model, n_draft=3, prefill_tokens=65), prompts) == alone
    assert _run(make_bench(model, max_running=16), prompts) == alone
