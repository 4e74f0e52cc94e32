"""Routing and combining on the host: the choice is the rule's, pairs stand by expert, in any order
of threads.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import numpy as np
import pytest

from baton_testing import host_cuda, host_matmul, host_routes
from baton_testing.host_orders import Order, each_last
from baton_worker.engine.backends.device.expert_kernels import Routes
from baton_worker.engine.model.experts import Experts, choose

RULES = {
    "qwen3": Experts(128, 8, 8, (0,)),
    "not-normed": Experts(6, 2, 8, (0,), normalises=False),
    "ernie": Experts(64, 6, 8, (0,), has_choice_bias=True, least_sum=1e-12),
    "glm": Experts(160, 8, 8, (0,), scores="sigmoid", has_choice_bias=True, scaling=2.5),
    "deepseek": Experts(
        256, 8, 8, (0,), scores="sigmoid", has_choice_bias=True, n_groups=8, n_chosen_groups=4,
        least_sum=1e-20,
    ),
    "all": Experts(7, 7, 8, (0,)),
    "one-of-many": Experts(500, 1, 8, (0,), n_groups=5, n_chosen_groups=2),
}  # fmt: skip


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> host_routes.HostRoutes:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("routes")
    return host_routes.HostRoutes(host_cuda.build(compiler, folder, host_routes.UNIT))


def aligned(values: Any) -> Any:
    """Return a copy that begins where vectors may."""
    raw = np.zeros(values.nbytes + 16, np.uint8)
    start = -raw.ctypes.data % 16
    out = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    out[...] = values
    return out


def apart(values: Any, between: int) -> Any:
    """Return rows with so many NaN between one and the next."""
    wide = np.full((len(values), values.shape[1] + between), np.nan, np.float32)
    memory = aligned(host_matmul.bf16(wide) if values.dtype == np.uint16 else wide)
    memory[:, : values.shape[1]] = values
    return memory[:, : values.shape[1]]


def room(n_tokens: int, rule: Experts) -> Routes:
    pairs = n_tokens * rule.chosen
    return Routes(
        np.full((n_tokens, rule.count), np.nan, np.float32),
        np.full(pairs, -7, np.int32),
        np.full(pairs, np.nan, np.float32),
        np.full(pairs, -7, np.int32),
        np.full(pairs, -7, np.int32),
        np.full(rule.count + 1, -7, np.int32),
    )


class Case:
    """Tokens, and what routing them gave."""

    def __init__(
        self,
        routes: host_routes.HostRoutes,
        name: str,
        n_tokens: int,
        hidden: int,
        is_bf16: bool,
        between: int = 8,
    ) -> None:
        self.rule = RULES[name]
        rng = np.random.default_rng([n_tokens, hidden, len(name)])
        values = rng.standard_normal((n_tokens, hidden)).astype(np.float32)
        self.x = apart(host_matmul.bf16(values) if is_bf16 else values, between)
        self.values = host_matmul.fp32(self.x) if is_bf16 else self.x
        router = rng.standard_normal((self.rule.count, hidden)) * hidden**-0.5
        self.router = aligned(router.astype(np.float32))
        self.bias = None
        if self.rule.has_choice_bias:
            self.bias = aligned(rng.normal(0.0, 0.2, self.rule.count).astype(np.float32))
        self.routes = routes
        self.launches = 0

    def routed(self, seed: int, rows: slice = slice(None)) -> Routes:
        x = self.x[rows]
        out = room(len(x), self.rule)
        self.routes.set(seed)
        self.routes.route(x, self.router, self.bias, self.rule, out)
        return out

    def normed(self, seed: int, at_once: bool, adds: bool) -> dict[str, Any]:
        """Return what norming and routing the rows writes, in one launch or in two."""
        rng = np.random.default_rng(seed)
        rows = [rng.standard_normal(self.x.shape).astype(np.float32) for _ in range(2)]
        weight = rng.standard_normal(self.x.shape[1]).astype(np.float32)
        stored = host_matmul.bf16 if self.x.dtype == np.uint16 else np.asarray
        x, residual = (apart(stored(values), 8) for values in rows)
        norm = host_routes.Norm(
            x if adds else None, residual, aligned(stored(weight)), 1e-6, apart(stored(rows[0]), 16)
        )
        out, choice = room(len(self.x), self.rule), (self.router, self.bias, self.rule)
        self.routes.set(seed)
        self.routes.launches()
        if at_once:
            self.routes.norm_route(norm, *choice, out)
        else:
            self.routes.norm(norm)
            self.routes.route(norm.out, *choice, out)
        self.launches = self.routes.launches()
        return {"residual": norm.residual, "normed": norm.out} | out._asdict()


SHAPES = [
    (1, 64, True, 8),
    (1, 51, False, 2),
    (3, 64, True, 8),
    (4, 51, False, 2),
    (5, 64, True, 8),
    (37, 51, False, 2),
    (9, 264, True, 3),
    (9, 264, True, 8),
    (6, 64, False, 1),
]
MANY = [(197, 16, True, 8), (197, 13, False, 1), (771, 16, True, 8), (771, 13, False, 1)]
"""Enough for the kernels that have several experts a warp."""


@pytest.mark.parametrize(
    ("name", "n_tokens", "hidden", "is_bf16", "between"),
    [(name, *shape) for name in RULES for shape in SHAPES]
    + [(name, *shape) for name in ("not-normed", "ernie") for shape in MANY]
    + [("all", 450, 16, True, 8)],  # a block sorts its pairs in four rounds
)
def test_choices_are_the_rules_and_pairs_stand_by_expert(
    routes: host_routes.HostRoutes,
    name: str,
    n_tokens: int,
    hidden: int,
    is_bf16: bool,
    between: int,
) -> None:
    case = Case(routes, name, n_tokens, hidden, is_bf16, between)
    out = case.routed(seed=n_tokens)
    wanted = case.values.astype(np.float64) @ case.router.T.astype(np.float64)
    np.testing.assert_allclose(out.products, wanted, rtol=0, atol=2e-5)
    chosen = choose(out.products, case.bias, case.rule)
    np.testing.assert_array_equal(out.expert, chosen.expert.ravel())
    np.testing.assert_allclose(out.weight, chosen.weight.ravel(), rtol=1e-6)
    order = np.argsort(out.expert, kind="stable")
    np.testing.assert_array_equal(out.place[order], np.arange(len(order)))
    np.testing.assert_array_equal(out.row, order // case.rule.chosen)
    counts = np.bincount(out.expert, minlength=case.rule.count)
    np.testing.assert_array_equal(out.starts, np.cumsum([0, *counts]))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "n_tokens", "hidden"),
    [("qwen3", 21, 200), ("deepseek", 21, 200), ("ernie", 197, 264), ("not-normed", 777, 16)],
)
def test_a_token_chooses_the_same_bits_alone(
    routes: host_routes.HostRoutes, name: str, n_tokens: int, hidden: int
) -> None:
    case = Case(routes, name, n_tokens, hidden, True)
    together = case.routed(seed=3)
    pairs = case.rule.chosen
    for token in {*range(0, n_tokens, n_tokens // 20), 1, 7, n_tokens - 1}:
        alone = case.routed(seed=token, rows=slice(token, token + 1))
        mine = slice(token * pairs, (token + 1) * pairs)
        np.testing.assert_array_equal(alone.products[0], together.products[token])
        np.testing.assert_array_equal(alone.expert, together.expert[mine])
        np.testing.assert_array_equal(alone.weight, together.weight[mine])


@pytest.mark.parametrize("name", ["qwen3", "glm", "deepseek"])
def test_a_token_with_a_number_that_is_none_is_broken_and_no_other(
    routes: host_routes.HostRoutes, name: str
) -> None:
    case = Case(routes, name, 5, 64, False)
    whole = case.routed(seed=1)
    case.x[2, 3] = np.nan
    out = case.routed(seed=1)
    pairs = case.rule.chosen
    assert np.isnan(out.weight[2 * pairs : 3 * pairs]).all()
    assert len(set(out.expert[2 * pairs : 3 * pairs].tolist())) == pairs
    others = [i for i in range(5 * pairs) if i // pairs != 2]
    np.testing.assert_array_equal(out.expert[others], whole.expert[others])
    np.testing.assert_array_equal(out.weight[others], whole.weight[others])


@pytest.mark.parametrize("where", ["router", "bias"])
def test_one_expert_with_a_number_that_is_none_breaks_all_of_a_tokens(
    routes: host_routes.HostRoutes, where: str
) -> None:
    """Sigmoid tells experts nothing of each other: the others' scores are numbers."""
    case = Case(routes, "glm", 3, 64, False)
    {"router": case.router[:, 0], "bias": case.bias}[where][17] = np.nan
    out = case.routed(seed=4)
    assert np.isfinite(np.delete(out.products, 17, axis=1)).all()
    assert np.isnan(out.weight).all()
    chosen = out.expert.reshape(3, -1)
    assert all(len({*row} & {*range(160)}) == case.rule.chosen for row in chosen.tolist())


@pytest.mark.parametrize(("name", "factor", "shift"), [("qwen3", 800, 0), ("deepseek", 1, -70)])
def test_scores_at_the_edges_of_exp_are_the_rules(
    routes: host_routes.HostRoutes, name: str, factor: float, shift: float
) -> None:
    """Where exp alone overflows, and where a sum is below what it is divided by at least."""
    case = Case(routes, name, 5, 64, False)
    case.x[:, 0], case.router[:, 0] = 1.0, shift
    case.router[:, 1:] *= factor
    out = case.routed(seed=5)
    chosen = choose(out.products, case.bias, case.rule)
    assert np.isfinite(chosen.weight).all()
    np.testing.assert_array_equal(out.expert, chosen.expert.ravel())
    np.testing.assert_allclose(out.weight, chosen.weight.ravel(), rtol=1e-6)


def test_of_equals_the_lower_expert_is_taken(routes: host_routes.HostRoutes) -> None:
    case = Case(routes, "qwen3", 3, 64, False)
    case.router[...] = 1.0
    out = case.routed(seed=2)
    assert out.expert.reshape(3, -1).tolist() == [list(range(8))] * 3


@pytest.mark.parametrize("name", ["qwen3", "glm", "all"])
def test_of_equals_a_single_token_takes_the_lower_expert_too(
    routes: host_routes.HostRoutes, name: str
) -> None:
    """Every third expert is like the one before it; some are like many."""
    case = Case(routes, name, 1, 264, True)
    case.router[1::3] = case.router[: len(case.router[1::3]) * 3 : 3]
    case.router[-3:] = case.router[0]
    if case.bias is not None:
        case.bias[...] = 0.5
    parts, once = (case.normed(3, way, adds=True) for way in (False, True))
    assert case.launches == 1
    for key, values in parts.items():
        np.testing.assert_array_equal(once[key], values, err_msg=key)


@pytest.mark.parametrize("is_bf16", [True, False])
@pytest.mark.parametrize("columns", [8, 51, 2056])
@pytest.mark.parametrize("has_beside", [True, False])
@pytest.mark.parametrize(("between", "chosen"), [(8, 4), (3, 4), (8, 1), (3, 6), (8, 7), (8, 8)])
def test_a_tokens_pairs_are_added_in_their_order(
    routes: host_routes.HostRoutes,
    is_bf16: bool,
    columns: int,
    has_beside: bool,
    between: int,
    chosen: int,
) -> None:
    rng = np.random.default_rng(columns)
    n_tokens = 5
    made = rng.standard_normal((n_tokens * chosen, columns)).astype(np.float32)
    beside = rng.standard_normal((n_tokens, columns)).astype(np.float32)
    place = rng.permutation(n_tokens * chosen).astype(np.int32)
    weight = rng.random(n_tokens * chosen).astype(np.float32)
    stored = host_matmul.bf16 if is_bf16 else np.asarray
    read = host_matmul.fp32 if is_bf16 else np.asarray
    made, beside = apart(stored(made), between), apart(stored(beside), between + 8)
    out = apart(np.zeros((n_tokens, columns), made.dtype), between + 16)
    routes.set(seed=columns)
    routes.combine(made, place, weight, beside if has_beside else None, out)
    wanted = np.zeros((n_tokens, columns), np.float32)
    for token in range(n_tokens):
        for pair in range(token * chosen, (token + 1) * chosen):
            wanted[token] += weight[pair] * read(made)[place[pair]]
    wanted = wanted + read(beside) if has_beside else wanted
    np.testing.assert_array_equal(out, stored(wanted))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("n_tokens", "hidden"), [(1, 24), (1, 264), (1, 2560), (1, 51), (3, 64)])
@pytest.mark.parametrize(("is_bf16", "adds"), [(True, True), (False, True), (True, False)])
def test_a_norm_and_a_choice_have_the_bits_of_both(
    routes: host_routes.HostRoutes,
    name: str,
    n_tokens: int,
    hidden: int,
    is_bf16: bool,
    adds: bool,
) -> None:
    case = Case(routes, name, n_tokens, hidden, is_bf16)
    parts, once = (case.normed(n_tokens + hidden, way, adds) for way in (False, True))
    for key, values in parts.items():
        np.testing.assert_array_equal(once[key], values, err_msg=key)
    is_one = n_tokens == 1 and hidden % 8 == 0 and case.rule.n_groups == case.rule.n_chosen_groups
    assert (case.launches == 1) is is_one


@pytest.mark.slow
def test_of_the_longest_rows_too(routes: host_routes.HostRoutes) -> None:
    """Of which a cluster has as many threads as one may have."""
    case = Case(routes, "qwen3", 1, 8_192, True)
    parts, once = (case.normed(3, way, adds=True) for way in (False, True))
    assert case.launches == 1
    for key, values in parts.items():
        np.testing.assert_array_equal(once[key], values, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "hidden"), [("glm", 264), ("qwen3", 2560)])
def test_whoever_comes_last_of_a_cluster_changes_no_bit(
    routes: host_routes.HostRoutes, name: str, hidden: int
) -> None:
    """A block, or in all of them a thread, a warp or a group of warps."""
    case = Case(routes, name, 1, hidden, True)
    parts = case.normed(5, at_once=False, adds=True)
    blocks = [Order(range(1024), block) for block in range(16)]
    for order in (*blocks, *each_last(320, seed=hidden, most=6)):
        with routes.ordered(order):
            once = case.normed(5, at_once=True, adds=True)
        assert case.launches == 1
        for key, values in parts.items():
            np.testing.assert_array_equal(once[key], values, err_msg=f"{key}, {order}")


@pytest.mark.parametrize("nth", [0, 2, 3, 4])
def test_a_norm_and_a_choice_need_each_barrier(routes: host_routes.HostRoutes, nth: int) -> None:
    """But the second: places are read behind it, which without it may be anywhere."""
    barriers = host_cuda.barriers(["norm_route.cuh"])
    assert len(barriers) == 5
    case = Case(routes, "qwen3", 1, 264, True)
    wanted = case.normed(5, at_once=False, adds=True)

    def differs(order: Order) -> bool:
        routes.skip(barriers[nth])
        try:
            with routes.ordered(order):
                once = case.normed(5, at_once=True, adds=True)
        except RuntimeError:
            return True
        finally:
            routes.skip()
        return any(once[key].tobytes() != values.tobytes() for key, values in wanted.items())

    last = [Order(range(1024), block) for block in (0, 1, 7)]
    assert any(map(differs, (*last, *each_last(256, seed=nth))))


def test_where_no_cluster_has_room_a_norm_and_a_choice_are_launches_of_their_own(
    routes: host_routes.HostRoutes,
) -> None:
    case = Case(routes, "qwen3", 1, 264, True)
    once = case.normed(7, at_once=True, adds=True)
    assert case.launches == 1
    routes.set_clusters(0)
    try:
        parts = case.normed(7, at_once=True, adds=True)
    finally:
        routes.set_clusters(1)
    assert case.launches > 1
    for key, values in parts.items():
        np.testing.assert_array_equal(once[key], values, err_msg=key)


@pytest.mark.parametrize("is_bf16", [True, False])
@pytest.mark.parametrize(
    ("n_tokens", "columns"),
    [(1, 264), (5, 2056), (9, 64), (3, 4616), (130, 264), (2, 51), (2, 8200)],
)
@pytest.mark.parametrize("has_beside", [True, False])
def test_a_sum_and_a_norm_have_the_bits_of_both(
    routes: host_routes.HostRoutes, is_bf16: bool, n_tokens: int, columns: int, has_beside: bool
) -> None:
    rng, chosen = np.random.default_rng(columns), 6
    stored = host_matmul.bf16 if is_bf16 else np.asarray

    def rows(n: int, between: int) -> Any:
        return apart(stored(rng.standard_normal((n, columns)).astype(np.float32)), between)

    made, residual, out = rows(n_tokens * chosen, 8), rows(n_tokens, 16), rows(n_tokens, 8)
    beside = rows(n_tokens, 24) if has_beside else None
    place = rng.permutation(n_tokens * chosen).astype(np.int32)
    weight = rng.random(n_tokens * chosen).astype(np.float32)
    scale = aligned(stored(rng.standard_normal(columns).astype(np.float32)))
    pair = made, place, weight, beside
    summed, same = rows(n_tokens, 8), apart(residual, 16)
    routes.set(seed=columns)
    routes.combine(*pair, summed)
    routes.norm(host_routes.Norm(summed, same, scale, 1e-6, summed))
    routes.combine_norm(*pair, host_routes.Norm(None, residual, scale, 1e-6, out))
    np.testing.assert_array_equal(residual, same)
    np.testing.assert_array_equal(out, summed)


@pytest.mark.parametrize("is_bf16", [True, False])
@pytest.mark.parametrize("columns", [51, 264, 2056])
def test_a_norm_of_nothing_added_has_the_bits_of_a_sums(
    routes: host_routes.HostRoutes, is_bf16: bool, columns: int
) -> None:
    """With an epsilon that counts: else a residual that is added to itself has the same norm."""
    rng = np.random.default_rng(columns)
    stored = host_matmul.bf16 if is_bf16 else np.asarray
    read = host_matmul.fp32 if is_bf16 else np.asarray
    rows = [rng.standard_normal((3, columns)).astype(np.float32) for _ in range(4)]
    x, residual, out, alone = (apart(stored(values), 8) for values in rows)
    scale = aligned(stored(rng.standard_normal(columns).astype(np.float32)))
    wanted = stored(read(residual) + read(x))
    routes.set(seed=columns)
    routes.norm(host_routes.Norm(x, residual, scale, 1.0, out))
    np.testing.assert_array_equal(residual, wanted)
    routes.norm(host_routes.Norm(None, residual, scale, 1.0, alone))
    np.testing.assert_array_equal(residual, wanted)
    np.testing.assert_array_equal(alone, out)
