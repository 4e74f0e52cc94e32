"""Logprobs: how many, and what they cost."""

from __future__ import annotations

from baton_mixin.expressions import WORKERS, quantile, rate, ratio
from baton_mixin.panels import Query, Row, graph

ROWS, COLUMNS = "baton_logprob_rows_total", "baton_logprob_columns_total"
OP = "baton_logprob_op_seconds"


def row() -> Row:
    """Return the row."""
    role = ["role"]
    return Row(
        "Logprobs",
        [
            graph(
                "Logprob rows by k",
                "Tokens with logprobs, a second, by how many alternatives were asked for.",
                "short",
                Query(rate(ROWS, by=["k"]), "k = {{k}}"),
                stacked=True,
            ),
            graph(
                "Logprob columns by k",
                "Entries of those tokens, a second: the token's own and its alternatives.",
                "short",
                Query(rate(COLUMNS, by=["k"]), "k = {{k}}"),
                stacked=True,
            ),
            graph(
                "Cost of the logprob op",
                "Seconds in the op per calling step, and its share of all step time.",
                "s",
                Query(quantile(0.5, OP, WORKERS, role), "{{role}} p50"),
                Query(quantile(0.99, OP, WORKERS, role), "{{role}} p99"),
            ),
            graph(
                "Logprobs' share of step time",
                "Time in the logprob op over time in engine steps.",
                "percentunit",
                Query(
                    ratio(
                        rate(f"{OP}_sum", by=role), rate("baton_engine_step_seconds_sum", by=role)
                    ),
                    "{{role}}",
                ),
            ),
        ],
    )
