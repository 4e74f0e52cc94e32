"""What clients saw of each part as records, and a record in words.

Pure. Owns what the parts of a pair's benchmark tell; `page_pair` makes the page of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from bench_gateway import Load
from pair_numbers import (
    distribution,
    gaps,
    quantile,
    queue_waits,
    token_times,
    tokens_between,
    waits,
)
from pair_sizes import Sizes
from stream_clients import Served

from baton_testing.arrivals import Phase

NTH = (1, 2, 3, 4)
"""Tokens of a single request whose times are looked at."""


def whole(served: Served) -> Served:
    """Return what was served if no request failed."""
    if served.failures:
        raise ValueError(f"{len(served.failures)} requests failed: {served.failures[0]}")
    return served


def first_waits(served: Served) -> tuple[float, ...]:
    """Return the seconds to each of the first tokens of the only request."""
    return tuple(waits(served, [0], nth)[0] for nth in NTH)


def first_tokens(
    prompt: int, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Return what was seen of the same single requests to a pair and to a mixed worker, in turns.

    Args:
        ours, theirs: of each request, the seconds to its first tokens (`NTH`).
    """
    record: dict[str, Any] = {"prompt": prompt}
    for name, times in (("pair", ours), ("mixed", theirs)):
        columns = [list(column) for column in zip(*times, strict=True)]
        between = [[b - a for a, b in zip(*two, strict=True)] for two in pairwise(columns)]
        record[name] = {
            "first": quantile(columns[0], 0.5),
            "second": quantile(columns[1], 0.5),
            "firsts": columns[0],
            "seconds": columns[1],
            "between": [quantile(some, 0.5) for some in between],
        }
    both = list(zip(ours, theirs, strict=True))
    for which, name in enumerate(("difference", "second_difference")):
        record[name] = quantile([a[which] - b[which] for a, b in both], 0.5)
    record["handed_over"] = quantile([(a[1] - a[0]) - (b[1] - b[0]) for a, b in both], 0.5)
    return record


def steady_numbers(served: Served, sizes: Sizes, n_prompts: int) -> dict[str, Any]:
    """Return what was seen of steady streams, request 0 and on, and of the prompts behind them.

    The phase begins when prompts may arrive and all streams run, and ends with their window or with
    the first stream that has no more to say.
    """
    streams, prompts = range(sizes.streams), range(sizes.streams, sizes.streams + n_prompts)
    times = [token_times(served.arrivals, stream) for stream in streams]
    failed = [line for line in served.failures if int(line.split()[1].rstrip(":")) in streams]
    if failed or any(len(of) <= sizes.skip for of in times):
        few = min(map(len, times))
        raise ValueError(f"a stream had {few} tokens: {failed[0] if failed else 'too slow'}")
    due = float(min(served.sent[: sizes.streams])) + sizes.lead
    begin = max(due, *(float(of[sizes.skip]) for of in times))
    end = min(due + sizes.window, *(float(of[-1]) for of in times))
    if end <= begin:
        raise ValueError(f"the streams ran together for {end - begin:.2f} s of the window")
    between = gaps(served.arrivals, streams, begin, end)
    if not between.any():
        raise ValueError("no two tokens of a stream came one after the other")
    firsts = waits(served, prompts)
    return {
        "seconds": end - begin,
        "gap_p50": quantile(between, 0.5, sizes.streams),
        "gap_p99": quantile(between, 0.99, sizes.streams),
        "gap_most": float(between.max()),
        "together": float((between == 0).mean()),
        "pause_p99": quantile(between[between > 0], 0.99, sizes.streams),
        "gaps": distribution(between),
        "steady_tokens_per_s": tokens_between(served.arrivals, streams, begin, end) / (end - begin),
        "tokens_per_s": tokens_between(served.arrivals, None, begin, end) / (end - begin),
        "prompts": n_prompts,
        "unserved": sum(not math.isfinite(first) for first in firsts),
        "ttft_p50": quantile(firsts, 0.5),
        "ttft_p99": quantile(firsts, 0.99),
        "firsts": [first if math.isfinite(first) else None for first in firsts],
        "failures": served.failures[:3],
        "client_busy": served.busy,
    }


def queue_numbers(times: Sequence[float], prompt_seconds: float, servers: int) -> dict[str, Any]:
    """Return the first tokens of a line that loses no time, for the same arrivals."""
    ideal = queue_waits(times, prompt_seconds, servers)
    return {
        "servers": servers,
        "prompt_seconds": prompt_seconds,
        "p50": quantile(ideal, 0.5)["value"],
        "p99": quantile(ideal, 0.99)["value"],
    }


def wide_phase(served: Served, wide: Load) -> Phase:
    """Return the phase in which all streams run."""
    wrong = [n for n in served.arrivals.totals(wide.streams).tolist() if n != wide.tokens]
    if wrong:
        raise ValueError(f"{len(wrong)} streams have not {wide.tokens} tokens: {wrong[:8]}")
    phase: Phase = served.arrivals.steady(wide.streams, wide.skip, wide.length)
    if not phase.seconds:
        raise ValueError("the streams' tokens came together: the phase took no time")
    return phase


def ttft_line(record: Mapping[str, Any]) -> str:
    """Return a size in words."""
    ours, theirs = (shown_ms(record[way]["first"]) for way in ("pair", "mixed"))
    return (
        f"{record['prompt']} tokens, chunks of {record['chunk']}: first token {ours} ms, mixed "
        f"{theirs}, apart {shown_ms(record['difference'])}; handed over in "
        f"{shown_ms(record['handed_over'])} ms more than a step; {pulled_line(record)}"
    )


def pulled_line(record: Mapping[str, Any]) -> str:
    """Return how much of the KV was read while prompts were computed."""
    pulled = record["handoff"]["pulled_blocks"]
    if not pulled:
        return "no KV was read in place"
    return f"{100 * pulled.get('ahead', 0.0) / sum(pulled.values()):.1f} % of the KV read ahead"


def steady_line(record: Mapping[str, Any]) -> str:
    """Return a way's steady streams in words."""
    return (
        f"{record['way']}, chunks of {record['chunk']}: gaps {shown_ms(record['gap_p50'])} ms, "
        f"p99 {shown_ms(record['gap_p99'])}; {record['tokens_per_s']:,.0f} tokens/s; first tokens "
        f"of {record['prompts']} prompts {shown_ms(record['ttft_p50'])} ms, "
        f"p99 {shown_ms(record['ttft_p99'])}, {record['unserved']} without; "
        f"a client is busy {100 * record['client_busy']:.0f} %"
    )


def gateway_line(cpu: Mapping[str, Mapping[str, float]]) -> str:
    """Return what the gateway's event loop took, by what was asked, in words."""
    took = [
        [cpu[name][f"gateway_first_thread{of}"] for of in ("", "_kernel")]
        for name in ("none", "top")
    ]
    (without, system), (with_, system_with) = took
    return (
        f"the gateway's loop took {without:.1f} and {with_:.1f} us a token, "
        f"{system:.1f} and {system_with:.1f} of them in the kernel"
    )


def shown_ms(told: Mapping[str, Any]) -> str:
    """Return a quantile in milliseconds."""
    return "-" if told["value"] is None else f"{1e3 * told['value']:.2f}"
