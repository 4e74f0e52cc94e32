"""The few facts that status shows of a worker's metrics, read from exposition text. Pure."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class Sample(NamedTuple):
    """One pod's facts. `wire` is MIN-MAX; `acceptance` is None before any draft was verified."""

    wire: str = ""
    config_hash: str = ""
    acceptance: float | None = None


def read_sample(text: str) -> Sample:
    """Return the facts in exposition text; absent or unreadable metrics leave theirs out."""
    wire, config_hash, proposed, accepted = "", "", 0.0, 0.0
    try:
        for family in text_string_to_metric_families(text):
            for each in family.samples:
                if each.name == "baton_wire_info":
                    wire = f"{each.labels['accepts_min']}-{each.labels['accepts_max']}"
                    config_hash = each.labels["config_hash"]
                elif each.name == "baton_draft_proposed_tokens_total":
                    proposed += each.value
                elif each.name == "baton_draft_accepted_tokens_total":
                    accepted += each.value
    except (ValueError, KeyError):
        return Sample()
    return Sample(wire, config_hash, accepted / proposed if proposed else None)
