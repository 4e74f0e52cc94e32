"""One metrics endpoint at one moment, and what happened between two moments.

Pure: text comes in. Owns which metrics a line of the view is made of; knows no socket or screen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An endpoint's samples, each name summed over its labels.

    Attributes:
        taken_seconds: when, by a steady clock.
        role, model: of the process; empty when it shows no metric of ours.
        values: sample name to the sum of its samples.
    """

    taken_seconds: float
    role: str
    model: str
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process did between two snapshots, and where it stands; None: it does not say.

    Rates are per second. `acceptance`, `kv_used` and `logprob_share` (of step time) are 0 to 1.
    """

    role: str
    model: str
    tokens: float | None
    prompt_tokens: float | None
    tokens_per_row: float | None
    acceptance: float | None
    logprob_rows: float | None
    logprob_share: float | None
    running: float | None
    waiting: float | None
    kv_used: float | None
    peers: float | None
    pressure: float | None
    lag_seconds: float | None


def parse(text: str, taken_seconds: float) -> Snapshot:
    """Return the snapshot of a page of metrics.

    Raises:
        ValueError: the text is no metrics page.
    """
    values: dict[str, float] = defaultdict(float)
    role = model = ""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] += sample.value
            if sample.name.startswith("baton_"):
                role, model = sample.labels.get("role", role), sample.labels.get("model", model)
    return Snapshot(taken_seconds, role, model, dict(values))


def activity(before: Snapshot, after: Snapshot) -> Activity:
    """Return what happened from one snapshot of a process to a later one."""
    change = _Change(before, after)
    is_gateway = after.role == "gateway"
    tokens = "baton_gateway_completion_tokens_total" if is_gateway else "baton_tokens_total"
    prompt = "baton_gateway_prompt_tokens_total" if is_gateway else "baton_prompt_tokens_total"
    now = after.values.get
    return Activity(
        role=after.role,
        model=after.model,
        tokens=change.rate(tokens),
        prompt_tokens=change.rate(prompt),
        tokens_per_row=change.ratio(
            "baton_accept_length_tokens_sum", "baton_accept_length_tokens_count"
        ),
        acceptance=change.ratio(
            "baton_draft_accepted_tokens_total", "baton_draft_proposed_tokens_total"
        ),
        logprob_rows=change.rate("baton_logprob_rows_total"),
        logprob_share=change.ratio("baton_logprob_op_seconds_sum", "baton_engine_step_seconds_sum"),
        running=now(
            "baton_gateway_live_requests" if is_gateway else "baton_engine_running_requests"
        ),
        waiting=now("baton_engine_waiting_requests"),
        kv_used=_share(now("baton_engine_kv_blocks_used"), now("baton_engine_kv_blocks")),
        peers=now("baton_link_workers_up" if is_gateway else "baton_link_gateways"),
        pressure=now("baton_link_pressure"),
        lag_seconds=now(
            "baton_link_consumer_lag_seconds" if is_gateway else "baton_link_oldest_age_seconds"
        ),
    )


class _Change:
    def __init__(self, before: Snapshot, after: Snapshot) -> None:
        self._before = before
        self._after = after

    def rate(self, name: str) -> float | None:
        seconds = self._after.taken_seconds - self._before.taken_seconds
        change = self._of(name)
        return None if change is None or seconds <= 0 else change / seconds

    def ratio(self, part: str, whole: str) -> float | None:
        return _share(self._of(part), self._of(whole))

    def _of(self, name: str) -> float | None:
        """A counter that fell belongs to a restarted process: it has counted since then."""
        if name not in self._after.values:
            return None
        now, then = self._after.values[name], self._before.values.get(name, 0.0)
        return now - then if now >= then else now


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
