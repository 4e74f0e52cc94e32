"""Between link and loop: acknowledgement after applying, lag, draining, rows that harm one only."""

import time

import msgspec
import pytest

from baton_testing.scripted_link import CREDIT_FRAMES, RowSpec
from baton_worker.gateway.output.sequence import SequenceOutput
from baton_worker.identity import Role
from baton_worker.messages import Abort, Reserve

BODY = {"model": "tiny", "prompt": "the fox", "max_tokens": 40}


def test_every_record_is_acknowledged_also_those_nobody_waits_for(start_gateway):
    gateway = start_gateway()
    link, worker = gateway.link, gateway.link.workers["decode-0"]
    for i in range(3):
        link.publish("decode-0", RowSpec(123, i, [70]))
    link.wait_until(lambda: worker.applied == worker.delivered == 2)
    assert gateway.metric("baton_gateway_rows_dropped_total", reason="unknown_request") == 3


def test_a_worker_that_goes_on_with_a_forgotten_request_is_told_to_stop_once(start_gateway):
    gateway = start_gateway()
    link, worker = gateway.link, gateway.link.workers["decode-0"]
    for i in range(3):
        link.publish("decode-0", RowSpec(123, i, [70]))
    link.wait_until(lambda: worker.applied == 2)
    assert link.sent(Abort) == [("decode-0", Abort(123, 0))]


def test_a_worker_that_was_given_up_is_told_again_when_it_comes_back(start_gateway):
    gateway = start_gateway()
    link = gateway.link
    link.publish("decode-0", RowSpec(123, 0, [70]))
    link.wait_until(lambda: len(link.sent(Abort)) == 1)
    link.down("decode-0")
    link.up("decode-0", Role.DECODE)
    link.publish("decode-0", RowSpec(123, 1, [70]))
    link.wait_until(lambda: len(link.sent(Abort)) == 2)


def test_a_longer_answer_than_the_credit_needs_acknowledgements_to_go_on(start_gateway):
    gateway = start_gateway(lambda submit: [70] * 400, per_step=1)
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=BODY | {"max_tokens": 400})
    assert answer.json()["usage"]["completion_tokens"] == 400
    assert gateway.link.workers["decode-0"].delivered > 5 * CREDIT_FRAMES


def test_a_blocked_loop_is_reported_as_lag(start_gateway):
    gateway = start_gateway()
    loop = gateway.service._ticker.get_loop()
    loop.call_soon_threadsafe(time.sleep, 0.3)
    gateway.link.wait_until(lambda: max(gateway.link.lags, default=0.0) >= 0.15)


def test_a_draining_worker_gets_no_new_request(start_gateway):
    gateway = start_gateway()
    link = gateway.link
    link.up("decode-1", Role.DECODE)
    info = link.workers["decode-0"].info
    link.announce("decode-0", msgspec.structs.replace(info, draining=True))
    with gateway.http() as client:
        for _ in range(4):
            assert client.post("/v1/completions", json=BODY).status_code == 200
    assert {worker for worker, _ in link.sent(Reserve)} == {"decode-1"}


def test_a_row_that_cannot_be_applied_harms_its_own_request_alone(
    start_gateway, monkeypatch, caplog
):
    push = SequenceOutput.push

    def fail_for_the_marked(self, parts, finish):
        if any(256 in part.row.tokens for part in parts):
            raise RuntimeError("a defect")
        return push(self, parts, finish)

    monkeypatch.setattr(SequenceOutput, "push", fail_for_the_marked)
    gateway = start_gateway()
    with gateway.http() as client:
        bad = client.post("/v1/completions", json=BODY | {"prompt": [256, 70]})
        good = client.post("/v1/completions", json=BODY)
    assert (bad.status_code, bad.json()["error"]["code"]) == (500, "internal")
    assert good.status_code == 200
    assert gateway.metric("baton_loop_faults_total", where="row") == 1
    assert "a defect" in caplog.text


@pytest.mark.parametrize("role", [Role.PREFILL, Role.MIXED])
def test_an_end_at_the_first_token_frees_the_reservation(start_gateway, role):
    gateway = start_gateway(lambda submit: [1], workers="pd" if role is Role.PREFILL else "m")
    link = gateway.link
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=BODY)
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert answer.json()["usage"]["completion_tokens"] == 1
    told = {worker for worker, _ in link.sent(Abort)}
    assert told == ({"decode-0"} if role is Role.PREFILL else set())
    link.do(lambda: None)
    assert link.held() == 0
