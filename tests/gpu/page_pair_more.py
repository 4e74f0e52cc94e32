"""Sections of a pair's page: what handing over adds, workers that die, and the links below.

Owns their goals. Knows no file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from page_record import ABOVE, LEAST, TEXT, WHOLE, Field, Group, Several
from page_text import Goal, Record, Run, share, table

ADDED_MS, AHEAD = {8192: 2.0}, {8192: 0.9}
"""What handing over may add behind the last chunk, in ms, and the share of the KV that is to be
read when the offer comes, by prompt."""
SHORT = 512
"""Tokens of the prompt whose KV is next to nothing: what more a long one's adds is its KV's."""
PULLED_GB_PER_S, SUMMED = 350.0, 0.6
KILLED = 200
ROLES = ("prefill", "decode")
TABLE = Field("a table of counts", lambda value: isinstance(value, dict))
KILL = Group({"role": TEXT, "open_offers": LEAST})
KILLS = Group(
    {"wanted": WHOLE, "cells": WHOLE, "problems": Several(TEXT)},
    {"kills": Several(Group({
        "kills": Several(KILL), "served": WHOLE, "asked_again": WHOLE, "ends": TABLE,
        "violations": TABLE, "leaks": Several(TEXT), "start_seconds": Several(ABOVE),
        "retries": LEAST, "mismatches": LEAST})),
     "memory_mib": TABLE, "unmeasured": Several(TEXT), "plain_starts": Several(TEXT)},
)  # fmt: skip
QUANTILE = Group(
    {"n": WHOLE},
    {name: Field("a number", lambda value: isinstance(value, int | float))
     for name in ("value", "low", "high")},
)  # fmt: skip
PULL = Group({"gpu": TEXT, "copy_gb_per_s": ABOVE, "same": TABLE, "apart": TABLE})
RATIOS = Group({
    "machine": Group({}), "commit": TEXT, "model": TEXT, "load": ABOVE,
    "ratios": Several(Group({
        "name": TEXT, "gpus": WHOLE,
        "mix": Group({"name": TEXT, "prompt": WHOLE, "tokens": WHOLE, "burst": WHOLE}),
        "at_once": Group({"tokens_per_s": ABOVE, "prompt_tokens_per_s": ABOVE}),
        "arriving": Group({"requests_per_s": ABOVE, "requests": WHOLE, "ttft_p50": QUANTILE,
                           "ttft_p99": QUANTILE, "gap_p50": QUANTILE, "gap_p99": QUANTILE},
                          {"second_p50": QUANTILE, "second_p99": QUANTILE}),
    }), 1),
}, {"unmeasured": Several(TEXT)})  # fmt: skip
RANK_SUM = Group(
    {
        "device": TEXT,
        "ranks": WHOLE,
        "hidden": WHOLE,
        "rows": Several(Group({"rows": WHOLE, "pairs": Several(Several(ABOVE, 2), 1)})),
    }
)


def handed_over(run: Run) -> str:
    """What a request pays for its KV, taken apart as far as workers count it."""
    rows = []
    for one in run.record.get("ttft") or ():
        told = one.get("handoff")
        if not told or not told["count"] or "handed_over" not in one:
            continue
        prompt, what = one["prompt"], f"{one['prompt']:,} tokens, chunks of {one['chunk']:,}"
        added, ahead = 1e3 * one["handed_over"]["value"], share_ahead(told)
        transfer, imported = (
            1e3 * told[name] / told["count"] for name in ("transfer_seconds", "import_seconds")
        )
        rows.append([
            f"{prompt:,}", f"{one['chunk']:,}",
            _held(run, f"handing over, {what}", "handover", added, ADDED_MS.get(prompt), "ms"),
            f"{transfer:.2f}", f"{imported:.2f}", f"{added - transfer - imported:.2f}",
            _steps(one["pair"]), _steps(one["mixed"]),
            "-" if ahead is None else
            _held(run, f"KV read while computed, {what}", "ahead", ahead, AHEAD.get(prompt)),
        ])  # fmt: skip
    if not rows:
        return ""
    head = ["prompt", "chunk", "added, ms (goal)", "offer to arrival", "to import", "the rest",
            "next gaps, 1P+1D", "mixed", "read before the offer (goal)"]  # fmt: skip
    return f"""## What handing over adds

In the same single requests: from the first token to the second, the pair's time less the mixed
worker's for the same prompt, the median. Prefill counts two parts of it, means of a handoff: from
its offer to decode's word of it, and on to decode's word that all the KV is in its pool. The rest
is decode's first step, which a mixed worker has launched before it tells the first token, and what
the means are off the median. *Next gaps*: from the second token to the third, and to the fourth, in
ms: there decode's steps are long under way. What is not read when decode takes the
offer, a few ms after the last chunk is computed, is read behind it.

{table(head, rows)}{_kv_alone(run)}"""


def _kv_alone(run: Run) -> str:
    """Return what a long prompt's KV adds to handing a short one's over, and hold it to the goal:
    all else of a handoff - words, plans, launches - is the same for both.
    """
    added = {
        (one["prompt"], one["chunk"]): 1e3 * one["handed_over"]["value"]
        for one in run.record.get("ttft") or ()
        if "handed_over" in one
    }
    told = []
    for (prompt, chunk), ms in added.items():
        if prompt in ADDED_MS and (SHORT, chunk) in added:
            name = f"of that the KV's, {prompt:,} tokens, chunks of {chunk:,}"
            more = _held(run, name, "handover", ms - added[SHORT, chunk], ADDED_MS[prompt], "ms")
            told.append(f"of {prompt:,} tokens in chunks of {chunk:,} {more}")
    if not told:
        return ""
    return f"""

The KV's own part is what a long prompt adds to a short one's handing over, in ms:
{"; ".join(told)}."""


def share_ahead(told: Record) -> float | None:
    """Return which share of the blocks was read before the offer; None where none was read."""
    pulled = told.get("pulled_blocks") or {}
    total = sum(pulled.values())
    return pulled.get("ahead", 0.0) / total if total else None


def _held(
    run: Run, name: str, subject: str, value: float, goal: float | None, unit: str = "share"
) -> str:
    told = share(value) if unit == "share" else f"{value:.2f}"
    if goal is None:
        return told
    return f"{told} ({run.held(Goal(name, subject, value, goal, unit, least=unit == 'share'))})"


def _steps(way: Mapping[str, Any]) -> str:
    return ", ".join(f"{1e3 * gap['value']:.2f}" for gap in way["between"][1:])


def killed(run: Run) -> str:
    """Workers that died while they served."""
    told = run.record.get("kills")
    rounds = (told or {}).get("kills") or ()
    if not told or not rounds:
        return ""
    kills = [kill for one in rounds for kill in one["kills"]]
    by_role = [
        [role, sum(kill["role"] == role for kill in kills),
         sum(kill["role"] == role and kill["open_offers"] > 0 for kill in kills)]
        for role in ROLES
    ]  # fmt: skip
    ends, faults = _summed(rounds, "ends"), _summed(rounds, "violations")
    run.held(Goal("workers killed", "kills", len(kills), KILLED, "kills", least=True))
    name = "rounds of kills behind which nothing was lost, doubled, of other bits or left behind"
    run.held(Goal(name, "killed", _clean(told, rounds), 1.0, "share", least=True))
    starts = sorted(seconds for one in rounds for seconds in one["start_seconds"])
    errors = ", ".join(f"{n} by {how}" for how, n in sorted(ends.items()) if how != "whole")
    found = ", ".join(f"{n} {fault}" for fault, n in sorted(faults.items())) or "none"
    leaks = [line for one in rounds for line in one["leaks"]]
    return f"""## Workers that are killed

The tiny model, two prefills on the first card and two decodes on the second, {told["cells"]} such
deployments side by side, KV over {_way(told)}, their clients' streams greedy and sampled,
each token held with the bits of its logprob against an undisturbed run's. kill -9 of one worker
after the other; for those with *KV under way* decode was made to stand still until offers of
prefill's had no answer.

{table(["killed", "times", "with KV under way"], by_role)}

{sum(one["served"] for one in rounds):,} requests were served and judged: {ends.get("whole", 0):,}
streams ended whole{f", {errors}" if errors else ""}; {sum(one["asked_again"] for one in rounds)}
were asked again by their clients. Tokens lost, doubled or of other bits: {found}. Requests, blocks,
handoffs or pools that workers still held when all was served: {len(leaks)}.
{_memory(told.get("memory_mib") or {})}Two workers at a time were back in {median(starts):.1f} s
({starts[0]:.1f} to {starts[-1]:.1f}), in the median{_forked(told)}.{_listed(told["problems"])}"""


def _way(told: Record) -> str:
    """Return by which way KV went; runs before the ways had names tell whether it stayed."""
    return str(told.get("kv") or ("nvlink" if told.get("share_kv") else "zmq"))


def _forked(told: Record) -> str:
    if not told.get("forks") or told.get("plain_starts"):
        return ""
    return ": forked from a process\nthat had imported PyTorch; a pod imports it and takes longer"


def _clean(told: Record, rounds: Sequence[Record]) -> float:
    """Return the share of rounds without a fault; what no round explains speaks against all."""
    faults = sum(bool(one["violations"] or one["leaks"]) for one in rounds)
    return 0.0 if told["problems"] and not faults else 1 - faults / len(rounds)


def _summed(rounds: Sequence[Record], name: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in rounds:
        found.update(one[name])
    return found


def _memory(told: Mapping[str, Sequence[int]]) -> str:
    before, after = told.get("before"), told.get("after")
    if not before or not after:
        return ""
    most = max(b - a for a, b in zip(before, after, strict=True))
    return f"When all had ended, a card had {max(most, 0)} MiB more in use than before. "


def _listed(problems: Sequence[str]) -> str:
    return "\n\n" + "\n".join(f"- {line}" for line in problems) if problems else ""


def pulled(run: Run) -> str:
    """How fast another process's pool is read."""
    told = run.record.get("pull")
    if not told:
        return ""
    cases = [name for name, one in told["same"].items() if "gb_per_s" in one]
    rows = []
    for case in cases:
        same, apart = told["same"][case], told["apart"].get(case) or {}
        rate = f"{apart['gb_per_s']:.0f}" if "gb_per_s" in apart else "-"
        if apart and case in ("8,192 tokens", "1.2 GB in one piece"):
            name = f"KV between two namespaces, {case}"
            goal = Goal(name, "pull", apart["gb_per_s"], PULLED_GB_PER_S, "GB/s", least=True)
            rate += f" ({run.held(goal)})"
        rows.append([case, f"{same['ms']:.2f}", f"{same['gb_per_s']:.0f}",
                     f"{apart['ms']:.2f}" if apart else "-", rate])  # fmt: skip
    head = ["what", "ms", "GB/s", "apart, ms", "apart, GB/s (goal)"]
    return f"""## Reading another process's pool

`tests/bench/gpu/bench_pull.py` on {told["gpu"]}: scattered blocks of 16 tokens,
pulled by one call. *Apart*: by a process without privileges in PID, IPC, network, UTS and mount
namespaces of its own. PyTorch's copy within one process: {told["copy_gb_per_s"]:.0f} GB/s.

{table(head, rows)}"""


def pulled_by_nixl(run: Run) -> str:
    """How fast NIXL reads it."""
    told = run.record.get("pull_nixl")
    if not told:
        return ""
    settings = [name for name, one in told.items() if isinstance(one, dict)]
    cases = dict.fromkeys(case for name in settings for case, one in told[name].items()
                          if isinstance(one, dict) and "gb_per_s" in one)  # fmt: skip
    rows = [
        [case, *(f"{one['gb_per_s']:.1f}" if (one := told[name].get(case)) else "-"
                 for name in settings)]
        for case in cases
    ]  # fmt: skip
    return f"""## The same by NIXL

`tests/bench/gpu/bench_pull_nixl.py` in the same run, on {told["gpu"]}, GB/s: the pool in plain
memory or in memory that has a descriptor (*mapped*), the reader in the same namespaces, in a PID
namespace of its own, or over TCP alone.

{table(["what", *settings], rows)}"""


def summed(run: Run) -> str:
    """The sum over ranks against NCCL's."""
    told = run.record.get("rank_sum")
    if not told:
        return ""
    rows = []
    for one in told["rows"]:
        theirs, ours = (median(pair[i] for pair in one["pairs"]) for i in (0, 1))
        ratio = median(pair[1] / pair[0] for pair in one["pairs"])
        cell = f"{ratio:.2f}"
        if one["rows"] <= 256:
            name = f"the sum over {told['ranks']} ranks over NCCL's, {one['rows']} rows"
            cell += f" ({run.held(Goal(name, 'sum', ratio, SUMMED, 'ratio', least=False))})"
        rows.append([f"{one['rows']:,}", f"{theirs:.1f}", f"{ours:.1f}", cell])
    head = ["rows", "NCCL, us", "ours, us", "ours over NCCL's (goal)"]
    return f"""## Sums over {told["ranks"]} ranks

`tests/bench/gpu/bench_rank_sum.py` in the same run, on {told["device"]}: bfloat16 rows of
{told["hidden"]:,}, from graphs' replays.

{table(head, rows)}"""


def started(run: Run) -> str:
    """How long deployments took to be there."""
    found = list(run.record.get("starts") or ())
    if not found:
        return ""
    rows = [[one["way"], f"{one['chunk']:,}", f"{one['seconds']:.1f}"] for one in found]
    return f"""## What starting took

From nothing to a deployment that serves: processes, weights from files in memory, graphs. Those
for single requests started side by side.

{table(["deployment", "chunk", "seconds"], rows)}"""


def ratios(told: Record, where: str, results: str, card: str = "") -> str:
    """Which ratio of prefill to decode serves which requests: a run of its own, on more GPUs.

    Args:
        card: what stands behind the heading, where there are several such runs.
    """
    parts = []
    for mix in {one["mix"]["name"]: one["mix"] for one in told["ratios"]}.values():
        some = [one for one in told["ratios"] if one["mix"]["name"] == mix["name"]]
        has_seconds = all("second_p50" in one["arriving"] for one in some)
        seconds = ("second_p50", "second_p99") if has_seconds else ()
        rows = [
            [one["name"], one["gpus"], f"{one['at_once']['tokens_per_s']:,.0f}",
             f"{one['at_once']['prompt_tokens_per_s']:,.0f}", _asked(one),
             *(_plain_ms(one["arriving"][name])
               for name in ("ttft_p50", "ttft_p99", *seconds, "gap_p50", "gap_p99"))]
            for one in some
        ]  # fmt: skip
        head = ["", "GPUs", "tokens/s", "of prompts", "sent of that", "first token p50, ms", "p99",
                *(["second behind it p50, ms", "p99"] if has_seconds else ()),
                "gap p50, ms", "p99"]  # fmt: skip
        arriving = some[0]["arriving"]
        parts.append(
            f"### {mix['name'].capitalize()}: {mix['prompt']:,} tokens in, {mix['tokens']:,} out"
            f"\n\n{mix['burst']} at once; then {arriving['requests']} by chance, "
            f"{arriving['requests_per_s']:.2f} a second. {_best(some)}\n\n{table(head, rows)}"
        )
    failed = "".join(f"\n- {line}" for line in told.get("unmeasured") or ())
    lacks = f"\n\nNot measured:\n{failed}" if failed else ""
    tables = "\n\n".join(parts)
    return f"""## Which ratio{card}

`make gpu-bench-4` on {where}, commit {told["commit"]}; [its numbers]({results}). Every deployment
stood alone on the GPUs: {told["model"]}, {told["layers"]} layers, chunks of 2,048 tokens, KV by
{told["kv"]}. Tokens a second are those of requests that came all at once; first tokens and gaps
those of requests that came by chance, at {share(told["load"])} of the requests a second that the
first deployment of the table served at once, the same for all. *Sent of that*: what came by chance
over what the row's own deployment served at once. Above 100 % requests only queue, and first
tokens say how long the run was.

{tables}{lacks}"""


def _best(some: Sequence[Record]) -> str:
    """Say who serves most, and of those that were not sent more than they serve whose gaps are
    shortest.
    """
    most = max(some, key=lambda one: one["at_once"]["tokens_per_s"])
    kept_up = [one for one in some if _sent(one) <= 1]
    quickest = min(kept_up, key=lambda one: one["arriving"]["gap_p99"]["value"] or math.inf)
    return (
        f"Most tokens a second: {most['name']}. Shortest gaps (p99) of those that keep up: "
        f"{quickest['name']}."
    )


def _sent(one: Record) -> float:
    return float(one["arriving"]["requests_per_s"] / one["at_once"]["requests_per_s"])


def _asked(one: Record) -> str:
    """Return what was sent by chance, of what was served at once."""
    return share(_sent(one))


def _plain_ms(told: Record) -> str:
    return "-" if told["value"] is None else f"{1e3 * told['value']:.1f}"
