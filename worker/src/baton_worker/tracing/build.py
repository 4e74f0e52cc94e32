"""The choice between recording spans and not: OpenTelemetry is imported only for an endpoint."""

from __future__ import annotations

from urllib.parse import urlsplit

from baton_worker.config import ConfigError, TracingConfig
from baton_worker.tracing.api import NoTracing, Tracing


def build_tracing(config: TracingConfig, service: str, instance: str) -> Tracing:
    """Return the tracing that a configuration asks for.

    Args:
        config: no endpoint means none.
        service: `service.name` of the spans.
        instance: `service.instance.id` of the spans.

    Raises:
        ConfigError: an endpoint is given that is no URL, or OpenTelemetry is not installed.
    """
    if not config.endpoint:
        return NoTracing()
    url = urlsplit(config.endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        wanted = "a collector's URL, as http://collector:4318/v1/traces"
        raise ConfigError(f"tracing.endpoint is {config.endpoint!r}: give {wanted}")
    try:
        from baton_worker.tracing.otlp import OtlpTracing
    except ImportError as error:
        hint = "install baton-worker[tracing]"
        raise ConfigError(f"tracing.endpoint is set and {error.name} is missing: {hint}") from error
    return OtlpTracing(config, service, instance)
