"""Every choice has a turn, in the order in which the gateway gave them out, and keeps it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from baton_worker.identity import Role
from baton_worker.messages import Submit

TEXT = {"model": "tiny", "prompt": "a stop here", "max_tokens": 2}


def turns_of(gateway) -> list[int]:
    return [submit.turn for _, submit in gateway.link.sent(Submit)]


def wait_submits(gateway, count):
    commands = gateway.link.commands
    gateway.link.wait_until(lambda: sum(isinstance(c, Submit) for _, c in commands) == count)


def test_turns_go_up_over_requests_and_their_choices(start_gateway):
    gateway = start_gateway()
    with gateway.http() as client:
        for n in (1, 3, 2):
            assert client.post("/v1/completions", json=TEXT | {"n": n}).status_code == 200
    assert turns_of(gateway) == [1, 2, 3, 4, 5, 6]


def test_a_request_that_is_tried_again_keeps_its_turn(start_gateway):
    gateway = start_gateway()
    gateway.link.up("prefill-1", Role.PREFILL)
    gateway.link.pause()
    with gateway.http() as client, ThreadPoolExecutor() as pool:
        first = pool.submit(client.post, "/v1/completions", json=TEXT)
        wait_submits(gateway, 1)
        second = pool.submit(client.post, "/v1/completions", json=TEXT)
        wait_submits(gateway, 2)
        gateway.link.down(gateway.link.sent(Submit)[0][0])
        gateway.link.resume()
        assert first.result().status_code == second.result().status_code == 200
    assert [(s.turn, s.attempt) for _, s in gateway.link.sent(Submit)] == [(1, 0), (2, 0), (1, 1)]
