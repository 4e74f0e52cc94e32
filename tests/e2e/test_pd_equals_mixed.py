"""A pair with speculation says what one plain process says, token for token."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton_testing.numpy_reference import forward
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import load_weights

TOLERANCE = 5e-5


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(8, 512) for _ in range(rng.randrange(1, 90))] for _ in range(count)]


def choices(deployment, many, **body):
    reply = deployment.complete(prompt=many, max_tokens=24, return_token_ids=True, **body)
    return sorted(reply["choices"], key=lambda c: c["index"])


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 11},
        {"temperature": 1.0, "top_p": 0.8, "top_k": 40, "seed": 12},
        {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3, "seed": 13},
        {"temperature": 0, "min_tokens": 8, "frequency_penalty": 0.5},
        {"min_p": 0.1, "bad_words": ["the", "copy"], "logit_bias": {"40": 3}, "seed": 14},
        {
            "temperature": 0.8,
            "top_p": 0.7,
            "repetition_penalty": 1.1,
            "seed": 15,
            "logprobs_mode": "processed_logprobs",
            "top_p_normalized_logprobs": True,
        },
    ],
    ids=["greedy", "seeded", "nucleus", "penalties", "min_tokens", "steered", "processed"],
)
def test_tokens_and_logprobs_agree(pair, mixed, sampling):
    many = prompts(16, seed=1)
    ours = choices(pair, many, logprobs=3, **sampling)
    plain = choices(mixed, many, logprobs=3, **sampling)
    assert [c["token_ids"] for c in ours] == [c["token_ids"] for c in plain]
    assert [c["finish_reason"] for c in ours] == [c["finish_reason"] for c in plain]
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(
            a["logprobs"]["token_logprobs"], b["logprobs"]["token_logprobs"], atol=TOLERANCE
        )


def test_every_logprob_is_the_full_forwards_first_token_included(pair, model_dir):
    shape = load_shape(model_dir)
    weights = load_weights(model_dir, shape)
    many = prompts(6, seed=2)
    for prompt, choice in zip(many, choices(pair, many, logprobs=0, seed=5), strict=True):
        ids = choice["token_ids"]
        logits = forward(weights, shape, [*prompt, *ids][:-1]).logits[len(prompt) - 1 :]
        shifted = logits - logits.max(axis=1, keepdims=True)
        want = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        got = choice["logprobs"]["token_logprobs"]
        assert len(got) == len(ids)
        np.testing.assert_allclose(got, want[np.arange(len(ids)), ids], atol=TOLERANCE)


def test_the_top_three_are_a_prefix_of_the_top_twenty(pair):
    def tops(k):
        reply = pair.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "copies"}],
            max_tokens=12,
            temperature=0,
            logprobs=True,
            top_logprobs=k,
        ).json()
        content = reply["choices"][0]["logprobs"]["content"]
        return [[(t["bytes"], t["logprob"]) for t in entry["top_logprobs"]] for entry in content]

    for three, twenty in zip(tops(3), tops(20), strict=True):
        assert len(twenty) == 20
        assert [b for b, _ in three] == [b for b, _ in twenty[:3]]


def test_the_pair_really_handed_over_and_accepted_drafts(pair):
    pair.complete(prompt="The license", max_tokens=32, temperature=0)
    pair.wait_at_least("decode", "baton_handoff_received_bytes_total", 1)
    pair.wait_at_least("decode", "baton_draft_accepted_tokens_total", 1)
    assert pair.metric("prefill", "baton_draft_proposed_tokens_total") == 0  # R43


def test_draft_logprobs_stand_at_their_positions_and_change_no_token(pair):
    many = prompts(8, seed=3)
    plain = choices(pair, many, logprobs=1, temperature=0)
    asked = choices(pair, many, logprobs=1, temperature=0, include_draft_logprobs=True)
    n_drafted = 0
    for without, choice in zip(plain, asked, strict=True):
        told = choice.pop("draft_logprobs")
        assert choice["token_ids"] == without["token_ids"]
        assert {len(column) for column in told.values()} == {len(choice["token_ids"])}
        assert told["token_logprobs"][0] is None, "nobody drafts the first token"
        drafted = [value for value in told["token_logprobs"] if value is not None]
        assert all(-9999 < value <= 0 for value in drafted)
        n_drafted += len(drafted)
    assert n_drafted > 0


def test_prompt_logprobs_are_the_full_forwards_whoever_computes_them(pair, mixed, model_dir):
    shape = load_shape(model_dir)
    weights = load_weights(model_dir, shape)
    many = [prompt for prompt in prompts(6, seed=4) if len(prompt) > 1]
    told = [choices(d, many, prompt_logprobs=2, seed=5) for d in (pair, mixed)]
    for prompt, ours, plain in zip(many, *told, strict=True):
        assert ours["token_ids"] == plain["token_ids"]
        logits = forward(weights, shape, prompt).logits[:-1]
        shifted = logits - logits.max(axis=1, keepdims=True)
        want = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        for choice in (ours, plain):
            first, *entries = choice["prompt_logprobs"]
            assert first is None
            got = [e[str(t)]["logprob"] for e, t in zip(entries, prompt[1:], strict=True)]
            np.testing.assert_allclose(got, want[np.arange(len(got)), prompt[1:]], atol=TOLERANCE)
            best = [max(c["logprob"] for c in e.values()) for e in entries]
            np.testing.assert_allclose(best, want.max(axis=1), atol=TOLERANCE)


def test_an_echoed_prompt_is_scored_like_any_output(pair):
    """What an evaluation harness asks: the likelihood of a given text."""
    said = pair.complete(prompt="The license", max_tokens=12, temperature=0, logprobs=0)
    text = "The license" + said["choices"][0]["text"]
    echoed = pair.complete(prompt=text, max_tokens=1, logprobs=0, echo=True)["choices"][0]
    own = dict(
        zip(echoed["logprobs"]["text_offset"], echoed["logprobs"]["token_logprobs"], strict=True)
    )
    entries = said["choices"][0]["logprobs"]
    at = [len("The license") + offset for offset in entries["text_offset"]]
    shared = [
        (own[a], value)
        for a, value in zip(at, entries["token_logprobs"], strict=True)
        if a in own and a < len(text)
    ]
    assert len(shared) > 3
    np.testing.assert_allclose(*zip(*shared, strict=True), atol=TOLERANCE)


def test_a_prompt_without_output_is_scored_by_the_full_forward(pair, mixed, model_dir):
    shape = load_shape(model_dir)
    weights = load_weights(model_dir, shape)
    for prompt in prompts(4, seed=9):
        logits = forward(weights, shape, prompt).logits[:-1]
        shifted = logits - logits.max(axis=1, keepdims=True)
        want = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        for deployment in (pair, mixed):
            answer = deployment.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=1)
            (choice,), usage = answer["choices"], answer["usage"]
            first, *got = choice["logprobs"]["token_logprobs"]
            assert first is None
            np.testing.assert_allclose(got, want[np.arange(len(got)), prompt[1:]], atol=TOLERANCE)
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 0)
            assert choice["finish_reason"] == "length"
