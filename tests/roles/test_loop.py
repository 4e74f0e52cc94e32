"""A request crosses from prefill to decode and ends once, whatever goes wrong on the way."""

from __future__ import annotations

import random

import pytest

from baton_worker.identity import make_handle
from baton_worker.link.api import GatewayLost, Pressure
from baton_worker.messages import Abort, DecodeTarget, Reserve, Submit
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.roles.event_queue import DrainRequested, StopRequested
from baton_worker.sampling import SamplingParams

GATEWAY = 77
PROMPT = tuple(range(20, 60))


def handle(n: int = 1) -> int:
    return make_handle(GATEWAY, n)


def submit(n: int = 1, decode: str | None = "decode-0", **sampling) -> Submit:
    sampling = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **sampling}
    target = None if decode is None else DecodeTarget(decode, "memory")
    return Submit(
        handle(n),
        0,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(**sampling),
        logprobs_k=2,
        decode=target,
    )


def reserve(n: int = 1, seconds: float = 60.0) -> Reserve:
    return Reserve(handle(n), 0, len(PROMPT), 12, seconds)


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def overlap(request):
    return request.param


@pytest.fixture
def prefill(make_worker, overlap):
    return make_worker("prefill-0", overlap=overlap)


@pytest.fixture
def decode(make_worker, overlap):
    return make_worker("decode-0", overlap=overlap)


@pytest.fixture
def mixed_tokens(make_worker):
    """What one process without speculation says."""
    worker = make_worker("mixed-0", k=0)
    worker.command(submit(decode=None))
    worker.run()
    return worker.tokens(handle())


def merged(prefill, decode, n: int = 1) -> list[int]:
    """Merge both workers' rows by position, as a gateway does; equal positions must agree."""
    out: dict[int, int] = {}
    for worker in (prefill, decode):
        for row in worker.rows(handle(n)):
            for offset, token in enumerate(row.tokens):
                assert out.setdefault(row.position + offset, token) == token
    return [out[i] for i in range(len(out))]


def settle(*workers) -> None:
    for _ in range(6):
        for worker in workers:
            worker.run()


def test_the_pair_says_what_one_process_says(prefill, decode, mixed_tokens):
    decode.command(reserve())
    prefill.command(submit())
    settle(prefill, decode)
    assert merged(prefill, decode) == mixed_tokens
    assert [len(row.tokens) for row in prefill.rows(handle())] == [1]
    assert decode.rows(handle())[0].is_echo
    assert decode.finish(handle()) is Finish.LENGTH
    assert prefill.is_clean()
    assert decode.is_clean()


def test_prefill_keeps_its_blocks_until_the_acknowledgement(prefill, decode):
    decode.transport.is_deaf = True
    prefill.command(submit())
    prefill.run()
    assert prefill.loop.parts.engine.load().held_handoffs == 1
    assert prefill.loop.parts.engine.load().kv_blocks_used > 0
    decode.transport.is_deaf = False
    prefill.transport.send(prefill.loop.live.all()[0])
    settle(decode, prefill)
    assert prefill.is_clean()


def test_a_repeated_offer_is_imported_once(prefill, decode, mixed_tokens):
    prefill.command(submit())
    prefill.run()
    key = prefill.loop.live.all()[0]
    prefill.transport.send(key)
    prefill.transport.send(key)
    settle(decode, prefill)
    assert merged(prefill, decode) == mixed_tokens
    assert [a for _, a in decode.transport.answers] == ["imported"] * len(decode.transport.answers)
    assert decode.is_clean()


@pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"ignore_eos": False, "stop": True}])
def test_a_request_that_ends_at_its_first_token_never_reaches_decode(
    prefill, decode, mixed_tokens, sampling
):
    if sampling.pop("stop", False):
        sampling["stop_token_ids"] = (mixed_tokens[0],)
    decode.command(reserve())
    prefill.command(submit(**sampling))
    settle(prefill, decode)
    want = Finish.LENGTH if "max_tokens" in sampling else Finish.STOP
    assert prefill.finish(handle()) is want
    assert prefill.tokens(handle()) == mixed_tokens[:1]
    assert decode.rows(handle()) == []
    decode.command(Abort(handle(), 0))  # what the gateway sends when a request is over
    settle(prefill, decode)
    assert prefill.is_clean()
    assert decode.is_clean()


def test_a_full_decode_says_so_and_everything_is_freed(prefill, make_worker):
    decode = make_worker("decode-0", ledger_capacity=1)
    decode.command(reserve(1))
    decode.command(reserve(2))
    decode.turn()
    assert decode.finish(handle(2)) is Finish.ERROR
    assert decode.rows(handle(2))[0].error.code is ErrorCode.DECODE_FULL
    prefill.command(submit(2))
    settle(prefill, decode)
    assert prefill.rows(handle(2))[-1].error.code is ErrorCode.DECODE_FULL
    assert prefill.is_clean()


def test_an_abort_frees_both_sides_at_every_stage(prefill, decode):
    for turns in range(6):
        n = 10 + turns
        decode.command(reserve(n))
        prefill.command(submit(n, max_tokens=400))
        for _ in range(turns):
            prefill.turn()
            decode.turn()
        for worker in (prefill, decode):
            worker.command(Abort(handle(n), 0))
        settle(prefill, decode)
        assert prefill.is_clean(), turns
        assert decode.is_clean(), turns


def test_a_handoff_after_the_abort_is_refused_and_no_failure(prefill, decode):
    """Clients leave all the time, and decode may hear of it first: nobody is to be woken for it."""
    decode.transport.is_deaf = True
    prefill.command(submit())
    prefill.run()
    decode.transport.is_deaf = False
    decode.command(Abort(handle(), 0))
    decode.turn()
    prefill.transport.send(prefill.loop.live.all()[0])
    settle(decode, prefill)
    assert decode.transport.answers[-1][1] == "over"
    assert prefill.rows(handle())[-1].error.code is ErrorCode.HANDOFF_REFUSED
    assert prefill.is_clean()
    counts = {
        (sample.name, *sorted(sample.labels.items())[1:2]): sample.value
        for family in prefill.registry.collect()
        for sample in family.samples
        if sample.name in ("baton_worker_requests_total", "baton_worker_refused_total")
        and sample.value
    }
    assert counts == {("baton_worker_requests_total", ("outcome", "aborted")): 1}


def test_another_models_handoff_fails_one_request_never_the_worker(prefill, make_worker):
    decode = make_worker("decode-0", block_size=32)
    prefill.command(submit())
    settle(prefill, decode)
    assert prefill.rows(handle())[-1].error.code is ErrorCode.INCOMPATIBLE
    decode.command(submit(2, decode=None))
    settle(decode)
    assert decode.finish(handle(2)) is Finish.LENGTH


def test_a_reservation_whose_handoff_never_comes_expires_aloud(decode):
    decode.command(reserve(seconds=5.0))
    decode.turn()
    decode.now[0] = 5.1
    decode.turn()
    assert decode.rows(handle())[-1].error.code is ErrorCode.RESERVATION_EXPIRED
    assert decode.is_clean()


def test_a_lost_gateway_frees_all_it_had(prefill, decode):
    for n in range(1, 4):
        decode.command(reserve(n))
        prefill.command(submit(n, max_tokens=300))
    decode.command(reserve(9))
    prefill.turn(2)
    decode.turn(2)
    for worker in (prefill, decode):
        worker.loop.inbox.put(GatewayLost(GATEWAY, "restarted"))
    settle(prefill, decode)
    assert prefill.is_clean()
    assert decode.is_clean()


def test_a_backed_up_link_stops_admission_then_pauses_then_ends_requests(make_worker):
    worker = make_worker("mixed-0")
    worker.command(submit(1, decode=None, max_tokens=200))
    worker.turn(3)
    worker.link.level = Pressure.STOP_ADMITTING
    worker.command(submit(2, decode=None))
    worker.turn(2)
    assert worker.rows(handle(2))[-1].error.code is ErrorCode.QUEUE_FULL
    worker.link.level = Pressure.PAUSE
    worker.turn()
    before = len(worker.tokens(handle(1)))
    worker.turn(5)
    assert len(worker.tokens(handle(1))) == before
    worker.link.level = Pressure.OPEN
    worker.turn(2)
    assert len(worker.tokens(handle(1))) > before
    worker.link.level = Pressure.STALLED
    worker.turn(2)
    assert worker.rows(handle(1))[-1].error.code is ErrorCode.LINK_STALLED
    assert worker.is_clean()


def test_a_handoff_in_line_when_its_gateway_stalls_is_refused_and_leaves_no_place_taken(
    make_worker, overlap
):
    prefill = make_worker("prefill-0", overlap=overlap)
    decode = make_worker("decode-0", overlap=overlap, max_running=1)
    for n in (1, 2):
        decode.command(reserve(n))
        prefill.command(submit(n, max_tokens=200))
    prefill.run()
    decode.turn(2)
    assert decode.loop.parts.engine.load().waiting == 1
    decode.link.level = Pressure.STALLED
    decode.run()
    assert decode.is_clean(), "neither the one that ran nor the one in line"
    assert [answer for _, answer in decode.transport.answers] == ["imported", "LINK_STALLED"]
    prefill.run()
    assert prefill.is_clean()


def test_draining_is_announced_once_and_finishes_what_was_on_its_way(make_worker):
    worker = make_worker("mixed-0")
    worker.command(submit(1, decode=None))
    worker.turn(2)
    worker.loop.inbox.put(DrainRequested())
    worker.command(submit(2, decode=None))
    worker.loop.inbox.put(DrainRequested())
    worker.turn(1)
    assert worker.link.infos == ["draining"]
    assert worker.loop.n_open() == 2
    worker.run()
    assert worker.finish(handle(1)) is Finish.LENGTH
    assert worker.finish(handle(2)) is Finish.LENGTH
    assert worker.link.infos == ["draining"]
    assert worker.loop.n_open() == 0


def test_a_drain_that_is_taken_back_is_announced_once_and_requests_are_served_again(make_worker):
    worker = make_worker("mixed-0")
    worker.loop.inbox.put(DrainRequested())
    for _ in range(2):
        worker.loop.inbox.put(DrainRequested(is_wanted=False))
    worker.command(submit(1, decode=None))
    worker.run()
    assert worker.link.infos == ["draining", "serving"]
    assert not worker.loop.is_draining
    assert worker.finish(handle(1)) is Finish.LENGTH


def test_a_pair_that_drains_finishes_a_request_that_was_on_its_way_to_both(prefill, decode):
    for worker in (prefill, decode):
        worker.loop.inbox.put(DrainRequested())
    decode.command(reserve())
    prefill.command(submit())
    settle(prefill, decode)
    assert decode.finish(handle()) is Finish.LENGTH
    assert prefill.loop.n_open() == decode.loop.n_open() == 0


def test_stopping_ends_every_request_with_a_row(make_worker, overlap):
    worker = make_worker("mixed-0", overlap=overlap)
    for n in range(1, 5):
        worker.command(submit(n, decode=None, max_tokens=300))
    worker.turn(2)
    worker.loop.inbox.put(StopRequested("shutting down"))
    worker.loop.run()
    for n in range(1, 5):
        assert worker.rows(handle(n))[-1].error.code is ErrorCode.DRAINING
    assert worker.is_clean()


@pytest.mark.fast_cases(1)
def test_random_faults_leave_nothing_behind_and_every_request_ends_at_most_once(prefill, decode):
    rng = random.Random(4)
    for n in range(1, 61):
        if rng.random() < 0.9:
            decode.command(reserve(n))
        prefill.command(submit(n, max_tokens=rng.randrange(1, 30), temperature=1.0, seed=n))
        decode.transport.is_deaf = rng.random() < 0.15
        for _ in range(rng.randrange(4)):
            prefill.turn()
            decode.turn()
        if rng.random() < 0.3:
            victim = rng.randrange(1, n + 1)
            for worker in (prefill, decode):
                worker.command(Abort(handle(victim), 0))
    decode.transport.is_deaf = False
    settle(prefill, decode)
    for key in prefill.loop.live.all():
        prefill.transport.send(key)
    settle(prefill, decode)
    for n in range(1, 61):
        for worker in (prefill, decode):
            ends = [r for r in worker.rows(handle(n)) if r.finish is not Finish.NONE]
            assert len(ends) <= 1
        merged(prefill, decode, n)
    for n in range(1, 61):
        decode.command(Abort(handle(n), 0))
    settle(prefill, decode)
    assert prefill.is_clean()
    assert decode.is_clean()


def test_who_has_rows_of_a_request_finds_it_counted(prefill, decode, monkeypatch):
    """A client may have its whole answer before the turns that made it end."""
    seen = []

    def publish_of(worker):
        name, keep = "baton_live_requests", worker.link.publish

        def publish(incarnation, columns, step_id):
            labels = {"model": "tiny", "role": "mixed"}
            live = worker.registry.get_sample_value(name, labels)
            seen.append((live, len(worker.loop.live)))
            keep(incarnation, columns, step_id)

        return publish

    for worker in (prefill, decode):
        monkeypatch.setattr(worker.link, "publish", publish_of(worker))
    prefill.command(submit())
    settle(prefill, decode)
    assert seen[0] == (1, 1), "the first token's row: its turn goes on"
    assert all(told == true for told, true in seen)
    assert len(prefill.loop.live) == len(decode.loop.live) == 0
