"""Which blocks have a name, what a name depends on, and who may share by it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.api import Handoff
from baton_worker.engine.kv.pool import BlockAllocator
from baton_worker.engine.options import EngineOptions
from baton_worker.engine.scheduling.prefix_cache import BlockNames, PrefixCache, prefix_cache
from baton_worker.engine.scheduling.requests import RequestLimits, RequestState, new_state
from baton_worker.messages import Submit
from baton_worker.sampling import LogprobParams, SamplingParams

BLOCK = 4
LIMITS = RequestLimits(vocab_size=100, max_model_len=64, max_top_k=4, table_width=16)


def names_of(tokens: list[int], salt: bytes = b"", size: int = BLOCK) -> list[bytes]:
    names: list[bytes] = []
    BlockNames(size, "model").extend(names, tokens, salt)
    return names


def request(n_tokens: int, prompt_k: int = -1) -> RequestState:
    prompt, params = tuple(range(n_tokens)), LogprobParams(prompt_k=prompt_k)
    source = Submit(1, 0, prompt_token_ids=prompt, sampling=SamplingParams(), logprobs=params)
    return new_state(source, LIMITS, 0.0)


class Pool:
    """A cache over a few blocks, and requests that hold some of them."""

    def __init__(self) -> None:
        self.allocator = BlockAllocator(16)
        self.cache = PrefixCache(self.allocator, BLOCK, "model")

    def hold(self, one: RequestState, n_computed: int) -> RequestState:
        one.n_blocks = -(-len(one.tokens) // BLOCK)
        one.table[: one.n_blocks] = self.allocator.allocate(one.n_blocks)
        one.n_computed = n_computed
        self.cache.remember(one)
        return one


@given(st.integers(0, 30), st.integers(1, 5))
def test_a_block_has_a_name_once_the_token_behind_it_is_known(n_tokens: int, size: int) -> None:
    assert len(names_of(list(range(n_tokens)), size=size)) == max(n_tokens - 1, 0) // size


def test_a_name_depends_on_every_token_up_to_the_one_behind_the_block_and_on_no_other() -> None:
    tokens = list(range(14))
    names = names_of(tokens)
    for position in range(len(tokens)):
        other = names_of([*tokens[:position], 99, *tokens[position + 1 :]])
        assert [a == b for a, b in zip(names, other, strict=True)] == [
            position > (block + 1) * BLOCK for block in range(3)
        ]


def test_names_that_are_made_as_tokens_come_are_those_made_at_once() -> None:
    names: list[bytes] = []
    for n_tokens in range(15):
        BlockNames(BLOCK, "model").extend(names, list(range(n_tokens)), b"salt")
    assert names == names_of(list(range(14)), b"salt")


def test_names_are_apart_by_salt_and_have_128_bits_so_that_none_meet_by_chance() -> None:
    tokens = list(range(9))
    names = [*names_of(tokens), *names_of(tokens, b"a"), *names_of(tokens, b"b")]
    assert len(set(names)) == 6
    assert {len(name) for name in names} == {16}


@pytest.mark.parametrize(
    ("n_tokens", "n_computed", "n_named"),
    [(4, 4, 0), (5, 3, 0), (5, 4, 1), (5, 5, 1), (8, 8, 1), (9, 8, 2), (9, 9, 2)],
)
def test_blocks_are_remembered_once_computed_and_followed(
    n_tokens: int, n_computed: int, n_named: int
) -> None:
    pool = Pool()
    one = pool.hold(request(n_tokens), n_computed)
    assert one.n_named == n_named
    assert pool.cache.match(request(n_tokens)) == one.blocks[:n_named]


def test_a_match_ends_at_the_first_block_that_nobody_has() -> None:
    pool = Pool()
    first = pool.hold(request(13), 4)
    assert first.n_named == 1
    first.n_computed = 12
    first.n_named = 2
    pool.cache.remember(first)
    assert first.n_named == 3
    assert pool.cache.match(request(13)) == first.blocks[:1]


def test_who_wants_its_prompt_scored_or_brings_kv_takes_none() -> None:
    pool = Pool()
    first = pool.hold(request(9), 9)
    assert pool.cache.match(request(9)) == first.blocks[:2]
    assert pool.cache.match(request(9, prompt_k=0)) == []
    bringing = request(9)
    bringing.incoming = Handoff(None, ())  # type: ignore[arg-type]  # nobody looks inside
    assert pool.cache.match(bringing) == []


@pytest.mark.parametrize("fields", [{"has_foreign_kv": True}, {"n_blocks": 0}])
def test_foreign_kv_and_what_holds_no_block_are_not_remembered(fields: dict[str, Any]) -> None:
    pool = Pool()
    one = request(9)
    one.n_blocks = 3
    one.table[:3] = pool.allocator.allocate(3)
    one.n_computed = 9
    for name, value in fields.items():
        setattr(one, name, value)
    pool.cache.remember(one)
    assert (one.n_named, pool.cache.match(request(9))) == (0, [])


@pytest.mark.parametrize("asked", [True, False])
def test_there_is_a_cache_where_options_ask_for_one(asked: bool) -> None:
    options = EngineOptions(
        block_size=BLOCK,
        n_blocks=4,
        max_running=1,
        max_waiting=1,
        max_model_len=16,
        prefill_tokens=8,
        n_draft=0,
        use_mtp=False,
        max_top_k=0,
        overlap=False,
        prefix_caching=asked,
    )
    assert (prefix_cache(BlockAllocator(4), options, "model") is not None) == asked
