"""What clients saw of a round as numbers: first tokens, gaps between tokens, rates, quantiles.

Pure. Owns their definitions. A token counts when its bytes came; those that came together have gaps
of 0 between them. Many of those make a stall rare among gaps, so their share is told beside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from stream_clients import Served

from baton_testing.arrivals import Arrivals, Times

DOUBT = 0.05
"""A value lies outside its interval one time in twenty, or less often."""
LONGER = (0.5, 0.25, 0.1, 0.05, 0.025, 0.01, 0.005, 0.0025, 0.001)
"""Shares of gaps that are longer than the points of a distribution."""


def token_times(arrivals: Arrivals, request: int) -> Times:
    """Return when each token of a request came."""
    of_it = arrivals.request == request
    return np.repeat(arrivals.time[of_it], arrivals.count[of_it])


def waits(served: Served, requests: Iterable[int], nth: int = 1) -> list[float]:
    """Return the seconds from sending each request to its n-th token; infinite where none came."""
    found = []
    for request in requests:
        times = token_times(served.arrivals, request)
        sent = float(served.sent[request])
        found.append(float(times[nth - 1]) - sent if len(times) >= nth else math.inf)
    return found


def second_gaps(arrivals: Arrivals, requests: Iterable[int]) -> list[float]:
    """Return the seconds between the first two tokens of each request that has two: of a pair, what
    handing over takes, and the steps that a request waits for beside others.
    """
    times = [token_times(arrivals, request) for request in requests]
    return [float(of_it[1] - of_it[0]) for of_it in times if len(of_it) > 1]


def gaps(arrivals: Arrivals, requests: Iterable[int], begin: float, end: float) -> Times:
    """Return the seconds between successive tokens, of gaps that end in (begin, end]."""
    found = [np.empty(0)]
    for request in requests:
        times = token_times(arrivals, request)
        ends = times[1:]
        found.append(np.diff(times)[(ends > begin) & (ends <= end)])
    return np.concatenate(found)


def tokens_between(
    arrivals: Arrivals, requests: Iterable[int] | None, begin: float, end: float
) -> int:
    """Return the tokens that came in (begin, end]: of these requests, or of all."""
    inside = (arrivals.time > begin) & (arrivals.time <= end)
    if requests is not None:
        inside &= np.isin(arrivals.request, list(requests))
    return int(arrivals.count[inside].sum())


def ranks(n: int, share: float) -> tuple[int, int]:
    """Return the places, from 1, of the draws that a quantile of n draws lies between.

    How many draws lie below it is binomial, whatever the distribution. 0 and n + 1 are places
    beyond the least and the largest: n draws do not bound it on that side.
    """
    below = np.arange(n + 1)
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in below]
    chances = np.exp(logs + below * math.log(share) + (n - below) * math.log1p(-share))
    summed = np.cumsum(chances)
    low = int(np.searchsorted(summed, DOUBT / 2, "right"))
    high = int(np.searchsorted(summed, 1 - DOUBT / 2, "left")) + 1
    return low, high


def quantile(values: Any, share: float, together: int = 1) -> dict[str, float | int | None]:
    """Return a quantile, and what it lies between 19 times in 20: None where nothing bounds it.

    Args:
        together: values that are no draws of their own, as the gaps of all streams of a step: so
            many count as one draw.
    """
    ordered = np.sort(np.asarray(values, np.float64))
    if not len(ordered):
        raise ValueError("no value was measured")
    draws = max(1, len(ordered) // together)
    low, high = ranks(draws, share)

    def at(place: int) -> float | None:
        if not 1 <= place <= draws:
            return None
        return _told(float(ordered[min(round(place / draws * len(ordered)), len(ordered)) - 1]))

    value = float(ordered[max(math.ceil(share * len(ordered)), 1) - 1])
    return {"value": _told(value), "low": at(low), "high": at(high), "n": len(ordered)}


def _told(value: float) -> float | None:
    """Return a number as JSON has it: what never came is no number."""
    return value if math.isfinite(value) else None


def distribution(values: Any) -> list[list[float]]:
    """Return (seconds, share of the values that are longer), for shares that values resolve."""
    ordered = np.sort(np.asarray(values, np.float64))
    shares = [share for share in LONGER if share * len(ordered) >= 1]
    places = [math.ceil((1 - share) * len(ordered)) - 1 for share in shares]
    return [[float(ordered[place]), share] for place, share in zip(places, shares, strict=True)]


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Return when events of a rate come within so many seconds, the same for a seed."""
    rng = np.random.default_rng(seed)
    times: list[float] = []
    now = float(rng.exponential(1 / rate))
    while now < seconds:
        times.append(now)
        now += float(rng.exponential(1 / rate))
    return times


def queue_waits(times: Sequence[float], seconds: float, servers: int) -> list[float]:
    """Return how long each of these arrivals would be in a line, its service included.

    The line of servers that do nothing else, take each as long as told and leave no gap: nobody
    who computes whole prompts one after the other is quicker in it.
    """
    free = [0.0] * servers
    found = []
    for time in times:
        which = min(range(servers), key=free.__getitem__)
        free[which] = max(free[which], time) + seconds
        found.append(free[which] - time)
    return found


def capacity(served: Served, n_requests: int, prompt: int) -> float:
    """Return the prompt tokens a second of prompts sent at once, to the last one's first token.

    One request's way through the stack is part of it: some prompts make that small. From first
    token to first token it would not be, but those may come together.
    """
    firsts = waits(served, range(n_requests))
    sent = served.sent[:n_requests]
    return prompt * n_requests / float((sent + firsts).max() - sent.min())
