"""Mixtures of experts: which layers have one, and how a token chooses among its experts.

Owns the sizes and the rule of choice, as every engine computes it: the output of a token is the sum
of its experts' outputs in the order of its own list, so that it does not depend on who shares them.
Knows no weights, no framework and no family's names.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

ExpertScores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of a model's layers.

    Attributes:
        count: experts of a layer.
        chosen: how many of them a token takes.
        intermediate_size: the width of each.
        shared_size: the width of the MLP that every token takes beside its own, 0 for none.
        layers: the main layers that have a mixture; the others have one MLP.
        scores: what of the router's products a token chooses by and weighs with.
        has_choice_bias: a learned number of each expert counts for the choice, and not for the
            weight.
        n_groups, n_chosen_groups: experts stand in groups, of which a token chooses some first: by
            the sum of the two best of each.
        normalises: the weights of a token's experts are divided by their sum, by at least
            `least_sum`.
        scaling: what the weights are multiplied with.
        has_mtp: MTP layers have a mixture too.
    """

    count: int
    chosen: int
    intermediate_size: int
    layers: tuple[int, ...]
    shared_size: int = 0
    scores: ExpertScores = "softmax"
    has_choice_bias: bool = False
    n_groups: int = 1
    n_chosen_groups: int = 1
    normalises: bool = True
    least_sum: float = 0.0
    scaling: float = 1.0
    has_mtp: bool = False

    def part(self, n_ranks: int) -> Experts:
        """Return what each of so many ranks computes: all experts, a part of the width of each."""
        return dataclasses.replace(
            self,
            intermediate_size=self.intermediate_size // n_ranks,
            shared_size=self.shared_size // n_ranks,
        )


class Chosen(NamedTuple):
    """A token's experts, the best first: expert i64[N, chosen], weight f32[N, chosen]."""

    expert: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float32]


def choose(
    products: npt.NDArray[np.float32], bias: npt.NDArray[np.float32] | None, experts: Experts
) -> Chosen:
    """Choose each token's experts by the router's products f32[N, count], the lower id on ties.

    Computed in float64, rounded once; a row's result depends on that row alone, and a row with NaN
    chooses some experts, weighted NaN. `bias` is f32[count], None for none. (DeepSeek-V3, arXiv
    2412.19437, equations 13 to 16, with groups as its code has them; Qwen3's is the softmax of all,
    arXiv 2505.09388.)
    """
    scores = _scores(products.astype(np.float64), experts.scores)
    wanted = scores if bias is None else scores + bias.astype(np.float64)
    is_broken = np.isnan(wanted).any(axis=1)
    if experts.n_chosen_groups < experts.n_groups:
        wanted = np.where(_in_best_groups(wanted, experts), wanted, -np.inf)
    best = np.argsort(-wanted, axis=1, kind="stable")[:, : experts.chosen]
    weight = np.take_along_axis(scores, best, axis=1)
    if experts.normalises:
        weight = weight / np.maximum(weight.sum(axis=1, keepdims=True), experts.least_sum)
    weight[is_broken] = np.nan  # whatever it chose: no text may come of it
    return Chosen(best, (weight * experts.scaling).astype(np.float32))


def _scores(products: npt.NDArray[np.float64], kind: ExpertScores) -> npt.NDArray[np.float64]:
    with np.errstate(over="ignore", invalid="ignore"):  # broken numbers break their row alone
        if kind == "sigmoid":
            return np.asarray(1.0 / (1.0 + np.exp(-products)))
        raised = np.exp(products - products.max(axis=1, keepdims=True))
        return np.asarray(raised / raised.sum(axis=1, keepdims=True))


def _in_best_groups(wanted: npt.NDArray[np.float64], experts: Experts) -> npt.NDArray[np.bool_]:
    """Return bool[N, count]: whether an expert's group is among those that the token chooses."""
    grouped = wanted.reshape(len(wanted), experts.n_groups, -1)
    of_group = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    best = np.argsort(-of_group, axis=1, kind="stable")[:, : experts.n_chosen_groups]
    is_chosen = np.zeros(of_group.shape, np.bool_)
    np.put_along_axis(is_chosen, best, True, axis=1)
    return np.repeat(is_chosen, grouped.shape[2], axis=1)
