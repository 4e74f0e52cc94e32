"""What replicas a role shall have: bounds and ratio applied to what was asked for. Pure.

A role whose replicas come from the spec is never clamped; one scaled from outside is, and the
reason is reported, because a refused scale would leave an autoscaler guessing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Clamp(StrEnum):
    """Why a role has other replicas than asked for."""

    NONE = ""
    MIN = "Min"
    MAX = "Max"
    RATIO = "Ratio"


class Wanted(NamedTuple):
    """What was asked for one role; the bounds hold only when it `is_external`."""

    replicas: int
    is_external: bool = False
    least: int = 1
    most: int = 4096


class Scaled(NamedTuple):
    """What the role shall have."""

    replicas: int
    clamped_by: Clamp


class Scaling(NamedTuple):
    """Both roles, and whether the ratio holds."""

    prefill: Scaled
    decode: Scaled
    is_ratio_kept: bool


Ratio = tuple[int, int]


def scale(prefill: Wanted, decode: Wanted, lowest: Ratio, highest: Ratio) -> Scaling:
    """Return the replicas of both roles.

    `lowest` and `highest` bound prefill : decode. The role that is in excess is reduced, when it
    is external; else the other is raised, when that one is. Bounds win over the ratio.
    """
    p, d = _bounded(prefill), _bounded(decode)
    if p.replicas * highest[1] > d.replicas * highest[0]:
        p, d = _balance(prefill, p, decode, d, (highest[0], highest[1]))
    elif p.replicas * lowest[1] < d.replicas * lowest[0]:
        d, p = _balance(decode, d, prefill, p, (lowest[1], lowest[0]))
    kept = (
        p.replicas * highest[1] <= d.replicas * highest[0]
        and p.replicas * lowest[1] >= d.replicas * lowest[0]
    )
    return Scaling(p, d, kept)


def _bounded(wanted: Wanted) -> Scaled:
    if not wanted.is_external:
        return Scaled(wanted.replicas, Clamp.NONE)
    if wanted.replicas < wanted.least:
        return Scaled(wanted.least, Clamp.MIN)
    if wanted.replicas > wanted.most:
        return Scaled(wanted.most, Clamp.MAX)
    return Scaled(wanted.replicas, Clamp.NONE)


def _balance(
    excess: Wanted, has: Scaled, other: Wanted, has_other: Scaled, limit: Ratio
) -> tuple[Scaled, Scaled]:
    """Bring excess : other down to `limit`."""
    if excess.is_external:
        fitting = max(excess.least, has_other.replicas * limit[0] // limit[1])
        if fitting < has.replicas:
            has = Scaled(fitting, Clamp.RATIO)
    if other.is_external:
        needed = min(other.most, -(-has.replicas * limit[1] // limit[0]))
        if needed > has_other.replicas:
            has_other = Scaled(needed, Clamp.RATIO)
    return has, has_other
