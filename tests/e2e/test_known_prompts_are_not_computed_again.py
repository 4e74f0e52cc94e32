"""A pair computes the common beginning of prompts once, says so, and says the same of each."""

from __future__ import annotations

from baton_testing.processes import wait_until

SYSTEM = "Redistribution and use in source and binary forms are permitted. " * 4


def test_the_second_prompt_costs_its_own_tokens_only(pair, mixed):
    def prompt_tokens():
        """Return how many prompt tokens prefill has found, and how many it has computed."""
        names = ("baton_prefix_cache_hit_tokens_total", "baton_prompt_tokens_total")
        return [pair.metric("prefill", name) for name in names]

    pair.wait_idle("prefill")
    found, computed = prompt_tokens()
    answers, usages = [], []
    for deployment in (pair, mixed):
        for question in ("What is it?", "What is not?"):
            reply = deployment.complete(
                prompt=SYSTEM + question, max_tokens=12, seed=4, logprobs=2, return_token_ids=True
            )
            answers.append(reply["choices"][0]["token_ids"])
            usages.append(reply["usage"])
    assert answers[:2] == answers[2:]
    whole = sum(usage["prompt_tokens"] for usage in usages[:2])
    now = wait_until(
        f"{whole} prompt tokens more were found or computed",
        prompt_tokens,
        lambda counts: sum(counts) == found + computed + whole,
    )
    hits = now[0] - found
    assert hits > 0
    for usage in (usages[:2], usages[2:]):
        first, second = (u["prompt_tokens_details"]["cached_tokens"] for u in usage)
        assert (first, second) == (0, hits)
