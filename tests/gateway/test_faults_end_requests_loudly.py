"""Whatever breaks behind the gateway: the client gets an explicit error, and nothing stays."""

import json
import threading
from contextlib import contextmanager

import pytest

from baton_testing.scripted_link import RowSpec
from baton_worker.identity import Role
from baton_worker.messages import Abort, Reserve, Submit
from baton_worker.records.columns import FLAG_ECHO, FLAG_FIRST_TOKEN, ErrorCode, Finish

BODY = {"model": "tiny", "prompt": [70, 71, 72], "max_tokens": 50, "stream": True}


class Stream:
    """A streamed completion read event by event, its request held on paused workers."""

    def __init__(self, gateway, response):
        self.gateway, self.response = gateway, response
        self.lines = response.iter_lines()

    def event(self):
        """The next event's data."""
        for line in self.lines:
            if line.startswith("data: "):
                return line[6:]
        return None

    def error(self):
        """The error that ends the stream; fails when anything else comes first."""
        error = json.loads(self.event())["error"]
        assert self.event() is None
        return error


@pytest.fixture
def gateway(start_gateway):
    running = start_gateway()
    running.link.pause()
    return running


@contextmanager
def streaming(gateway, **changes):
    """Open a stream whose first token has come from prefill; yields (stream, handle)."""
    with gateway.http() as client:
        link = gateway.link
        before = len(link.sent(Submit))
        request = client.build_request("POST", "/v1/completions", json=BODY | changes)
        published = threading.Thread(target=_first_token, args=(link, before))
        published.start()
        response = client.send(request, stream=True)
        published.join()
        stream = Stream(gateway, response)
        assert response.status_code == 200
        stream.event()
        yield stream, link.sent(Submit)[before][1].handle
        response.close()


def _first_token(link, before):
    link.wait_until(lambda: len(link.commands) >= 2 and _n_submits(link) > before)
    handle = next(c.handle for _, c in reversed(link.commands) if isinstance(c, Submit))
    link.publish("prefill-0", RowSpec(handle, 0, [70], flags=FLAG_FIRST_TOKEN))


def _n_submits(link):
    return sum(isinstance(c, Submit) for _, c in link.commands)


def aborted(link):
    return {worker for worker, _ in link.sent(Abort)}


def test_a_lost_decode_ends_the_stream_with_an_error(gateway):
    with streaming(gateway) as (stream, _):
        gateway.link.down("decode-0", "silent")
        assert stream.error()["code"] == "worker_lost"
    assert aborted(gateway.link) == {"prefill-0"}


def test_a_lost_prefill_ends_what_it_has_not_handed_over(gateway):
    with streaming(gateway) as (stream, _):
        gateway.link.down("prefill-0")
        assert stream.error()["code"] == "worker_lost"
    assert aborted(gateway.link) == {"decode-0"}


def test_a_lost_prefill_does_not_touch_what_decode_holds(gateway):
    with streaming(gateway) as (stream, handle):
        echo = RowSpec(handle, 0, [70], flags=FLAG_ECHO)
        gateway.link.publish("decode-0", echo)
        gateway.link.down("prefill-0")
        gateway.link.publish("decode-0", RowSpec(handle, 1, [71, 1], Finish.STOP))
        assert json.loads(stream.event())["choices"][0]["finish_reason"] == "stop"
        assert stream.event() == "[DONE]"


def test_a_handoff_that_prefill_gives_up_after_decode_spoke_changes_nothing(gateway):
    with streaming(gateway) as (stream, handle):
        link = gateway.link
        link.publish("decode-0", RowSpec(handle, 0, [70], flags=FLAG_ECHO))
        error = (ErrorCode.HANDOFF_TIMEOUT, "no acknowledgement")
        link.publish("prefill-0", RowSpec(handle, 0, finish=Finish.ERROR, error=error))
        link.publish("decode-0", RowSpec(handle, 1, [71, 1], Finish.STOP))
        assert json.loads(stream.event())["choices"][0]["finish_reason"] == "stop"
    assert gateway.metric("baton_gateway_rows_dropped_total", reason="released_worker") == 1


def test_rows_of_a_worker_that_has_no_part_in_a_request_are_dropped(gateway):
    with streaming(gateway) as (stream, handle):
        link = gateway.link
        link.up("other", Role.DECODE)
        link.publish("other", RowSpec(handle, 0, finish=Finish.ERROR))
        link.publish("decode-0", RowSpec(handle, 1, [71, 1], Finish.STOP))
        assert json.loads(stream.event())["choices"][0]["finish_reason"] == "stop"
    assert gateway.metric("baton_gateway_rows_dropped_total", reason="foreign_worker") == 1


def test_a_worker_that_went_before_it_was_told_fails_all_choices(gateway):
    gateway.link.do(lambda: gateway.link.workers.pop("prefill-0"))
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=BODY | {"n": 3})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")
    assert gateway.service.requests.is_empty
    assert len(gateway.link.sent(Reserve)) == 1
    assert {load.outstanding_requests for load in gateway.service.workers.loads()} == {0}


def test_a_row_that_waits_for_prefill_does_not_free_the_client_of_it(gateway):
    with gateway.http() as client:

        def lose():
            gateway.link.wait_until(lambda: _n_submits(gateway.link) > 0)
            handle = gateway.link.sent(Submit)[0][1].handle
            gateway.link.publish("decode-0", RowSpec(handle, 1, [71]))
            gateway.link.down("prefill-0")

        thread = threading.Thread(target=lose)
        thread.start()
        answer = client.post("/v1/completions", json=BODY)
        thread.join()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")


@pytest.mark.parametrize("stream", [True, False])
def test_before_the_first_token_the_error_is_a_status(gateway, stream):
    link = gateway.link

    def lose():
        link.wait_until(lambda: _n_submits(link) > 0)
        link.down("decode-0")

    thread = threading.Thread(target=lose)
    thread.start()
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=BODY | {"stream": stream})
    thread.join()
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "service_unavailable_error"


def test_lost_records_end_every_request_of_that_worker(gateway):
    with streaming(gateway) as (stream, _):
        gateway.link.lose("decode-0")
        assert "lost records 3 to 4" in stream.error()["message"]
    assert aborted(gateway.link) == {"prefill-0", "decode-0"}


def test_a_replaced_worker_ends_the_old_ones_requests_and_takes_new_ones(gateway):
    with streaming(gateway) as (stream, _):
        gateway.link.up("decode-0", Role.DECODE)
        assert stream.error()["code"] == "worker_lost"
    gateway.link.resume()
    with gateway.http() as client:
        assert client.post("/v1/completions", json=BODY | {"stream": False}).status_code == 200


@pytest.mark.parametrize(
    ("code", "status", "outcome"),
    [
        (ErrorCode.INTERNAL, 500, "error"),
        (ErrorCode.QUEUE_FULL, 429, "workers_full"),
        (ErrorCode.DECODE_FULL, 429, "workers_full"),
        (ErrorCode.HANDOFF_TIMEOUT, 503, "error"),
        (ErrorCode.INVALID_REQUEST, 400, "error"),
        (ErrorCode.INCOMPATIBLE, 503, "error"),
        (ErrorCode.DRAINING, 503, "error"),
        (ErrorCode.ARITHMETIC, 500, "error"),
    ],
)
def test_a_workers_error_row_becomes_a_status_with_its_detail(gateway, code, status, outcome):
    link = gateway.link

    def fail():
        link.wait_until(lambda: _n_submits(link) > 0)
        handle = link.sent(Submit)[0][1].handle
        spec = RowSpec(handle, 0, finish=Finish.ERROR, error=(code, "detail of it"))
        link.publish("prefill-0", spec)

    thread = threading.Thread(target=fail)
    thread.start()
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=BODY)
    thread.join()
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code.name.lower())
    assert "prefill-0: detail of it" in error["message"]
    assert aborted(link) == {"decode-0"}
    counted = {"endpoint": "completion", "outcome": outcome}
    assert gateway.metric("baton_gateway_requests_total", **counted) == 1


def test_a_workers_abort_ends_the_stream(gateway):
    with streaming(gateway) as (stream, handle):
        gateway.link.publish("decode-0", RowSpec(handle, 0, finish=Finish.ABORT))
        assert stream.error()["code"] == "worker_aborted"
    assert aborted(gateway.link) == {"prefill-0"}


def test_rows_that_contradict_each_other_end_the_stream(gateway):
    with streaming(gateway) as (stream, handle):
        gateway.link.publish("decode-0", RowSpec(handle, 0, [99], flags=FLAG_ECHO))
        assert stream.error()["code"] == "overlap_mismatch"
    assert gateway.metric("baton_gateway_overlap_mismatches_total") == 1


def test_a_gap_that_stays_open_ends_the_stream(gateway):
    with streaming(gateway) as (stream, handle):
        gateway.link.publish("decode-0", RowSpec(handle, 3, [71, 72]))
        assert stream.error()["code"] == "gap_timeout"
    assert gateway.metric("baton_gateway_gap_timeouts_total") == 1
    assert gateway.metric("baton_gateway_hold_rows") == 0


def test_missing_logprobs_are_an_error_and_not_a_null(gateway):
    link = gateway.link

    def first():
        link.wait_until(lambda: _n_submits(link) > 0)
        handle = link.sent(Submit)[0][1].handle
        link.publish("prefill-0", RowSpec(handle, 0, [70], width=0))

    thread = threading.Thread(target=first)
    thread.start()
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=BODY | {"logprobs": 1, "stream": False})
    thread.join()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "logprobs_missing")
    counted = {"endpoint": "completion", "outcome": "logprobs_missing"}
    assert gateway.metric("baton_gateway_requests_total", **counted) == 1


def test_a_request_beyond_its_time_is_504(start_gateway):
    gateway = start_gateway(request_timeout_seconds=0.2)
    gateway.link.pause()
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert aborted(gateway.link) == {"prefill-0", "decode-0"}


def test_no_usable_pair_is_503_and_not_ready(start_gateway):
    gateway = start_gateway(workers="p")
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_usable_pair")
        assert answer.headers["retry-after"]
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["reasons"]) == (503, ["no decode worker is linked"])
        gateway.link.up("decode-0", Role.DECODE)
        while client.get("/readyz").status_code != 200:
            pass
        gateway.link.down("decode-0")
        while client.get("/readyz").status_code != 503:
            pass


def test_a_full_gateway_is_429_with_retry_after(start_gateway):
    gateway = start_gateway(max_outstanding_requests=2, max_wait_seconds=0)
    gateway.link.pause()
    with streaming(gateway), gateway.http() as client:
        answer = client.post("/v1/completions", json=BODY | {"n": 2})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "gateway_full")
        assert answer.headers["retry-after"] == "1"
        assert "1 choices in hand" in answer.json()["error"]["message"]
        assert client.post("/v1/completions", json=BODY | {"n": 3}).status_code == 400
    assert gateway.metric("baton_gateway_refusals_total", reason="gateway_full") == 1


def test_full_workers_are_429_and_no_choice_is_half_sent(start_gateway):
    gateway = start_gateway(info={"max_running": 1, "max_waiting": 1}, max_wait_seconds=0)
    gateway.link.pause()
    with streaming(gateway), gateway.http() as client:
        told = list(gateway.link.commands)
        answer = client.post("/v1/completions", json=BODY | {"n": 2})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "workers_full")
        assert gateway.link.commands == told


def test_more_choices_than_all_workers_could_ever_have_are_a_400_with_the_most(start_gateway):
    """A 429 would have the client try again for ever."""
    gateway = start_gateway(workers="m", info={"max_running": 1, "max_waiting": 2})
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=BODY | {"n": 4})
        assert client.post("/v1/completions", json=BODY | {"n": 3}).status_code == 200
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "n")
    assert error["message"] == "4 choices at once: the most is 3"
