"""A request whose worker is lost goes on elsewhere: no token twice, none lost, or a clear error."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager

import pytest

from baton_testing.scripted_link import RowSpec, logprob_of
from baton_worker.gateway.output.merge import RowMerge
from baton_worker.identity import RequestKey, Role
from baton_worker.messages import FEATURES, Abort, Submit
from baton_worker.records.columns import FLAG_ECHO, FLAG_FIRST_TOKEN, ErrorCode, Finish
from baton_worker.records.rows import Row
from baton_worker.records.scored import ScoredRow
from baton_worker.sampling import LOGPROB_PARAMS

OUTPUT = [100 + n for n in range(12)]
BODY = {
    "model": "tiny", "prompt": [70, 71, 72], "max_tokens": len(OUTPUT), "stream": True,
    "return_token_ids": True, "logprobs": 1, "include_step_details": True,
}  # fmt: skip


class Client(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, gateway, **changes):
        super().__init__()
        self.gateway, self.body = gateway, BODY | changes
        self.tokens, self.logprobs, self.error, self.finish = [], [], None, ""
        self.usage = None
        self.got = threading.Condition()
        gateway.link.begin_asking()

    def run(self):
        with (
            self.gateway.link.asking(),
            self.gateway.http() as http,
            http.stream("POST", "/v1/completions", json=self.body) as reply,
        ):
            for line in reply.iter_lines():
                if line.startswith("data: {") or (
                    not line.startswith("data: ") and "error" in line
                ):
                    self.take(json.loads(line.removeprefix("data: ")))

    def take(self, event):
        with self.got:
            self.error = event.get("error", self.error)
            self.usage = event.get("usage", self.usage)
            for choice in event.get("choices", ()):
                self.tokens += choice["token_ids"]
                self.logprobs += choice["logprobs"]["token_logprobs"]
                self.finish = choice["finish_reason"] or self.finish
            self.got.notify_all()

    def wait_tokens(self, count):
        with self.got:
            assert self.got.wait_for(lambda: len(self.tokens) >= count, 60)


@contextmanager
def reading(gateway, **changes):
    client = Client(gateway, **changes)
    client.start()
    yield client
    client.join(60)
    assert not client.is_alive()


@pytest.fixture
def gateway(start_gateway):
    """Two decode workers, which rest: tests publish by hand, or let them run with `resume`."""
    running = start_gateway(lambda submit: OUTPUT)
    running.link.up("decode-1", Role.DECODE)
    running.link.pause()
    return running


def submit_of(gateway, attempt):
    """Wait for an attempt's SUBMIT; return it, with the names of its prefill and decode workers."""
    link = gateway.link
    link.wait_told(lambda: sum(isinstance(c, Submit) for _, c in link.commands) > attempt)
    worker, submit = link.sent(Submit)[attempt]
    return submit, worker, submit.decode.worker_id if submit.decode else ""


def test_a_decode_lost_before_its_first_token_is_replaced_behind_prefills_token(gateway):
    with reading(gateway, priority=3, cache_salt="x", min_p=0.1) as client:
        first, prefill, decode = submit_of(gateway, 0)
        assert (first.priority, first.sampling.min_p) == (3, 0.1)
        row = RowSpec(first.handle, 0, OUTPUT[:1], width=2, flags=FLAG_FIRST_TOKEN)
        gateway.link.publish(prefill, row)
        client.wait_tokens(1)
        gateway.link.down(decode)
        again, _, other = submit_of(gateway, 1)
        assert other != decode
        assert (again.handle, again.attempt) == (first.handle, 1)
        assert again.fields() == first.fields() | {"output_token_ids": tuple(OUTPUT[:1])}
        gateway.link.resume()
    assert client.error is None
    assert client.tokens == OUTPUT
    assert client.logprobs == pytest.approx(
        [logprob_of(token, at) for at, token in enumerate(OUTPUT)], abs=1e-6
    )
    assert (prefill, 0) in [(w, a.attempt) for w, a in gateway.link.sent(Abort)]
    assert gateway.metric("baton_gateway_retries_total", how="from_token") == 1
    assert gateway.metric("baton_gateway_retries_total", how="from_start") == 0


def test_a_prefill_lost_before_any_token_is_replaced_from_the_start(gateway):
    gateway.link.up("prefill-1", Role.PREFILL)
    with reading(gateway) as client:
        _, prefill, _ = submit_of(gateway, 0)
        gateway.link.down(prefill)
        again, other, _ = submit_of(gateway, 1)
        assert other != prefill
        assert again.output_token_ids == ()
        gateway.link.resume()
    assert client.tokens == OUTPUT
    assert gateway.metric("baton_gateway_retries_total", how="from_start") == 1


def test_requests_of_a_lost_pod_with_both_roles_go_on_in_another(start_gateway):
    gateway = start_gateway(lambda submit: OUTPUT)
    link = gateway.link
    for pod in ("a", "b"):
        for role in (Role.PREFILL, Role.DECODE):
            link.up(f"{pod}-{role.label}", role, pair_group=pod)
    for alone in ("prefill-0", "decode-0"):
        link.down(alone)
    link.pause()
    with reading(gateway) as client:
        first, prefill, decode = submit_of(gateway, 0)
        assert {prefill, decode} in ({"a-prefill", "a-decode"}, {"b-prefill", "b-decode"})
        link.publish(prefill, RowSpec(first.handle, 0, OUTPUT[:1], width=2))
        link.publish(decode, RowSpec(first.handle, 1, OUTPUT[1:6], width=2))
        client.wait_tokens(6)
        link.down(prefill)
        link.down(decode)
        again, other, its_own = submit_of(gateway, 1)
        assert {other, its_own} == {"a-prefill", "a-decode", "b-prefill", "b-decode"} - {
            prefill,
            decode,
        }
        assert again.output_token_ids == tuple(OUTPUT[:6])
        link.resume()
    assert client.error is None
    assert client.tokens == OUTPUT


@pytest.mark.parametrize("has_answered", [True, False], ids=["a-token-came", "no-token-came"])
def test_what_one_model_began_no_other_goes_on_with(gateway, has_answered):
    """As when a worker dies in a rollout: only the new revision is left."""
    with reading(gateway) as client:
        submit, prefill, decode = submit_of(gateway, 0)
        if has_answered:
            row = RowSpec(submit.handle, 0, OUTPUT[:1], width=2, flags=FLAG_FIRST_TOKEN)
            gateway.link.publish(prefill, row)
            client.wait_tokens(1)
        for name, role in (("prefill-9", Role.PREFILL), ("decode-9", Role.DECODE)):
            gateway.link.up(name, role, revision="r2", model_fingerprint="b" * 32)
        gateway.link.down(prefill)
        for name in {"decode-0", "decode-1"} - {decode}:
            gateway.link.down(name)
        gateway.link.down(decode)
        if not has_answered:
            again, other, _ = submit_of(gateway, 1)
            assert (other, again.output_token_ids) == ("prefill-9", ())
        gateway.link.resume()
    assert client.tokens == (OUTPUT[:1] if has_answered else OUTPUT)
    assert (client.error is not None) is has_answered


@pytest.mark.parametrize("has_answered", [True, False], ids=["a-token-came", "no-token-came"])
def test_cached_tokens_are_those_of_the_attempt_that_gave_the_first_token(gateway, has_answered):
    gateway.link.up("prefill-1", Role.PREFILL)
    with reading(gateway, stream_options={"include_usage": True}) as client:
        submit, prefill, _ = submit_of(gateway, 0)
        if has_answered:
            first = RowSpec(submit.handle, 0, OUTPUT[:1], width=2, reused=2)
            gateway.link.publish(prefill, first)
            client.wait_tokens(1)
        gateway.link.down(prefill)
        submit_of(gateway, 1)
        gateway.link.reused = lambda submit: 1
        gateway.link.resume()
    assert client.tokens == OUTPUT
    assert client.usage["prompt_tokens_details"] == {"cached_tokens": 2 if has_answered else 1}


def test_a_decode_lost_mid_stream_is_replaced_and_its_late_rows_change_nothing(gateway):
    with reading(gateway) as client:
        first, prefill, decode = submit_of(gateway, 0)
        handle, link = first.handle, gateway.link
        link.publish(prefill, RowSpec(handle, 0, OUTPUT[:1], width=2))
        link.publish(decode, RowSpec(handle, 1, OUTPUT[1:6], width=2))
        client.wait_tokens(6)
        link.down(decode)
        again, _, other = submit_of(gateway, 1)
        assert again.output_token_ids == tuple(OUTPUT[:6])
        link.publish(prefill, RowSpec(handle, 6, [1, 2, 3], width=2))  # of attempt 0
        link.publish(other, RowSpec(handle, 0, OUTPUT[:1], width=2, flags=FLAG_ECHO))
        link.resume()
    assert client.tokens == OUTPUT
    assert client.finish == "length"
    assert gateway.metric("baton_gateway_rows_dropped_total", reason="stale_attempt") >= 1


def test_a_row_of_the_old_attempt_does_not_let_go_of_the_new_prefill(gateway):
    gateway.link.up("prefill-1", Role.PREFILL)
    with reading(gateway) as client:
        first, prefill, decode = submit_of(gateway, 0)
        link = gateway.link
        link.publish(prefill, RowSpec(first.handle, 0, OUTPUT[:1], width=2))
        client.wait_tokens(1)
        link.down(prefill)
        again, other, same = submit_of(gateway, 1)
        live = gateway.service.requests.get(first.handle)
        assert live is not None
        if same == decode:
            link.publish(decode, RowSpec(first.handle, 0, OUTPUT[:1], flags=FLAG_ECHO))
        link.publish(other, RowSpec(again.handle, 1, OUTPUT[1:2], width=2, attempt=1))
        client.wait_tokens(2)
        assert other in live.sources, "only decode's rows of this attempt free the client of it"
        link.resume()
    assert client.tokens == OUTPUT


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.HANDOFF_TIMEOUT,
        ErrorCode.HANDOFF_PEER_LOST,
        ErrorCode.HANDOFF_REFUSED,
        ErrorCode.DECODE_FULL,
    ],
)
def test_a_handoff_that_fails_is_tried_with_another_decode(gateway, code):
    with reading(gateway) as client:
        first, prefill, decode = submit_of(gateway, 0)
        link = gateway.link
        link.publish(prefill, RowSpec(first.handle, 0, OUTPUT[:1], width=2))
        ended = RowSpec(first.handle, 1, finish=Finish.ERROR, error=(code, "no luck"))
        link.publish(prefill, ended)
        _, same_prefill, other = submit_of(gateway, 1)
        assert same_prefill == prefill
        assert other != decode
        link.resume()
    assert client.tokens == OUTPUT


def test_a_full_decode_is_left_for_another(gateway):
    with reading(gateway) as client:
        first, _, decode = submit_of(gateway, 0)
        error = (ErrorCode.DECODE_FULL, "no place left")
        ended = RowSpec(first.handle, 0, finish=Finish.ERROR, error=error)
        gateway.link.publish(decode, ended)
        _, _, other = submit_of(gateway, 1)
        assert other != decode
        gateway.link.resume()
    assert client.tokens == OUTPUT


def test_a_fault_of_the_request_is_not_tried_again(gateway):
    gateway.link.up("prefill-1", Role.PREFILL)
    with reading(gateway) as client:
        first, prefill, _ = submit_of(gateway, 0)
        error = (ErrorCode.INVALID_REQUEST, "top_p is 7")
        row = RowSpec(first.handle, 0, finish=Finish.ERROR, error=error)
        gateway.link.publish(prefill, row)
    assert client.error["code"] == "invalid_request"
    assert len(gateway.link.sent(Submit)) == 1


def test_without_another_worker_the_request_ends_with_an_error(start_gateway):
    gateway = start_gateway(lambda submit: OUTPUT)
    gateway.link.pause()
    with reading(gateway) as client:
        _, _, decode = submit_of(gateway, 0)
        gateway.link.down(decode)
    assert client.error["code"] == "worker_lost"
    assert gateway.metric("baton_gateway_retries_refused_total", reason="no_workers") == 1


def test_attempts_are_counted_and_end(start_gateway):
    gateway = start_gateway(lambda submit: OUTPUT, max_retries=1)
    for name in ("decode-1", "decode-2"):
        gateway.link.up(name, Role.DECODE)
    gateway.link.pause()
    with reading(gateway) as client:
        for attempt in range(2):
            gateway.link.down(submit_of(gateway, attempt)[2])
    assert client.error["code"] == "worker_lost"
    assert len(gateway.link.sent(Submit)) == 2
    assert gateway.metric("baton_gateway_retries_refused_total", reason="attempts") == 1


def test_a_worker_that_cannot_go_on_behind_tokens_is_not_asked_to(start_gateway):
    old = {"features": tuple(f for f in FEATURES if f == LOGPROB_PARAMS)}
    gateway = start_gateway(lambda submit: OUTPUT, info=old)
    gateway.link.up("decode-1", Role.DECODE, **old)
    gateway.link.pause()
    with reading(gateway) as client:
        first, prefill, decode = submit_of(gateway, 0)
        gateway.link.publish(prefill, RowSpec(first.handle, 0, OUTPUT[:1], width=2))
        client.wait_tokens(1)
        gateway.link.down(decode)
    assert client.tokens == OUTPUT[:1]
    assert client.error["code"] == "worker_lost"


def test_each_choice_moves_alone(gateway):
    with reading(gateway, n=2, stream=True) as client:
        submits = [submit_of(gateway, n) for n in range(2)]
        decodes = {decode for _, _, decode in submits}
        assert len(decodes) == 2, "the two choices take turns"
        gateway.link.down(submits[0][2])
        again, _, other = submit_of(gateway, 2)
        assert again.handle == submits[0][0].handle
        assert other == submits[1][2]
        gateway.link.resume()
    assert client.error is None
    assert sorted(client.tokens) == sorted(OUTPUT * 2)


def prompt_row(first, tokens, attempt):
    told = ScoredRow(first, tokens, 1, [-1.0] * len(tokens), [1] * len(tokens), [], [])
    return Row(1, attempt, 0, [], 0, 0, [], [], [], [], [], prompt_tokens=told)


def output_row(position, tokens, attempt):
    return Row(1, attempt, position, tokens, 0, 0, [], [], [], [], [])


@pytest.mark.parametrize("n_told", [2, 4])
def test_a_prompt_is_told_whole_and_once_whatever_attempt_tells_it(n_told):
    """Prompt of 5 tokens, the first without logprobs; the first attempt tells some, or all."""
    merge = RowMerge(0, 5)
    told = list(merge.offer(prompt_row(1, [41, 42, 43, 44][:n_told], 0), 0.0).prompt)
    merge.offer(output_row(1, [8], 0), 0.0)
    assert merge.held_rows == 1
    assert merge.begin_attempt(1) == 1
    assert merge.held_rows == 0
    told += merge.offer(prompt_row(1, [41, 42, 43, 44], 1), 0.0).prompt
    assert [token for row in told for token in row.tokens] == [41, 42, 43, 44]
    merge.offer(output_row(0, [7], 1), 0.0)
    assert merge.offer(output_row(0, [9], 0), 0.0).stale
    assert merge.delivered == (7,)


def test_a_later_attempt_is_not_asked_for_a_prompt_that_was_told(gateway):
    """Its blocks may then come from the prefix cache."""
    with reading(gateway, prompt_logprobs=1) as client:
        first, prefill, decode = submit_of(gateway, 0)
        link = gateway.link
        row = RowSpec(first.handle, 0, OUTPUT[:1], width=2, flags=FLAG_FIRST_TOKEN)
        link.publish(prefill, *link.prompt_rows(RequestKey(first.handle, 0), first), row)
        client.wait_tokens(1)
        link.down(decode)
        again, _, _ = submit_of(gateway, 1)
        assert (first.logprobs.prompt_k, again.logprobs.prompt_k) == (1, -1)
        link.resume()
    assert client.error is None
    assert client.tokens == OUTPUT


def test_a_later_attempt_tells_a_prompt_of_which_a_part_was_lost(gateway):
    with reading(gateway, prompt=[*range(70, 79)], prompt_logprobs=1) as client:
        first, prefill, decode = submit_of(gateway, 0)
        link = gateway.link
        told = link.prompt_rows(RequestKey(first.handle, 0), first)
        link.publish(prefill, told[0])
        link.down(decode)
        again, _, _ = submit_of(gateway, 1)
        assert again.logprobs.prompt_k == 1
        link.resume()
    assert client.error is None
    assert client.tokens == OUTPUT


def test_a_worker_that_was_only_silent_is_told_of_what_ended_meanwhile(gateway):
    """A place kept for a handoff that nobody will make sends no row that would give it away."""
    link = gateway.link
    with reading(gateway) as client:
        first, _, decode = submit_of(gateway, 0)
        silent = link.workers[decode]
        link.do(lambda: None)  # its Reserve has arrived
        assert RequestKey(first.handle, 0) in silent.reserved
        link.down(decode)
        submit_of(gateway, 1)
        link.resume()
    assert client.tokens == OUTPUT
    assert silent.reserved, "nobody could tell it"
    link.back(silent)
    link.wait_until(lambda: (decode, Abort(first.handle, 0)) in link.commands)
    link.do(lambda: None)
    assert not silent.reserved


def test_a_worker_that_fell_silent_behind_an_abort_is_told_again(gateway):
    """The abort was sent; whether it arrived, nobody knows."""
    link = gateway.link
    link.publish("decode-0", RowSpec(123, 0, [70]))
    link.wait_until(lambda: len(link.sent(Abort)) == 1)
    silent = link.workers["decode-0"]
    link.down("decode-0")
    link.back(silent)
    link.wait_until(lambda: link.sent(Abort) == [("decode-0", Abort(123, 0))] * 2)
