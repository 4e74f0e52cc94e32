"""No client keeps the others waiting: who holds fewest is next, and the line has an end."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_testing.scripted_link import RowSpec
from baton_worker.gateway.serving.slots import Slots, Ticket
from baton_worker.identity import Role
from baton_worker.messages import Submit
from baton_worker.records.columns import Finish

BODY = {"model": "tiny", "prompt": [70, 71], "max_tokens": 4}


def slots(capacity=16, max_waiting=4, **held):
    made = Slots(capacity, max_waiting)
    for client, n in held.items():
        made.take(client, n)
    return made


def ticket(client, n=1):
    return Ticket(client, n, None)


def test_one_client_may_have_all_but_an_eighth_when_nobody_else_wants_them():
    made = slots(16)
    assert made.most == 14
    made.take("greedy", 13)
    assert made.is_open_to("greedy", 1)
    made.take("greedy", 1)
    assert not made.is_open_to("greedy", 1)
    assert made.is_open_to("other", 2)


def test_who_holds_fewest_is_next_and_among_its_own_who_came_first():
    made = slots(16, greedy=10, modest=5, none=1)
    tickets = [ticket("greedy"), ticket("modest"), ticket("none"), ticket("none")]
    for one in tickets:
        made.join(one)
    made.release("greedy", 3)
    order = []
    for _ in range(3):
        one = made.next()
        made.leave(one)
        made.take(one.client, one.n_slots)
        order.append(one)
    assert order == [tickets[2], tickets[3], tickets[1]], "1, 2 and 5 slots, and not 7"


def test_a_client_that_waits_for_its_own_requests_holds_up_nobody():
    made = slots(16, greedy=14)
    made.join(ticket("greedy"))
    assert made.is_open_to("other", 2)
    assert made.next() is None


def test_a_wide_request_is_waited_for():
    made = slots(16, a=6, b=8)
    wide, narrow = ticket("a", 4), ticket("b", 1)
    made.join(wide)
    made.join(narrow)
    assert made.next() is None, "two are free: enough for the narrow one, whose client has more"
    made.release("b", 2)
    assert made.next() is wide


def test_who_cannot_begin_at_all_is_passed_by_its_own_client_too_and_then_goes_first():
    made = slots(16)
    wide, own, other = ticket("a", 4), ticket("a"), ticket("b")
    for one in (wide, own, other):
        made.join(one)
    wide.is_passed = True
    assert made.next() is own
    made.leave(own)
    made.leave(other)
    assert made.is_open_to("a", 1)
    assert made.is_open_to("b", 1)
    made.pass_nobody()
    assert made.next() is wide
    assert not made.is_open_to("b", 1)


def test_nobody_passes_those_who_wait():
    made = slots(4, a=3)
    made.join(ticket("b", 2))
    assert not made.is_open_to("c", 1)


def test_a_full_line_drops_the_newest_of_who_has_most_in_it():
    made = slots(2, 3, a=2)
    mine = [ticket("a") for _ in range(3)]
    assert [made.join(one) for one in mine] == [None] * 3
    other = ticket("b")
    assert made.join(other) is mine[2]
    last = ticket("a")
    assert made.join(last) is last
    assert made.waiting() == [*mine[:2], other]


STEPS = st.lists(
    st.tuples(st.sampled_from("jrln"), st.sampled_from("abc"), st.integers(1, 6)), max_size=80
)


@given(STEPS, st.integers(1, 20))
def test_slots_are_never_over_committed_and_the_next_is_always_a_least_holder(steps, capacity):
    made, held, line = Slots(capacity, 5), dict.fromkeys("abc", 0), []
    for kind, client, n in steps:
        if kind == "j" and n <= made.most:
            one = ticket(client, n)
            line.append(one)
            dropped = made.join(one)
            if dropped is not None:
                line.remove(dropped)
        elif kind == "r" and held[client]:
            made.release(client)
            held[client] -= 1
        elif kind == "l" and line:
            made.leave(line.pop(n % len(line)))
        elif (chosen := made.next()) is not None:
            eligible = [t.client for t in line if held[t.client] + t.n_slots <= made.most]
            first_of = {t.client: t for t in reversed(line)}
            assert chosen is first_of[chosen.client]
            heads = [c for c in eligible if first_of[c].n_slots + held[c] <= made.most]
            assert held[chosen.client] == min(held[c] for c in heads)
            made.leave(chosen)
            line.remove(chosen)
            made.take(chosen.client, chosen.n_slots)
            held[chosen.client] += chosen.n_slots
        assert made.used == sum(held.values()) <= capacity
        assert all(made.held_by(c) == held[c] <= made.most for c in "abc")
        assert made.n_waiting == len(line) <= 5


class Poster(threading.Thread):
    """Posts a completion and keeps the answer."""

    def __init__(self, gateway, key="none", **changes):
        super().__init__()
        self.gateway, self.body, self.answer = gateway, BODY | changes, None
        self.headers = {"authorization": f"Bearer {key}"}
        self.start()

    def run(self):
        with self.gateway.http(headers=self.headers) as client:
            self.answer = client.post("/v1/completions", json=self.body)

    def status(self):
        self.join(60)
        assert not self.is_alive()
        return self.answer.status_code


def wait_in_line(gateway, n):
    while gateway.service.dispatcher.n_waiting != n:
        pass


def submits(gateway):
    return [submit for _, submit in gateway.link.sent(Submit)]


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice\nbob\n")
    return str(path)


def test_a_full_gateway_lets_wait_and_then_serves(start_gateway):
    gateway = start_gateway(max_outstanding_requests=1, max_wait_seconds=60)
    gateway.link.pause()
    first = Poster(gateway)
    gateway.link.wait_until(lambda: len(gateway.link.commands) == 2)
    second = Poster(gateway)
    wait_in_line(gateway, 1)
    assert gateway.metric("baton_gateway_line_requests") == 1
    assert len(submits(gateway)) == 1
    gateway.link.resume()
    assert (first.status(), second.status()) == (200, 200)
    assert gateway.metric("baton_gateway_line_requests") == 0
    assert gateway.metric("baton_gateway_line_wait_seconds_count") == 1


def test_full_workers_let_wait_and_then_serve(start_gateway):
    gateway = start_gateway(workers="m", info={"max_running": 1, "max_waiting": 0})
    gateway.link.pause()
    posters = [Poster(gateway) for _ in range(3)]
    wait_in_line(gateway, 2)
    gateway.link.resume()
    assert [poster.status() for poster in posters] == [200] * 3


def test_a_worker_that_comes_serves_those_who_wait(start_gateway):
    gateway = start_gateway(workers="m", info={"max_running": 1, "max_waiting": 0})
    gateway.link.pause()
    posters = [Poster(gateway) for _ in range(2)]
    wait_in_line(gateway, 1)
    gateway.link.up("mixed-1", Role.MIXED, max_running=1, max_waiting=0)
    gateway.link.wait_until(lambda: len(gateway.link.commands) == 2)
    gateway.link.resume()
    assert [poster.status() for poster in posters] == [200] * 2


def test_another_key_goes_before_the_second_batch_of_one_that_took_all(start_gateway, keys_file):
    """Alice has both slots and another request in line; Bob, who came last, is served first."""
    gateway = start_gateway(
        max_outstanding_requests=2, max_wait_seconds=60, api_keys_file=keys_file
    )
    gateway.link.pause()
    running = [Poster(gateway, "alice", prompt=[70, 70 + i]) for i in range(2)]
    gateway.link.wait_until(lambda: len(submits_of(gateway)) == 2)
    again = Poster(gateway, "alice", prompt=[99, 98])
    wait_in_line(gateway, 1)
    bob = Poster(gateway, "bob", prompt=[80, 81])
    wait_in_line(gateway, 2)
    first = submits(gateway)[0]
    gateway.link.publish("decode-0", RowSpec(first.handle, 0, [70, 1], Finish.STOP))
    gateway.link.wait_until(lambda: len(submits_of(gateway)) == 3)
    assert submits(gateway)[2].prompt_token_ids == (80, 81)
    gateway.link.resume()
    assert [poster.status() for poster in (*running, again, bob)] == [200] * 4


def submits_of(gateway):
    """As `submits`, for conditions that are looked at with the link's lock held."""
    return [c for _, c in gateway.link.commands if isinstance(c, Submit)]


def test_who_waits_too_long_is_told_to_come_again(start_gateway):
    gateway = start_gateway(max_outstanding_requests=1, max_wait_seconds=0.1)
    gateway.link.pause()
    first = Poster(gateway)
    gateway.link.wait_until(lambda: len(gateway.link.commands) == 2)
    second = Poster(gateway)
    assert second.status() == 429
    assert second.answer.json()["error"]["code"] == "gateway_full"
    assert second.answer.headers["retry-after"] == "1"
    gateway.link.resume()
    assert first.status() == 200
    assert gateway.metric("baton_gateway_refusals_total", reason="gateway_full") == 1


def test_a_line_that_is_full_refuses_at_once(start_gateway):
    gateway = start_gateway(max_outstanding_requests=1, max_wait_seconds=60, max_waiting_requests=1)
    gateway.link.pause()
    first = Poster(gateway)
    gateway.link.wait_until(lambda: len(gateway.link.commands) == 2)
    second = Poster(gateway)
    wait_in_line(gateway, 1)
    third = Poster(gateway)
    assert third.status() == 429
    assert third.answer.json()["error"]["code"] == "line_full"
    gateway.link.resume()
    assert (first.status(), second.status()) == (200, 200)


def test_a_client_that_leaves_the_line_is_never_served(start_gateway):
    gateway = start_gateway(max_outstanding_requests=1, max_wait_seconds=60)
    gateway.link.pause()
    first = Poster(gateway)
    gateway.link.wait_until(lambda: len(gateway.link.commands) == 2)
    body = json.dumps(BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 60) as leaves:
        leaves.sendall(head.encode() + body)
        wait_in_line(gateway, 1)
    wait_in_line(gateway, 0)
    gateway.link.resume()
    assert first.status() == 200
    assert len(submits(gateway)) == 1


def test_a_gateway_that_ends_refuses_those_who_wait(start_gateway):
    gateway = start_gateway(max_outstanding_requests=1, max_wait_seconds=60)
    gateway.link.pause()
    posters = [Poster(gateway), Poster(gateway)]
    wait_in_line(gateway, 1)
    gateway.stop()
    assert [poster.status() for poster in posters] == [503, 503]
    assert {p.answer.json()["error"]["code"] for p in posters} == {"shutting_down"}


def test_more_choices_than_a_request_may_have_are_a_400_at_once(start_gateway):
    gateway = start_gateway(max_choices=8)
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=BODY | {"n": 9})
        assert client.post("/v1/completions", json=BODY | {"n": 8}).status_code == 200
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "n")
    assert error["message"] == "9 choices at once: the most is 8"


def test_more_choices_than_one_client_may_hold_are_a_400_at_once(start_gateway):
    gateway = start_gateway(max_outstanding_requests=16, max_choices=16)
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=BODY | {"n": 15})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "15 choices at once: the most is 14"


def test_a_wide_request_that_waits_is_tried_again_only_when_room_may_have_come(start_gateway):
    """What its own plan took and gave back is no room that has come: the loop would not rest."""
    gateway = start_gateway(workers="m", info={"max_running": 2, "max_waiting": 0})
    gateway.link.pause()
    first = Poster(gateway)
    gateway.link.wait_until(lambda: len(gateway.link.commands) == 1)
    table, tried = gateway.service.workers, []
    assign = table.assign
    table.assign = lambda *args: tried.append(args) or assign(*args)
    wide = Poster(gateway, n=2)
    wait_in_line(gateway, 1)
    with gateway.http() as client:
        for _ in range(50):
            assert client.get("/healthz").status_code == 200
    assert len(tried) <= 6, "two choices, when it came and when the line was looked at"
    gateway.link.resume()
    assert (first.status(), wide.status()) == (200, 200)


def eject(gateway, worker):
    table = gateway.service.workers
    while not table.failed(worker, table.now(), "broken", is_full=False):
        pass  # it may not have come yet, and then it takes some failures


def test_what_needs_an_ejected_worker_is_passed_and_is_first_when_that_is_tried(start_gateway):
    """Two workers of two places; three choices at once need both, one of which is ejected."""
    info = {"max_running": 2, "max_waiting": 0}
    gateway = start_gateway(workers="m", info=info, max_wait_seconds=600)
    gateway.link.up("mixed-1", Role.MIXED, **info)
    now = [1000.0]
    table = gateway.service.workers
    gateway.link.do(lambda: setattr(table, "_clock", lambda: now[0]))
    eject(gateway, "mixed-1")
    wide = Poster(gateway, n=3)
    wait_in_line(gateway, 1)
    assert [Poster(gateway).status() for _ in range(5)] == [200] * 5, "who comes later passes it"
    assert {worker for worker, _ in gateway.link.commands} == {"mixed-0"}
    assert gateway.service.dispatcher.n_waiting == 1
    now[0] += 3600
    assert wide.status() == 200, "it tries the worker as a whole, with as many choices as it needs"
    assert {worker for worker, _ in gateway.link.commands} == {"mixed-0", "mixed-1"}


def test_what_needs_all_workers_is_waited_for_once_they_are_used_again(start_gateway):
    info = {"max_running": 2, "max_waiting": 0}
    gateway = start_gateway(workers="m", info=info, max_wait_seconds=600)
    gateway.link.up("mixed-1", Role.MIXED, **info)
    gateway.link.pause()
    now = [1000.0]
    table = gateway.service.workers
    gateway.link.do(lambda: setattr(table, "_clock", lambda: now[0]))
    eject(gateway, "mixed-1")
    first = Poster(gateway)
    gateway.link.wait_until(lambda: len(submits_of(gateway)) == 1)
    wide = Poster(gateway, n=4)
    wait_in_line(gateway, 1)
    now[0] += 3600
    while any(load.is_ejected for load in table.loads()):
        pass
    narrow = Poster(gateway, prompt=[99])
    wait_in_line(gateway, 2)
    assert len(submits(gateway)) == 1, "there is room for it, and it came later"
    gateway.link.resume()
    assert [each.status() for each in (first, wide, narrow)] == [200] * 3
    assert [s.prompt_token_ids for s in submits(gateway)[1:5]] == [(70, 71)] * 4


def test_prompts_of_one_request_need_not_all_fit_every_worker(start_gateway):
    """One long prompt fits one worker's context, which has one place; it is busy for a while."""
    info = {"max_running": 1, "max_waiting": 0}
    gateway = start_gateway(workers="m", info=info, max_wait_seconds=60)
    for n in range(2):
        gateway.link.up(f"small-{n}", Role.MIXED, max_running=1, max_waiting=0, max_model_len=64)
    gateway.link.pause()
    busy = Poster(gateway, prompt=[70] * 100)
    gateway.link.wait_until(lambda: len(gateway.link.commands) == 1)
    mixed = Poster(gateway, prompt=[[70], [70] * 100, [71]])
    wait_in_line(gateway, 1)
    gateway.link.resume()
    assert (busy.status(), mixed.status()) == (200, 200)


def test_who_fits_no_worker_any_more_holds_up_nobody_in_line(start_gateway):
    gateway = start_gateway(
        workers="m", info={"max_running": 1, "max_waiting": 0}, max_wait_seconds=60
    )
    gateway.link.up("small-0", Role.MIXED, max_running=1, max_waiting=0, max_model_len=64)
    gateway.link.pause()
    posters = [Poster(gateway, prompt=[70] * 100)]
    gateway.link.wait_until(lambda: len(gateway.link.commands) == 1)
    posters.append(Poster(gateway))
    gateway.link.wait_until(lambda: len(gateway.link.commands) == 2)
    long = Poster(gateway, prompt=[70] * 100)
    wait_in_line(gateway, 1)
    gateway.link.down("mixed-0")
    assert long.status() == 503
    assert long.answer.json()["error"]["code"] == "no_usable_pair"
    gateway.link.up("small-1", Role.MIXED, max_running=1, max_waiting=0, max_model_len=64)
    posters.append(Poster(gateway))
    gateway.link.wait_until(lambda: len(gateway.link.commands) == 3)
    gateway.link.resume()
    assert [poster.status() for poster in posters[1:]] == [200, 200]
