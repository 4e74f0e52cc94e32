"""A worker's spans: one phase at a time, under the context that the gateway sent."""

import pytest

from baton_worker.config import ConfigError, TracingConfig
from baton_worker.identity import RequestKey
from baton_worker.roles.traces import RequestTraces
from baton_worker.tracing.api import NoTracing, valid_traceparent
from baton_worker.tracing.build import build_tracing

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
KEY = RequestKey(1, 0)
SECOND = 1_000_000_000


class Recorder(NoTracing):
    """Keeps what is recorded; refuses a span that ends before it starts."""

    is_on = True

    def __init__(self):
        self.spans = []

    def record(self, name, parent, start, end, attributes):
        assert 0 <= start <= end
        assert valid_traceparent(parent)
        self.spans.append((name, start // SECOND, end // SECOND, dict(attributes)))


@pytest.fixture
def clock():
    return [10]


@pytest.fixture
def traces(clock):
    return RequestTraces(Recorder(), lambda: clock[0] * SECOND)


def test_prefills_phases_follow_each_other(traces, clock):
    traces.submitted(KEY, PARENT, hands_over=True)
    clock[0] = 15
    traces.first_tokens([(KEY, 2.0, 3.0)])
    traces.offered(KEY)
    clock[0] = 17
    traces.left(KEY, "handed_over")
    assert traces.tracing.spans == [
        ("baton.queue", 10, 12, {}),
        ("baton.prefill", 12, 15, {}),
        ("baton.handoff", 15, 17, {"baton.outcome": "handed_over"}),
    ]


def test_decodes_phase_lasts_from_arrival_to_the_end(traces, clock):
    traces.arrived(KEY, PARENT)
    clock[0] = 30
    traces.left(KEY, "finished")
    assert traces.tracing.spans == [("baton.decode", 10, 30, {"baton.outcome": "finished"})]


def test_a_prefill_worker_decodes_nothing_of_what_ends_at_its_first_token(traces, clock):
    traces.submitted(KEY, PARENT, hands_over=True)
    clock[0] = 15
    traces.first_tokens([(KEY, 2.0, 3.0)])
    traces.left(KEY, "finished")
    assert traces.tracing.spans == [
        ("baton.queue", 10, 12, {}),
        ("baton.prefill", 12, 15, {"baton.outcome": "finished"}),
    ]


def test_a_mixed_worker_decodes_after_its_prefill(traces, clock):
    traces.submitted(KEY, PARENT, hands_over=False)
    traces.first_tokens([(KEY, 0.0, 0.0)])
    clock[0] = 12
    traces.left(KEY, "finished")
    names = [name for name, *_ in traces.tracing.spans]
    assert names == ["baton.queue", "baton.prefill", "baton.decode"]


def test_a_request_that_ends_in_line_says_so(traces, clock):
    traces.submitted(KEY, PARENT, hands_over=True)
    clock[0] = 11
    traces.left(KEY, "aborted")
    assert traces.tracing.spans == [("baton.queue", 10, 11, {"baton.outcome": "aborted"})]


def test_without_a_context_or_a_collector_nothing_is_kept(traces):
    traces.submitted(KEY, "", hands_over=True)
    off = RequestTraces()
    off.submitted(KEY, PARENT, hands_over=True)
    for made in (traces, off):
        made.first_tokens([(KEY, 0.0, 0.0)])
        made.left(KEY, "finished")
        assert not made._phases
    assert traces.tracing.spans == []


@pytest.mark.parametrize(
    "header",
    ["", "junk", PARENT.upper(), PARENT[:-1], "ff" + PARENT[2:], PARENT.replace("a", "0")],
)
def test_a_header_that_is_no_context_begins_a_new_trace(header):
    assert valid_traceparent(header) == ""


def test_a_valid_context_passes_through_without_a_collector():
    tracing = build_tracing(TracingConfig(), "baton-gateway", "gateway")
    assert tracing.start("x", valid_traceparent(PARENT)).traceparent == PARENT


def test_a_missing_sdk_is_a_configuration_error(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "baton_worker.tracing.otlp", None)
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        build_tracing(TracingConfig("http://127.0.0.1:1/v1/traces"), "s", "i")
