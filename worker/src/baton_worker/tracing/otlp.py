"""Spans to an OpenTelemetry collector over OTLP/HTTP.

Owns the SDK's set-up. Sending happens on the SDK's own thread; a collector that is down costs its
spans and a log line, never a request.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton_worker.config import TracingConfig
from baton_worker.tracing.api import Attributes, Span

_SEND_EVERY_MILLISECONDS = 1000
_SEND_TIMEOUT_SECONDS = 3
_PROPAGATOR = TraceContextTextMapPropagator()


class _OtlpSpan:
    def __init__(self, span: trace.Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
        self.traceparent = carrier.get("traceparent", "")

    def end(self, attributes: Attributes) -> None:
        """End it now."""
        self._span.set_attributes(dict(attributes))
        self._span.end()


class OtlpTracing:
    """Records spans and sends them in batches."""

    is_on = True

    def __init__(self, config: TracingConfig, service: str, instance: str) -> None:
        """Start the sender; `config.endpoint` is the collector's URL for traces."""
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=Resource.create({"service.name": service, "service.instance.id": instance}),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=config.endpoint, timeout=_SEND_TIMEOUT_SECONDS)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=_SEND_EVERY_MILLISECONDS)
        )
        self._tracer = self._provider.get_tracer("baton")

    def start(self, name: str, parent: str) -> Span:
        """Begin a span now."""
        return _OtlpSpan(
            self._tracer.start_span(name, _context(parent), kind=trace.SpanKind.SERVER)
        )

    def record(self, name: str, parent: str, start: int, end: int, attributes: Attributes) -> None:
        """Record a span that has ended."""
        span = self._tracer.start_span(
            name, _context(parent), attributes=dict(attributes), start_time=start
        )
        span.end(end)

    def close(self) -> None:
        """Send what is left and end the sender."""
        self._provider.shutdown()


def _context(parent: str) -> Context:
    return _PROPAGATOR.extract({"traceparent": parent} if parent else {}, Context())
