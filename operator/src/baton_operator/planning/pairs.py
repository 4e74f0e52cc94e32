"""Pods of two roles counted in pairs, and what a rollout may take: formulas without decisions.

With targets T_r for the roles,

    N            = max(T_prefill, T_decode)          pairs of a full rollout
    new_r(k)     = ceil(T_r * k / N)                 the growing revision with k pairs
    old_r(j)     = floor(T_r * j / N), at least 1    the shrinking one with j pairs left
    pairs(c)     = min_r floor(c_r * N / T_r)        what counts `c` of one revision can serve

new_r(k) + old_r(N - k) = T_r wherever the minimum of 1 does not bind, so the ratio holds at every
step. A pair is the share of both roles that one step moves, an Nth of each: one-replica roles move
in fractions, and change hands when their share of pairs does.

Budgets are given in pairs and hold for each role:

    surge        wanted and existing pods of all revisions <= T_r + ceil(T_r * S / N)
    unavailable  ready pods after a step >= T_r - ceil(T_r * U / N), when they were before
    served       pairs inside revisions after a step >= N - U - ceil(N / min T_r), and >= 1 for
                 U = 0, when they were before and anything may surge
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from baton_operator.names import WORKER_ROLES, Role


class Counts(NamedTuple):
    """Pods of both roles."""

    prefill: int = 0
    decode: int = 0

    def plus(self, other: Counts) -> Counts:
        """Return the sum by role."""
        return Counts(self.prefill + other.prefill, self.decode + other.decode)

    def less(self, other: Counts) -> Counts:
        """Return the difference by role, at least 0."""
        return Counts(max(0, self.prefill - other.prefill), max(0, self.decode - other.decode))

    def capped(self, most: Counts) -> Counts:
        """Return the smaller by role."""
        return Counts(min(self.prefill, most.prefill), min(self.decode, most.decode))

    def of(self, role: Role) -> int:
        """Return the pods of a role, or of pairs: pods with both count for either role."""
        return max(self) if role is Role.PAIR else self[WORKER_ROLES.index(role)]

    @property
    def is_zero(self) -> bool:
        """Whether both are 0."""
        return self == Counts()


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sum by role."""
    result = Counts()
    for each in counts:
        result = result.plus(each)
    return result


class Revision(NamedTuple):
    """One revision's workloads. `existing` counts pods that have not begun to terminate."""

    name: str
    desired: Counts
    existing: Counts
    ready: Counts

    @property
    def is_live(self) -> bool:
        """Whether it has or wants pods."""
        return not (self.desired.is_zero and self.existing.is_zero)

    @property
    def held(self) -> Counts:
        """Pods that its budget must count: those that exist and those on their way."""
        return Counts(*map(max, self.desired, self.existing))


@dataclass(frozen=True, slots=True)
class Budget:
    """What a rollout may take, in pairs; see the module's formulas."""

    surge_pairs: int
    unavailable_pairs: int


def pairs_of(target: Counts) -> int:
    """Return N."""
    return max(target)


def growing(target: Counts, n_pairs: int) -> Counts:
    """Return new_r(k)."""
    n = pairs_of(target)
    return Counts(*(-(-size * n_pairs // n) for size in target)) if n else Counts()


def shrinking(target: Counts, n_pairs: int, *, is_whole: bool) -> Counts:
    """Return old_r(j); `is_whole` applies the minimum of 1."""
    n = pairs_of(target)
    if not n or n_pairs <= 0:
        return Counts()
    least = int(is_whole)
    return Counts(*(max(min(least, size), size * n_pairs // n) for size in target))


def served_pairs(counts: Counts, target: Counts) -> int:
    """Return pairs(c), at most N."""
    n = pairs_of(target)
    shares = [have * n // want for have, want in zip(counts, target, strict=True) if want]
    return min([n, *shares])


def surge_limit(target: Counts, budget: Budget) -> Counts:
    """Return the most pods of each role over all revisions."""
    n = pairs_of(target)
    if not n:
        return Counts()
    return Counts(*(size + -(-size * budget.surge_pairs // n) for size in target))


def available_floor(target: Counts, budget: Budget) -> Counts:
    """Return the fewest ready pods of each role that a step may leave."""
    n = pairs_of(target)
    if not n:
        return Counts()
    return target.less(Counts(*(-(-size * budget.unavailable_pairs // n) for size in target)))


def served_floor(target: Counts, budget: Budget) -> int:
    """Return the fewest pairs that a step may leave served inside revisions: one pod of the smaller
    role may be between two of them. Where nothing may surge, none is sure. More is lost between
    three of them: `rollout` waives it, but for one pair, where nothing could move otherwise.
    """
    n = pairs_of(target)
    if not n or not budget.surge_pairs:
        return 0
    missing = budget.unavailable_pairs
    rounding = -(-n // min(size for size in target if size))
    return max(0 if missing else 1, n - missing - rounding)


def usable(revision: Revision) -> Counts:
    """Return ready pods that are still wanted."""
    return revision.ready.capped(revision.desired)
