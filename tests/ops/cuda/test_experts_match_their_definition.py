"""What experts make of tokens on a GPU: the rule's choice, each row's own product, the same bits in
any company, from a graph too.
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
    "glm": {"count": 128, "chosen": 8, "bias": True, "scores": "sigmoid", "scaling": 2.5},
    "deepseek": {
        "count": 256,
        "chosen": 8,
        "bias": True,
        "scores": "sigmoid",
        "n_groups": 8,
        "n_chosen_groups": 4,
        "least_sum": 1e-20,
    },
}


class Mixture:
    """A layer's router and experts, and what routing makes room for."""

    def __init__(
        self, torch: ModuleType, dtype: str, name: str, hidden: int = 512, width: int = 192
    ) -> None:
        told = {"scores": "softmax", "n_groups": 1, "n_chosen_groups": 1, "scaling": 1.0}
        told |= {"normalises": True, "least_sum": 0.0, "bias": False} | RULES[name]
        self.torch, self.rule = torch, SimpleNamespace(**told)
        self.count, self.hidden, self.width = told["count"], hidden, width
        self.dtype = getattr(torch, dtype)
        self.router = torch.randn(self.count, hidden, device="cuda") * hidden**-0.5
        self.bias = torch.randn(self.count, device="cuda") * 0.1 if told["bias"] else None
        self.gate_up = self.random(self.count * 2 * width, hidden) / hidden**0.5
        self.down = self.random(self.count * hidden, width) / width**0.5

    def random(self, *shape: int) -> Any:
        return self.torch.randn(*shape, device="cuda").to(self.dtype)

    def room(self, tokens: int) -> Any:
        pairs, torch = tokens * self.rule.chosen, self.torch
        ints = [torch.full((n,), -7, dtype=torch.int32, device="cuda") for n in (pairs,) * 3]
        return SimpleNamespace(
            products=torch.full((tokens, self.count), torch.nan, device="cuda"),
            weight=torch.full((pairs,), torch.nan, device="cuda"),
            expert=ints[0],
            place=ints[1],
            row=ints[2],
            starts=torch.full((self.count + 1,), -7, dtype=torch.int32, device="cuda"),
        )

    def routed(self, x: Any) -> Any:
        out = self.room(len(x))
        experts.route_into(x, self.router, self.bias, self.rule, out)
        return out

    def made(self, x: Any, routes: Any) -> Any:
        """Return by place what each expert makes, and what it had behind the gate."""
        pairs = len(routes.row)
        spread, gated, made = (
            self.torch.full((pairs, n), self.torch.nan, device="cuda", dtype=self.dtype)
            for n in (self.hidden, self.width, self.hidden)
        )
        decoder.gather_into(x, routes.row, spread)
        experts.expert_gate_up_silu_into(spread, routes.starts, self.gate_up, gated)
        experts.expert_matmul_into(gated, routes.starts, self.down, made)
        return gated, made

    def computed(self, x: Any, beside: Any = None) -> Any:
        routes = self.routed(x)
        _, made = self.made(x, routes)
        out = self.torch.full_like(x, self.torch.nan)
        experts.combine_into(made, routes, beside, out)
        return out


def chosen_by_the_rule(mixture: Mixture, products: Any) -> tuple[Any, Any]:
    """Return experts and weights of f32[N, X], by PyTorch in fp64."""
    rule, torch = mixture.rule, mixture.torch
    values = products.double()
    scores = values.sigmoid() if rule.scores == "sigmoid" else values.softmax(1)
    wanted = scores if mixture.bias is None else scores + mixture.bias.double()
    if rule.n_chosen_groups < rule.n_groups:
        grouped = wanted.reshape(len(wanted), rule.n_groups, -1)
        best = grouped.topk(2, dim=2).values.sum(2).topk(rule.n_chosen_groups, dim=1).indices
        kept = torch.zeros_like(grouped[:, :, 0], dtype=torch.bool).scatter_(1, best, True)
        wanted = wanted.masked_fill(~kept.repeat_interleave(grouped.shape[2], 1), -torch.inf)
    expert = wanted.topk(rule.chosen, dim=1).indices
    weight = scores.gather(1, expert)
    if rule.normalises:
        weight = weight / weight.sum(1, keepdim=True).clamp(min=rule.least_sum)
    return expert, weight * rule.scaling


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tokens", [1, 7, 300, 2048])
def test_choices_are_the_rules_and_pairs_stand_by_expert(
    torch: ModuleType, dtype: str, name: str, tokens: int
) -> None:
    mixture = Mixture(torch, dtype, name)
    x = mixture.random(tokens, mixture.hidden)
    routes = mixture.routed(x)
    exact = x.double() @ mixture.router.double().T
    torch.testing.assert_close(routes.products.double(), exact, rtol=0, atol=1e-5)
    expert, weight = chosen_by_the_rule(mixture, routes.products)
    assert torch.equal(routes.expert.long(), expert.flatten())
    torch.testing.assert_close(routes.weight.double(), weight.flatten(), rtol=1e-6, atol=0)
    order = routes.expert.long().argsort(stable=True)
    assert torch.equal(routes.place[order].long(), torch.arange(len(order), device="cuda"))
    assert torch.equal(routes.row.long(), order // mixture.rule.chosen)
    counts = torch.bincount(expert.flatten(), minlength=mixture.count).cumsum(0)
    assert torch.equal(routes.starts[1:].long(), counts)
    assert int(routes.starts[0]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_each_row_has_the_bits_of_its_own_product(
    torch: ModuleType, dtype: str, tokens: int
) -> None:
    mixture = Mixture(torch, dtype, "qwen3")
    x = mixture.random(tokens, mixture.hidden)
    routes = mixture.routed(x)
    gated, made = mixture.made(x, routes)
    width, hidden = mixture.width, mixture.hidden
    starts = routes.starts.tolist()
    for expert in range(mixture.count):
        first, last = starts[expert], starts[expert + 1]
        if first == last:
            continue
        rows = x[routes.row[first:last].long()]
        up = mixture.gate_up[expert * 2 * width : (expert + 1) * 2 * width]
        down = mixture.down[expert * hidden : (expert + 1) * hidden]
        wanted, then = gated[first:last].clone(), made[first:last].clone()
        decoder.gate_up_silu_into(rows, up, wanted)
        decoder.matmul_into(wanted, down, then)
        assert torch.equal(gated[first:last], wanted), expert
        assert torch.equal(made[first:last], then), expert


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_has_the_bits_that_it_has_at_every_place(torch: ModuleType, dtype: str) -> None:
    mixture = Mixture(torch, dtype, "qwen3")
    x = mixture.random(1, mixture.hidden)
    routes = mixture.routed(x)
    wanted, _ = mixture.made(x, routes)
    gated = torch.full_like(wanted, torch.nan)
    experts.expert_gate_up_silu_into(x, routes.starts, mixture.gate_up, gated)
    assert torch.equal(gated, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_a_token_has_the_same_bits_in_any_company(torch: ModuleType, dtype: str, name: str) -> None:
    mixture = Mixture(torch, dtype, name)
    x, beside = mixture.random(1500, mixture.hidden), mixture.random(1500, mixture.hidden)
    whole = mixture.computed(x, beside)
    assert bool(whole.isfinite().all())
    for start, stop in ((0, 1), (1499, 1500), (3, 11), (100, 164), (700, 1157)):
        part = mixture.computed(x[start:stop].contiguous(), beside[start:stop].contiguous())
        assert torch.equal(part, whole[start:stop])
    crowd = x[5].repeat(1500, 1)
    assert torch.equal(mixture.computed(crowd, beside[5].repeat(1500, 1))[77], whole[5])


@pytest.mark.parametrize("tokens", [1, 64])
def test_a_graph_routes_anew(torch: ModuleType, tokens: int) -> None:
    mixture = Mixture(torch, "bfloat16", "glm")
    x, out = mixture.random(tokens, mixture.hidden), mixture.random(tokens, mixture.hidden)
    routes = mixture.room(tokens)
    pairs = len(routes.row)
    spread, gated, made = (
        torch.empty(pairs, n, device="cuda", dtype=mixture.dtype)
        for n in (mixture.hidden, mixture.width, mixture.hidden)
    )

    def layer() -> None:
        experts.route_into(x, mixture.router, mixture.bias, mixture.rule, routes)
        decoder.gather_into(x, routes.row, spread)
        experts.expert_gate_up_silu_into(spread, routes.starts, mixture.gate_up, gated)
        experts.expert_matmul_into(gated, routes.starts, mixture.down, made)
        experts.combine_into(made, routes, None, out)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    for _ in range(3):
        x.copy_(mixture.random(tokens, mixture.hidden))
        graph.replay()
        assert torch.equal(out, mixture.computed(x))
