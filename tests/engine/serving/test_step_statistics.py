"""Statistics count what happened, acceptance only where drafts were verified (R43)."""

from __future__ import annotations

from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from baton_worker.engine.api import EngineLoad, StepStats
from baton_worker.engine.metrics import EngineMetrics
from baton_worker.metrics import MetricFactory
from baton_worker.sampling import LogprobParams

ENGINES = ("paddle", "device")


def test_prefill_reports_drafts_but_no_acceptance(make_bench: Any, make_prompts: Any) -> None:
    bench = make_bench(n_draft=3, prefill_tokens=20)
    prompts = make_prompts(6, seed=1)
    for n, p in enumerate(prompts):
        bench.submit(n, p, temperature=0.0, max_tokens=9, hand_over=True)
    stats = [result.stats for result in bench.drain()]
    assert sum(s.prefill_tokens for s in stats) == sum(map(len, prompts))
    assert sum(s.emitted_tokens for s in stats) == 6
    for s in stats:
        assert not s.proposed_by_position.any()
        assert s.accept_lengths == ()
        assert s.decode_rows == 0


def test_decode_counts_each_position(make_bench: Any, make_prompts: Any) -> None:
    bench = make_bench(n_draft=3)
    keys = [
        bench.submit(n, p, temperature=0.0, max_tokens=20, logprobs_k=n % 3 - 1)
        for n, p in enumerate(make_prompts(6, seed=1))
    ]
    stats = [result.stats for result in bench.drain()]
    streams = [bench.reader[key] for key in keys]
    proposed = [n for s in streams for n in s.proposed]
    accepted = [n for s in streams for n in s.accepted]
    total = sum(s.accepted_by_position for s in stats)
    assert total.tolist() == [sum(n > p for n in accepted) for p in range(3)]
    assert total[0] >= total[1] >= total[2]
    offered = sum(s.proposed_by_position for s in stats)
    assert offered.tolist() == [sum(n > p for n in proposed) for p in range(3)]
    lengths = [length for s in stats for length in s.accept_lengths]
    assert len(lengths) == sum(s.decode_rows for s in stats)
    assert sum(lengths) == sum(accepted) + len(lengths)
    assert sum(s.emitted_tokens for s in stats) == sum(len(s.tokens) for s in streams)
    scored = [s for s in streams if s.logprobs]
    assert sum(s.logprob_rows for s in stats) == sum(len(s.logprobs) for s in scored)
    assert sum(s.logprob_columns for s in stats) == sum(
        len(s.logprobs) + sum(map(len, s.topk)) for s in scored
    )


def test_prompt_tokens_that_are_told_count_apart_from_output(
    make_bench: Any, make_prompts: Any
) -> None:
    """In chunks, and whether or not a token of output has logprobs too."""
    registry = CollectorRegistry()
    metrics = EngineMetrics(MetricFactory(registry, "tiny", "mixed"))
    bench = make_bench(n_draft=1, prefill_tokens=20)
    prompts = make_prompts(3, seed=1)
    told = list(zip(prompts, (-1, 0, 5), (5, -1, 2), strict=True))
    for n, (prompt, prompt_k, k) in enumerate(told):
        wanted = LogprobParams(prompt_k=prompt_k)
        bench.submit(n, prompt, temperature=0.0, max_tokens=3, logprobs_k=k, logprobs=wanted)
    for result in bench.drain():
        metrics.observe(result.stats, bench.engine.load())
    for label, want in (("0", len(prompts[1]) - 1), ("1-5", len(prompts[2]) - 1), ("6-20", 0)):
        labels = {"model": "tiny", "role": "mixed", "k": label}
        assert registry.get_sample_value("baton_prompt_logprob_rows_total", labels) == want
        output = registry.get_sample_value("baton_logprob_rows_total", labels)
        assert output == (6 if label == "1-5" else 0)


def test_queue_and_prefill_times_come_from_the_given_clock(make_bench: Any) -> None:
    """The bench's clock moves 1 ms per reading."""
    bench = make_bench(max_running=1, prefill_tokens=10)
    first = bench.submit(1, range(5, 30), temperature=0.0, max_tokens=2)
    second = bench.submit(2, range(5, 10), temperature=0.0, max_tokens=2)
    times = {key: (q, p) for r in bench.drain() for key, q, p in r.stats.first_tokens}
    assert set(times) == {first, second}
    assert all(queue > 0 and prefill > 0 for queue, prefill in times.values())
    assert times[second][0] > times[first][0] + times[first][1]


def test_an_attempt_that_goes_on_behind_anothers_tokens_is_timed_to_its_own_first(
    make_bench: Any,
) -> None:
    bench, given = make_bench(max_running=1, n_draft=1, prefill_tokens=10), (40, 41, 42)
    first = bench.submit(1, range(5, 30), temperature=0.0, max_tokens=2)
    going_on = bench.submit(2, range(5, 30), temperature=0.0, max_tokens=9, output_token_ids=given)
    bench.reader[going_on].tokens += given
    seen = [(key, q, p) for r in bench.drain() for key, q, p in r.stats.first_tokens]
    assert [key for key, _, _ in seen] == [first, going_on]
    times = {key: (q, p) for key, q, p in seen}
    assert times[going_on][0] > sum(times[first]), "it waited for the other's end"
    assert times[going_on][1] > 0


def test_metrics_add_up(make_bench: Any) -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(MetricFactory(registry, "tiny", "decode"))
    stats = StepStats(
        prefill_tokens=5,
        decode_rows=2,
        emitted_tokens=4,
        preempted=1,
        proposed_by_position=np.array([2, 2]),
        accepted_by_position=np.array([2, 0]),
        accept_lengths=(2, 2),
        logprob_rows_by_k=((0, 2), (5, 1), (6, 4), (64, 1)),
        logprob_op_seconds=1e-5,
        step_seconds=2e-3,
        first_tokens=(),
    )
    for _ in range(2):
        metrics.observe(stats, EngineLoad(2, 1, 3, 40, 100))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model": "tiny", "role": "decode"} | labels)

    assert value("baton_tokens_total") == 8
    assert value("baton_prompt_tokens_total") == 10
    assert value("baton_draft_proposed_tokens_total", position="2") == 4
    assert value("baton_draft_accepted_tokens_total", position="1") == 4
    assert value("baton_draft_accepted_tokens_total", position="2") == 0
    assert value("baton_accept_length_tokens_bucket", le="2.0") == 4
    for k, rows, columns in (("0", 4, 4), ("1-5", 2, 12), ("6-20", 8, 56), ("21-64", 2, 130)):
        assert value("baton_logprob_rows_total", k=k) == rows
        assert value("baton_logprob_columns_total", k=k) == columns
    assert value("baton_engine_preemptions_total") == 2
    assert value("baton_engine_step_seconds_count") == 2
    assert value("baton_engine_kv_blocks_used") == 40
    assert value("baton_engine_held_handoffs") == 3
    metrics.observe_load(EngineLoad(0, 0, 0, 0, 100))
    assert value("baton_engine_kv_blocks_used") == 0


def test_a_prefill_workers_metrics_show_no_draft_nobody_checked(make_bench: Any) -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(MetricFactory(registry, "tiny", "prefill"))
    bench = make_bench(n_draft=2)
    bench.submit(1, range(5, 30), temperature=0.0, max_tokens=9, hand_over=True)
    for result in bench.drain():
        metrics.observe(result.stats, bench.engine.load())
    labels = {"model": "tiny", "role": "prefill", "position": "1"}
    assert registry.get_sample_value("baton_draft_proposed_tokens_total", labels) == 0
    assert registry.get_sample_value("baton_draft_accepted_tokens_total", labels) == 0
    del labels["position"]
    assert registry.get_sample_value("baton_accept_length_tokens_count", labels) == 0
