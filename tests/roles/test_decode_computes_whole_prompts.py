"""A decode worker takes whole requests beside those handed over: it says what a mixed worker says,
in small chunks, and keeps every place that it has promised.
"""

from __future__ import annotations

import dataclasses

import pytest

from baton_worker.config import SimConfig
from baton_worker.handoff.places import PlaceLimits
from baton_worker.identity import make_handle
from baton_worker.link.api import GatewayLost
from baton_worker.messages import HANDOFF_PLACES, Abort, DecodeTarget, Reserve, Submit
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.records.rows import rows
from baton_worker.roles.event_queue import StopRequested
from baton_worker.sampling import LogprobParams, SamplingParams

GATEWAY = 77
AT_ONCE = SimConfig(prefill_token_seconds=0.0, decode_step_seconds=0.0, decode_row_seconds=0.0)
CHUNK = 16
WAYS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    "min_tokens": {"temperature": 0.0, "min_tokens": 8, "frequency_penalty": 0.5},
}


def handle(n: int) -> int:
    return make_handle(GATEWAY, n)


def prompt(n: int, length: int = 70) -> tuple[int, ...]:
    return tuple(20 + (7 * n + 3 * i) % 200 for i in range(length))


def submit(n: int, is_own: bool, length: int = 70, turn: int = 0, **asked) -> Submit:
    sampling = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "seed": n}
    sampling |= asked.pop("sampling", {})
    return Submit(
        handle(n),
        asked.pop("attempt", 0),
        prompt_token_ids=asked.pop("prompt", prompt(n, length)),
        sampling=SamplingParams(**sampling),
        logprobs_k=2,
        decode=None if is_own else DecodeTarget("d", "memory", "", (HANDOFF_PLACES,)),
        turn=turn,
        **asked,
    )


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def overlap(request):
    return request.param


@pytest.fixture
def make_pair(make_worker, overlap):
    """Make prefill, a decode worker that takes prompts in chunks, and how they are told."""

    def make(places: PlaceLimits | None = None, **engine):
        told = {"overlap": overlap, "prefill_chunk_tokens": 2048} | engine
        more = {} if places is None else {"places": places}
        helping = told | {"prefill_chunk_tokens": CHUNK}
        return make_worker("p", **told), make_worker("d", takes_prompts=True, **more, **helping)

    return make


def simulated(make_pair, slots: int, **engine):
    places = PlaceLimits(slots, 1 << 30, engine.pop("kv_tokens", 1 << 20), 1024, 600.0)
    return make_pair(places, device="sim", sim=AT_ONCE, max_running=slots, **engine)


def settle(*workers) -> None:
    for _ in range(6):
        for worker in workers:
            worker.run()


def said(*workers, n: int) -> list[tuple[object, ...]]:
    """Return what a client is told of a request, by position: tokens, logprobs, alternatives."""
    told = {}
    for row in (row for worker in workers for row in worker.rows(handle(n))):
        k = row.width - 1
        for i, token in enumerate(row.tokens):
            top = (row.topk_tokens[i * k :][:k], row.topk_logprobs[i * k :][:k])
            told[row.position + i] = (token, row.logprobs[i], row.ranks[i], *top)
    return [told[at] for at in range(len(told))]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("sampling", WAYS.values(), ids=WAYS)
def test_decode_says_to_the_bit_what_a_mixed_worker_says_while_others_are_handed_over(
    make_pair, make_worker, sampling
):
    prefill, decode = make_pair()
    for n in range(4):
        is_own = n % 2 == 1
        if not is_own:
            decode.command(Reserve(handle(n), 0, 70, 12, 600.0))
        (decode if is_own else prefill).command(submit(n, is_own, sampling=sampling))
    most_beside = 0
    for _ in range(200):
        prefill.turn()
        decode.turn()
        most_beside = max(most_beside, decode.loop.parts.engine.load().running)
        if prefill.is_clean() and decode.is_clean():
            break
    assert most_beside == 4, "own prompts and those handed over ran together"
    mixed = make_worker("m", k=0, prefill_chunk_tokens=2048)
    for n in range(4):
        mixed.command(submit(n, True, sampling=sampling))
    mixed.run()
    for n in range(4):
        assert decode.finish(handle(n)) is Finish.LENGTH
        assert said(prefill, decode, n=n) == said(mixed, n=n)
        assert bool(prefill.rows(handle(n))) is (n % 2 == 0)
    assert prefill.is_clean()
    assert decode.is_clean()


def test_prompt_logprobs_are_a_mixed_workers(make_pair, make_worker):
    _, decode = make_pair()
    mixed = make_worker("m", prefill_chunk_tokens=2048)
    asked = {"logprobs": LogprobParams(prompt_k=2)}
    for worker in (decode, mixed):
        worker.command(submit(1, True, **asked))
        worker.run()

    def scored(worker):
        told = [row.prompt_tokens for row in worker.rows(handle(1)) if row.prompt_tokens]
        return [(r.tokens, r.logprobs, r.ranks, r.topk_tokens, r.topk_logprobs) for r in told]

    def joined(worker):
        return [
            [value for row in column for value in row]
            for column in zip(*scored(worker), strict=True)
        ]

    assert len(scored(decode)) > len(scored(mixed)), "in more chunks"
    assert joined(decode) == joined(mixed)
    assert len(joined(decode)[0]) == 69


def test_a_beginning_that_decode_computed_is_not_computed_again(make_pair):
    _, decode = make_pair()
    for n in (1, 2):
        decode.command(submit(n, True, prompt=prompt(1)))
        decode.run()
    reused = [max(row.n_reused for row in decode.rows(handle(n))) for n in (1, 2)]
    assert reused == [0, 64]
    assert decode.tokens(handle(1)) == decode.tokens(handle(2))


def test_an_attempt_that_goes_on_behind_an_output_does_so_here(make_pair, make_worker):
    _, decode = make_pair()
    mixed = make_worker("m", k=0)
    mixed.command(submit(1, True))
    mixed.run()
    whole = mixed.tokens(handle(1))
    decode.command(submit(1, True, attempt=1, output_token_ids=tuple(whole[:5])))
    decode.run()
    told = {row.position + i: t for row in decode.rows(handle(1)) for i, t in enumerate(row.tokens)}
    assert [told[at] for at in range(5, 12)] == whole[5:]


def test_a_step_has_no_more_of_prompts_than_the_chunk_and_one_prompt_at_a_time(make_pair):
    _, decode = simulated(make_pair, 4, overlap=False)
    stats = []
    observed = dataclasses.replace(
        decode.loop.parts, observe=lambda one, load: stats.append(one.prefill_tokens)
    )
    decode.loop.parts = observed
    for n in range(3):
        decode.command(submit(n, True, length=64))
    decode.run()
    assert max(stats) == CHUNK
    told = [
        row.handle for _, columns in decode.link.published for row in rows(columns) if row.tokens
    ]
    assert list(dict.fromkeys(told)) == [handle(n) for n in range(3)], "first tokens, in order"
    first = [one for one in stats if one]
    assert first == [CHUNK] * 12, "each in chunks, none idle between"


def test_own_prompts_never_take_a_place_that_was_promised(make_pair):
    slots = 3
    prefill, decode = simulated(make_pair, slots, max_waiting=64)
    n_requests = 24
    for n in range(n_requests):
        is_own = n % 3 == 2
        if not is_own:
            decode.command(Reserve(handle(n), 0, 70, 12, 600.0))
        (decode if is_own else prefill).command(submit(n, is_own, turn=n + 1))
    told_at: dict[int, int] = {}
    for at in range(4000):
        prefill.turn()
        decode.turn()
        load = decode.loop.parts.engine.load()
        assert load.running + load.waiting <= slots, "who has a place begins at once"
        assert decode.transport.places.n_taken <= slots
        for worker in (prefill, decode):
            for _, columns in worker.link.published:
                for row in rows(columns):
                    if row.tokens:
                        told_at.setdefault(row.handle, at)
        if prefill.is_clean() and decode.is_clean():
            break
    assert len(told_at) == n_requests
    for n in range(n_requests):
        assert decode.finish(handle(n)) is Finish.LENGTH
        assert len(decode.tokens(handle(n))) == 12
        passed = [m for m in range(n) if told_at[handle(m)] > told_at[handle(n)]]
        assert len(passed) < slots, f"{n} passed {passed}"
    assert prefill.is_clean()
    assert decode.is_clean()


def test_a_prompt_that_the_pool_has_no_room_for_waits_and_takes_nothing_of_others(make_pair):
    """The pool has room for two of them: prefill's, which have asked first."""
    prefill, decode = simulated(make_pair, 4, kv_tokens=160, kv_blocks=14, max_model_len=100)
    for n, is_own in enumerate((False, True, True, False)):
        (decode if is_own else prefill).command(submit(n, is_own, turn=n + 1))
    prefill.run()
    decode.turn()
    prefill.run()
    assert decode.transport.places.n_waiting == len(decode.loop.placeless) == 2
    for _ in range(200):
        prefill.turn()
        decode.turn()
    for n in range(4):
        assert decode.finish(handle(n)) is Finish.LENGTH
    assert prefill.is_clean()
    assert decode.is_clean()


def test_an_abort_frees_a_prompt_in_line_and_one_half_computed(make_pair):
    _, decode = simulated(make_pair, 1)
    for n in (1, 2):
        decode.command(submit(n, True, length=400))
    decode.turn(4)
    assert decode.rows(handle(1)) == [], "its prompt is being computed"
    assert len(decode.loop.placeless) == 1
    for n in (2, 1):
        decode.command(Abort(handle(n), 0))
    decode.run()
    assert decode.is_clean()
    decode.command(submit(3, True))
    decode.run()
    assert decode.finish(handle(3)) is Finish.LENGTH


def test_a_lost_gateway_and_a_stop_leave_nothing_of_own_prompts(make_pair):
    _, decode = simulated(make_pair, 1)
    for n in (1, 2):
        decode.command(submit(n, True, length=400))
    decode.turn(4)
    decode.loop.inbox.put(GatewayLost(GATEWAY, "gone"))
    decode.run()
    assert decode.is_clean()
    for n in (3, 4):
        decode.command(submit(n, True, length=400))
    decode.turn(4)
    decode.loop.inbox.put(StopRequested("shutting down"))
    decode.loop.run()
    for n in (3, 4):
        assert decode.rows(handle(n))[-1].error.code is ErrorCode.DRAINING
    assert not decode.loop.placeless


def test_what_cannot_be_served_is_refused_and_gives_its_place_back(make_pair):
    _, decode = simulated(make_pair, 1)
    decode.command(submit(1, True, prompt=(10**9,)))
    decode.command(submit(2, True))
    decode.run()
    assert decode.rows(handle(1))[-1].error.code is ErrorCode.INVALID_REQUEST
    assert decode.finish(handle(2)) is Finish.LENGTH
    assert decode.is_clean()
