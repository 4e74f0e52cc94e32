"""Two readings of a process's metrics: rates, shares, restarts and what is not there."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton_worker.gateway.metrics import GatewayMetrics
from baton_worker.metrics import MetricFactory
from baton_worker.top.snapshot import Snapshot, activity, parse


def snapshot(seconds, role="decode", **values):
    named = {f"baton_{name}": float(value) for name, value in values.items()}
    return Snapshot(seconds, role, "tiny", named)


def test_counters_become_rates():
    before, after = snapshot(10, tokens_total=100), snapshot(12, tokens_total=150)
    assert activity(before, after).tokens == 25.0


def test_shares_are_of_what_happened_in_between():
    before = snapshot(0, draft_accepted_tokens_total=900, draft_proposed_tokens_total=1000)
    after = snapshot(2, draft_accepted_tokens_total=905, draft_proposed_tokens_total=1020)
    assert activity(before, after).acceptance == 0.25


def test_a_restarted_process_has_counted_since_its_start():
    before, after = snapshot(0, tokens_total=1000), snapshot(2, tokens_total=30)
    assert activity(before, after).tokens == 15.0


def test_nothing_happened_is_not_no_answer():
    same = {"tokens_total": 5, "draft_accepted_tokens_total": 1, "draft_proposed_tokens_total": 2}
    seen = activity(snapshot(0, **same), snapshot(2, **same))
    assert (seen.tokens, seen.acceptance, seen.waiting) == (0.0, None, None)


def test_occupancy_is_the_later_ones():
    before = snapshot(0, engine_kv_blocks_used=1, engine_kv_blocks=8, engine_waiting_requests=9)
    after = snapshot(2, engine_kv_blocks_used=2, engine_kv_blocks=8, engine_waiting_requests=3)
    seen = activity(before, after)
    assert (seen.kv_used, seen.waiting) == (0.25, 3.0)


def test_a_gateways_page_is_read_as_a_gateways():
    registry = CollectorRegistry()
    metrics = GatewayMetrics(MetricFactory(registry, "tiny", "gateway"))
    before = parse(generate_latest(registry).decode(), 0.0)
    metrics.completion_tokens.inc(10)
    metrics.live.set(3)
    seen = activity(before, parse(generate_latest(registry).decode(), 5.0))
    assert (seen.role, seen.model, seen.tokens, seen.running) == ("gateway", "tiny", 2.0, 3.0)


def test_samples_of_one_name_are_summed_over_labels():
    lines = ['baton_tokens_total{model="a"} 1', 'baton_tokens_total{model="b"} 2', ""]
    assert parse("\n".join(lines), 0.0).values["baton_tokens_total"] == 3.0


def test_something_else_is_no_metrics_page():
    with pytest.raises(ValueError, match=r"\S"):
        parse("<html>", 0.0)
