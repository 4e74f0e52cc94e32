"""The way to the first token is measured part by part, each by the worker that knows it (R44)."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from prometheus_client import CollectorRegistry

from baton_worker.engine.metrics import EngineMetrics
from baton_worker.identity import make_handle
from baton_worker.messages import DecodeTarget, Reserve, Submit
from baton_worker.metrics import MetricFactory
from baton_worker.sampling import SamplingParams

PROMPT = tuple(range(20, 60))
N_REQUESTS = 3


@pytest.fixture
def measured(make_worker):
    """Make a worker whose engine is counted as in a process, and its registry."""

    def make(name: str, role: str, **options):
        registry = CollectorRegistry()
        metrics = EngineMetrics(MetricFactory(registry, "tiny", role))
        worker = make_worker(name, **options)
        worker.loop.parts = dataclasses.replace(worker.loop.parts, observe=metrics.observe)
        return worker, registry

    return make


@pytest.mark.parametrize("given", [(), (31, 32, 33)], ids=["first", "later attempt"])
def test_queue_and_prefill_are_prefills_and_first_emit_is_decodes(measured, given):
    prefill, counted_at_prefill = measured("prefill-0", "prefill")
    ticks = itertools.count()
    decode, counted_at_decode = measured(
        "decode-0",
        "decode",
        clock=lambda: next(ticks) / 1000,  # a millisecond per reading
    )
    for n in range(N_REQUESTS):
        handle = make_handle(77, n)
        decode.command(Reserve(handle, 0, len(PROMPT), 6, 60.0))
        sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        prefill.command(
            Submit(
                handle,
                0,
                prompt_token_ids=PROMPT,
                output_token_ids=given,
                sampling=sampling,
                decode=DecodeTarget("decode-0", "memory"),
            )
        )
    for _ in range(4):
        prefill.run()
        decode.run()

    def value(registry, role, name):
        return registry.get_sample_value(name, {"model": "tiny", "role": role})

    for name in ("baton_engine_queue_seconds", "baton_engine_prefill_seconds"):
        assert value(counted_at_prefill, "prefill", f"{name}_count") == N_REQUESTS
        assert value(counted_at_prefill, "prefill", f"{name}_sum") > 0
        assert value(counted_at_decode, "decode", f"{name}_count") == 0, "decode prefills nothing"
    of_roles = decode.registry
    assert value(of_roles, "mixed", "baton_first_emit_seconds_count") == N_REQUESTS
    assert value(of_roles, "mixed", "baton_first_emit_seconds_sum") >= N_REQUESTS / 1000


def test_first_emit_begins_where_the_handoff_ends_and_echoes_do_not_end_it(make_worker):
    prefill, decode = make_worker("prefill-0"), make_worker("decode-0")
    handle = make_handle(77, 1)
    decode.command(Reserve(handle, 0, len(PROMPT), 6, 60.0))
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prefill.command(
        Submit(
            handle,
            0,
            prompt_token_ids=PROMPT,
            sampling=sampling,
            decode=DecodeTarget("decode-0", "memory"),
        )
    )
    prefill.run()
    decode.now[0] = 100.0
    decode.turn()
    assert [row.is_echo for row in decode.rows(handle)] == [True], "imported, nothing decoded yet"
    decode.now[0] = 107.0
    decode.run()
    registry = decode.registry
    labels = {"model": "tiny", "role": "mixed"}
    assert registry.get_sample_value("baton_first_emit_seconds_count", labels) == 1
    assert registry.get_sample_value("baton_first_emit_seconds_sum", labels) == 7.0
