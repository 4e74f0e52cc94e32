"""MTP: what drafting yields."""

from __future__ import annotations

from baton_mixin.expressions import WORKERS, mean, rate, ratio
from baton_mixin.panels import Query, Row, graph

PROPOSED, ACCEPTED = "baton_draft_proposed_tokens_total", "baton_draft_accepted_tokens_total"


def row() -> Row:
    """Return the row."""
    position = ["position"]
    rows = rate("baton_engine_decode_rows_total")
    at_most = rate("baton_accept_length_tokens_bucket", f'{WORKERS},le!="+Inf"', ["le"])
    rows_seen = rate("baton_accept_length_tokens_count")
    more = f"1 - {at_most} / on () group_left () ({rows_seen} > 0)"
    return Row(
        "Drafting",
        [
            graph(
                "Acceptance by draft position",
                "Share of verified drafts that were accepted. Later positions count only the steps"
                " that had such a draft.",
                "percentunit",
                Query(
                    ratio(rate(ACCEPTED, by=position), rate(PROPOSED, by=position)),
                    "draft {{position}}",
                ),
                Query(ratio(rate(ACCEPTED), rate(PROPOSED)), "all"),
            ),
            graph(
                "Tokens per decode row",
                "Accepted drafts and one: what a row yields where 1 is plain decoding; and K in"
                " use, the drafts that a row verifies.",
                "short",
                Query(mean("baton_accept_length_tokens"), "accept length"),
                Query(ratio(rate(PROPOSED), rows), "K in use"),
            ),
            graph(
                "Rows that yielded more",
                "Share of decode rows that yielded more than so many tokens.",
                "percentunit",
                Query(more, "more than {{le}}"),
            ),
        ],
    )
