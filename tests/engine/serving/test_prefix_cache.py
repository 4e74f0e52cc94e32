"""Requests that begin alike share the KV of their common full blocks, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

from baton_worker.engine.scheduling.prefix_cache import BlockNames
from baton_worker.engine.scheduling.requests import RequestLimits, imported_state
from baton_worker.records.columns import Finish

ENGINES = ("paddle", "device")

SYSTEM = tuple(range(5, 53))
BLOCK = 16
OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "logprobs_k": 2}


def run(bench: Any, number: int, prompt: tuple[int, ...], **options: Any) -> tuple[Any, list[Any]]:
    """Run one prompt to its end; return what was said, and the steps' statistics."""
    key = bench.submit(number, prompt, **(OPTIONS | options))
    results = bench.drain()
    stream = bench.reader[key]
    said = (stream.tokens, stream.logprobs, stream.ranks, stream.topk)
    return said, [result.stats for result in results]


def fed(stats: list[Any]) -> int:
    return sum(s.prefill_tokens for s in stats)


def hits(stats: list[Any]) -> int:
    return sum(s.prefix_hit_tokens for s in stats)


@pytest.mark.parametrize("n_draft", [0, 1, 4])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}])
def test_a_known_beginning_is_not_computed_again(
    make_bench: Any, n_draft: int, options: dict[str, Any]
) -> None:
    cached = make_bench(n_draft=n_draft)
    plain = make_bench(n_draft=n_draft, prefix_caching=False)
    for number, tail in enumerate([(60, 61, 62), (70,), (60, 61, 99)]):
        prompt = SYSTEM + tail
        said, stats = run(cached, number, prompt, **options)
        expected, plain_stats = run(plain, number, prompt, **options)
        assert said == expected
        assert [s.accept_lengths for s in stats] == [s.accept_lengths for s in plain_stats]
        assert (fed(plain_stats), hits(plain_stats)) == (len(prompt), 0)
        known = 0 if number == 0 else 2 if tail == (70,) else 3
        assert hits(stats) == known * BLOCK
        assert fed(stats) == len(prompt) - known * BLOCK
        assert sum(s.prefix_query_tokens for s in stats) == len(prompt)


def test_the_first_tokens_row_tells_what_was_known(make_bench: Any) -> None:
    bench = make_bench(n_draft=1)
    for number, known in ((1, []), (2, [3 * BLOCK])):
        key = bench.submit(number, (*SYSTEM, 60), **OPTIONS)
        bench.drain()
        assert bench.reader[key].reused == known


def test_decode_repeats_what_prefill_knew(make_bench: Any, hand_over: Any) -> None:
    prefill, decode = make_bench(n_draft=1), make_bench(n_draft=1)
    for number, known in ((1, []), (2, [3 * BLOCK])):
        key = prefill.submit(number, (*SYSTEM, 60), hand_over=True, **OPTIONS)
        hand_over(prefill, decode, prefill.handoffs())
        decode.drain()
        assert prefill.reader[key].reused == decode.reader[key].reused == known


def test_the_last_token_is_always_computed(make_bench: Any) -> None:
    """There must be a row to choose from, also when every block of the prompt is known."""
    bench = make_bench(n_draft=2)
    said, _ = run(bench, 1, SYSTEM)
    again, stats = run(bench, 2, SYSTEM)
    assert again == said
    assert fed(stats) == BLOCK, "the third block ends with the last token"


@pytest.mark.slow
def test_blocks_are_told_apart_by_the_token_behind_them(make_bench: Any) -> None:
    """The MTP layer's KV of a block's last position depends on the next token."""
    bench = make_bench(n_draft=3)
    fresh = make_bench(n_draft=3, prefix_caching=False)
    for number, after in enumerate((60, 61)):
        prompt = (*SYSTEM, after, 7, 8)
        key, other = (b.submit(number, prompt, **OPTIONS) for b in (bench, fresh))
        stats = [result.stats for result in bench.drain()]
        fresh.drain()
        assert hits(stats) == (2 * BLOCK if number else 0)
        assert bench.reader[key].tokens == fresh.reader[other].tokens
        assert bench.reader[key].accepted == fresh.reader[other].accepted


def test_an_answer_is_known_to_the_next_turn(make_bench: Any) -> None:
    bench = make_bench(n_draft=2)
    (answer, *_), _ = run(bench, 1, SYSTEM, max_tokens=40)
    conversation = (*SYSTEM, *answer, 60, 61)
    _, stats = run(bench, 2, conversation)
    assert hits(stats) == (len(conversation) - 3) // BLOCK * BLOCK


def test_running_requests_share_what_is_computed_already(make_bench: Any) -> None:
    bench = make_bench()
    first = bench.submit(1, (*SYSTEM, 60), **OPTIONS)
    bench.step()
    alone = bench.engine.load().kv_blocks_used
    second = bench.submit(2, (*SYSTEM, 60), **OPTIONS)
    bench.step()
    assert bench.engine.load().kv_blocks_used == alone + 1
    bench.engine.abort(first)
    bench.drain()
    assert bench.reader[second].finish is Finish.LENGTH
    assert bench.engine.load().kv_blocks_used == 0
    assert bench.engine.load().kv_blocks_cached == 3


def test_a_full_pool_forgets_the_least_recently_used(make_bench: Any) -> None:
    bench = make_bench(max_model_len=64, n_blocks=9)
    prompts = [tuple(range(n, n + 49)) for n in (5, 105, 205)]
    for number, prompt in enumerate(prompts[:2]):
        run(bench, number, prompt, max_tokens=2)
    assert bench.engine.load().kv_blocks_cached == 6
    run(bench, 2, prompts[0], max_tokens=2)
    run(bench, 3, prompts[2], max_tokens=2)
    _, recent = run(bench, 4, prompts[0], max_tokens=2)
    assert hits(recent) == 3 * BLOCK
    _, forgotten = run(bench, 5, prompts[1], max_tokens=2)
    assert hits(forgotten) < 3 * BLOCK


@pytest.mark.slow
def test_a_preempted_request_finds_its_own_blocks(make_bench: Any, make_prompts: Any) -> None:
    options = {"max_model_len": 128, "block_size": 8, "n_blocks": 18, "n_draft": 2}
    fed_tokens = {}
    for prefix_caching in (True, False):
        bench = make_bench(prefix_caching=prefix_caching, **options)
        keys = [
            bench.submit(number, prompt, temperature=0.0, max_tokens=40)
            for number, prompt in enumerate(make_prompts(14, seed=4, longest=30))
        ]
        stats = [result.stats for result in bench.drain()]
        assert sum(s.preempted for s in stats) > 0
        fed_tokens[prefix_caching] = fed(stats)
        told = [bench.reader[key].reused for key in keys]
        assert told == [[]] * 14, "what it finds again was not known when it came"
    assert fed_tokens[True] < fed_tokens[False]


def test_kv_of_a_handoff_is_not_shared(make_bench: Any, hand_over: Any) -> None:
    """Damaged KV of one peer must harm its own request only."""
    prefill = make_bench(n_draft=1)
    decode = make_bench(n_draft=1, reader=prefill.reader)
    for number in (1, 2):
        prefill.submit(number, (*SYSTEM, 60), hand_over=True, **OPTIONS)
        hand_over(prefill, decode, prefill.handoffs())
        stats = [result.stats for result in decode.drain()]
        assert sum(s.prefix_query_tokens for s in stats) == 0
    assert decode.engine.load().kv_blocks_cached == 0
    assert prefill.engine.load().kv_blocks_cached == 3


def test_a_prompt_that_waits_for_its_pull_is_shared_already(make_bench: Any) -> None:
    bench = make_bench(n_draft=1)
    for number, known in ((1, 0), (2, 3)):
        bench.submit(number, (*SYSTEM, 60), hand_over=True, **OPTIONS)
        assert hits([result.stats for result in bench.drain()]) == known * BLOCK
    assert bench.engine.load().held_handoffs == 2
    assert bench.engine.load().kv_blocks_used == 3 + 2 * 1


def test_prefill_hands_over_what_it_had_cached(make_bench: Any) -> None:
    bench = make_bench(n_draft=1)
    exported = []
    for number in (1, 2):
        bench.submit(number, (*SYSTEM, 60), hand_over=True, **OPTIONS)
        (handoff,) = bench.handoffs()
        exported.append((handoff.state.first_token, handoff.state.drafts, handoff.kv))
    (first, drafts, kv), (again, drafts_again, kv_again) = exported
    assert (first, drafts) == (again, drafts_again)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(kv, kv_again, strict=True))


@pytest.mark.slow
def test_requests_of_other_salts_share_nothing_and_those_of_one_do(make_bench: Any) -> None:
    bench, plain = make_bench(n_draft=1), make_bench(n_draft=1, prefix_caching=False)
    known = []
    for number, salt in enumerate([b"", b"a", b"b", b"a", b"", b"b"]):
        said, stats = run(bench, number, (*SYSTEM, 60), cache_salt=salt)
        assert said == run(plain, number, (*SYSTEM, 60))[0], "a salt changes no output"
        known.append(hits(stats))
    assert known == [0, 0, 0, *[3 * BLOCK] * 3]


def test_a_salt_goes_over_with_the_handoff_for_what_decode_may_compute_anew(
    make_bench: Any,
) -> None:
    prefill = make_bench(n_draft=1)
    prefill.submit(1, (*SYSTEM, 60), hand_over=True, cache_salt=b"mine", **OPTIONS)
    (handoff,) = prefill.handoffs()
    assert handoff.state.cache_salt == b"mine"
    limits = RequestLimits(vocab_size=512, max_model_len=128, max_top_k=20, table_width=8)
    assert imported_state(handoff, limits, 0.0).params.cache_salt == b"mine"


def test_names_depend_on_every_token_and_on_what_computed_them() -> None:
    def names(
        tokens: list[int], block_size: int = 4, identity: str = "model", salt: bytes = b""
    ) -> list[bytes]:
        found: list[bytes] = []
        BlockNames(block_size, identity).extend(found, tokens, salt)
        return found

    tokens = list(range(9))
    assert len(names(tokens)) == 2
    assert len(names(tokens[:8])) == 1, "nothing follows the second block yet"
    assert names([]) == []
    assert names(tokens)[0] == names(tokens[:5])[0]
    for changed in range(9):
        other = [*tokens[:changed], 99, *tokens[changed + 1 :]]
        same = [a == b for a, b in zip(names(tokens), names(other), strict=True)]
        assert same == [changed > 4, False], changed
    assert not set(names(tokens)) & set(names(tokens, identity="other"))
    assert not set(names(tokens)) & set(names(tokens, block_size=2))
    assert not set(names(tokens)) & set(names(tokens, salt=b"a"))
    assert not set(names(tokens, salt=b"b")) & set(names(tokens, salt=b"a"))


def test_names_grow_with_the_tokens() -> None:
    grown, whole = list[bytes](), list[bytes]()
    names = BlockNames(4, "model")
    for count in range(30):
        names.extend(grown, list(range(count)))
    names.extend(whole, list(range(29)))
    assert grown == whole
