"""Which of a test's combinations are fast tests, and which are slow: those that have each value.

Where one case is an engine that serves or a kernel of hundreds of fibers, all combinations of a
test's parameters take minutes. A few of those that have each value once are fast tests, the others
of those, and as many again from behind, slow ones, which `make slow` and `make test` run; the rest
are long ones, for `make slow LONG=1`. How long one takes is not asked, so that each machine runs
the same tests.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest


def covering(cases: Sequence[Sequence[str]]) -> set[int]:
    """Return places of cases, by parameter the name of its value, that have all these values.

    Each is the first of those that have most values which none before had.
    """
    pairs = [set(enumerate(case)) for case in cases]
    rest = set().union(*pairs)
    taken = set()
    while rest:
        best = max(range(len(pairs)), key=lambda place: len(rest & pairs[place]))
        rest -= pairs[best]
        taken.add(best)
    return taken


def spread(places: Sequence[int], most: int) -> list[int]:
    """Return so many of these at most, as far apart as they stand: the first, and not the last,
    which where values grow takes longest.
    """
    n_taken = min(most, len(places))
    return [places[nth * len(places) // n_taken] for nth in range(n_taken)]


def in_turn(places: Sequence[int], name: str) -> int:
    """Return the first of these or the one in their middle, by a test's name: where the first
    value is one backend and the second another, half of the tests take each.
    """
    candidates = spread(places, 2)
    return candidates[zlib.crc32(name.encode()) % len(candidates)]


def leave_to_slow(items: Iterable[pytest.Item], most: int | None = None) -> None:
    """Mark as slow all cases of a test but so many, or as many as its mark `fast_cases` says; as
    long as well those of values that others have.

    `most` is for tests that have no such mark; without it all their cases stay as they are.

    Those that stay are of the fewest that have each value of each parameter. Where one stays, it
    is one or another by the test's name.
    """
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if most is None and item.get_closest_marker("fast_cases") is None:
            continue
        is_fast = item.get_closest_marker("slow") is None and item.get_closest_marker("gpu") is None
        if is_fast and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for test, cases in tests.items():
        # Values have no other name that is one's own among those of its parameters.
        values = [case.callspec._idlist for case in cases]
        taken = sorted(covering(values))
        # What has most values is beside the first of all others, and from behind beside the last.
        from_behind = {len(cases) - 1 - place for place in covering(values[::-1])}
        mark = cases[0].get_closest_marker("fast_cases")
        if mark is None and most == 1:
            fast = [in_turn(taken, test.rpartition("::")[2])]
        else:
            fast = spread(taken, mark.args[0] if mark else most)
        for place, case in enumerate(cases):
            if place not in fast:
                case.add_marker(pytest.mark.slow)
            if place not in taken and place not in from_behind:
                case.add_marker(pytest.mark.long)
