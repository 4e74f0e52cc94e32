"""The few facts that status shows of a worker's metrics, read from exposition text. Pure."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from baton_operator.pods.kv_ways import KvWays

_PREFIXES = (
    "baton_wire_info",
    "baton_draft_proposed_tokens_total",
    "baton_draft_accepted_tokens_total",
)
_MAX_LINES = 256
_MAX_LINE_CHARACTERS = 512
_WIRE = re.compile(r"\d{1,3}-\d{1,3}", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{1,64}")


class Sample(NamedTuple):
    """What pods say. `wire` is MIN-MAX; `acceptance` is None before any draft was verified; `kv` is
    of the deployment, the rest of one pod.
    """

    wire: str = ""
    config_hash: str = ""
    acceptance: float | None = None
    kv: KvWays = KvWays()


def read_sample(text: str) -> Sample:
    """Return the facts in exposition text; absent or unreadable metrics leave theirs out.

    Nothing but the lines of these few metrics is looked at, and of those no more than any worker
    has: a page of megabytes takes seconds to parse, and a status holds no text without end.
    """
    lines = [line for line in text.splitlines() if line.startswith(_PREFIXES)]
    if len(lines) > _MAX_LINES or any(len(line) > _MAX_LINE_CHARACTERS for line in lines):
        return Sample()
    wire, config_hash, proposed, accepted = "", "", 0.0, 0.0
    try:
        for family in text_string_to_metric_families("\n".join([*lines, ""])):
            for each in family.samples:
                if each.name == "baton_wire_info":
                    wire = f"{each.labels['accepts_min']}-{each.labels['accepts_max']}"
                    config_hash = each.labels["config_hash"]
                elif each.name == "baton_draft_proposed_tokens_total":
                    proposed += each.value
                elif each.name == "baton_draft_accepted_tokens_total":
                    accepted += each.value
    except (ValueError, KeyError, IndexError):
        return Sample()
    if wire and not (_WIRE.fullmatch(wire) and _HASH.fullmatch(config_hash)):
        return Sample()
    return Sample(wire, config_hash, _share(accepted, proposed))


def _share(accepted: float, proposed: float) -> float | None:
    is_sound = 0 <= accepted <= proposed < math.inf
    return accepted / proposed if is_sound and proposed else None
