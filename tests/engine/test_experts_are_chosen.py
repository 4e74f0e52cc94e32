"""A token's experts and their weights are those of the published formulas, whoever else asks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.model.experts import Experts, choose

QWEN3 = Experts(8, 3, 16, (0,))
RULES = {
    "qwen3": QWEN3,
    "qwen3-not-normed": Experts(8, 3, 16, (0,), normalises=False),
    "ernie": Experts(8, 3, 16, (0,), has_choice_bias=True, least_sum=1e-12),
    "glm": Experts(
        8, 3, 16, (0,), scores="sigmoid", has_choice_bias=True, least_sum=1e-20, scaling=2.5
    ),
    "deepseek": Experts(
        8,
        3,
        16,
        (0,),
        scores="sigmoid",
        has_choice_bias=True,
        n_groups=4,
        n_chosen_groups=2,
        least_sum=1e-20,
    ),
}


def published(products: Any, bias: Any, rule: Experts) -> tuple[list[int], list[float]]:
    """One token, in plain words."""
    scores = [1 / (1 + np.exp(-p)) for p in products]
    if rule.scores == "softmax":
        raised = [np.exp(p - max(products)) for p in products]
        scores = [r / sum(raised) for r in raised]
    wanted = [s + b for s, b in zip(scores, bias, strict=True)]
    size = rule.count // rule.n_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(rule.n_groups)]
    if rule.n_chosen_groups < rule.n_groups:
        best = sorted(groups, key=lambda g: -sum(sorted(wanted[i] for i in g)[-2:]))
        groups = best[: rule.n_chosen_groups]
    own = sorted(sorted(i for g in groups for i in g), key=lambda i: -wanted[i])[: rule.chosen]
    total = max(sum(scores[i] for i in own), rule.least_sum) if rule.normalises else 1.0
    return own, [rule.scaling * scores[i] / total for i in own]


@pytest.mark.parametrize("name", RULES)
@given(seed=st.integers(0, 1000), n_tokens=st.integers(1, 9))
def test_each_token_has_the_published_experts_and_weights(
    name: str, seed: int, n_tokens: int
) -> None:
    rule, rng = RULES[name], np.random.default_rng(seed)
    products = (rng.normal(0.0, 2.0, (n_tokens, rule.count))).astype(np.float32)
    bias = rng.normal(0.0, 0.3, rule.count).astype(np.float32) if rule.has_choice_bias else None
    found = choose(products, bias, rule)
    for row in range(n_tokens):
        told = np.zeros(rule.count) if bias is None else bias.astype(np.float64)
        own, weights = published(products[row].astype(np.float64), told, rule)
        assert found.expert[row].tolist() == own
        np.testing.assert_allclose(found.weight[row], weights, rtol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_a_token_chooses_the_same_bits_alone_and_among_others(name: str) -> None:
    rule, rng = RULES[name], np.random.default_rng(1)
    products = rng.normal(0.0, 2.0, (300, rule.count)).astype(np.float32)
    bias = rng.normal(0.0, 0.3, rule.count).astype(np.float32) if rule.has_choice_bias else None
    together = choose(products, bias, rule)
    for row in range(len(products)):
        alone = choose(products[row : row + 1].copy(), bias, rule)
        np.testing.assert_array_equal(alone.expert[0], together.expert[row])
        np.testing.assert_array_equal(alone.weight[0], together.weight[row])


def test_of_equals_the_lower_expert_is_taken() -> None:
    found = choose(np.zeros((1, 8), np.float32), None, QWEN3)
    assert found.expert.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(found.weight, 1 / 3)


@pytest.mark.parametrize("name", ["qwen3", "glm", "deepseek"])
@pytest.mark.parametrize("value", [np.nan, 1e30])
def test_a_token_of_broken_numbers_is_broken_and_no_other(name: str, value: float) -> None:
    """A router's NaN must not become text of the experts that are left."""
    products = np.zeros((2, 8), np.float32)
    products[0, 3] = value
    found = choose(products, np.zeros(8, np.float32), RULES[name])
    assert found.expert[1].tolist() == [0, 1, 2]
    assert np.isfinite(found.weight[1]).all()
    assert set(found.expert[0].tolist()) <= set(range(8)), "whatever it is, it is an expert"
    assert np.isnan(found.weight[0]).all() == np.isnan(value)
    assert np.isfinite(found.weight[0]).all() == (value == 1e30)
