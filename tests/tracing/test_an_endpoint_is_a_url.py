"""Spans that can never be sent are a configuration error, and no silence."""

from __future__ import annotations

import pytest

from baton_worker.config import ConfigError, TracingConfig
from baton_worker.tracing.api import NoTracing
from baton_worker.tracing.build import build_tracing


@pytest.mark.parametrize("endpoint", ["nope", "collector:4318", "http://", "ftp://collector/x"])
def test_what_is_no_url_is_refused_by_name_and_value(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint is .*http://collector:4318") as error:
        build_tracing(TracingConfig(endpoint=endpoint), "gateway", "g")
    assert repr(endpoint) in str(error.value)


def test_no_endpoint_means_no_traces() -> None:
    assert isinstance(build_tracing(TracingConfig(), "gateway", "g"), NoTracing)
