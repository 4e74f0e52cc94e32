"""Logprobs: how many, and what they cost."""

from __future__ import annotations

from baton_mixin.expressions import WORKERS, quantile, rate, ratio
from baton_mixin.panels import Query, Row, graph

ROWS, COLUMNS = "baton_logprob_rows_total", "baton_logprob_columns_total"
PROMPT_ROWS = "baton_prompt_logprob_rows_total"
OP = "baton_logprob_op_seconds"


def row() -> Row:
    """Return the row."""
    role = ["role"]
    return Row(
        "Logprobs",
        [
            graph(
                "Logprob rows by k",
                "Tokens with logprobs, a second, by how many alternatives were asked for: of"
                " output, and of prompts.",
                "short",
                Query(rate(ROWS, by=["k"]), "k = {{k}}"),
                Query(rate(PROMPT_ROWS, by=["k"]), "prompt, k = {{k}}"),
                stacked=True,
            ),
            graph(
                "Logprob columns by k",
                "Entries of output tokens, a second: the token's own and its alternatives.",
                "short",
                Query(rate(COLUMNS, by=["k"]), "k = {{k}}"),
                stacked=True,
            ),
            graph(
                "Cost of the logprob op",
                "Seconds in the op per step that calls it for output; prompts' logprobs are not in"
                " it.",
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
