"""Serving: where the time to the first tokens goes."""

from __future__ import annotations

from baton_mixin.expressions import DEPLOYMENT, lowest, mean, quantile, rate, ratio
from baton_mixin.panels import Query, Row, graph

TTFT = "baton_gateway_time_to_first_token_seconds"
DELIVERED = "baton_handoff_delivered_bytes_total"


def row() -> Row:
    """Return the row."""
    return Row(
        "First token",
        [
            graph(
                "Time to first token",
                "From a request's arrival to its first tokens in the gateway. What gets none, as it"
                " is refused or fails, is not in it.",
                "s",
                *(
                    Query(quantile(q, TTFT, DEPLOYMENT), f"p{100 * q:.0f}")
                    for q in (0.5, 0.9, 0.99)
                ),
            ),
            graph(
                "Where the time goes, mean",
                "The wait for a place at decode, queue and prefill come before the first token at"
                " the client; before the second"
                " come the KV's way to decode, the handoff (decode's wait for a step and the copy"
                " into its pool) and decode's first rows.",
                "s",
                Query(mean("baton_handoff_place_seconds", DEPLOYMENT), "place at decode"),
                Query(mean("baton_engine_queue_seconds", DEPLOYMENT), "queue"),
                Query(mean("baton_engine_prefill_seconds", DEPLOYMENT), "prefill"),
                Query(mean("baton_handoff_transfer_seconds", DEPLOYMENT), "KV transfer"),
                Query(mean("baton_handoff_import_seconds", DEPLOYMENT), "handoff"),
                Query(mean("baton_first_emit_seconds", DEPLOYMENT), "first decode rows"),
                stacked=True,
            ),
            graph(
                "Handoff",
                "From offering a handoff to its acknowledgement: KV imported by decode.",
                "s",
                *(
                    Query(quantile(q, "baton_handoff_seconds", DEPLOYMENT), f"p{100 * q:.0f}")
                    for q in (0.5, 0.9, 0.99)
                ),
            ),
            graph(
                "KV by transport",
                "KV that decode has, a second, by the way that it took: nvlink and shm are read out"
                " of prefill's pool on the same host, nixl by UCX; zmq is sent.",
                "Bps",
                Query(rate(DELIVERED, DEPLOYMENT, ["transport"]), "{{transport}}"),
                stacked=True,
            ),
            graph(
                "KV rate of a transfer, slowest workers",
                "KV bytes for each second of a handoff's first part, of the five prefill workers"
                " with the slowest; what was pulled while the prompt was computed counts as bytes.",
                "Bps",
                Query(lowest(5, _rate_of_pairs()), "{{instance}}"),
                is_log=True,
            ),
        ],
    )


def _rate_of_pairs() -> str:
    seconds = rate("baton_handoff_transfer_seconds_sum", DEPLOYMENT, ["instance"])
    return ratio(rate(DELIVERED, DEPLOYMENT, ["instance"]), seconds)
