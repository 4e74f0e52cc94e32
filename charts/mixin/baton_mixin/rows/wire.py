"""MTP and logprobs: what they weigh on the wire."""

from __future__ import annotations

from baton_mixin.expressions import DEPLOYMENT, WORKERS, largest, rate, ratio
from baton_mixin.panels import Query, Row, graph

FIXED_MESSAGE_BYTES = 530_444
"""One message of the layout with 512 slots of 6 tokens with 21 entries each."""


def row() -> Row:
    """Return the row."""
    sent, frames = rate("baton_link_sent_bytes_total"), rate("baton_link_sent_frames_total")
    tokens = rate("baton_tokens_total")
    return Row(
        "Record link",
        [
            graph(
                "Bytes per record",
                "Bytes of a step record on the wire, next to a fixed message with room for every"
                " slot.",
                "bytes",
                Query(ratio(sent, frames), "record"),
                Query(f"vector({FIXED_MESSAGE_BYTES})", "fixed message"),
                is_log=True,
            ),
            graph(
                "Bytes per token",
                "Bytes of step records per output token, logprobs included, next to the same ones"
                " as fixed messages.",
                "bytes",
                Query(ratio(sent, tokens), "record"),
                Query(ratio(f"{FIXED_MESSAGE_BYTES} * {frames}", tokens), "fixed message"),
                is_log=True,
            ),
            graph(
                "Back-pressure",
                "Highest rung of any gateway (0: none), and the age of the oldest record that"
                " nobody has acknowledged.",
                "short",
                Query(largest("baton_link_pressure", WORKERS, ["role"]), "{{role}} rung"),
                Query(
                    largest("baton_link_oldest_age_seconds", WORKERS, ["role"]),
                    "{{role}} oldest, seconds",
                ),
            ),
            graph(
                "KV handed over",
                "KV bytes that decode has, a second, whichever way they took; and those that were"
                " sent and received as messages, again where a connection broke.",
                "Bps",
                Query(rate("baton_handoff_delivered_bytes_total", DEPLOYMENT), "delivered"),
                Query(rate("baton_handoff_sent_bytes_total", DEPLOYMENT), "sent"),
                Query(rate("baton_handoff_received_bytes_total", DEPLOYMENT), "received"),
            ),
        ],
    )
