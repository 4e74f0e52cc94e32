"""A norm and the choice behind it, an experts' sum and the norm behind that: in one launch or in
two, alone or replayed from a graph, the bits are the same.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from baton_ops import decoder, experts

DTYPES = ["bfloat16", "float32"]
RULES = {
    "qwen3": {"count": 128, "chosen": 8},
    "ernie": {"count": 64, "chosen": 6, "bias": True, "least_sum": 1e-12},
    "glm": {"count": 160, "chosen": 8, "bias": True, "scores": "sigmoid", "scaling": 2.5},
    "not-normed": {"count": 6, "chosen": 2, "normalises": False},
    "groups": {"count": 64, "chosen": 6, "scores": "sigmoid", "n_groups": 8, "n_chosen_groups": 4},
    "many": {"count": 500, "chosen": 9},
}  # fmt: skip
EPS = 1e-6


class Layer:
    """What lies around a mixture of rows E[N, H]."""

    def __init__(
        self, torch: ModuleType, dtype: str, name: str, tokens: int, hidden: int, width: int = 64
    ) -> None:
        told = {"scores": "softmax", "n_groups": 1, "n_chosen_groups": 1, "scaling": 1.0}
        told |= {"normalises": True, "least_sum": 0.0, "bias": False} | RULES[name]
        self.torch, self.rule, self.dtype = torch, SimpleNamespace(**told), getattr(torch, dtype)
        self.count, self.tokens, self.hidden = told["count"], tokens, hidden
        self.router = torch.randn(self.count, hidden, device="cuda") * hidden**-0.5
        self.bias = torch.randn(self.count, device="cuda") * 0.1 if told["bias"] else None
        self.gate_up = self.random(self.count * 2 * width, hidden) / hidden**0.5
        self.down = self.random(self.count * hidden, width) / width**0.5
        self.gated = self.nothing(tokens * told["chosen"], width)
        self.weight, self.behind = self.random(hidden), self.random(hidden)

    def random(self, *shape: int) -> Any:
        return self.torch.randn(*shape, device="cuda").to(self.dtype)

    def nothing(self, *shape: int) -> Any:
        return self.torch.full(shape, self.torch.nan, device="cuda", dtype=self.dtype)

    def rows(self) -> Any:
        return self.random(self.tokens, self.hidden)

    def room(self) -> Any:
        pairs, torch = self.tokens * self.rule.chosen, self.torch
        ints = {
            name: torch.full((n,), -7, dtype=torch.int32, device="cuda")
            for name, n in (("expert", pairs), ("place", pairs), ("row", pairs))
        }
        return SimpleNamespace(
            products=torch.full((self.tokens, self.count), torch.nan, device="cuda"),
            weight=torch.full((pairs,), torch.nan, device="cuda"),
            starts=torch.full((self.count + 1,), -7, dtype=torch.int32, device="cuda"),
            **ints,
        )

    def routed(self, at_once: bool, x: Any, residual: Any) -> dict[str, Any]:
        """Return all that is written by the norm and the choice."""
        normed, routes = self.nothing(self.tokens, self.hidden), self.room()
        choice = self.router, self.bias, self.rule, routes
        if at_once:
            experts.norm_route_into(x, residual, self.weight, EPS, normed, *choice)
        else:
            decoder.add_norm_into(x, residual, self.weight, EPS, normed)
            experts.route_into(normed, *choice)
        return {"residual": residual, "normed": normed} | vars(routes)

    def step(self, at_once: bool, x: Any, residual: Any, normed: Any, routes: Any) -> None:
        """Norm, choose, feed the experts, add what they made and norm that: all in place."""
        torch, pairs = self.torch, len(routes.row)
        choice = self.router, self.bias, self.rule, routes
        made = torch.empty(pairs, self.hidden, device="cuda", dtype=self.dtype)
        if at_once:
            experts.norm_route_into(x, residual, self.weight, EPS, normed, *choice)
        else:
            decoder.add_norm_into(x, residual, self.weight, EPS, normed)
            experts.route_into(normed, *choice)
        fed = normed
        if self.tokens > 1:
            fed = torch.empty_like(made)
            decoder.gather_into(normed, routes.row, fed)
        experts.expert_gate_up_silu_into(fed, routes.starts, self.gate_up, self.gated)
        experts.expert_matmul_into(self.gated, routes.starts, self.down, made)
        if at_once:
            experts.combine_norm_into(made, routes, None, residual, self.behind, EPS, x)
        else:
            experts.combine_into(made, routes, None, x)
            decoder.add_norm_into(x, residual, self.behind, EPS, x)


def assert_alike(torch: ModuleType, left: dict[str, Any], right: dict[str, Any]) -> None:
    assert [*left] == [*right]
    for name, values in left.items():
        torch.testing.assert_close(values, right[name], rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 2048), (1, 2560), (1, 72), (1, 51), (3, 512)])
@pytest.mark.parametrize("adds", [True, False])
def test_a_norm_and_a_choice(
    torch: ModuleType, dtype: str, name: str, tokens: int, hidden: int, adds: bool
) -> None:
    layer = Layer(torch, dtype, name, tokens, hidden)
    for _ in range(3):
        x, residual = layer.rows() if adds else None, layer.rows()
        parts = layer.routed(False, x, residual.clone())
        assert_alike(torch, layer.routed(True, x, residual), parts)


def test_a_token_with_a_number_that_is_none(torch: ModuleType) -> None:
    layer = Layer(torch, "bfloat16", "qwen3", 1, 2048)
    x, residual = layer.rows(), layer.rows()
    x[0, 3] = torch.nan
    parts = layer.routed(False, x, residual.clone())
    assert bool(parts["weight"].isnan().all())
    assert_alike(torch, layer.routed(True, x, residual), parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "hidden"),
    [(1, 2048), (8, 2560), (9, 51), (300, 4096), (1, 5120), (3, 7168), (130, 8192), (2, 8200)],
)
@pytest.mark.parametrize("has_beside", [True, False])
def test_a_sum_and_a_norm(
    torch: ModuleType, dtype: str, tokens: int, hidden: int, has_beside: bool
) -> None:
    layer = Layer(torch, dtype, "ernie", tokens, hidden, width=8)
    routes, residual = layer.room(), layer.rows()
    pairs = len(routes.place)
    routes.place.copy_(torch.randperm(pairs, device="cuda"))
    routes.weight.copy_(torch.rand(pairs, device="cuda"))
    made, beside = layer.random(pairs, hidden), layer.rows() if has_beside else None
    parts, out, same = (
        layer.nothing(tokens, hidden),
        layer.nothing(tokens, hidden),
        residual.clone(),
    )
    experts.combine_into(made, routes, beside, parts)
    decoder.add_norm_into(parts, same, layer.weight, EPS, parts)
    experts.combine_norm_into(made, routes, beside, residual, layer.weight, EPS, out)
    assert torch.equal(out, parts)
    assert torch.equal(residual, same)


@pytest.mark.parametrize("tokens", [1, 3])
def test_layers_from_a_graph_see_no_row_of_the_replay_before(
    torch: ModuleType, tokens: int
) -> None:
    """A kernel rehearses while what it will read is still being written."""
    layer = Layer(torch, "bfloat16", "qwen3", tokens, 2048, width=768)
    held = {way: (layer.rows(), layer.rows(), layer.rows(), layer.room()) for way in (True, False)}

    def steps(at_once: bool) -> None:
        for _ in range(4):
            layer.step(at_once, *held[at_once])

    graphs = {}
    for way in held:
        steps(way)
        torch.cuda.synchronize()
        graphs[way] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[way]):
            steps(way)
    for _ in range(20):
        for x, residual in [(layer.rows(), layer.rows())]:
            for way, (own_x, own_residual, *_) in held.items():
                own_x.copy_(x)
                own_residual.copy_(residual)
                graphs[way].replay()
        for left, right in zip(held[True][:3], held[False][:3], strict=True):
            assert bool(left.isfinite().all())
            assert torch.equal(left, right)
