"""A seed means the same text in any company; a stop string is found wherever tokens cut it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

BODY = {"prompt": "The license", "max_tokens": 32, "logprobs": 2, "return_token_ids": True}


def one(deployment, **changes):
    (choice,) = deployment.complete(**(BODY | changes))["choices"]
    return choice


def test_a_seed_gives_the_same_text_alone_in_a_list_and_under_load(pair, mixed):
    asked = {"temperature": 0.9, "seed": 4711, "ignore_eos": True}
    alone = one(pair, **asked)
    assert one(mixed, **asked)["token_ids"] == alone["token_ids"]

    def other(n):
        return pair.complete(
            prompt=f"{n} copies", max_tokens=20 + 5 * n, temperature=1.0, seed=n, logprobs=n % 4
        )

    with ThreadPoolExecutor(9) as pool:
        company = [pool.submit(other, n) for n in range(8)]
        beside = pool.submit(one, pair, **asked).result()
        assert all(future.result()["choices"] for future in company)
    listed = pair.complete(**(BODY | asked | {"prompt": ["You may", BODY["prompt"], "x"]}))
    several = pair.complete(**(BODY | asked | {"n": 3}))
    same = [beside, listed["choices"][1], several["choices"][0]]
    for choice in same:
        assert choice["token_ids"] == alone["token_ids"]
        got, want = choice["logprobs"]["token_logprobs"], alone["logprobs"]["token_logprobs"]
        assert got == pytest.approx(want, abs=5e-5)
    assert several["choices"][1]["token_ids"] != alone["token_ids"]


def test_each_of_n_choices_repeats_and_has_its_own_logprobs(pair):
    asked = {"n": 4, "temperature": 1.0, "seed": 5, "include_draft_logprobs": True}
    runs = [pair.complete(**(BODY | asked))["choices"] for _ in range(2)]
    assert [c["token_ids"] for c in runs[0]] == [c["token_ids"] for c in runs[1]]
    assert len({tuple(c["token_ids"]) for c in runs[0]}) == 4
    for choice in runs[0]:
        columns = [*choice["logprobs"].values(), *choice["draft_logprobs"].values()]
        assert {len(column) for column in columns} == {len(choice["token_ids"])}


def test_a_stop_string_across_tokens_ends_text_tokens_and_logprobs_together(pair, mixed):
    """Every cut of the greedy text that spans two or more tokens, with drafts and without."""
    whole = one(mixed, temperature=0)
    text, offsets = whole["text"], whole["logprobs"]["text_offset"]
    tried = 0
    for first in range(2, len(offsets) - 4, 3):
        start, end = offsets[first] + 1, offsets[first + 2] + 1
        stop = text[start:end]
        found = text.find(stop)
        inside = [i for i, offset in enumerate(offsets) if found < offset < found + len(stop)]
        if not inside:
            continue
        tried += 1
        n_tokens = max(i for i, offset in enumerate(offsets) if offset < found + len(stop)) + 1
        for deployment in (pair, mixed):
            cut = one(deployment, temperature=0, stop=[stop, "never said"])
            assert cut["text"] == text[:found], stop
            assert cut["finish_reason"] == "stop"
            assert cut["token_ids"] == whole["token_ids"][:n_tokens]
            assert {len(column) for column in cut["logprobs"].values()} == {n_tokens}
    assert tried >= 3
