"""Where a step's time goes: microseconds of each kernel, from a trace of a replayed step.

Owns the reading of PyTorch's profiler. Needs a GPU.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

STEPS = 3
_NAMESPACES = re.compile(r"\(anonymous namespace\)::|\b[a-z_0-9]+::")


class Kernel(NamedTuple):
    """A kernel of a step: launches of it, and microseconds of them together."""

    name: str
    launches: float
    us: float


def spans(run: Callable[[], object], count: int = 1) -> list[tuple[str, float, float]]:
    """Return the name, begin and end (us) of all that the device did in so many calls."""
    import torch

    kinds = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(count):
            run()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def kernels(run: Callable[[], object]) -> list[Kernel]:
    """Return the kernels of a call, the one that takes longest first."""
    return summed(spans(run, STEPS), STEPS)


def summed(found: Iterable[tuple[str, float, float]], count: int) -> list[Kernel]:
    """Return the mean of so many calls, by kernel.

    A kernel may begin before those that it waits for end, so what counts as its own is the time
    from the last end before its own: the sum is the step less what the device idles.
    """
    times: dict[str, list[float]] = defaultdict(list)
    until = 0.0
    for name, begin, end in sorted(found, key=lambda span: span[2]):
        times[short(name)].append(end - max(begin, until))
        until = end
    each = [Kernel(name, len(us) / count, sum(us) / count) for name, us in times.items()]
    return sorted(each, key=lambda kernel: -kernel.us)


def short(name: str) -> str:
    """Return a kernel's name without namespaces, arguments and what it returns."""
    bare = _NAMESPACES.sub("", name.removeprefix("void "))
    depth = 0
    for place, letter in enumerate(bare):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return bare[:place]
    return bare
