"""Ranks that meet in a kernel, on the host: the ordered sum's bits on all of them, and no race.

Ranks run side by side over many calls on two halves, thread by thread in a drawn order, or each as
far ahead as meetings let it. That this says something, planted faults are found.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from baton_testing import host_cuda, host_ranks
from baton_testing.host_cuda import FIRST_FIRST
from baton_testing.host_matmul import fp32
from baton_testing.host_orders import Order
from baton_testing.host_ranks import APART, GATHER, NORM, Call, HostGroup

RANKS = (2, 4, 8)
KINDS = (("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32"))
"""Of parts and sums."""
HALF_BYTES = 1 << 14
LIMIT = 300_000
"""In readings of the clock by any thread: far more than a rank lags behind."""
SIZES = (1, 2, 7, 8, 31, 32, 33, 64, 100, 130)
"""Of a part, in vectors: shares that are empty or cut short, up to five blocks of a warp."""


FOUND = {
    "parts are read without a meeting": "one shot",
    "who gave up leaves what was there": "one shot",
}
"""By fault: the way that shows it, where two shots do not."""
OF_A_DEAD_RANK = [name for name in host_ranks.FAULTS if name.startswith(("who", "the wait"))]
OF_PUSHES = ["the wait for a row has no end", "who gave up pushes again"]
OF_NORMS = [name for name in host_ranks.FAULTS if name.startswith("rows")]
OF_A_LIMIT = ["each of several is waited for anew"]
OF_AN_ORDER = [
    "rows are taken whatever is beside them",
    "rows are taken when their first word has come",
    "rows are pushed for a meeting that is not counted",
    "rows are pushed to where others were",
]
"""Not found where each thread goes on for as long as it may: then all is pushed when one looks."""
OF_WHO_RUNS_AHEAD = ["rows are pushed to one half"]
"""Found there alone: in a drawn order none makes a whole call while a thread of another waits."""
OF_A_STILL_RANK = ["its own head alone is read", "who gave up leaves no word"]
OF_THE_LIVING = [
    name
    for name in host_ranks.FAULTS
    if name not in (*OF_A_DEAD_RANK, *OF_A_STILL_RANK, *OF_NORMS, *OF_A_LIMIT)
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    return host_cuda.build(compiler, tmp_path_factory.mktemp("ranks"), host_ranks.UNIT)


def calls_of(
    ranks: int,
    ways: Sequence[str],
    n: int,
    seed: int,
    sizes: Sequence[int] = SIZES,
    kinds: Sequence[tuple[str, str]] = KINDS,
) -> list[Call]:
    """Return calls on the two halves in turns, drawn from these ways, sizes and types."""
    rng = np.random.default_rng([seed, ranks])
    calls = []
    for i in range(n):
        part, out = kinds[rng.integers(len(kinds))]
        way, vectors = ways[rng.integers(len(ways))], int(rng.choice(sizes))
        calls.append(host_ranks.call(rng, ranks, vectors, way, part, out, i % 2))
    return calls


def wrong(calls: Sequence[Call], ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the calls that have other bits than they must, and on which rank."""
    return [
        (i, rank)
        for i, call in enumerate(calls)
        for rank in ranks
        if call.outs[rank].tobytes() != call.wanted().tobytes()
    ]


def outcome(group: HostGroup, calls: Sequence[Call]) -> str:
    """Return what is wrong after calls on all ranks, or nothing."""
    try:
        group.run(calls, limit_ns=LIMIT)
    except RuntimeError as error:
        return str(error)
    errors = group.errors()
    return f"errors {errors}" if any(errors) else str(wrong(calls, range(group.ranks)) or "")


@pytest.mark.parametrize("way", [*host_ranks.WAYS, GATHER])
@pytest.mark.parametrize("ranks", RANKS)
def test_all_ranks_have_the_bits_of_the_ordered_sum(library: Path, ranks: int, way: str) -> None:
    for seed in (*range(3), FIRST_FIRST):
        group = HostGroup(library, ranks, HALF_BYTES, seed)
        assert outcome(group, calls_of(ranks, [way], 12, seed)) == "", seed


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("ranks", RANKS)
def test_calls_of_every_kind_follow_each_other(library: Path, ranks: int) -> None:
    """Grids of one block to five, so that blocks of a rank have met unequally often."""
    for seed in (*range(2), FIRST_FIRST):
        group = HostGroup(library, ranks, HALF_BYTES, seed)
        assert outcome(group, calls_of(ranks, ["one shot", "two shots", GATHER], 30, seed)) == ""


@pytest.mark.parametrize("way", ["one shot", "two shots"])
def test_a_rows_bits_do_not_depend_on_what_is_summed_with_it(library: Path, way: str) -> None:
    whole = calls_of(4, [way], 1, seed=5, sizes=[130], kinds=[("bf16", "bf16")])[0]
    group = HostGroup(library, 4, HALF_BYTES, seed=5)
    group.run([whole])
    for vectors in (1, 33, 100):
        few = host_ranks.call(np.random.default_rng(0), 4, vectors, way, "bf16", "bf16", 1)
        few.parts[...] = whole.parts[:, : vectors * 8]
        other = HostGroup(library, 4, HALF_BYTES, seed=vectors)
        other.run([few])
        np.testing.assert_array_equal(few.outs, whole.outs[:, : vectors * 8])


def norms_of(ranks: int, seed: int, n: int = 8) -> list[Call]:
    """Return calls whose sums are normed, of one row to five, of up to as many as a warp takes."""
    rng = np.random.default_rng([seed, ranks])
    made = []
    for i in range(n):
        kind, rows = ("bf16", "fp32")[int(rng.integers(2))], int(rng.integers(1, 6))
        columns = int(rng.choice([8, 64, 248, 256]))
        made.append(host_ranks.norm_call(rng, ranks, rows, columns, kind, i % 2))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_a_sum_that_is_normed_in_its_launch_has_the_bits_of_both(library: Path, ranks: int) -> None:
    for seed in (*range(3), FIRST_FIRST):
        assert wrong_norms(library, ranks, seed) == []


def norms_behind_a_row(ranks: int, seed: int) -> list[Call]:
    """Return calls of three rows, behind two of the first row alone: that team has met before by
    the numbers at which the others do then, in the same half.
    """
    rng = np.random.default_rng([seed, ranks])
    rows = (1, 1, 3, 3)
    return [host_ranks.norm_call(rng, ranks, n, 64, "fp32", i % 2) for i, n in enumerate(rows)]


@pytest.mark.parametrize("ranks", RANKS)
def test_teams_that_have_met_unequally_often_take_no_old_rows_of_each_other(
    library: Path, ranks: int
) -> None:
    for seed in (*range(6), FIRST_FIRST):
        assert wrong_norms(library, ranks, seed, made=norms_behind_a_row) == []


def wrong_norms(
    library: Path,
    ranks: int,
    seed: int,
    fault: str = "",
    made: Callable[[int, int], list[Call]] = norms_of,
) -> list[int]:
    """Return which calls have other bits than a sum and a norm in two launches, on any rank.

    Raises RuntimeError, as runs do.
    """
    together = made(ranks, seed)
    apart = copy.deepcopy(together)
    for call in apart:
        call.way = APART
    for calls, planted, each in ((together, fault, 1), (apart, "", 2)):
        group = HostGroup(library, ranks, HALF_BYTES, seed, planted)
        group.run(calls, limit_ns=LIMIT)
        if any(group.errors()):
            raise RuntimeError(f"errors {group.errors()}")
        assert group.launches() == each * len(calls)
    return [
        number
        for number, (one, two) in enumerate(zip(together, apart, strict=True))
        if one.normed_bits() != two.normed_bits() or len({*one.normed_bits()}) != 1
    ]


BEHIND = {
    "rows are pushed to where others were": norms_behind_a_row,
    "rows are pushed to one half": norms_behind_a_row,
}
"""By fault: the calls that show it."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", OF_NORMS)
def test_a_fault_in_a_norm_of_a_sum_is_found(library: Path, fault: str) -> None:
    def fails(seed: int) -> bool:
        try:
            return wrong_norms(library, 4, seed, fault, BEHIND.get(fault, norms_of)) != []
        except RuntimeError as error:
            return str(error).startswith(("a race", "errors", "a rank waits for ever"))

    found = [fails(seed) for seed in (*range(4), FIRST_FIRST)]
    assert any(found[:-1]) or fault in OF_WHO_RUNS_AHEAD
    assert found[-1] or fault in OF_AN_ORDER


def test_rows_that_are_not_in_whole_chunks_are_normed_in_a_launch_of_their_own(
    library: Path,
) -> None:
    calls = [
        host_ranks.norm_call(np.random.default_rng(i), 2, 3, 12, "fp32", i % 2) for i in range(4)
    ]
    apart = copy.deepcopy(calls)
    for call in apart:
        call.way = APART
    for some in (calls, apart):
        group = HostGroup(library, 2, HALF_BYTES, 1)
        group.run(some, limit_ns=LIMIT)
        assert group.launches() == 2 * len(some)
    assert [bits_of(call) for call in calls] == [bits_of(call) for call in apart]


@pytest.mark.parametrize("ranks", RANKS)
def test_norms_and_sums_follow_each_other(library: Path, ranks: int) -> None:
    """Grids of a block a row and of a block a warp of vectors, on the same halves and flags."""
    rng = np.random.default_rng(ranks)
    calls = calls_of(ranks, ["one shot", "two shots", GATHER], 12, seed=7)
    for i, call in enumerate(calls[::3]):
        normed = host_ranks.norm_call(rng, ranks, 1 + i, 64, "bf16", call.half)
        calls[3 * i] = normed
    for seed in (0, FIRST_FIRST):
        group = HostGroup(library, ranks, HALF_BYTES, seed)
        group.run(calls, limit_ns=LIMIT)
        assert group.errors() == [0] * ranks
        sums = [call for call in calls if call.normed is None]
        assert wrong(sums, range(ranks)) == []


@pytest.mark.slow
def test_a_dead_rank_leaves_nan_in_residuals_and_norms(library: Path) -> None:
    for seed in (*range(3), FIRST_FIRST):
        group = HostGroup(library, 4, HALF_BYTES, seed)
        group.ignore_races()
        calls = norms_of(4, seed)
        group.run(calls, limit_ns=LIMIT, made=[8, 8, 4, 8])
        assert [group.errors()[rank] for rank in (0, 1, 3)] == [3, 3, 3]
        for number, call in enumerate(calls):
            assert call.normed is not None
            for whole in (call.outs, call.normed.residuals.reshape(4, -1)):
                living = whole[[0, 1, 3]]
                values = living if living.dtype == np.float32 else fp32(living)
                assert (np.isnan(values) == (number >= 4)).all()


def limits_waited(library: Path, kind: str, dead: Sequence[int], seed: int, fault: str) -> float:
    """Return for how many limits ranks waited for those that had died, by what they push."""
    group = HostGroup(library, 4, HALF_BYTES, seed, fault)
    group.ignore_races()
    rng, limit = np.random.default_rng(seed), LIMIT // 3
    calls = [host_ranks.norm_call(rng, 4, 2, 64, kind, i % 2) for i in range(6)]
    group.run(calls, limit, made=[2 if rank in dead else 6 for rank in range(4)])
    assert group.errors()[0] in [1 + rank for rank in dead]
    return group.nanoseconds() / limit


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", *OF_A_LIMIT])
@pytest.mark.parametrize(("kind", "dead"), [("fp32", (2,)), ("bf16", (1, 2, 3))], ids=str)
def test_ranks_that_push_nothing_any_more_are_waited_for_once(
    library: Path, kind: str, dead: tuple[int, ...], fault: str
) -> None:
    """A thread has two vectors of fp32 to wait for, and those of several ranks."""
    for seed in (0, FIRST_FIRST):
        assert (limits_waited(library, kind, dead, seed, fault) > 1.5) == bool(fault)


def test_special_values_are_summed_as_the_others() -> None:
    """The reference of these tests starts from rank 0's part: -0 and -0 are -0."""
    call = host_ranks.call(np.random.default_rng(0), 2, 1, "one shot", "fp32", "fp32", 0)
    call.parts[...] = -0.0
    assert np.signbit(call.wanted()).all()


@pytest.mark.parametrize("way", ["one shot", "two shots"])
def test_infinities_and_signed_zeros_keep_their_bits(library: Path, way: str) -> None:
    call = host_ranks.call(np.random.default_rng(0), 2, 2, way, "fp32", "fp32", 0)
    call.parts[0] = [-0.0, 0.0, np.inf, -np.inf, 3.4e38, 1e-45, -1.0, 0.0]
    call.parts[1] = [-0.0, -0.0, 1.0, 1.0, 3.4e38, 1e-45, 1.0, 0.0]
    with np.errstate(over="ignore"):
        assert outcome(HostGroup(library, 2, HALF_BYTES, seed=1), [call]) == ""


@pytest.mark.parametrize("ranks", RANKS)
def test_flags_wrap_around(library: Path, ranks: int) -> None:
    group = HostGroup(library, ranks, HALF_BYTES, seed=3)
    group.count_from(2**32 - 7)
    calls = calls_of(ranks, ["one shot", "two shots", GATHER], 16, seed=3, sizes=[31, 64])
    assert outcome(group, calls) == ""


@pytest.mark.parametrize("ranks", RANKS)
def test_numbers_beside_what_is_pushed_wrap_around(library: Path, ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    calls = [host_ranks.norm_call(rng, ranks, 2, 64, "bf16", i % 2) for i in range(6)]
    apart = copy.deepcopy(calls)
    for call in apart:
        call.way = APART
    for some in (calls, apart):
        group = HostGroup(library, ranks, HALF_BYTES, seed=3)
        group.count_from(2**32 - 4)
        group.run(some, limit_ns=LIMIT)
        assert group.errors() == [0] * ranks
    assert [bits_of(call) for call in calls] == [bits_of(call) for call in apart]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["one shot", "two shots", GATHER])
def test_a_dead_rank_is_given_up_within_the_limit(library: Path, way: str) -> None:
    """The others' output is NaN from then on, they say who is missing, and wait no second time.

    Nothing but time orders what runs on after giving up: races do not count.
    """
    for seed in (*range(3), FIRST_FIRST):
        group = HostGroup(library, 4, HALF_BYTES, seed)
        group.ignore_races()
        calls = calls_of(4, [way], 8, seed, kinds=[("bf16", "bf16")])
        group.run(calls, limit_ns=LIMIT, made=[8, 8, 4, 8])
        assert wrong(calls[:4], range(4)) == []
        assert [group.errors()[rank] for rank in (0, 1, 3)] == [3, 3, 3]
        for call in calls[4:]:
            living = call.outs[[0, 1, 3]]
            assert (living == (0xFFFF if way == GATHER else 0x7FFF)).all()
        # The limit, and what the other threads that wait read of the clock meanwhile.
        assert group.nanoseconds() < 2 * LIMIT


def test_a_rank_that_is_late_is_waited_for(library: Path) -> None:
    group = HostGroup(library, 4, HALF_BYTES, seed=11)
    calls = calls_of(4, ["two shots"], 6, seed=11)
    group.run(calls)
    assert group.nanoseconds() > 0
    assert wrong(calls, range(4)) == []


def last_ones(ranks: int, most_blocks: int) -> list[Order]:
    """Return who comes last in turn: all of a rank's blocks of one number, a thread of each block
    that meets others, one that does not, and all threads that meet a rank.
    """
    blocks = [Order(range(32), block) for block in range(ranks * most_blocks)]
    return [*blocks, *(Order(range(thread, thread + 1)) for thread in (0, 1, ranks - 1, 20))]


@pytest.mark.parametrize("way", [*host_ranks.WAYS[1:], GATHER])
@pytest.mark.parametrize("ranks", [2, 4])
def test_whoever_comes_last_is_waited_for(library: Path, ranks: int, way: str) -> None:
    """A block of a rank, or a thread of all."""
    for seed, order in enumerate(last_ones(ranks, most_blocks=3)):
        group = HostGroup(library, ranks, HALF_BYTES, seed)
        with group.ordered(order):
            calls = calls_of(ranks, [way], 4, seed, sizes=[33, 96])
            assert outcome(group, calls) == "", order


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_whoever_comes_last_where_sums_are_normed_is_waited_for(library: Path, ranks: int) -> None:
    """Of what is pushed, and of what is read."""
    for seed, order in enumerate(last_ones(ranks, most_blocks=5)):
        group = HostGroup(library, ranks, HALF_BYTES, seed)
        calls, right = norms_of(ranks, seed, n=4), norms_of(ranks, seed, n=4)
        HostGroup(library, ranks, HALF_BYTES, seed).run(right)
        with group.ordered(order):
            group.run(calls, limit_ns=LIMIT)
        assert not any(group.errors()), order
        assert [c.normed_bits() for c in calls] == [c.normed_bits() for c in right], order


def test_a_half_that_is_taken_twice_running_is_a_race_and_an_error(library: Path) -> None:
    def calls() -> list[Call]:
        made = calls_of(2, ["one shot"], 6, seed=1, sizes=[100])
        for call in made:
            call.half = 1
        return made

    for seed in (*range(3), FIRST_FIRST):
        assert outcome(HostGroup(library, 2, HALF_BYTES, seed), calls()).startswith("a race")
        group = HostGroup(library, 2, HALF_BYTES, seed)
        group.ignore_races()
        group.run(calls(), limit_ns=LIMIT)
        assert group.errors() == [9, 9]


def fails(library: Path, fault: str, seed: int) -> bool:
    group = HostGroup(library, 4, HALF_BYTES, seed, fault)
    group.count_from(2**32 - 5)
    way = FOUND.get(fault, "two shots")
    return outcome(group, calls_of(4, [way], 10, seed, sizes=[100])) != ""


@pytest.mark.parametrize("fault", ["", *OF_THE_LIVING])
def test_a_planted_fault_is_found(library: Path, fault: str) -> None:
    assert any(fails(library, fault, seed) for seed in range(4)) == bool(fault)
    assert fails(library, fault, FIRST_FIRST) == bool(fault)


def is_given_up_badly(library: Path, fault: str, seed: int) -> bool:
    """Whether a rank that dies between a call's arrival and its end does harm."""
    group = HostGroup(library, 4, HALF_BYTES, seed, fault)
    group.ignore_races()
    calls = calls_of(4, [FOUND.get(fault, "two shots")], 6, seed, kinds=[("bf16", "bf16")])
    if fault in OF_PUSHES:
        rng = np.random.default_rng(seed)
        calls = [host_ranks.norm_call(rng, 4, 2, 64, "bf16", i % 2) for i in range(6)]
    try:
        group.run(calls, limit_ns=LIMIT, made=[6, 6, 2, 6])
    except RuntimeError:
        return True
    is_spoilt = all(np.isnan(fp32(call.outs[[0, 1, 3]])).all() for call in calls[2:])
    has_word = [group.errors()[rank] for rank in (0, 1, 3)] == [3, 3, 3]
    return not (is_spoilt and has_word and group.nanoseconds() < 2 * LIMIT)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("fault", ["", *OF_A_DEAD_RANK])
def test_a_fault_that_a_dead_rank_shows_is_found(library: Path, fault: str) -> None:
    assert any(is_given_up_badly(library, fault, seed) for seed in range(4)) == bool(fault)
    assert is_given_up_badly(library, fault, FIRST_FIRST) == bool(fault)


STEP = 4
"""Calls of a step, behind which the heads are read."""
PUSHED = "norm of what is pushed"


class Still(NamedTuple):
    """Rank 0 stood still in a step's call while the others went on, to the end of the next step."""

    is_wrong: bool
    """It has values that are numbers, and wrong."""
    is_told: bool
    """What it read of the heads behind that step says that they do not count."""


def stood_still(
    library: Path, ranks: int, way: str, call: int, seed: int, fault: str = ""
) -> Still:
    sums = sums_of_steps(ranks, way, seed)
    right = copy.deepcopy(sums)
    HostGroup(library, ranks, HALF_BYTES, seed).run(right)
    group = HostGroup(library, ranks, HALF_BYTES, seed, fault)
    group.ignore_races()
    calls = [*sums[:STEP], host_ranks.errors(ranks), *sums[STEP:], host_ranks.errors(ranks)]
    group.run(calls, limit_ns=LIMIT // 10, still=(0, call))
    of_ranks = [[bits_of(some[n]) for n in range(STEP)] for some in (sums, right)]
    assert of_ranks[0][:call] == of_ranks[1][:call], "nobody was late before"
    are_numbers = not any(np.isnan(of.outs[0].view(np.float32)).any() for of in sums[:STEP])
    is_wrong = any(got[0] != wanted[0] for got, wanted in zip(*of_ranks, strict=True))
    heads = calls[STEP].outs[0]
    return Still(are_numbers and is_wrong, bool(heads.any()))


def sums_of_steps(ranks: int, way: str, seed: int) -> list[Call]:
    """Return the calls of two steps, in fp32."""
    if way not in (NORM, PUSHED):
        return calls_of(ranks, [way], 2 * STEP, seed, sizes=[33], kinds=[("fp32", "fp32")])
    rng, rows = np.random.default_rng([seed, ranks]), 3 if way == PUSHED else 5
    return [host_ranks.norm_call(rng, ranks, rows, 64, "fp32", i % 2) for i in range(2 * STEP)]


def bits_of(call: Call) -> list[bytes]:
    """Return what each rank has of a call."""
    return [out.tobytes() for out in call.outs] if call.normed is None else call.normed_bits()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "n_unseen"),
    [("one shot", 2), ("two shots", 1), (GATHER, 2), (NORM, 2), (PUSHED, 0)],
    ids=lambda x: str(x),
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_who_stands_still_in_a_steps_last_calls_is_told_that_they_do_not_count(
    library: Path, ranks: int, way: str, n_unseen: int
) -> None:
    """Longer than the limit: the others give it up where they meet next, and write over what it
    reads. In so many of the last calls it sees nothing of that itself, for it met them all since.
    What was pushed to it nobody writes over.
    """
    for seed in (*range(3), FIRST_FIRST):
        for call in range(STEP):
            found = stood_still(library, ranks, way, call, seed)
            assert found == Still(call >= STEP - n_unseen, True), (seed, call)


@pytest.mark.parametrize("fault", OF_A_STILL_RANK)
def test_a_fault_that_a_still_rank_shows_is_found(library: Path, fault: str) -> None:
    found = stood_still(library, 4, "one shot", STEP - 1, 1, fault)
    assert found == Still(is_wrong=True, is_told=False)


def test_heads_that_are_read_between_calls_take_no_turn_and_say_nothing_of_who_is_late(
    library: Path,
) -> None:
    for seed in (*range(3), FIRST_FIRST):
        group = HostGroup(library, 4, HALF_BYTES, seed)
        calls = []
        for call in calls_of(4, ["one shot", "two shots", GATHER], 12, seed):
            calls += [call, host_ranks.errors(4)]
        assert outcome(group, calls) == "", seed


def test_a_fence_of_one_device_alone_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="gpu"):
        host_cuda.rewritten('asm volatile("fence.acq_rel.gpu;");', host_ranks.INSTRUCTIONS)


def test_a_fault_whose_expression_is_gone_is_refused() -> None:
    with pytest.raises(ValueError, match="fix host_ranks"):
        host_ranks.UNIT.rewrite("rank_team.cuh", "")
