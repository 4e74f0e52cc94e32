"""Who comes when in a launch on the host, beside what a seed draws.

Owns the threads that come last at every point, copies and products that end as late as they may,
and blocks side by side; `tests/ops/cuda_on_host/orders.h` is the other side. Knows no kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

WARP, WARPGROUP = 32, 128


@dataclass(frozen=True)
class Order:
    """Who comes when in a launch, beside what a seed draws. None of it may change a bit."""

    starved: range = range(0)
    """Threads of a block that come last at every point: they go on only where no other may."""
    block: int = -1
    """Whose: of a cluster, or of blocks side by side; every block's if negative."""
    is_once_told: bool = False
    """No sooner than a thread of their block has told other blocks something, by an atomic."""
    are_copies_late: bool = False
    """The copy engine makes a copy when all threads wait, one of those asked for; else at once."""
    are_warps_apart: bool = False
    """A warp's part of a warpgroup's product is over when that warp has waited for it: the others'
    may read on."""
    is_side_by_side: bool = False
    """All blocks of a grid run at once; else one after the other."""


class Ordered:
    """A library of kernels that is told who comes when."""

    _library: ctypes.CDLL

    @contextmanager
    def ordered(self, order: Order) -> Iterator[None]:
        """Have launches run so meanwhile."""
        who = order.starved.start, len(order.starved), order.block, order.is_once_told
        how = order.are_copies_late, order.are_warps_apart, order.is_side_by_side
        self._library.host_order(*map(int, (*who, *how)))
        try:
            yield
        finally:
            self._library.host_order(0, 0, -1, 0, 0, 0, 0)


def each_last(threads: int, seed: int, most: int | None = None) -> list[Order]:
    """Return orders in which threads of a block of so many come last in turn: of every warp its
    first, another that is drawn, and all - or so many of these, drawn -, then of every warpgroup
    all. It is drawn too whether copies are late.
    """
    rng = np.random.default_rng(seed)
    warps = [range(first, first + WARP) for first in range(0, threads, WARP)]
    groups = [
        range(first, min(first + WARPGROUP, threads)) for first in range(0, threads, WARPGROUP)
    ]
    lanes = rng.integers(1, WARP, len(warps)).tolist()
    pairs = [(warp[0], warp[lane]) for warp, lane in zip(warps, lanes, strict=True)]
    single = [range(thread, thread + 1) for pair in pairs for thread in pair]
    few = [*single, *warps]
    if most is not None:
        few = [few[at] for at in sorted(rng.permutation(len(few))[:most].tolist())]
    late = rng.integers(2, size=len(few) + len(groups)).tolist()
    pairs_of = zip((*few, *groups), late, strict=True)
    return [Order(who, are_copies_late=bool(is_late)) for who, is_late in pairs_of]
