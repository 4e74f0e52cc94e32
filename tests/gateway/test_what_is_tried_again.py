"""Whether a request whose worker failed goes on, where, and what becomes of the workers' accounts.

By `retry_books`: no socket, thread or clock.
"""

from __future__ import annotations

import logging

import pytest

from baton_testing.retry_books import Books
from baton_worker.gateway.errors import SUSPECT_REQUEST, WORKER_LOST
from baton_worker.gateway.serving.balance import Needs
from baton_worker.gateway.serving.ejection import EJECT_AFTER
from baton_worker.gateway.serving.failures import MAX_HARMS, TREATMENTS, Blame, Loss
from baton_worker.messages import FEATURES, Abort, Submit
from baton_worker.records.columns import ErrorCode
from baton_worker.sampling import RESUME

ONE_PLACE = {"max_running": 1, "max_waiting": 0}
RETRIED, REFUSED = "baton_gateway_retries_total", "baton_gateway_retries_refused_total"
WAITING, ENDED = "baton_gateway_waiting_retries", "baton_gateway_requests_total"


@pytest.fixture
def new():
    """`new("p0", "d0", facts={}, **options)`: a gateway's books with these workers."""

    def make(*names, facts=None, **options):
        gateway = Books(**options)
        gateway.up(*names, **(facts or {}))
        return gateway

    return make


@pytest.mark.parametrize("reporter", [0, 1])
@pytest.mark.parametrize("cause", TREATMENTS)
def test_the_next_attempt_does_without_those_that_the_cause_speaks_against(new, cause, reporter):
    gateway = new("p0", "d0")
    live = gateway.ask_one()
    gateway.up("p1", "d1")
    treatment, (prefill, decode) = TREATMENTS[cause], live.holders
    ended = gateway.fail(live, cause, live.holders[reporter])
    if not treatment.retries:
        assert ended is gateway.broken
        assert gateway.taken() == {}
        return
    against = {
        Blame.REPORTER: {(prefill, decode)[reporter]},
        Blame.DECODE: {decode},
        Blame.EITHER: {prefill, decode},
    }[treatment.blame]
    assert ended is None
    assert live.avoided == against
    assert live.key.attempt == 1
    (decode_id, _), (prefill_id, submit) = gateway.wire.sent[-2:]
    assert live.holders == live.sources == (prefill_id, decode_id)
    assert not against & {prefill_id, decode_id}
    assert submit.decode.worker_id == decode_id
    assert gateway.taken() == {prefill_id: 1, decode_id: 1}


@pytest.mark.parametrize("cause", TREATMENTS)
def test_a_failure_harms_whom_it_speaks_against_if_the_request_may_be_its_cause(new, cause):
    gateway = new("p0", "d0", "p1", "d1")
    live, treatment = gateway.ask_one(), TREATMENTS[cause]
    named = {
        Blame.NOBODY: "p0",
        Blame.REPORTER: "p0",
        Blame.DECODE: "d0",
        Blame.EITHER: "p0 or d0",
    }[treatment.blame]
    gateway.fail(live, cause, "p0")
    assert live.generation.harmed == (frozenset({named}) if treatment.harms else frozenset())


@pytest.mark.parametrize("cause", TREATMENTS)
def test_failures_of_request_after_request_eject_where_the_worker_is_at_fault(new, cause):
    gateway = new("p0", "d0", max_retries=0)
    treatment = TREATMENTS[cause]
    for n in range(EJECT_AFTER):
        assert gateway.workers.ejected() == []
        assert gateway.ask(prompt=(1, n)) is not None, "the last pair is used all the same"
        gateway.fail(gateway.requests.live()[0], cause, "p0")
    at_fault = {
        Blame.NOBODY: "",
        Blame.REPORTER: "prefill",
        Blame.DECODE: "decode",
        Blame.EITHER: "prefill decode",
    }[treatment.blame]
    for role in ("prefill", "decode", "mixed"):
        is_ejected = treatment.ejects and role in at_fault
        ejections = gateway.metric("baton_gateway_worker_ejections_total", worker_role=role)
        assert ejections == is_ejected
        shown = {"worker": f"{role[0]}0", "worker_role": role}
        assert gateway.metric("baton_gateway_worker_ejected", **shown) == is_ejected
    assert len(gateway.workers.ejected()) == treatment.ejects * len(at_fault.split())


def test_a_request_counts_once_against_a_worker_however_many_choices_it_has(new):
    gateway = new("m0", max_retries=0)
    for n in range(EJECT_AFTER - 1):
        many = gateway.ask(EJECT_AFTER, prompt=(1, n))
        for live in tuple(many.live.values()):
            gateway.retrier.recover(live, ErrorCode.QUEUE_FULL, "m0", gateway.broken)
        gateway.leave(many)
    assert gateway.workers.ejected() == []
    gateway.fail(gateway.ask_one(), ErrorCode.QUEUE_FULL, "m0")
    assert len(gateway.workers.ejected()) == 1


def eject(gateway, name, n_rows):
    """Fail as many requests as it takes, each behind so many good rows."""
    for n in range(EJECT_AFTER):
        (live,) = gateway.ask(prompt=(1, n)).live.values()
        live.n_rows[name] += n_rows
        gateway.fail(live, ErrorCode.QUEUE_FULL, name)
    assert len(gateway.workers.ejected()) == 1


@pytest.mark.parametrize("n_failed", [0, 2])
def test_what_goes_further_than_the_failures_restores_a_worker_and_no_less(new, n_failed):
    gateway = new("m0", max_retries=0)
    eject(gateway, "m0", n_failed)
    live = gateway.ask_one()
    gateway.retrier.worked(live, "m0", is_whole=False)
    for n in range(1, n_failed + 2):
        assert len(gateway.workers.ejected()) == 1, f"{n - 1} rows are no more than {n_failed}"
        live.n_rows["m0"] = n
        gateway.retrier.worked(live, "m0", is_whole=False)
    assert gateway.workers.ejected() == []
    shown = {"worker": "m0", "worker_role": "mixed"}
    assert gateway.metric("baton_gateway_worker_ejected", **shown) == 0


def test_what_is_done_whole_restores_a_worker_whatever_it_took(new, caplog):
    gateway = new("m0", max_retries=0)
    eject(gateway, "m0", 3)
    with caplog.at_level(logging.INFO, "baton_worker.gateway.serving.retry"):
        gateway.retrier.worked(gateway.ask_one(), "m0", is_whole=True)
        assert gateway.workers.ejected() == []
        assert caplog.records[-1].message == "a worker is given requests again"
        caplog.clear()
        gateway.retrier.worked(gateway.ask_one(), "m0", is_whole=True)
    assert caplog.records == [], "once"


def test_what_harms_two_workers_is_tried_on_no_third_and_known_again(new, caplog):
    gateway = new("p0", "p1", "p2", "d0")
    live = gateway.ask_one()
    assert gateway.fail(live, Loss.DIED, live.holders[0]) is None
    ended = gateway.fail(live, Loss.DIED, live.holders[0])
    assert (ended.code, ended.status) == (SUSPECT_REQUEST, 500)
    assert all(name in ended.message for name in ("p0", "p1", gateway.broken.message))
    assert gateway.metric(REFUSED, reason=SUSPECT_REQUEST) == 1
    assert len(gateway.wire.of(Submit)) == 1, "the first was given without `recover`"
    suspects, request = gateway.retrier.suspects, live.generation.request
    assert suspects.verdicts(request, gateway.now) == 1


def test_what_two_workers_fail_is_held_against_neither(new):
    gateway = new("m0", "m1")
    for n in range(EJECT_AFTER + 1):
        (live,) = gateway.ask(prompt=(1, n)).live.values()
        for _ in range(MAX_HARMS):
            gateway.fail(live, ErrorCode.INTERNAL, live.holders[0])
        assert gateway.end_of(live.generation).code == SUSPECT_REQUEST
    assert gateway.workers.ejected() == []
    assert gateway.metric("baton_gateway_worker_ejections_total", worker_role="mixed") == 0


def test_a_worker_that_the_first_of_two_failures_ejected_is_restored_by_the_second(new, caplog):
    gateway = new("m0", "m1")
    live = gateway.ask_one()
    for _ in range(EJECT_AFTER - 1):
        gateway.workers.failed("m0", 100.0, "broken", is_full=False)
    shown = {"worker": "m0", "worker_role": "mixed"}
    gateway.fail(live, ErrorCode.INTERNAL, "m0")
    assert gateway.metric("baton_gateway_worker_ejected", **shown) == 1
    with caplog.at_level(logging.INFO, "baton_worker.gateway.serving.retry"):
        gateway.fail(live, ErrorCode.INTERNAL, "m1")
    assert gateway.workers.ejected() == []
    assert gateway.metric("baton_gateway_worker_ejected", **shown) == 0
    said = [record.worker for record in caplog.records if "given requests again" in record.message]
    assert said == ["m0"], "m1 was never ejected"


def test_what_a_request_cannot_have_caused_stays_held_against_the_worker(new):
    gateway = new("m0", "m1", "m2")
    for n in range(EJECT_AFTER):
        assert gateway.workers.ejected() == []
        (live,) = gateway.ask(prompt=(1, n)).live.values()
        gateway.fail(live, ErrorCode.QUEUE_FULL, "m0")
        for name in ("m1", "m2"):
            gateway.fail(live, ErrorCode.INTERNAL, name)
        assert not live.generation.live
    assert [said.split()[0] for said in gateway.workers.ejected()] == ["m0"]


def test_what_was_suspect_before_ends_with_the_first_worker_that_fails_under_it(new):
    gateway = new("p0", "p1", "d0")
    live = gateway.ask_one()
    live.generation.verdicts = MAX_HARMS - 1
    assert gateway.fail(live, Loss.DIED, "p0").code == SUSPECT_REQUEST


def test_what_was_suspect_before_is_tried_again_behind_what_it_cannot_have_caused(new):
    gateway = new("p0", "p1", "d0")
    live = gateway.ask_one()
    live.generation.verdicts = MAX_HARMS
    live.generation.harmed = frozenset({"m7", "m8"})
    assert gateway.fail(live, Loss.LEFT, "p0") is None
    assert live.holders == ("p1", "d0")


@pytest.mark.parametrize("max_retries", [0, 1, 4])
def test_a_request_is_tried_again_as_often_as_configured(new, max_retries):
    gateway = new(*(f"m{n}" for n in range(9)), max_retries=max_retries)
    live = gateway.ask_one()
    for _ in range(max_retries):
        assert gateway.fail(live, Loss.LEFT, live.holders[0], gateway.lost) is None
    assert gateway.metric(REFUSED, reason="attempts") == 0
    assert gateway.fail(live, Loss.LEFT, live.holders[0], gateway.lost) is gateway.lost
    tried = [submit.attempt for _, submit in gateway.wire.of(Submit)]
    assert tried == list(range(1, max_retries + 1))
    assert gateway.metric(REFUSED, reason="attempts") == 1
    assert gateway.taken() == {}


def test_an_attempt_goes_on_behind_what_the_client_has_at_weights_that_made_it(new):
    gateway = new("m0", max_wait_seconds=0)
    fresh, begun = gateway.ask_one(), gateway.ask_one()
    gateway.tell(begun, 3, 4)
    gateway.up("m1", model_fingerprint="b" * 32, revision="r2")
    assert gateway.fail(fresh, Loss.LEFT, "m0") is None
    assert gateway.fail(begun, Loss.LEFT, "m0") is gateway.broken, "another model has other tokens"
    worker_id, submit = gateway.wire.of(Submit)[0]
    assert (worker_id, submit.output_token_ids) == ("m1", ())
    assert gateway.metric(RETRIED, how="from_start") == 1
    assert gateway.metric(REFUSED, reason="no_workers") == 1


def test_only_who_can_go_on_behind_tokens_is_asked_to(new):
    gateway = new("m0")
    live = gateway.ask_one()
    gateway.tell(live, 3, 4)
    gateway.up("m1", features=tuple(feature for feature in FEATURES if feature != RESUME))
    gateway.up("m2")
    assert gateway.fail(live, Loss.LEFT, "m0") is None
    ((worker_id, submit),) = gateway.wire.of(Submit)
    assert (worker_id, submit.output_token_ids, submit.attempt) == ("m2", (3, 4), 1)
    assert gateway.metric(RETRIED, how="from_token") == 1
    assert gateway.metric(RETRIED, how="from_start") == 0


def test_of_a_pair_of_which_either_may_be_at_fault_prefill_stays_if_there_is_no_other(new):
    gateway = new("p0", "d0", "d1")
    live = gateway.ask_one()
    assert gateway.fail(live, ErrorCode.HANDOFF_TIMEOUT, "p0") is None
    assert live.holders == ("p0", "d1")
    assert live.avoided == {"d0"}
    gateway.fail(live, ErrorCode.HANDOFF_TIMEOUT, "p0")
    assert not live.generation.live, "no third decode is there"


def test_who_went_before_it_was_told_is_left_for_another(new):
    gateway = new("m0", "m1", "m2")
    live = gateway.ask_one()
    gateway.wire.there.remove("m1")
    assert gateway.fail(live, Loss.LEFT, "m0") is None
    assert live.key.attempt == 2, "the link knew more than the table"
    assert live.holders == ("m2",)
    assert gateway.taken() == {"m2": 1}
    assert live.avoided == {"m0", "m1"}


def test_what_no_message_can_hold_is_the_requests_fault_and_tried_nowhere_else(new):
    gateway = new("m0", "m1", "m2")
    live = gateway.ask_one()
    gateway.wire.is_narrow = True
    ended = gateway.fail(live, Loss.LEFT, "m0")
    assert (ended.status, ended.code) == (400, "request_too_large")
    assert live.key.attempt == 1
    assert gateway.taken() == {}


def full(new, **options):
    """Two workers of one place with a request each."""
    gateway = new("m0", "m1", facts=ONE_PLACE, **options)
    first, second = gateway.ask_one(), gateway.ask_one()
    assert gateway.ask() is None
    return gateway, first, second


def test_it_waits_for_workers_that_are_full_and_goes_on_at_the_first_that_is_not(new):
    gateway, first, second = full(new)
    gateway.tell(first, 3)
    gateway.down("m0")
    assert first.holders == ()
    assert first.key.attempt == 1
    assert (len(gateway.retrier), gateway.metric(WAITING)) == (1, 1)
    assert gateway.retrier.serve()
    assert (len(gateway.retrier), gateway.metric(WAITING)) == (1, 1)
    assert gateway.wire.of(Submit) == []
    gateway.requests.finish(second, "m1")
    assert gateway.retrier.serve()
    assert (len(gateway.retrier), gateway.metric(WAITING)) == (0, 0)
    ((worker_id, submit),) = gateway.wire.of(Submit)
    assert (worker_id, submit.attempt, submit.output_token_ids) == ("m1", 1, (3,))
    assert gateway.taken() == {"m1": 1}
    assert gateway.metric(RETRIED, how="from_token") == 1


def test_workers_are_told_that_an_attempt_is_over_while_the_next_one_waits(new):
    gateway, first, _ = full(new)
    assert gateway.fail(first, ErrorCode.DRAINING, "m0") is None
    assert gateway.wire.of(Abort) == [("m0", Abort(first.key.handle, 0))]
    assert gateway.taken() == {"m1": 1}


def test_it_waits_as_long_as_any_request_and_ends_with_its_own_error(new):
    gateway, first, _ = full(new, max_wait_seconds=30.0)
    gateway.down("m0")
    gateway.now += 29.9
    gateway.retrier.expire(gateway.now)
    assert (len(gateway.retrier), gateway.metric(WAITING)) == (1, 1)
    gateway.now = 130.0
    gateway.retrier.expire(gateway.now)
    assert (len(gateway.retrier), gateway.metric(WAITING)) == (0, 0)
    assert gateway.end_of(first.generation) is gateway.lost
    assert gateway.metric(REFUSED, reason="no_workers") == 1
    assert gateway.metric(ENDED, endpoint="completion", outcome=WORKER_LOST) == 1


def test_an_error_of_its_own_stays_one_when_nobody_came(new):
    gateway, first, _ = full(new)
    gateway.fail(first, ErrorCode.HANDOFF_REFUSED, "m0")
    gateway.now += 30
    gateway.retrier.expire(gateway.now)
    assert gateway.end_of(first.generation) is gateway.broken
    assert gateway.metric(ENDED, endpoint="completion", outcome="error") == 1


def test_one_whose_client_leaves_is_forgotten_and_counts_as_no_refusal(new):
    gateway, first, _ = full(new)
    gateway.down("m0")
    gateway.leave(first.generation)
    gateway.retrier.expire(gateway.now)
    assert (len(gateway.retrier), gateway.metric(WAITING)) == (0, 0)
    assert gateway.metric(REFUSED, reason="no_workers") == 0


def test_one_whose_client_has_left_begins_nowhere(new):
    gateway, first, second = full(new)
    gateway.down("m0")
    gateway.leave(first.generation)
    gateway.requests.finish(second, "m1")
    assert gateway.retrier.serve()
    assert len(gateway.retrier) == 0
    assert gateway.wire.of(Submit) == []
    assert gateway.taken() == {}


def test_where_nobody_waits_for_room_it_ends_at_once(new):
    gateway, first, _ = full(new, max_wait_seconds=0)
    assert gateway.fail(first, Loss.DIED, "m0", gateway.lost) is gateway.lost
    assert len(gateway.retrier) == 0
    assert gateway.metric(REFUSED, reason="no_workers") == 1


def test_where_no_worker_could_ever_take_it_it_ends_at_once(new):
    gateway = new("m0")
    live = gateway.ask_one()
    assert gateway.fail(live, Loss.DIED, "m0", gateway.lost) is gateway.lost
    assert len(gateway.retrier) == 0
    assert gateway.metric(REFUSED, reason="no_workers") == 1


def test_it_ends_when_the_last_worker_has_gone_that_it_waited_for(new):
    gateway, first, second = full(new)
    gateway.down("m0")
    gateway.down("m1", Loss.LEFT)
    assert not second.generation.live
    assert gateway.retrier.serve()
    assert (len(gateway.retrier), gateway.metric(WAITING)) == (0, 0)
    assert gateway.end_of(first.generation) is gateway.lost
    assert gateway.metric(REFUSED, reason="no_workers") == 2


def test_one_that_waited_and_meets_a_worker_that_has_gone_goes_on_at_another(new):
    gateway, first, second = full(new)
    gateway.down("m0")
    gateway.requests.finish(second, "m1")
    gateway.wire.there.remove("m1")
    gateway.up("m2", max_running=2)
    gateway.workers.assign(Needs(2, 4, -1), frozenset({"m1"}))  # m1 is the less loaded
    assert gateway.retrier.serve()
    assert first.holders == ("m2",)
    assert first.key.attempt == 2
    assert first.generation.live


def test_one_that_waited_and_meets_only_workers_that_have_gone_ends(new):
    gateway, first, second = full(new)
    gateway.down("m0")
    gateway.requests.finish(second, "m1")
    gateway.wire.there.remove("m1")
    assert gateway.retrier.serve()
    assert gateway.end_of(first.generation) is gateway.lost
    assert gateway.metric(ENDED, endpoint="completion", outcome=WORKER_LOST) == 1
    assert gateway.taken() == {}


def test_one_that_waited_and_fits_no_message_ends_by_its_own_fault(new):
    gateway, first, second = full(new)
    gateway.down("m0")
    gateway.requests.finish(second, "m1")
    gateway.wire.is_narrow = True
    assert gateway.retrier.serve()
    assert gateway.end_of(first.generation).code == "request_too_large"
    assert first.key.attempt == 1
    assert gateway.metric(ENDED, endpoint="completion", outcome="request_too_large") == 1


def test_of_many_alike_that_wait_one_is_tried_for_all_in_a_turn(new, monkeypatch):
    gateway = new()
    gateway.up("m0", "m1", max_running=60, max_waiting=0)
    for _ in range(120):
        gateway.ask()
    gateway.down("m0")
    assert len(gateway.retrier) == 60
    tried, assign = [], gateway.workers.assign

    def counted(needs, *args):
        tried.append(needs)
        return assign(needs, *args)

    monkeypatch.setattr(gateway.workers, "assign", counted)
    assert gateway.retrier.serve(), "that turn was all of theirs"
    assert len(tried) <= 2, "with whom it blames, or without"
    running = [g for g in gateway.requests.generations() if any(x.holders for x in g.live.values())]
    for generation in running[:3]:
        gateway.leave(generation)
    assert gateway.retrier.serve()
    assert len(gateway.retrier) == 57, "all that there is room for go on"
