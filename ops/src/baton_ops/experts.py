"""Mixtures of experts on CUDA: whom a token chooses, what each expert makes, and their sum.

A pair is a token and one of its C experts: token t's are t * C to t * C + C - 1, the first wanted
most. Pairs stand sorted by expert, in each by number, at places; so an expert's rows lie together
and its weight is read once. A token's bits depend on the token alone, not on who else chose its
experts. Owns the Python form of these ops. Knows no model.

Shapes: N tokens, H hidden size, X experts of width I. E is bfloat16 or float32. Every function
raises TypeError or ValueError where a dtype, shape or device is wrong; the message names it.
"""

from __future__ import annotations

from typing import Protocol

from baton_ops._library import Tensor, launch

MOST_EXPERTS, MOST_CHOSEN, MOST_GROUPS = 512, 32, 32
"""Of a layer, of a token, and groups of experts, that `route_into` takes."""


class Rule(Protocol):
    """How a token chooses."""

    @property
    def chosen(self) -> int:
        """C, at most 32."""

    @property
    def scores(self) -> str:
        """What the router's products become: "softmax" or "sigmoid"."""

    @property
    def n_groups(self) -> int:
        """Groups that experts stand in, at most 32, dividing X."""

    @property
    def n_chosen_groups(self) -> int:
        """Of how many groups a token's experts are: those whose two best add up to most."""

    @property
    def normalises(self) -> bool:
        """Whether weights are divided by their sum, by at least `least_sum`."""

    @property
    def least_sum(self) -> float:
        """See `normalises`."""

    @property
    def scaling(self) -> float:
        """What weights are multiplied with."""


class Routes(Protocol):
    """Which experts N tokens take, and where their pairs stand."""

    @property
    def products(self) -> Tensor:
        """f32[N, X], the router's."""

    @property
    def expert(self) -> Tensor:
        """i32[N * C] of each pair."""

    @property
    def weight(self) -> Tensor:
        """f32[N * C] of each pair."""

    @property
    def place(self) -> Tensor:
        """i32[N * C]: where each pair stands."""

    @property
    def row(self) -> Tensor:
        """i32[N * C]: whose token stands at each place."""

    @property
    def starts(self) -> Tensor:
        """i32[X + 1]: places where each expert's pairs begin."""


def route_into(x: Tensor, router: Tensor, bias: Tensor | None, rule: Rule, out: Routes) -> None:
    """Choose for x E[N, H] by x @ router f32[X, H]^T, and sort the pairs; X is at most 512.

    Products are summed in fp32, what follows is in fp64, rounded once. `bias` f32[X] counts for the
    choice alone. Of equals the lower expert is taken; a token with NaN takes some, weighted NaN.
    Without tokens nothing is written.
    """
    launch("cuda_route")(x, router, bias, *_of(rule), *_parts(out))


def norm_route_into(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    router: Tensor,
    bias: Tensor | None,
    rule: Rule,
    out: Routes,
) -> None:
    """Do what `decoder.add_norm_into` does to `normed` E[N, H], and route that by `route_into`: the
    same bits, for a single token in one launch.
    """
    norm = (x, residual, weight, float(eps), normed)
    launch("cuda_norm_route")(*norm, router, bias, *_of(rule), *_parts(out))


def expert_gate_up_silu_into(
    x: Tensor, starts: Tensor, weight: Tensor, out: Tensor, *, known: bool = False
) -> None:
    """Write out E[P, I]: of each place `decoder.gate_up_silu_into` of its row of x E[P, H] and of
    its expert's rows of weight E[X * 2 I, H]. x E[1, H], a single token's: that
    row stands at every place, of which an expert has one at most.

    Args:
        known: between what wrote `starts` and this call there is `decoder.gate_up_silu_into` of the
            same tokens: with few rows `starts` is read before the launches before are over.

    Raises:
        RuntimeError: as `decoder.gate_up_silu_into`.
    """
    launch("cuda_expert_gate_up_silu")(x, starts, weight, out, int(known))


def expert_matmul_into(x: Tensor, starts: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write out E[P, H]: of each place `decoder.matmul_into` of its row of x E[P, I] and of its
    expert's rows of weight E[X * H, I]. Call it behind `expert_gate_up_silu_into` with the same
    `starts`: it reads them before that one is over, so right behind `route_into` too early.

    Raises:
        RuntimeError: as `decoder.matmul_into`.
    """
    launch("cuda_expert_matmul")(x, starts, weight, out)


def _of(rule: Rule) -> tuple[int | float, ...]:
    if rule.scores not in ("softmax", "sigmoid"):
        raise ValueError(f'scores must be "softmax" or "sigmoid", got {rule.scores!r}')
    return (
        rule.chosen,
        rule.n_groups,
        rule.n_chosen_groups,
        int(rule.scores == "sigmoid"),
        int(rule.normalises),
        float(rule.least_sum),
        float(rule.scaling),
    )


def _parts(out: Routes) -> tuple[Tensor, ...]:
    return (out.products, out.expert, out.weight, out.place, out.row, out.starts)


def combine_into(made: Tensor, routes: Routes, beside: Tensor | None, out: Tensor) -> None:
    """Write out E[N, H]: of each token the sum of its pairs' rows of made E[N * C, H] times their
    weights, from the first on, then of beside E[N, H] if there is one; each step rounded to fp32.
    Call it behind `expert_matmul_into`: what `route_into` wrote is read before that one is over.
    """
    launch("cuda_combine")(out, made, routes.place, routes.weight, beside)


def combine_norm_into(
    made: Tensor,
    routes: Routes,
    beside: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
) -> None:
    """Do what `combine_into` and `decoder.add_norm_into` of that do one after the other, in one
    launch: residual E[N, H] gets the sum, rounded, and out E[N, H] what is normed. Called as
    `combine_into` is.
    """
    norm = (residual, weight, float(eps), out)
    launch("cuda_combine_norm")(*norm, made, routes.place, routes.weight, beside)
