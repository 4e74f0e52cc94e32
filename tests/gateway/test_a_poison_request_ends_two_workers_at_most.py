"""A request under which two workers died is not tried on a third; its neighbours go on."""

from __future__ import annotations

import logging
import threading

import pytest

from baton_testing.scripted_link import RowSpec
from baton_worker.gateway.errors import SUSPECT_REQUEST
from baton_worker.identity import Role
from baton_worker.messages import Submit
from baton_worker.records.columns import FLAG_FIRST_TOKEN

OUTPUT = [100 + n for n in range(6)]
BODY = {"model": "tiny", "prompt": [70, 71, 72], "max_tokens": 6, "return_token_ids": True}


def ask(gateway, **changes):
    return gateway.ask(BODY | changes)


@pytest.fixture
def start(start_gateway):
    """`start(prefills, decodes, **options)`: a gateway whose workers rest."""

    def make(prefills, decodes, **options):
        gateway = start_gateway(lambda submit: OUTPUT, max_retries=8, **options)
        for i in range(1, prefills):
            gateway.link.up(f"prefill-{i}", Role.PREFILL)
        for i in range(1, decodes):
            gateway.link.up(f"decode-{i}", Role.DECODE)
        gateway.link.pause()
        return gateway

    return make


def submit_of(gateway, n):
    """Wait for the n-th SUBMIT; return it and its prefill worker."""
    link = gateway.link
    link.wait_told(lambda: sum(isinstance(c, Submit) for _, c in link.commands) > n)
    worker, submit = link.sent(Submit)[n]
    return submit, worker


def first_token(gateway, submit, worker):
    row = RowSpec(
        submit.handle,
        len(submit.output_token_ids),
        OUTPUT[len(submit.output_token_ids) :][:1],
        attempt=submit.attempt,
        flags=FLAG_FIRST_TOKEN,
    )
    gateway.link.publish(worker, row)


def test_prefill_dies_under_it_twice_and_the_third_never_hears_of_it(start, caplog):
    gateway = start(prefills=3, decodes=1)
    with caplog.at_level(logging.ERROR, "baton_worker.gateway.serving.retry"):
        client = ask(gateway)
        killed = []
        for n in range(2):
            _, worker = submit_of(gateway, n)
            killed.append(worker)
            gateway.link.down(worker, "disconnected")
        answer = client.result()
    assert (answer.status_code, client.error["code"]) == (500, SUSPECT_REQUEST)
    assert all(worker in client.error["message"] for worker in killed)
    assert answer.headers["x-should-retry"] == "false", "clients try again after a 500 by default"
    assert len(gateway.link.sent(Submit)) == 2
    record = next(r for r in caplog.records if r.name == "baton_worker.gateway.serving.retry")
    assert record.request == answer.headers["x-request-id"]
    assert sorted(record.workers) == sorted(killed)
    refused = "baton_gateway_retries_refused_total"
    assert gateway.metric(refused, reason=SUSPECT_REQUEST) == 1
    ended = {"endpoint": "completion", "outcome": SUSPECT_REQUEST}
    assert gateway.metric("baton_gateway_requests_total", **ended) == 1


def test_openais_client_does_not_send_it_again(start):
    gateway = start(prefills=4, decodes=1)
    failed = []

    def create():
        with gateway.link.asking(), gateway.openai(max_retries=2) as client:
            try:
                client.completions.create(model="tiny", prompt=[70], max_tokens=4)
            except Exception as error:  # noqa: BLE001 - what it is, is asserted
                failed.append(error)

    gateway.link.begin_asking()
    thread = threading.Thread(target=create)
    thread.start()
    for n in range(2):
        gateway.link.down(submit_of(gateway, n)[1], "disconnected")
    thread.join(60)
    assert failed[0].code == SUSPECT_REQUEST
    assert len(gateway.link.sent(Submit)) == 2


def test_decode_dies_under_it_twice_behind_tokens(start):
    gateway = start(prefills=1, decodes=3)
    client = ask(gateway)
    for n in range(2):
        submit, worker = submit_of(gateway, n)
        first_token(gateway, submit, worker)
        gateway.link.down(submit.decode.worker_id, "silent")
    assert client.error["code"] == SUSPECT_REQUEST
    assert len(gateway.link.sent(Submit)) == 2


def test_one_prefill_and_one_decode_are_two(start):
    gateway = start(prefills=2, decodes=2)
    client = ask(gateway)
    _, worker = submit_of(gateway, 0)
    gateway.link.down(worker, "silent")
    submit, worker = submit_of(gateway, 1)
    first_token(gateway, submit, worker)
    gateway.link.down(submit.decode.worker_id, "silent")
    assert client.error["code"] == SUSPECT_REQUEST


def test_a_decode_that_holds_a_place_for_it_alone_does_not_die_of_it(start):
    gateway = start(prefills=1, decodes=4)
    client = ask(gateway)
    for n in range(3):
        submit, _ = submit_of(gateway, n)
        gateway.link.down(submit.decode.worker_id, "silent")
    submit_of(gateway, 3)
    gateway.link.resume()
    assert client.choices() == [OUTPUT]


def test_workers_that_leave_in_good_order_do_not_count(start):
    gateway = start(prefills=4, decodes=1)
    client = ask(gateway)
    for n in range(3):
        gateway.link.down(submit_of(gateway, n)[1], "bye")
    submit_of(gateway, 3)
    gateway.link.resume()
    assert client.choices() == [OUTPUT]


def test_bystanders_of_one_death_go_on_token_for_token(start):
    """Three requests share a worker that dies; which of them did it, nobody can know."""
    gateway = start(prefills=2, decodes=1, info={"max_running": 8})
    clients = [ask(gateway) for _ in range(6)]
    submits = [submit_of(gateway, n) for n in range(6)]
    on_first = [submit for submit, worker in submits if worker == "prefill-0"]
    assert len(on_first) == 3
    gateway.link.down("prefill-0", "disconnected")
    again = [submit_of(gateway, n) for n in range(6, 9)]
    assert {s.handle for s, _ in again} == {s.handle for s in on_first}
    gateway.link.resume()
    for client in clients:
        assert client.choices() == [OUTPUT]


def test_choices_that_share_a_death_count_it_once(start):
    gateway = start(prefills=2, decodes=1)
    client = ask(gateway, n=4)
    submits = [submit_of(gateway, n) for n in range(4)]
    assert sum(worker == "prefill-0" for _, worker in submits) == 2
    gateway.link.down("prefill-0", "disconnected")
    submit_of(gateway, 5)
    gateway.link.resume()
    assert client.choices() == [OUTPUT] * 4


def test_choices_on_many_workers_are_one_request(start):
    """Each choice has lost one worker only: the request has lost two."""
    gateway = start(prefills=4, decodes=1)
    client = ask(gateway, n=4)
    workers = [submit_of(gateway, n)[1] for n in range(4)]
    assert len(set(workers)) == 4
    gateway.link.down("prefill-0", "disconnected")
    submit_of(gateway, 4)
    gateway.link.down("prefill-1", "disconnected")
    assert client.error["code"] == SUSPECT_REQUEST
    assert gateway.service.requests.is_empty


def test_fewer_attempts_than_the_bound_end_it_as_ever(start_gateway):
    gateway = start_gateway(lambda submit: OUTPUT, max_retries=0)
    gateway.link.up("prefill-1", Role.PREFILL)
    gateway.link.pause()
    client = ask(gateway)
    gateway.link.down(submit_of(gateway, 0)[1], "disconnected")
    assert (client.result().status_code, client.error["code"]) == (503, "worker_lost")
    assert "x-should-retry" not in client.result().headers


def test_sent_again_it_ends_one_more_and_then_none(start, caplog):
    gateway = start(prefills=5, decodes=1)
    for n_killed, total in ((2, 2), (1, 3)):
        client = ask(gateway)
        for n in range(total - n_killed, total):
            gateway.link.down(submit_of(gateway, n)[1], "disconnected")
        assert (client.result().status_code, client.error["code"]) == (500, SUSPECT_REQUEST)
    with caplog.at_level(logging.WARNING, "baton_worker.gateway.serving.dispatch"):
        again = ask(gateway, seed=5)
        assert (again.result().status_code, again.error["code"]) == (400, SUSPECT_REQUEST)
    assert "a suspect request is refused" in [record.message for record in caplog.records]
    assert gateway.metric("baton_gateway_refusals_total", reason=SUSPECT_REQUEST) == 1
    other = ask(gateway, prompt=[70, 71, 73])
    submit_of(gateway, 3)
    gateway.link.resume()
    assert other.choices() == [OUTPUT]
    assert len(gateway.link.sent(Submit)) == 4


def test_what_stood_beside_two_deaths_is_served_when_it_is_sent_again(start):
    gateway = start(prefills=4, decodes=1)
    client = ask(gateway)
    for n in range(2):
        gateway.link.down(submit_of(gateway, n)[1], "disconnected")
    assert client.error["code"] == SUSPECT_REQUEST
    gateway.link.resume()
    assert ask(gateway).choices() == [OUTPUT]


def test_copies_beside_the_same_two_deaths_are_one_verdict(start):
    """A probe, or a prompt that many send, may stand beside them several times over."""
    gateway = start(prefills=2, decodes=1, info={"max_running": 16})
    clients = [ask(gateway, seed=n) for n in range(8)]
    for n in range(8):
        submit_of(gateway, n)
    gateway.link.down("prefill-0", "disconnected")
    submit_of(gateway, 11)
    gateway.link.up("prefill-2", Role.PREFILL, max_running=16)
    gateway.link.down("prefill-1", "disconnected")
    submit_of(gateway, 15)
    gateway.link.resume()
    assert sorted(client.result().status_code for client in clients) == [200] * 4 + [500] * 4
    assert ask(gateway).choices() == [OUTPUT]


def test_a_copy_that_waited_in_line_knows_the_verdict_when_it_begins(start_gateway):
    one = {"max_running": 1, "max_waiting": 0}
    gateway = start_gateway(
        lambda submit: OUTPUT, workers="m", info=one, max_retries=8, max_wait_seconds=600.0
    )
    gateway.link.pause()
    busy = ask(gateway, prompt=[81])
    submit_of(gateway, 0)
    gateway.link.up("mixed-1", Role.MIXED, **one)
    first = ask(gateway)
    assert submit_of(gateway, 1)[1] == "mixed-1"
    copy = ask(gateway, seed=5)
    gateway.wait_metric("baton_gateway_line_requests", 1)
    gateway.link.down("mixed-1", "disconnected")
    gateway.wait_metric("baton_gateway_waiting_retries", 1)
    gateway.link.up("mixed-2", Role.MIXED, **one)
    assert submit_of(gateway, 2)[1] == "mixed-2"
    gateway.link.down("mixed-2", "disconnected")
    assert first.error["code"] == SUSPECT_REQUEST
    gateway.link.up("mixed-3", Role.MIXED, **one)
    assert submit_of(gateway, 3)[1] == "mixed-3"
    gateway.link.down("mixed-3", "disconnected")
    assert (copy.result().status_code, copy.error["code"]) == (500, SUSPECT_REQUEST)
    again = ask(gateway)
    assert (again.result().status_code, again.error["code"]) == (400, SUSPECT_REQUEST)
    assert len(gateway.link.sent(Submit)) == 4
    gateway.link.resume()
    assert busy.result().status_code == 200


def test_a_copy_in_line_is_refused_when_two_verdicts_fall_before_its_turn(start_gateway):
    one = {"max_running": 1, "max_waiting": 0}
    gateway = start_gateway(
        lambda submit: OUTPUT, workers="m", info=one, max_retries=8, max_wait_seconds=600.0
    )
    other = ask(gateway, prompt=[80])
    assert other.result().status_code == 200
    gateway.link.pause()
    busy = ask(gateway, prompt=[81])
    submit_of(gateway, 1)
    copy = ask(gateway)
    gateway.wait_metric("baton_gateway_line_requests", 1)
    suspects = gateway.service.retrier.suspects
    known = next(ticket.value for ticket in gateway.service.dispatcher._queue._slots.waiting())
    asked = known.begin.args[0].generation.request
    for n in range(2):
        suspects.condemn(asked, n, gateway.service.dispatcher.now())
    gateway.link.resume()
    assert busy.result().status_code == 200
    assert (copy.result().status_code, copy.error["code"]) == (400, SUSPECT_REQUEST)
    assert len(gateway.link.sent(Submit)) == 2
