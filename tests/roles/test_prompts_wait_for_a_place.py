"""A prompt is computed only when decode has a place for it; a queue fails and repeats nothing."""

from __future__ import annotations

import pytest

from baton_worker.config import SimConfig
from baton_worker.handoff.places import PlaceLimits
from baton_worker.identity import make_handle
from baton_worker.link.api import Pressure
from baton_worker.messages import HANDOFF_PLACES, Abort, DecodeTarget, Reserve, Submit
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.records.rows import rows
from baton_worker.roles.event_queue import StopRequested
from baton_worker.sampling import SamplingParams

GATEWAY = 77
PROMPT = tuple(range(20, 60))
AT_ONCE = SimConfig(prefill_token_seconds=0.0, decode_step_seconds=0.0, decode_row_seconds=0.0)
SLOTS, AHEAD = 4, 2


def limits(slots: int = SLOTS + AHEAD, receive_bytes: int = 1 << 30) -> PlaceLimits:
    return PlaceLimits(slots, receive_bytes, 1 << 20, 4096, 600.0)


def handle(n: int) -> int:
    return make_handle(GATEWAY, n)


def submit(
    n: int, max_tokens: int = 12, prompt=PROMPT, features=(HANDOFF_PLACES,), turn: int = 0
) -> Submit:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    target = DecodeTarget("d", "memory", "", features)
    return Submit(
        handle(n), 0, prompt_token_ids=prompt, sampling=sampling, decode=target, turn=turn
    )


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def overlap(request):
    return request.param


@pytest.fixture
def pair(make_worker, overlap):
    """Make a prefill worker that could run everything, and a decode worker of few slots."""

    def make(places: PlaceLimits, **decode):
        engine = {"device": "sim", "sim": AT_ONCE, "overlap": overlap}
        return (
            make_worker("p", max_running=64, max_waiting=4096, ledger_capacity=4096, **engine),
            make_worker(
                "d",
                places=places,
                ledger_capacity=4096,
                **{"max_running": SLOTS, **engine, **decode},
            ),
        )

    return make


def settle(*workers) -> None:
    for _ in range(6):
        for worker in workers:
            worker.run()


def ends_of(worker, n: int) -> list:
    return [row for row in worker.rows(handle(n)) if row.finish is not Finish.NONE]


def test_a_saturated_pair_fails_nothing_repeats_nothing_and_keeps_the_order(pair):
    prefill, decode = pair(limits(), max_waiting=AHEAD)
    n_requests = 16 * SLOTS
    for n in range(n_requests):
        decode.command(Reserve(handle(n), 0, len(PROMPT), 12, 600.0))
        prefill.command(submit(n, max_tokens=6 + n % 7))
    most_ahead = 0
    for _ in range(4000):
        prefill.turn()
        decode.turn()
        most_ahead = max(most_ahead, len(decode.loop.live))
        assert len(decode.loop.live) <= SLOTS + AHEAD
        if prefill.is_clean() and decode.is_clean():
            break
    assert most_ahead == SLOTS + AHEAD, "it was saturated"
    told = [row for _, columns in prefill.link.published for row in rows(columns)]
    first_tokens = [row.handle for row in told if row.tokens]
    assert first_tokens == [handle(n) for n in range(n_requests)], "each once, in arrival order"
    for n in range(n_requests):
        assert decode.finish(handle(n)) is Finish.LENGTH
        assert len(decode.tokens(handle(n))) == 6 + n % 7
        assert ends_of(prefill, n) == []
    assert [answer for _, answer in decode.transport.answers] == ["imported"] * n_requests
    assert prefill.is_clean()
    assert decode.is_clean()


def first_tokens_of(*workers) -> list[int]:
    """Return whose first token each worker told, in its order."""
    told = [rows(columns) for worker in workers for _, columns in worker.link.published]
    return [row.handle for of_record in told for row in of_record if row.tokens]


@pytest.mark.parametrize("slots", [1, 3])
def test_a_prefill_worker_that_was_slow_to_ask_costs_its_requests_no_turn(
    make_worker, overlap, slots
):
    """Of several prefill workers that compute at once: who is told out of turn is in service."""
    engine = {"device": "sim", "sim": AT_ONCE, "overlap": overlap, "max_running": 64}
    quick, slow = (make_worker(name, **engine) for name in ("p", "q"))
    decode = make_worker("d", places=limits(slots), **engine | {"max_running": slots})
    n_requests = 24
    for n in range(n_requests):
        at = slow if n >= slots and n % 2 else quick
        decode.command(Reserve(handle(n), 0, len(PROMPT), 6, 600.0))
        at.command(submit(n, max_tokens=6, turn=n + 1))
    settle(quick)
    assert first_tokens_of(quick) == [handle(n) for n in range(slots)], "the others have no place"
    told_at: dict[int, int] = {}
    for at in range(4000):
        for worker in (slow, quick, decode):
            worker.turn()
        for one in first_tokens_of(quick, slow):
            told_at.setdefault(one, at)
        if all(worker.is_clean() for worker in (quick, slow, decode)):
            break
    for n in range(n_requests):
        assert decode.finish(handle(n)) is Finish.LENGTH
        passed = [m for m in range(n) if told_at[handle(m)] > told_at[handle(n)]]
        assert len(passed) < slots, f"{n} passed {passed}"


def test_nothing_is_computed_and_no_client_is_promised_a_thing_without_a_place(pair):
    prefill, decode = pair(limits(slots=1))
    for n in (1, 2):
        prefill.command(submit(n, max_tokens=200))
    prefill.run()
    decode.turn(3)
    prefill.run()
    assert len(prefill.tokens(handle(1))) == 1
    assert prefill.rows(handle(2)) == []
    assert prefill.loop.parts.engine.load().kv_blocks_used == 0
    assert prefill.loop.n_open() == 1, "it counts as open: a drain waits for it"
    decode.command(Abort(handle(1), 0))
    settle(decode, prefill)
    assert len(prefill.tokens(handle(2))) == 1
    assert decode.finish(handle(2)) is Finish.LENGTH
    assert prefill.is_clean()
    assert decode.is_clean()


def test_decodes_memory_for_kv_that_it_has_not_imported_is_a_bound_that_prefill_waits_for(pair):
    prefill, decode = pair(limits(receive_bytes=1), max_running=2)
    for n in range(6):
        prefill.command(submit(n))
    for _ in range(600):
        prefill.turn()
        assert decode.loop.parts.engine.load().waiting <= 1, "one at a time"
        decode.turn()
    for n in range(6):
        assert decode.finish(handle(n)) is Finish.LENGTH
    assert prefill.is_clean()
    assert decode.is_clean()


def test_a_request_that_ends_before_decode_has_it_gives_its_place_back(pair):
    prefill, decode = pair(limits(slots=1))
    prefill.command(submit(1, max_tokens=1))
    prefill.command(submit(2, max_tokens=1))
    prefill.command(submit(3))
    settle(prefill, decode)
    assert prefill.finish(handle(1)) is prefill.finish(handle(2)) is Finish.LENGTH
    assert decode.finish(handle(3)) is Finish.LENGTH
    assert prefill.is_clean()
    assert decode.is_clean()


def test_an_abort_or_a_stop_in_line_for_a_place_leaves_nothing(pair):
    prefill, decode = pair(limits(slots=1))
    for n in (1, 2, 3):
        prefill.command(submit(n, max_tokens=200))
    prefill.turn(3)
    prefill.command(Abort(handle(2), 0))
    prefill.turn()
    assert decode.transport.places.n_waiting == 1
    prefill.loop.inbox.put(StopRequested("shutting down"))
    prefill.loop.run()
    assert ends_of(prefill, 3)[-1].error.code is ErrorCode.DRAINING
    for n in (1, 2, 3):
        decode.command(Abort(handle(n), 0))
    settle(decode)
    assert decode.is_clean()
    assert not prefill.loop.placeless


def test_a_prompt_that_cannot_be_served_is_refused_and_gives_its_place_back(pair):
    prefill, decode = pair(limits(slots=1))
    prefill.command(submit(1, prompt=(10**9,)))
    prefill.command(submit(2))
    settle(prefill, decode)
    assert ends_of(prefill, 1)[-1].error.code is ErrorCode.INVALID_REQUEST
    assert decode.finish(handle(2)) is Finish.LENGTH
    assert prefill.is_clean()
    assert decode.is_clean()


def test_more_requests_than_prefill_may_hold_in_line_are_refused(make_worker):
    prefill = make_worker("p", ledger_capacity=2, device="sim", sim=AT_ONCE)
    decode = make_worker("d", places=limits(slots=1), device="sim", sim=AT_ONCE)
    for n in range(4):
        prefill.command(submit(n, max_tokens=200))
    prefill.turn()
    assert ends_of(prefill, 2)[-1].error.code is ErrorCode.QUEUE_FULL
    assert ends_of(prefill, 3)[-1].error.code is ErrorCode.QUEUE_FULL
    settle(prefill, decode)
    assert decode.finish(handle(0)) is decode.finish(handle(1)) is Finish.LENGTH


@pytest.mark.parametrize("why", ["capacity", "pressure"])
def test_a_place_that_decode_had_no_room_for_is_no_failed_handoff_at_prefill_either(
    make_worker, why
):
    """Decode tells the gateway that it is full; prefill, which asks later, hears the same."""
    prefill = make_worker("p", device="sim", sim=AT_ONCE)
    decode = make_worker("d", ledger_capacity=1, places=limits(), device="sim", sim=AT_ONCE)
    if why == "pressure":
        decode.link.level = Pressure.STOP_ADMITTING
    for n in (0, 1):
        decode.command(Reserve(handle(n), 0, len(PROMPT), 8, 600.0))
    decode.turn()
    told = {"capacity": ErrorCode.DECODE_FULL, "pressure": ErrorCode.QUEUE_FULL}[why]
    assert ends_of(decode, 1)[-1].error.code is told
    prefill.command(submit(1))
    prefill.turn(2)
    assert ends_of(prefill, 1)[-1].error.code is ErrorCode.DECODE_FULL
    assert prefill.is_clean()


def test_an_older_decode_worker_is_not_asked(pair):
    prefill, decode = pair(limits(slots=1))
    for n in range(6):
        prefill.command(submit(n, features=()))
    prefill.run()
    assert prefill.transport.asked == {}
    assert all(len(prefill.tokens(handle(n))) == 1 for n in range(6))
    settle(decode, prefill)
    assert all(decode.finish(handle(n)) is Finish.LENGTH for n in range(6))
    assert prefill.is_clean()
    assert decode.is_clean()


def test_a_handoff_that_decode_does_not_come_to_ends_aloud_and_frees_both_sides(pair):
    prefill, decode = pair(limits(), max_running=1)
    for n in (1, 2):
        decode.command(Reserve(handle(n), 0, len(PROMPT), 200, 600.0))
        prefill.command(submit(n, max_tokens=200))
    prefill.run()
    decode.turn(3)
    assert decode.loop.parts.engine.load().waiting == 1
    decode.now[0] = 601.0  # received at 0, and never begun
    decode.turn()
    settle(decode, prefill)
    assert ends_of(decode, 2)[-1].error.code is ErrorCode.DECODE_FULL
    assert ends_of(prefill, 2)[-1].error.code is ErrorCode.DECODE_FULL
    assert decode.finish(handle(1)) is Finish.LENGTH, "what runs is not in the queue"
    assert prefill.is_clean()
    assert decode.is_clean()
