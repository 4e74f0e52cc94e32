"""One trace over gateway, prefill, handoff and decode, as an OTLP collector receives it."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

pytestmark = pytest.mark.e2e

PATIENCE_SECONDS = 600.0
PARENT = "00f067aa0ba902b7"
EXPECTED = {
    ("baton-gateway", "baton.request"),
    ("baton-prefill", "baton.queue"),
    ("baton-prefill", "baton.prefill"),
    ("baton-prefill", "baton.handoff"),
    ("baton-decode", "baton.decode"),
}


class Collector:
    """Receives OTLP/HTTP and keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.changed = threading.Condition()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    raise AssertionError("no compression was configured")
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self.changed:
            for of_process in request.resource_spans:
                attributes = {a.key: a.value.string_value for a in of_process.resource.attributes}
                for scope in of_process.scope_spans:
                    self.spans += [(attributes["service.name"], span) for span in scope.spans]
            self.changed.notify_all()

    def of_trace(self, trace: str) -> dict[tuple[str, str], Any]:
        return {(s, x.name): x for s, x in self.spans if x.trace_id.hex() == trace}

    def wait(self, trace: str, count: int) -> dict[tuple[str, str], Any]:
        with self.changed:
            self.changed.wait_for(lambda: len(self.of_trace(trace)) >= count, PATIENCE_SECONDS)
            found = self.of_trace(trace)
            assert len(found) >= count, f"{count} spans: not so after {PATIENCE_SECONDS} s: {found}"
        return found


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture(scope="module")
def traced(collector: Collector, start_local: Any) -> Iterator[Any]:
    with start_local("--traces", collector.url) as deployment:
        yield deployment


def complete(url: str, trace: str, flags: str = "01") -> dict[str, Any]:
    body = {"model": "tiny-mtp", "prompt": "You may copy", "max_tokens": 12}
    header = {"traceparent": f"00-{trace}-{PARENT}-{flags}"}
    reply = httpx.post(f"{url}/v1/completions", json=body, headers=header, timeout=PATIENCE_SECONDS)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_clients_trace_goes_through_every_process(traced: Any, collector: Collector) -> None:
    trace = "1" * 32
    answer = complete(traced.url, trace)
    spans = collector.wait(trace, len(EXPECTED))
    assert set(spans) == EXPECTED
    gateway = spans["baton-gateway", "baton.request"]
    assert gateway.parent_span_id.hex() == PARENT
    facts = {a.key: a.value for a in gateway.attributes}
    assert facts["baton.completion_tokens"].int_value == answer["usage"]["completion_tokens"]
    assert facts["baton.outcome"].string_value == "ok"
    assert facts["baton.request_id"].string_value == answer["id"]
    for key in EXPECTED - {("baton-gateway", "baton.request")}:
        assert spans[key].parent_span_id == gateway.span_id
        assert gateway.start_time_unix_nano <= spans[key].start_time_unix_nano
        assert spans[key].start_time_unix_nano <= spans[key].end_time_unix_nano


def test_the_phases_follow_each_other(traced: Any, collector: Collector) -> None:
    trace = "2" * 32
    complete(traced.url, trace)
    spans = collector.wait(trace, len(EXPECTED))
    queue, prefill, handoff = (
        spans["baton-prefill", f"baton.{name}"] for name in ("queue", "prefill", "handoff")
    )
    assert queue.end_time_unix_nano <= prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano <= handoff.start_time_unix_nano
    decode = spans["baton-decode", "baton.decode"]
    assert prefill.end_time_unix_nano <= decode.start_time_unix_nano


def test_a_client_that_decided_against_a_trace_gets_none(traced: Any, collector: Collector) -> None:
    refused, wanted = "3" * 32, "4" * 32
    complete(traced.url, refused, flags="00")
    complete(traced.url, wanted)
    assert set(collector.wait(wanted, len(EXPECTED))) == EXPECTED
    assert collector.of_trace(refused) == {}
