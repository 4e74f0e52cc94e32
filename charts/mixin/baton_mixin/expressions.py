"""PromQL as the panels need it: every selector carries the dashboard's variables.

Owns label matchers and aggregation. Knows no panel.
"""

from __future__ import annotations

from collections.abc import Sequence

DEPLOYMENT = 'namespace=~"$namespace",job=~"$deployment",model=~"$model"'
"""Matchers of a whole deployment: the gateway's metrics have no role to choose."""

WORKERS = f'{DEPLOYMENT},role=~"$role"'
"""Matchers of the workers chosen by role."""

OPERATOR = 'namespace=~"$namespace",job=~"$job"'
"""Matchers of the operator's own metrics."""

RATE = "$__rate_interval"


def rate(metric: str, matchers: str = WORKERS, by: Sequence[str] = ()) -> str:
    """Return the per-second rate of a counter, summed by labels."""
    return f"sum{_by(by)} (rate({metric}{{{matchers}}}[{RATE}]))"


def increase(metric: str, matchers: str = WORKERS, by: Sequence[str] = ()) -> str:
    """Return how much a counter rose within a step of the graph, summed by labels."""
    return f"sum{_by(by)} (increase({metric}{{{matchers}}}[{RATE}]))"


def total(metric: str, matchers: str = WORKERS, by: Sequence[str] = ()) -> str:
    """Return a gauge summed by labels."""
    return f"sum{_by(by)} ({metric}{{{matchers}}})"


def largest(metric: str, matchers: str = WORKERS, by: Sequence[str] = ()) -> str:
    """Return the largest of a gauge's series by labels."""
    return f"max{_by(by)} ({metric}{{{matchers}}})"


def smallest(metric: str, matchers: str = WORKERS, by: Sequence[str] = ()) -> str:
    """Return the smallest of a gauge's series by labels."""
    return f"min{_by(by)} ({metric}{{{matchers}}})"


def quantile(q: float, histogram: str, matchers: str = WORKERS, by: Sequence[str] = ()) -> str:
    """Return a quantile of a histogram over all its series, by labels."""
    buckets = rate(f"{histogram}_bucket", matchers, ("le", *by))
    return f"histogram_quantile({q}, {buckets})"


def mean(histogram: str, matchers: str = WORKERS, by: Sequence[str] = ()) -> str:
    """Return a histogram's mean, by labels."""
    return ratio(rate(f"{histogram}_sum", matchers, by), rate(f"{histogram}_count", matchers, by))


def ratio(part: str, whole: str) -> str:
    """Return `part / whole`, without a value where there is no whole."""
    return f"{part} / ({whole} > 0)"


def lowest(count: int, expression: str) -> str:
    """Return the series of an expression with the smallest values."""
    return f"bottomk({count}, {expression})"


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
