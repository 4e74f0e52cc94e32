"""MTP and logprobs: nothing may be lost, and here it would show."""

from __future__ import annotations

from baton_mixin.expressions import DEPLOYMENT, rate
from baton_mixin.panels import Query, Row, graph


def row() -> Row:
    """Return the row."""
    ended = "baton_gateway_gap_timeouts_total", "baton_gateway_overlap_mismatches_total"
    return Row(
        "Loss accounting",
        [
            graph(
                "Records sent and applied",
                "Step records that workers sent for the first time, and that gateways applied. The"
                " lines lie on each other.",
                "cps",
                Query(rate("baton_link_sent_frames_total", DEPLOYMENT), "sent"),
                Query(rate("baton_link_applied_frames_total", DEPLOYMENT), "applied"),
            ),
            graph(
                "Records lost",
                "Records that a gateway will never get. Their requests end with an error.",
                "cps",
                Query(rate("baton_link_lost_frames_total", DEPLOYMENT), "lost"),
                Query(rate("baton_link_gaps_total", DEPLOYMENT), "gaps, then replayed"),
                Query(rate("baton_link_duplicates_total", DEPLOYMENT), "duplicates, dropped"),
            ),
            graph(
                "Requests ended for a hole",
                "Requests that ended because a gap stayed open, or because rows contradicted each"
                " other.",
                "reqps",
                Query(rate(ended[0], DEPLOYMENT), "gap"),
                Query(rate(ended[1], DEPLOYMENT), "contradiction"),
            ),
            graph(
                "Rows not delivered",
                "Rows the gateway dropped, by reason. Echo, duplicate and unknown_request are"
                " usual: decode repeats the first token, which may be here before prefill's, and"
                " rows of ended requests are on their way.",
                "cps",
                Query(
                    rate("baton_gateway_rows_dropped_total", DEPLOYMENT, ["reason"]), "{{reason}}"
                ),
            ),
        ],
    )
