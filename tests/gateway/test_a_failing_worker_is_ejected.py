"""A worker that fails request after request gets none, unless it is the last; then it is said."""

from __future__ import annotations

import threading
import time
from collections import Counter

import msgspec
import pytest

from baton_testing.scripted_link import worker_info
from baton_worker.gateway.serving.assignment import choose_all
from baton_worker.gateway.serving.balance import Needs, WorkerLoad
from baton_worker.gateway.serving.ejection import (
    BACKOFF_SECONDS,
    EJECT_AFTER,
    MAX_EXCUSED,
)
from baton_worker.gateway.serving.workers import LinkedWorkers
from baton_worker.identity import Role
from baton_worker.records.columns import ErrorCode

NEEDS = Needs(prompt_tokens=10, max_tokens=20, logprobs_k=0)
OUTPUT = [100, 101, 102]
BODY = {"model": "tiny", "prompt": [70, 71, 72], "max_tokens": 3}


def choose(loads, needs, *rules, **more):
    """Return the pair of a request of one choice."""
    pairs = choose_all(loads, [needs], *rules, **more)
    return pairs[0] if pairs else None


def test_a_worker_that_refuses_at_once_draws_a_handful_of_a_thousand():
    """It is always the least loaded. Ten requests a second, each a second on the other worker."""
    now = [0.0]
    table = LinkedWorkers("tiny", clock=lambda: now[0])
    table.up("good", 1, worker_info("good", Role.MIXED))
    table.up("bad", 2, worker_info("bad", Role.MIXED))
    drawn, running = Counter(), []
    for _ in range(1000):
        now[0] += 0.1
        while running and running[0] <= now[0]:
            running.pop(0)
            table.release("good", NEEDS)
        pair = table.assign(NEEDS)
        drawn[pair.worker_ids[0]] += 1
        if pair.worker_ids == ("bad",):
            table.failed("bad", now[0], "broken", is_full=False)
            table.release("bad", NEEDS)
        else:
            table.worked("good", now[0])
            running.append(now[0] + 1.0)
    assert drawn["bad"] <= EJECT_AFTER + 8, "trials after 1, 2, 4, 8, 16, 32, 60 s"
    assert drawn["good"] == 1000 - drawn["bad"]


def test_an_ejected_worker_is_passed_over_even_when_the_others_are_full():
    def load(name, **facts):
        info = worker_info(name, Role.MIXED, max_running=1, max_waiting=0)
        return WorkerLoad(info, 1, **facts)

    full, bad = load("full", outstanding_requests=1), load("bad", is_ejected=True)
    assert choose([full, bad], NEEDS) is None
    assert choose([load("free", outstanding_tokens=999), bad], NEEDS).worker_ids == ("free",)
    assert choose([bad], NEEDS).worker_ids == ("bad",)
    full.info = msgspec.structs.replace(full.info, draining=True)
    assert choose([full, bad], NEEDS).worker_ids == ("bad",), "who drains is no other"


def test_an_ejected_kind_is_the_last_choice():
    """The new revision's only decode fails: the old pair is taken, however busy."""
    new = {"semantic_hash": 5}
    loads = [
        WorkerLoad(worker_info("p-new", Role.PREFILL, **new), 1),
        WorkerLoad(worker_info("d-new", Role.DECODE, **new), 1, is_ejected=True),
        WorkerLoad(worker_info("p-old", Role.PREFILL), 1, outstanding_tokens=900),
        WorkerLoad(worker_info("d-old", Role.DECODE), 1, outstanding_tokens=900),
    ]
    assert choose(loads, NEEDS).worker_ids == ("p-old", "d-old")
    assert choose(loads[:2], NEEDS).worker_ids == ("p-new", "d-new")


def test_every_request_is_served_beside_a_worker_that_fails_all(start_gateway):
    gateway = start_gateway(lambda submit: OUTPUT)
    gateway.link.up("decode-1", Role.DECODE)
    gateway.link.refusals["decode-0"] = ErrorCode.INTERNAL
    with gateway.http() as client:
        codes = [client.post("/v1/completions", json=BODY).status_code for _ in range(30)]
        ready = client.get("/readyz")
    assert codes == [200] * 30
    assert ready.status_code == 200
    assert [r.partition(":")[0] for r in ready.json()["reasons"]] == [
        f"decode-0 is ejected: {EJECT_AFTER} failures in a row, the last".partition(":")[0]
    ]
    assert "worker decode-0: not here" in ready.json()["reasons"][0]
    assert gateway.metric("baton_gateway_worker_ejections_total", worker_role="decode") == 1
    shown = {"worker": "decode-0", "worker_role": "decode"}
    assert gateway.metric("baton_gateway_worker_ejected", **shown) == 1
    gateway.link.down("decode-0")
    limit = time.monotonic() + 60
    with gateway.http() as client:
        while client.get("/readyz").json()["reasons"]:
            assert time.monotonic() < limit
    assert gateway.metric("baton_gateway_worker_ejected", **shown) == 0


def test_a_worker_that_begins_all_and_ends_none_is_ejected(start_gateway):
    gateway = start_gateway(lambda submit: OUTPUT)
    gateway.link.up("decode-1", Role.DECODE)
    gateway.link.failures["decode-0"] = {70}
    with gateway.http() as client:
        answers = [client.post("/v1/completions", json=BODY) for _ in range(30)]
        reasons = client.get("/readyz").json()["reasons"]
        assert [answer.status_code for answer in answers] == [200] * 30
        assert reasons[0].startswith("decode-0 is ejected: ")
        gateway.link.failures.clear()
        limit = time.monotonic() + 60
        while client.get("/readyz").json()["reasons"]:  # what it serves to the end restores it
            assert time.monotonic() < limit
            assert client.post("/v1/completions", json=BODY).status_code == 200
    assert gateway.metric("baton_gateway_worker_ejections_total", worker_role="decode") >= 1


def test_requests_that_every_worker_fails_eject_none_though_nothing_else_is_asked(start_gateway):
    """They are the requests' own failures: two workers agree on each of them."""
    gateway = start_gateway(lambda submit: OUTPUT)
    gateway.link.up("decode-1", Role.DECODE)
    gateway.link.failures |= {"decode-0": {99}, "decode-1": {99}}
    with gateway.http() as client:
        for n in range(MAX_EXCUSED):
            poison = client.post("/v1/completions", json=BODY | {"prompt": [99, 80 + n]})
            assert poison.json()["error"]["code"] == "suspect_request"
        assert client.get("/readyz").json()["reasons"] == []
    assert gateway.metric("baton_gateway_worker_ejections_total", worker_role="decode") == 0


def test_two_workers_that_fail_everything_are_ejected_all_the_same(start_gateway):
    """Each request finds them, for both are always the least loaded; a third could."""
    gateway = start_gateway(lambda submit: OUTPUT)
    for name in ("decode-1", "decode-2"):
        gateway.link.up(name, Role.DECODE)
    gateway.link.failures |= {"decode-0": set(range(256)), "decode-1": set(range(256))}
    table = gateway.service.workers
    gateway.link.do(lambda: setattr(table, "_clock", lambda: 1000.0))  # no trial becomes due
    gateway.link.wait_until(lambda: table.count(Role.DECODE) == 3)  # handed over is not applied
    with gateway.http() as client:
        busy = next(load for load in table.loads() if load.info.worker_id == "decode-2")
        busy.outstanding_tokens += 10_000
        answers = [
            client.post("/v1/completions", json=BODY | {"prompt": [80 + n]}).status_code
            for n in range(MAX_EXCUSED + EJECT_AFTER + 1)
        ]
        busy.outstanding_tokens -= 10_000
    assert answers == [500] * (MAX_EXCUSED + EJECT_AFTER) + [200]
    assert gateway.metric("baton_gateway_worker_ejections_total", worker_role="decode") == 2


@pytest.mark.parametrize("n_choices", [1, 4])
def test_requests_that_workers_fail_beside_others_eject_none(start_gateway, n_choices):
    """The prompts that begin with 99 end every worker's attempt; all else is well."""
    gateway = start_gateway(lambda submit: OUTPUT)
    gateway.link.up("decode-1", Role.DECODE)
    gateway.link.failures |= {"decode-0": {99}, "decode-1": {99}}
    with gateway.http() as client:
        for n in range(2 * EJECT_AFTER):
            poison = BODY | {"prompt": [99, 80 + n], "n": n_choices}
            assert client.post("/v1/completions", json=poison).status_code == 500
            good = BODY | {"n": 2}  # one choice for each decode worker
            assert client.post("/v1/completions", json=good).status_code == 200
    assert gateway.metric("baton_gateway_worker_ejections_total", worker_role="decode") == 0


def test_one_request_of_many_choices_ejects_nobody(start_gateway):
    """It tells of a failure once, however many of its choices have to go elsewhere."""
    gateway = start_gateway(lambda submit: OUTPUT)
    gateway.link.up("decode-1", Role.DECODE)
    gateway.link.refusals["decode-0"] = ErrorCode.HANDOFF_REFUSED
    with gateway.http() as client:
        many = BODY | {"n": 6 * EJECT_AFTER}
        assert client.post("/v1/completions", json=many).status_code == 200
    retries = [
        gateway.metric("baton_gateway_retries_total", how=how)
        for how in ("from_start", "from_token")
    ]
    assert sum(retries) >= EJECT_AFTER
    assert gateway.metric("baton_gateway_worker_ejections_total", worker_role="decode") == 0


def test_the_last_pair_is_used_although_ejected_and_restored_by_what_it_serves(start_gateway):
    gateway = start_gateway(lambda submit: OUTPUT)
    gateway.link.refusals["decode-0"] = ErrorCode.INTERNAL
    with gateway.http() as client:
        for _ in range(EJECT_AFTER + 3):
            answer = client.post("/v1/completions", json=BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert ready.json()["reasons"][0].startswith("decode-0 is ejected: ")
        gateway.link.refusals.clear()
        assert client.post("/v1/completions", json=BODY).status_code == 200
        assert client.get("/readyz").json()["reasons"] == []
    shown = {"worker": "decode-0", "worker_role": "decode"}
    assert gateway.metric("baton_gateway_worker_ejected", **shown) == 0


def test_a_trial_that_was_not_sent_is_still_due():
    """A wide request that finds no room for its last choice must not use the trial up."""
    now = [0.0]
    table = LinkedWorkers("tiny", "", clock=lambda: now[0])
    for name in ("bad", "good"):
        table.up(name, 1, worker_info(name, Role.MIXED, max_running=1, max_waiting=0))
    for _ in range(EJECT_AFTER):
        table.failed("bad", 0.0, "broken", is_full=False)
    now[0] = BACKOFF_SECONDS
    pairs = [table.assign(NEEDS), table.assign(NEEDS)]
    assert None not in pairs
    assert table.assign(NEEDS) is None
    for pair in pairs:
        table.unassign(pair, NEEDS)
    again = [table.assign(NEEDS), table.assign(NEEDS)]
    assert {pair.worker_ids for pair in again if pair} == {("bad",), ("good",)}
    table.unassign(again[0], NEEDS)
    table.unassign(again[1], NEEDS)
    assert [(load.dispatched, load.outstanding_tokens) for load in table.loads()] == [(0, 0)] * 2


def test_who_waits_is_told_of_a_restored_worker_and_of_one_that_is_due_to_be_tried():
    now, told = [0.0], []
    table = LinkedWorkers("tiny", "", clock=lambda: now[0])
    for name in ("bad", "good"):
        table.up(name, 1, worker_info(name, Role.MIXED, max_running=1, max_waiting=0))
    table.on_room = lambda: told.append(now[0])
    for _ in range(EJECT_AFTER):
        table.failed("bad", 0.0, "broken", is_full=False)
    assert table.assign(NEEDS).worker_ids == ("good",)
    assert table.assign(NEEDS) is None
    for now[0] in (BACKOFF_SECONDS / 2, BACKOFF_SECONDS, BACKOFF_SECONDS * 1.1):
        table.look()
    assert told == [BACKOFF_SECONDS]
    assert table.assign(NEEDS).worker_ids == ("bad",)
    table.worked("bad", now[0])
    table.worked("bad", now[0])
    assert told == [BACKOFF_SECONDS, now[0]]


@pytest.mark.parametrize(
    "ask",
    [
        lambda table: table.are_usable([NEEDS]),
        lambda table: table.to_keep([NEEDS]),
        lambda table: table.has_room(frozenset()),
        lambda table: table.assign(NEEDS),
        lambda table: table.look(),
    ],
    ids=["are_usable", "to_keep", "has_room", "assign", "look"],
)
def test_whoever_sees_first_that_a_trial_is_due_tells_who_waits(ask):
    """Time may pass between two questions about one request: the second one's answer is that
    there is room, and the request that was refused by the first must be tried again.
    """
    now, told = [0.0], []
    table = LinkedWorkers("tiny", "", clock=lambda: now[0])
    for name in ("bad", "good"):
        table.up(name, 1, worker_info(name, Role.MIXED, max_running=1, max_waiting=0))
    for _ in range(EJECT_AFTER):
        table.failed("bad", 0.0, "broken", is_full=False)
    assert table.assign_all([NEEDS, NEEDS]) is None
    table.on_room = lambda: told.append(now[0])
    now[0] = BACKOFF_SECONDS
    for _ in range(3):
        ask(table)
    table.look()
    assert told == [BACKOFF_SECONDS]


def test_a_request_in_line_begins_when_an_ejected_worker_is_due(start_gateway):
    """The other one has no room, and nothing happens but that time passes."""
    gateway = start_gateway(
        workers="m", info={"max_running": 1, "max_waiting": 0}, max_wait_seconds=60
    )
    gateway.link.up("mixed-1", Role.MIXED, max_running=1, max_waiting=0)
    table = gateway.service.workers
    while not table.failed("mixed-1", table.now(), "broken", is_full=False):
        pass  # it may not have come yet, and then it takes some failures
    gateway.link.pause()
    answers = []

    def post():
        with gateway.http() as client:
            answers.append(client.post("/v1/completions", json=BODY).status_code)

    posters = [threading.Thread(target=post) for _ in range(2)]
    for poster in posters:
        poster.start()
    gateway.link.wait_until(lambda: len(gateway.link.commands) == 2, 30)
    assert {worker for worker, _ in gateway.link.commands} == {"mixed-0", "mixed-1"}
    gateway.link.resume()
    for poster in posters:
        poster.join(60)
    assert answers == [200, 200]
