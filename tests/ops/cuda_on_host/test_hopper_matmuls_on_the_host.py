"""Hopper's matmuls on the host: every way has one sequential sum's bits, and stores nothing else.

That this says something, planted faults are found.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import numpy as np
import pytest

from baton_testing import host_cuda, host_matmul
from baton_testing.host_orders import WARP, Order, each_last

WAYS = 16
KINDS = ("bf16", "fp32", "gated")
ROWS = (1, 7, 8, 9, 63, 64, 65, 128, 129, 161, 193, 200)
"""Of x: one, and both sides of what a block of rows and a tile of each way has."""
SHAPES = ((40, 8), (264, 520), (8, 136), (200, 72), (72, 264), (104, 8), (328, 264))
"""Of the output's columns, and K: no step is whole, and rings are gone through more than once."""
FIRST_MANY, FIRST_TURNED = 8, 14
MOST_FEW_ROWS = 64  # of products by groups
GUARD = 0xA5


@pytest.fixture(scope="module")
def matmuls(tmp_path_factory: pytest.TempPathFactory) -> host_matmul.HostMatmul:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("matmuls")
    return host_matmul.HostMatmul(host_cuda.build(compiler, folder, host_matmul.UNIT))


def aligned(shape: tuple[int, int], dtype: Any, fill: int = 0) -> Any:
    """Return an array whose data begins where the copy engine can read."""
    bytes_of = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.full(bytes_of + 16, fill, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + bytes_of].view(dtype).reshape(shape)


class Case:
    """A product, what must be in memory after it, and what was there before."""

    def __init__(self, matmuls: host_matmul.HostMatmul, kind: str, m: int, n: int, k: int) -> None:
        self.matmuls, self.kind, self.m, self.n = matmuls, kind, m, n
        rng = np.random.default_rng([KINDS.index(kind), m, n, k])
        # Rows of x are further apart than they are long; what lies between is NaN.
        wide = aligned((m, k + 8), np.uint16, fill=0xFF)
        self.x = wide[:, :k]
        self.x[...] = host_matmul.bf16(rng.standard_normal((m, k)))
        self.weight = aligned((2 * n if kind == "gated" else n, k), np.uint16)
        self.weight[...] = host_matmul.bf16(rng.standard_normal(self.weight.shape))
        self.dtype = np.float32 if kind == "fp32" else np.uint16
        # A gated product's rows may begin anywhere.
        self.first = 3 if kind == "gated" and m % 2 else 0
        self.stride = n + (5 if self.first else 8)
        sums = host_matmul.sequential(self.x, self.weight)
        if kind == "gated":
            sums = matmuls.silu_mul(np.ascontiguousarray(sums[:, :n]), sums[:, n:])
        self.expected = self.memory()
        self.view(self.expected)[...] = sums if kind == "fp32" else host_matmul.bf16(sums)

    def memory(self) -> Any:
        """Return what is stored to: more rows, before and behind, than any tile has."""
        return aligned((self.m + 528, self.stride), self.dtype, fill=GUARD)

    def view(self, memory: Any) -> Any:
        flat = memory.reshape(-1)[self.first + 8 * self.stride :]
        return flat[: self.m * self.stride].reshape(self.m, self.stride)[:, : self.n]

    def multiply(self, way: int, out: Any, processors: int) -> None:
        self.matmuls.run(way, self.x, self.weight, out, processors)

    def lets_early(self, way: int) -> bool:
        """Whether the next launch may start before this one has waited: what it may rely on as it
        starts is what is read early in an engine's steps.
        """
        return way >= FIRST_MANY or self.kind != "gated"

    def differs(self, way: int, seed: int, fault: str = "") -> str:
        """Return how a way's memory differs from what is expected, or nothing."""
        self.matmuls.set(seed, fault)
        memory = self.memory()
        try:
            self.multiply(way, self.view(memory), 1 + seed % 3)
        except RuntimeError as error:
            return str(error)
        if self.matmuls.lets_early() != self.lets_early(way):
            return "the next launch may start at another time"
        wrong = np.flatnonzero((memory.view(np.uint8) != self.expected.view(np.uint8)).ravel())
        return f"{len(wrong)} bytes from byte {wrong[0]} on differ" if len(wrong) else ""


def test_every_way_is_known_here(matmuls: host_matmul.HostMatmul) -> None:
    assert matmuls.ways == WAYS


def test_what_another_library_is_set_to_does_not_count_here(
    matmuls: host_matmul.HostMatmul, compiled: host_cuda.HostLibrary
) -> None:
    compiled.set(seed=1, capability=8)
    assert Case(matmuls, "bf16", 8, 40, 8).differs(way=0, seed=1) == ""


@pytest.mark.slow
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_has_the_bits_of_one_sequential_sum(
    matmuls: host_matmul.HostMatmul, kind: str, m: int
) -> None:
    first = ROWS.index(m) + KINDS.index(kind)
    for n, k in (SHAPES[first % len(SHAPES)], SHAPES[(first + 3) % len(SHAPES)]):
        case = Case(matmuls, kind, m, n, k)
        differences = {way: case.differs(way, seed=m + way) for way in range(WAYS)}
        assert {way: text for way, text in differences.items() if text} == {}, (n, k)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_more_than_one_band_of_tiles_have_the_same_bits(
    matmuls: host_matmul.HostMatmul, kind: str
) -> None:
    case = Case(matmuls, kind, 2_177, 200, 8)
    differences = {way: case.differs(way, seed=way) for way in range(FIRST_MANY, WAYS)}
    assert {way: text for way, text in differences.items() if text} == {}


FOUND = {
    "bytes of a whole tile are expected of a lower one": ("bf16", 12),
    "rows behind a tile's height are stored": ("bf16", 12),
    "rows behind a low tile's are stored": ("bf16", 2),
    "a stage is given back while its products are under way": ("bf16", 12),
    "a pair's second block is read from where the next pair is": ("gated", FIRST_TURNED),
}
"""By fault: a product and a way that show it."""
OF_WHO_IS_LAST = {
    "x is multiplied before it has come": (2, range(160, 161)),
    "the weight is multiplied before it has come": (2, range(128, 129)),
    "a stage is there without its rows": (2, range(160, 161)),
    "a stage is there without its weight": (2, range(128, 129)),
    "one warpgroup gives stages back for all": (12, range(256, 384)),
}
"""By fault: a way and threads that show it where they come last."""


@pytest.mark.parametrize("fault", FOUND)
def test_a_planted_fault_is_found(matmuls: host_matmul.HostMatmul, fault: str) -> None:
    kind, way = FOUND[fault]
    case = Case(matmuls, kind, 129, 264, 264)
    assert not any(case.differs(way, seed) for seed in range(1, 4))
    assert any(case.differs(way, seed, fault) for seed in range(1, 4))


def test_a_fault_whose_expression_is_gone_is_refused() -> None:
    with pytest.raises(ValueError, match="fix FAULTS"):
        host_matmul.UNIT.rewrite("matmul_few.cuh", "")


GROUPED_WAYS = {0: 32, 2: 64, 3: 96, 4: 128, 7: 256}
"""By way: the columns of its tiles."""
GROUPS = (
    (1,),
    (0, 3, 0, 0, 1, 0),
    (8, 0, 9, 1, 0, 0, 2),
    (64, 65, 0, 1, 130),
    (0,) * 70 + (5,) + (0,) * 30 + (1, 17),
)
"""How many rows groups have: none, one, both sides of what tiles have; more groups than lanes."""


class Grouped(Case):
    """As `Case`, of rows that lie group by group."""

    def __init__(
        self, matmuls: host_matmul.HostMatmul, kind: str, counts: tuple[int, ...], n: int, k: int
    ) -> None:
        super().__init__(matmuls, kind, sum(counts), n, k)
        self.starts = np.cumsum([0, *counts], dtype=np.int32)
        rows = 2 * n if kind == "gated" else n
        rng = np.random.default_rng([len(counts), *counts[:3], n, k])
        self.weight = aligned((len(counts) * rows, k), np.uint16)
        self.weight[...] = host_matmul.bf16(rng.standard_normal(self.weight.shape))
        for group in range(len(counts)):
            mine = slice(self.starts[group], self.starts[group + 1])
            part = self.weight[group * rows : (group + 1) * rows]
            sums = host_matmul.sequential(self.x[mine], part)
            if kind == "gated" and len(sums):
                sums = matmuls.silu_mul(np.ascontiguousarray(sums[:, :n]), sums[:, n:].copy())
            made = sums if kind == "fp32" else host_matmul.bf16(sums[:, :n])
            self.view(self.expected)[mine] = made

    def lets_early(self, way: int) -> bool:
        """Of few rows, or of many."""
        return (self.m <= MOST_FEW_ROWS) == (self.kind != "gated")

    def multiply(self, way: int, out: Any, processors: int) -> None:
        self.matmuls.run_grouped(way, self.x, self.weight, self.starts, out, processors)


@pytest.mark.parametrize("counts", GROUPS, ids=len)
@pytest.mark.parametrize("kind", ["bf16", "gated"])
def test_rows_of_groups_have_the_bits_of_their_own_part_of_the_weight(
    matmuls: host_matmul.HostMatmul, kind: str, counts: tuple[int, ...]
) -> None:
    for n, k in ((40, 264), (136, 72)):
        case = Grouped(matmuls, kind, counts, n, k)
        differences = {way: case.differs(way, seed=n + way) for way in GROUPED_WAYS}
        assert {way: text for way, text in differences.items() if text} == {}, (n, k)


def late_by_way(case: Case, way: int, most: int) -> dict[Order, str]:
    """Return, by who comes last, how a way's memory differs: of one multiprocessor, whose ring is
    gone through more than once. Products' parts end apart where who gives stages back is last.
    """
    apart = [
        Order(range(first, first + WARP), are_warps_apart=True)
        for first in ((128, 256) if way >= FIRST_MANY else (0,))
    ]
    orders = [*each_last(384 if way >= FIRST_MANY else 192, seed=way, most=most), *apart]
    found = {}
    for nth, order in enumerate(orders):
        with case.matmuls.ordered(order):
            found[order] = case.differs(way, seed=3 * nth)
    return {order: text for order, text in found.items() if text}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("way", range(WAYS))
def test_whoever_comes_last_changes_no_bit(matmuls: host_matmul.HostMatmul, way: int) -> None:
    kind = KINDS[::2][way // 2 % 2]
    case = Case(matmuls, kind, 70 if way >= FIRST_MANY or way % 2 else 8, 136, 2_056)
    assert late_by_way(case, way, most=5) == {}


@pytest.mark.parametrize("way", GROUPED_WAYS)
@pytest.mark.parametrize("kind", ["bf16", "gated"])
def test_whoever_comes_last_in_groups_changes_no_bit(
    matmuls: host_matmul.HostMatmul, kind: str, way: int
) -> None:
    assert late_by_way(Grouped(matmuls, kind, (8, 0, 9, 1), 72, 1_288), way, most=4) == {}


@pytest.mark.parametrize("fault", OF_WHO_IS_LAST)
def test_a_planted_fault_is_found_by_who_comes_last(
    matmuls: host_matmul.HostMatmul, fault: str
) -> None:
    way, last = OF_WHO_IS_LAST[fault]
    case = Case(matmuls, "bf16", 70, 136, 2_056)
    with matmuls.ordered(Order(last)):
        assert case.differs(way, seed=3) == ""
        assert case.differs(way, seed=3, fault=fault) != ""


class Known(Grouped):
    """As `Grouped`, of groups that are known as the launch begins."""

    def lets_early(self, way: int) -> bool:
        return True

    def multiply(self, way: int, out: Any, processors: int) -> None:
        self.matmuls.run_grouped(way, self.x, self.weight, self.starts, out, processors, known=True)


@pytest.mark.parametrize("counts", GROUPS, ids=len)
def test_groups_that_are_known_may_be_read_early(
    matmuls: host_matmul.HostMatmul, counts: tuple[int, ...]
) -> None:
    """Of many rows, whose groups come with the wait here, they are not."""
    case = Known(matmuls, "gated", counts, 40, 264)
    differences = {way: case.differs(way, seed=way) for way in GROUPED_WAYS}
    assert {way: text for way, text in differences.items() if text} == {}


class OneRow(Grouped):
    """One row of x, which the only row of each group is."""

    def __init__(
        self, matmuls: host_matmul.HostMatmul, kind: str, counts: tuple[int, ...], n: int, k: int
    ) -> None:
        super().__init__(matmuls, kind, counts, n, k)
        rows = len(self.weight) // len(counts)
        self.x = self.x[:1]
        for group in range(len(counts)):
            mine = slice(self.starts[group], self.starts[group + 1])
            sums = host_matmul.sequential(self.x, self.weight[group * rows : (group + 1) * rows])
            if kind == "gated":
                sums = matmuls.silu_mul(sums[:, :n].copy(), sums[:, n:].copy())
            self.view(self.expected)[mine] = host_matmul.bf16(sums)


@pytest.mark.parametrize("counts", [(0, 1, 1, 0, 1), (1, 1), (0,) * 40 + (1,) + (0,) * 9 + (1,)])
@pytest.mark.parametrize("kind", ["bf16", "gated"])
def test_one_row_has_the_bits_that_it_has_at_every_place(
    matmuls: host_matmul.HostMatmul, kind: str, counts: tuple[int, ...]
) -> None:
    case = OneRow(matmuls, kind, counts, 40, 264)
    differences = {way: case.differs(way, seed=way + 1) for way in GROUPED_WAYS}
    assert {way: text for way, text in differences.items() if text} == {}


def test_more_places_of_one_row_than_there_are_groups_are_refused(
    matmuls: host_matmul.HostMatmul,
) -> None:
    """Which group one has is looked up in memory that has room for one of each."""
    for kind in ("bf16", "gated"):
        case = OneRow(matmuls, kind, (3, 0), 40, 72)
        assert "one row of x has more places than groups" in case.differs(3, seed=1)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("way", GROUPED_WAYS)
def test_whoever_comes_last_of_one_row_changes_no_bit(
    matmuls: host_matmul.HostMatmul, way: int
) -> None:
    assert late_by_way(OneRow(matmuls, "gated", (0, 1, 1, 0, 1), 72, 1_288), way, most=4) == {}


def test_which_groups_one_row_is_for_is_read_behind_the_wait(
    matmuls: host_matmul.HostMatmul,
) -> None:
    case = OneRow(matmuls, "gated", (0, 1, 1, 0, 1), 40, 72)
    assert not any(case.differs(3, seed) for seed in range(1, 4))
    fault = "groups are read before the grid that writes them is over"
    assert any(case.differs(3, seed, fault) for seed in range(1, 4))


OF_GROUPS = [fault for fault in host_matmul.FAULTS if fault not in {**FOUND, **OF_WHO_IS_LAST}]


@pytest.mark.parametrize("fault", OF_GROUPS)
def test_a_planted_fault_of_groups_is_found(matmuls: host_matmul.HostMatmul, fault: str) -> None:
    case = Grouped(matmuls, "gated", (8, 0, 9, 1), 40, 72)
    assert not any(case.differs(2, seed) for seed in range(1, 4))
    assert any(case.differs(2, seed, fault) for seed in range(1, 4))


def test_groups_of_many_rows_are_read_behind_the_wait_by_a_product_that_is_not_gated(
    matmuls: host_matmul.HostMatmul,
) -> None:
    case = Grouped(matmuls, "bf16", (64, 0, 9, 1), 40, 72)
    assert not any(case.differs(2, seed) for seed in range(1, 4))
    fault = "groups are read before the grid that writes them is over"
    assert any(case.differs(2, seed, fault) for seed in range(1, 4))
