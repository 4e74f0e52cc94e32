"""One table says what each failure means: whether it is tried again, whom it speaks against."""

from __future__ import annotations

import json
import threading

import pytest

from baton_testing.scripted_link import RowSpec
from baton_worker.gateway.errors import (
    COUNTED_CODES,
    SUSPECT_REQUEST,
    WORKERS_FULL,
    worker_error,
)
from baton_worker.gateway.metrics import OUTCOMES
from baton_worker.gateway.serving.failures import TREATMENTS, Blame, Loss, loss_of
from baton_worker.identity import Role
from baton_worker.messages import Submit
from baton_worker.records.columns import ErrorCode, Finish

OUTPUT = [100, 101, 102]
BODY = {"model": "tiny", "prompt": [70, 71, 72], "max_tokens": 3, "return_token_ids": True}


def test_every_cause_is_in_the_table_with_its_reason():
    assert set(TREATMENTS) == {*ErrorCode, *Loss}
    assert all(treatment.why for treatment in TREATMENTS.values())


def test_what_is_tried_again_avoids_somebody():
    for cause, treatment in TREATMENTS.items():
        assert not treatment.retries or treatment.blame is not Blame.NOBODY, cause


def test_a_full_worker_is_ejected_for_a_moment_and_harmed_by_nobody():
    full = {cause for cause, treatment in TREATMENTS.items() if treatment.is_full}
    assert full == {ErrorCode.QUEUE_FULL, ErrorCode.DECODE_FULL}
    assert all(TREATMENTS[cause].ejects and not TREATMENTS[cause].harms for cause in full)


@pytest.mark.parametrize("code", ErrorCode)
def test_what_no_worker_can_do_better_is_the_clients_error_and_no_other(code):
    assert TREATMENTS[code].retries == (worker_error("w", code, "").status != 400)


@pytest.mark.parametrize("reason", ["bye", "key_revoked", "link_failed"])
def test_a_worker_that_leaves_in_good_order_has_not_died(reason):
    assert loss_of(reason) is Loss.LEFT


@pytest.mark.parametrize("reason", ["silent", "disconnected", "replaced", "a later version's word"])
def test_a_worker_that_leaves_otherwise_has_died(reason):
    assert loss_of(reason) is Loss.DIED


AT_FAULT = [
    (code, worker)
    for code in ErrorCode
    for worker in ("prefill-0", "decode-0")
    # What prefill tells of decode is the next test's.
    if TREATMENTS[code].retries and (worker, TREATMENTS[code].blame) != ("prefill-0", Blame.DECODE)
]


@pytest.mark.parametrize(("code", "at_fault"), AT_FAULT)
def test_what_another_worker_can_do_another_worker_does(start_gateway, code, at_fault):
    """All of a kind but one fail so: the request is served within two attempts."""
    gateway = start_gateway(lambda submit: OUTPUT)
    role = Role.PREFILL if at_fault == "prefill-0" else Role.DECODE
    gateway.link.refusals[at_fault] = code
    gateway.link.up(at_fault[:-1] + "1", role)
    with gateway.http() as client:
        answers = [client.post("/v1/completions", json=BODY) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {tuple(answer.json()["choices"][0]["token_ids"]) for answer in answers} == {
        tuple(OUTPUT)
    }
    retries = "baton_gateway_retries_total"
    assert sum(gateway.metric(retries, how=how) for how in ("from_start", "from_token")) >= 1


@pytest.mark.parametrize(
    "code", [code for code in ErrorCode if TREATMENTS[code].blame in (Blame.DECODE, Blame.EITHER)]
)
def test_what_prefill_reports_of_decode_is_tried_with_another_decode(start_gateway, code):
    gateway = start_gateway(lambda submit: OUTPUT)
    link = gateway.link
    link.up("decode-1", Role.DECODE)
    link.pause()
    client = gateway.ask(BODY)
    link.wait_told(lambda: any(isinstance(c, Submit) for _, c in link.commands))
    _, first = link.sent(Submit)[0]
    error = (code, "no luck")
    link.publish("prefill-0", RowSpec(first.handle, 0, finish=Finish.ERROR, error=error))
    link.wait_told(lambda: sum(isinstance(c, Submit) for _, c in link.commands) == 2)
    assert link.sent(Submit)[1][1].decode.worker_id != first.decode.worker_id
    link.resume()
    assert client.choices() == [OUTPUT]


def test_rows_that_never_came_are_asked_of_another_worker(start_gateway):
    """The gap is at position 1 and nobody will fill it; the client has position 0."""
    gateway = start_gateway(lambda submit: OUTPUT)
    link = gateway.link
    link.up("decode-1", Role.DECODE)
    link.pause()
    with gateway.http() as client:
        events = []

        def read():
            body = BODY | {"stream": True}
            with link.asking(), client.stream("POST", "/v1/completions", json=body) as reply:
                lines = reply.iter_lines()
                events.extend(json.loads(ln[6:]) for ln in lines if ln.startswith("data: {"))

        link.begin_asking()
        thread = threading.Thread(target=read)
        thread.start()
        link.wait_told(lambda: any(isinstance(c, Submit) for _, c in link.commands))
        _, first = link.sent(Submit)[0]
        link.publish("prefill-0", RowSpec(first.handle, 0, OUTPUT[:1]))
        link.publish(first.decode.worker_id, RowSpec(first.handle, 2, OUTPUT[2:]))
        link.wait_told(lambda: sum(isinstance(c, Submit) for _, c in link.commands) == 2)
        _, again = link.sent(Submit)[1]
        assert again.output_token_ids == tuple(OUTPUT[:1])
        assert again.decode.worker_id != first.decode.worker_id
        link.resume()
        thread.join(60)
    tokens = [t for event in events for c in event["choices"] for t in c["token_ids"]]
    assert tokens == OUTPUT
    assert gateway.metric("baton_gateway_gap_timeouts_total") == 1


@pytest.mark.parametrize("code", [code for code in ErrorCode if TREATMENTS[code].harms])
def test_what_the_request_may_be_the_cause_of_is_tried_on_two_workers_and_no_more(
    start_gateway, code
):
    gateway = start_gateway(lambda submit: OUTPUT, workers="m", max_retries=8)
    names = ["mixed-0", "mixed-1", "mixed-2", "mixed-3"]
    for name in names[1:]:
        gateway.link.up(name, Role.MIXED)
    gateway.link.refusals |= dict.fromkeys(names, code)
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, SUSPECT_REQUEST)
    assert len(gateway.link.sent(Submit)) == 2


def test_a_pair_of_which_either_may_be_at_fault_is_one_failure_and_named_whole(start_gateway):
    gateway = start_gateway(lambda submit: OUTPUT, max_retries=8)
    for name, role in (("prefill-1", Role.PREFILL), ("decode-1", Role.DECODE)):
        gateway.link.up(name, role)
    prefills = ("prefill-0", "prefill-1")
    gateway.link.refusals |= dict.fromkeys(prefills, ErrorCode.INCOMPATIBLE)
    with gateway.http() as client:
        error = client.post("/v1/completions", json=BODY).json()["error"]
    assert error["code"] == SUSPECT_REQUEST
    asked = [(name, submit.decode.worker_id) for name, submit in gateway.link.sent(Submit)]
    assert sorted(prefill for prefill, _ in asked) == list(prefills)
    assert all(f"{prefill} or {decode}" in error["message"] for prefill, decode in asked)


@pytest.mark.parametrize("code", [ErrorCode.QUEUE_FULL, ErrorCode.DRAINING])
def test_what_no_request_can_be_the_cause_of_is_tried_as_often_as_configured(start_gateway, code):
    gateway = start_gateway(lambda submit: OUTPUT, workers="m", max_retries=3)
    names = ["mixed-0", "mixed-1", "mixed-2", "mixed-3", "mixed-4"]
    for name in names[1:]:
        gateway.link.up(name, Role.MIXED)
    gateway.link.refusals |= dict.fromkeys(names, code)
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=BODY)
    assert answer.json()["error"]["code"] == code.name.lower()
    assert len(gateway.link.sent(Submit)) == 4


@pytest.mark.parametrize("code", ErrorCode)
def test_what_a_worker_answers_is_counted_as_load_where_it_is_full_and_else_as_an_error(code):
    is_full = TREATMENTS[code].is_full
    assert worker_error("w", code, "").outcome == ("workers_full" if is_full else "error")


def test_every_outcome_of_an_error_is_a_series_from_the_start():
    assert {"ok", "error", WORKERS_FULL, *COUNTED_CODES} == set(OUTCOMES)
