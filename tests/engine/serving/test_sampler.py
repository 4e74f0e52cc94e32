"""Each processing step does what its parameter says, against a slow oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_worker.engine.sampling.noise import as_seed, uniforms
from baton_worker.engine.sampling.sampler import choose
from baton_worker.engine.scheduling.batch import FedSequence
from baton_worker.engine.scheduling.requests import RequestLimits, RequestState, new_state
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

VOCAB = 24
LIMITS = RequestLimits(VOCAB, 64, 4, 8, frozenset({1}))


def _state(prompt: list[int], output: list[int], **params: Any) -> RequestState:
    request = Submit(1, 0, prompt_token_ids=tuple(prompt), sampling=SamplingParams(**params))
    state = new_state(request, LIMITS, 0.0)
    state.accept(output)
    return state


def _uniform(seed: int, position: int) -> float:
    return float(uniforms(np.array([as_seed(seed)], np.uint64), np.array([position], np.uint64))[0])


def oracle(logits: list[float], prompt: list[int], output: list[int], p: SamplingParams) -> int:
    """One token at a time, in float64 and plain Python."""
    x = list(logits)
    stops = {*p.stop_token_ids} | (set() if p.ignore_eos else {1})
    for token in range(VOCAB):
        x[token] += sum(value for biased, value in p.logit_bias if biased == token)
        count = output.count(token)
        if token in prompt or count:
            x[token] = (
                x[token] / p.repetition_penalty
                if x[token] > 0
                else (x[token] * p.repetition_penalty)
            )
        x[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
        if len(output) < p.min_tokens and token in stops:
            x[token] = -math.inf
    for *before, last in p.bad_words:
        if not before or output[-len(before) :] == before:
            x[last] = -math.inf
    ranked = sorted(range(VOCAB), key=lambda t: (-x[t], t))
    if p.temperature == 0.0:
        return ranked[0]
    weight = {t: math.exp((x[t] - x[ranked[0]]) / p.temperature) for t in ranked}
    ranked = [t for t in ranked if weight[t] >= p.min_p][: p.top_k or VOCAB]
    weight = {t: weight[t] for t in ranked}
    total, mass, kept = sum(weight.values()), 0.0, set()
    for token in ranked:
        if mass / total <= p.top_p:
            kept.add(token)
        mass += weight[token]
    goal = _uniform(p.seed, len(output)) * sum(weight[t] for t in kept)
    running = 0.0
    for token in sorted(kept):
        running += weight[token]
        if running > goal:
            return token
    return max(kept)


token_ids = st.integers(0, VOCAB - 1)
VALUES = {
    "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    "top_p": st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    "top_k": st.sampled_from([0, 1, 3, 24]),
    "seed": st.integers(0, 2**64 - 1),
    "presence_penalty": st.sampled_from([0.0, 0.7, -0.4]),
    "frequency_penalty": st.sampled_from([0.0, 0.3]),
    "repetition_penalty": st.sampled_from([1.0, 1.4, 0.8]),
    "min_tokens": st.integers(0, 5),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.sampled_from([(), (2,), (2, 9)]),
    "max_tokens": st.just(50),
    "min_p": st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    "logit_bias": st.sampled_from([(), ((3, 2.5), (7, -100.0)), ((0, 100.0),), ((1, 4.0),)]),
    "bad_words": st.sampled_from([(), ((4,),), ((3, 5), (8, 3, 3), (6,)), ((7, 0), (0, 0))]),
}
"""Of each field of `SamplingParams`, what is tried; the oracle says what it does."""


def test_each_parameter_is_tried() -> None:
    lacking = [name for name in SamplingParams.__struct_fields__ if name not in VALUES]
    assert lacking == [], "give each some VALUES, and tell the oracle above what it does"


@settings(max_examples=200, deadline=None)
@given(
    options=st.fixed_dictionaries(VALUES),
    prompt=st.lists(token_ids, min_size=1, max_size=6),
    output=st.lists(st.sampled_from([0, 3, 4, 5, 6, 7, 8, 11, 12]), max_size=6),
    n_right=st.integers(0, 4),
    wrong=st.lists(token_ids, max_size=2),
    seed=st.integers(0, 2**32 - 1),
)
def test_verified_tokens_are_those_of_step_by_step_sampling(
    options: dict[str, Any],
    prompt: list[int],
    output: list[int],
    n_right: int,
    wrong: list[int],
    seed: int,
) -> None:
    """`n_right` drafts are what the oracle picks, so that rows behind accepted ones are reached."""
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(n_right + len(wrong) + 1, VOCAB)).astype(np.float32) * 2
    before = raw.copy()
    state = _state(prompt, output, **options)
    assert state.n_output == len(output)
    drafts: list[int] = []
    for row in range(n_right):
        history = [*output, *drafts]
        logits = raw[row].astype(float).tolist()
        drafts.append(oracle(logits, prompt, history, SamplingParams(**options)))
    drafts += wrong
    chosen = choose(raw, [FedSequence(state, 0, tuple(drafts), True)])
    sampling, history, expected = SamplingParams(**options), list(output), []
    for row in range(len(drafts) + 1):
        expected.append(oracle(raw[row].astype(float).tolist(), prompt, history, sampling))
        history.append(expected[-1])
        if row == len(drafts) or expected[-1] != drafts[row]:
            break
    n_accepted = int(chosen.n_accepted[0])
    assert chosen.token[0, : n_accepted + 1].tolist() == expected
    assert n_accepted == len(expected) - 1
    assert (raw == before).all()


def test_of_no_sequences_nothing_is_chosen() -> None:
    chosen = choose(np.empty((0, VOCAB), np.float32), [])
    assert [part.shape for part in chosen] == [(0,), (0, 1), (0,)]


@pytest.mark.parametrize("temperatures", [(0.0, 0.7), (0.7, 0.0), (0.0, 0.0), (0.7, 0.7)])
def test_behind_the_last_chosen_token_there_is_none(temperatures: tuple[float, float]) -> None:
    """Also where a sequence with drafts is chosen for otherwise than its neighbour without."""
    raw = np.zeros((4, VOCAB), np.float32)
    raw[[0, 1, 2, 3], [5, 6, 7, 8]] = 90.0
    plain, drafted = (_state([2], [], temperature=t, seed=3) for t in temperatures)
    fed = [FedSequence(plain, 0, (), False), FedSequence(drafted, 1, (6, 9), True)]
    assert choose(raw, fed).token.tolist() == [[5, -1, -1], [6, 7, -1]]


def test_ties_go_to_the_lower_id() -> None:
    raw = np.zeros((1, VOCAB), np.float32)
    raw[0, [4, 9, 17]] = 3.0
    greedy = _state([2], [], temperature=0.0)
    assert choose(raw, [FedSequence(greedy, 0, (), False)]).token[0, 0] == 4
    for seed in range(40):
        two = _state([2], [], temperature=1.0, top_k=2, seed=seed)
        assert choose(raw, [FedSequence(two, 0, (), False)]).token[0, 0] in (4, 9)


def test_truncation_keeps_the_lower_ids_of_many_equal_tokens() -> None:
    vocab_size = 400
    limits = RequestLimits(vocab_size, 64, 4, 8, frozenset())
    raw = np.random.default_rng(2).integers(0, 2, (1, vocab_size)).astype(np.float32) * 30
    best = np.flatnonzero(raw[0])[:7].tolist()
    picked: dict[str, set[int]] = {"top_k": set(), "top_p": set()}
    for name, value in (("top_k", 7), ("top_p", 6.5 / np.count_nonzero(raw))):
        for seed in range(60):
            params = SamplingParams(temperature=1.0, seed=seed, **{name: value})
            state = new_state(Submit(1, 0, prompt_token_ids=(2,), sampling=params), limits, 0.0)
            picked[name].add(int(choose(raw, [FedSequence(state, 0, (), False)]).token[0, 0]))
    assert picked == {"top_k": set(best), "top_p": set(best)}


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    raw = np.random.default_rng(0).normal(size=(1, VOCAB)).astype(np.float32) * 50
    state = _state([2], [], temperature=1e-30, seed=3)
    assert choose(raw, [FedSequence(state, 0, (), False)]).token[0, 0] == raw[0].argmax()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, {"bad_words": ((5,),)}, {"presence_penalty": 1.0}])
def test_broken_logits_mark_their_sequence_and_no_other(
    temperature: float, bad: float, options: dict[str, Any]
) -> None:
    raw = np.random.default_rng(0).normal(size=(5, VOCAB)).astype(np.float32)
    rows = [(0,), (1, 2), (3,), (4,)]
    params = ({}, options, options, {})
    states = [_state([2], [], temperature=temperature, seed=3, **p) for p in params]
    fed = [
        FedSequence(state, at[0], (7,) * (len(at) - 1), True)
        for state, at in zip(states, rows, strict=True)
    ]
    clean = choose(raw.copy(), fed)
    assert not clean.broken.any()
    raw[2, 5] = bad
    raw[4] = -np.inf
    found = choose(raw, fed)
    assert found.broken.tolist() == [False, True, False, True]
    for index in (0, 2):
        assert found.token[index].tolist() == clean.token[index].tolist()


def test_sampled_frequencies_follow_the_probabilities() -> None:
    raw = np.random.default_rng(4).normal(size=(1, VOCAB)).astype(np.float32)
    n = 4000
    states = [_state([2], [], temperature=0.8, seed=seed) for seed in range(n)]
    fed = [FedSequence(state, i, (), False) for i, state in enumerate(states)]
    counts = np.bincount(choose(np.repeat(raw, n, axis=0), fed).token[:, 0], minlength=VOCAB)
    weights = np.exp(raw[0].astype(float) / 0.8)
    expected = n * weights / weights.sum()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 49.7, "0.1 % point of chi-square with 23 degrees of freedom"


def test_parameters_of_one_request_do_not_reach_another() -> None:
    """Per-row parameters repeat by row count; a batch gives what its members give alone (R38)."""
    rng = np.random.default_rng(8)
    options = [
        {"temperature": 0.0},
        {"temperature": 2.0, "seed": 5},
        {"temperature": 0.5, "top_k": 2, "seed": 6},
        {"temperature": 1.0, "top_p": 0.1, "presence_penalty": 2.0, "seed": 7},
    ]
    states = [_state([2, 3], [4, 4], **o) for o in options]
    drafts = [(5, 6, 7), (), (8,), (9, 10)]
    raw = rng.normal(size=(sum(len(d) + 1 for d in drafts), VOCAB)).astype(np.float32) * 3
    fed, row, alone = [], 0, []
    for state, proposal in zip(states, drafts, strict=True):
        fed.append(FedSequence(state, row, proposal, True))
        rows = raw[row : row + len(proposal) + 1]
        alone.append(choose(rows, [FedSequence(state, 0, proposal, True)]))
        row += len(proposal) + 1
    together = choose(raw, fed)
    for index, single in enumerate(alone):
        n = int(single.n_accepted[0])
        assert together.n_accepted[index] == n
        assert together.token[index, : n + 1].tolist() == single.token[0, : n + 1].tolist()


def test_uniforms_are_splitmix64() -> None:
    """Published first outputs of SplitMix64 from state 0 (rosettacode, Vigna's reference code)."""
    from baton_worker.engine.sampling import noise

    state = np.array([0], np.uint64)
    with np.errstate(over="ignore"):
        first = noise._finalise(state + noise._GOLDEN)
    assert int(first[0]) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_uniforms_are_uniform_and_depend_on_seed_and_position_alone(seed: int) -> None:
    positions = np.arange(20_000, dtype=np.uint64)
    seeds = np.full(20_000, as_seed(seed), np.uint64)
    values = uniforms(seeds, positions)
    assert (values >= 0).all()
    assert (values < 1).all()
    assert values.mean() == pytest.approx(0.5, abs=0.01)
    assert np.histogram(values, 10)[0] == pytest.approx(np.full(10, 2000), abs=200)
    assert (uniforms(seeds[:5], positions[7:12]) == values[7:12]).all()
    neighbour = uniforms(np.full(20_000, as_seed(seed + 1), np.uint64), positions)
    assert abs(np.corrcoef(values, neighbour)[0, 1]) < 0.03
    shifted = neighbour[:-1] - values[1:]
    assert np.abs(shifted).min() > 0
