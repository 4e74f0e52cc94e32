"""A gateway that was paused heard nothing: it hears what came first, then judges who is late.

The clock is the test's: a pause is that it goes on while the event loop does not.
"""

from __future__ import annotations

import threading

import pytest

from baton_testing.scripted_link import RowSpec
from baton_worker.gateway.server import service
from baton_worker.identity import Role
from baton_worker.messages import Submit
from baton_worker.records.columns import Finish

OUTPUT = [100 + n for n in range(6)]
BODY = {"model": "tiny", "max_tokens": len(OUTPUT), "return_token_ids": True}
ONE_PLACE = {"max_running": 1, "max_waiting": 0}
PAUSE_SECONDS = 30.0
TICK_SECONDS = 0.01
"""Of the machine's time: the gateway's own is the test's, and each turn of it costs that much."""


class Poster(threading.Thread):
    """Posts a completion and keeps the answer."""

    def __init__(self, gateway, prompt):
        super().__init__()
        self.gateway, self.body, self.answer = gateway, BODY | {"prompt": [prompt]}, None
        self.start()

    def run(self):
        with self.gateway.http() as client:
            self.answer = client.post("/v1/completions", json=self.body)

    def result(self):
        self.join(60)
        assert not self.is_alive()
        return self.answer


class Stopped:
    """A gateway whose clock only the test moves."""

    def __init__(self, gateway):
        self.gateway, self.now = gateway, 1000.0
        self.ticked = threading.Condition()
        self.lags = []
        self.pause_in_a_turn = 0.0
        service = gateway.service
        for part in (service, service.applier, service.workers):
            part._clock = lambda: self.now
        gateway.link.set_lag = self._tick

    def _tick(self, lag):
        with self.ticked:
            self.lags.append(lag)
            self.now += self.pause_in_a_turn
            self.pause_in_a_turn = 0.0
            self.ticked.notify_all()

    def turns(self, n=2):
        """Wait until the housekeeping has begun anew and gone through since."""
        with self.ticked:
            before = len(self.lags)
            assert self.ticked.wait_for(lambda: len(self.lags) > before + n, 60)

    def pass_by(self, seconds):
        self.now += seconds
        self.turns()

    def pass_in_a_turn(self, seconds):
        """The pause falls within the housekeeping, which has looked at the clock already."""
        self.pause_in_a_turn = seconds
        self.turns()


PAUSES = pytest.mark.parametrize("pause", [Stopped.pass_by, Stopped.pass_in_a_turn])


@pytest.fixture
def stopped(start_gateway, monkeypatch):
    monkeypatch.setattr(service, "_TICK_SECONDS", TICK_SECONDS)
    gateway = start_gateway(
        lambda submit: OUTPUT, workers="m", info=ONE_PLACE, max_wait_seconds=PAUSE_SECONDS / 2
    )
    gateway.link.pause()
    stopped = Stopped(gateway)
    stopped.turns()
    return stopped


def submit_of(gateway, n):
    link = gateway.link
    link.wait_until(lambda: len(link.sent(Submit)) > n)
    return link.sent(Submit)[n]


def wait_for(gateway, name, value):
    while gateway.metric(name) != value:
        pass


def with_a_gap(stopped):
    gateway = stopped.gateway
    poster = Poster(gateway, 70)
    _, submit = submit_of(gateway, 0)
    gateway.link.publish("mixed-0", RowSpec(submit.handle, 2, OUTPUT[2:4]))
    wait_for(gateway, "baton_gateway_hold_rows", 1)
    return poster, submit


@PAUSES
def test_a_row_that_came_meanwhile_closes_its_gap(stopped, pause):
    poster, submit = with_a_gap(stopped)
    pause(stopped, PAUSE_SECONDS)
    gateway = stopped.gateway
    gateway.link.publish("mixed-0", RowSpec(submit.handle, 0, OUTPUT[:2]))
    gateway.link.publish("mixed-0", RowSpec(submit.handle, 4, OUTPUT[4:], Finish.LENGTH))
    assert poster.result().json()["choices"][0]["token_ids"] == OUTPUT
    assert gateway.metric("baton_gateway_gap_timeouts_total") == 0
    assert gateway.metric("baton_gateway_retries_total", how="from_start") == 0


@PAUSES
def test_a_gap_that_stays_open_afterwards_ends_as_ever(stopped, pause):
    poster, _ = with_a_gap(stopped)
    pause(stopped, PAUSE_SECONDS)
    for _ in range(3):
        assert stopped.gateway.metric("baton_gateway_gap_timeouts_total") == 0
        stopped.pass_by(0.7)
    assert poster.result().status_code == 500
    assert stopped.gateway.metric("baton_gateway_gap_timeouts_total") == 1


def test_a_gap_that_stays_open_ends_though_the_loop_stands_still_again_and_again(stopped):
    poster, _ = with_a_gap(stopped)
    for _ in range(10):
        stopped.pass_by(1.5)
    assert stopped.gateway.metric("baton_gateway_gap_timeouts_total") == 1
    assert poster.result().status_code == 500


def test_a_row_that_came_while_it_stood_still_once_more_closes_its_gap(stopped):
    """It comes when the gap has been open for as long as it may, of what the gateway listened."""
    poster, submit = with_a_gap(stopped)
    for _ in range(3):
        stopped.pass_by(1.5)
    gateway = stopped.gateway
    gateway.link.publish("mixed-0", RowSpec(submit.handle, 0, OUTPUT[:2]))
    gateway.link.publish("mixed-0", RowSpec(submit.handle, 4, OUTPUT[4:], Finish.LENGTH))
    stopped.pass_by(1.5)
    assert poster.result().json()["choices"][0]["token_ids"] == OUTPUT
    assert gateway.metric("baton_gateway_gap_timeouts_total") == 0


def waiting_for_a_worker(stopped):
    """One request whose worker is lost, behind one that keeps the only other."""
    gateway = stopped.gateway
    lost = Poster(gateway, 70)
    submit_of(gateway, 0)
    gateway.link.up("mixed-1", Role.MIXED, **ONE_PLACE)
    busy = Poster(gateway, 71)
    assert submit_of(gateway, 1)[0] == "mixed-1"
    gateway.link.down("mixed-0", "disconnected")
    wait_for(gateway, "baton_gateway_waiting_retries", 1)
    return lost, busy


def test_a_request_waits_no_longer_for_a_worker_where_the_loop_stands_still_again_and_again(
    stopped,
):
    lost, busy = waiting_for_a_worker(stopped)
    for _ in range(25):
        stopped.pass_by(1.5)
    assert stopped.gateway.metric("baton_gateway_waiting_retries") == 0
    assert lost.result().json()["error"]["code"] == "worker_lost"
    stopped.gateway.link.resume()
    assert busy.result().json()["choices"][0]["token_ids"] == OUTPUT


@PAUSES
def test_a_request_that_waits_for_a_worker_takes_the_room_that_came_meanwhile(stopped, pause):
    lost, busy = waiting_for_a_worker(stopped)
    pause(stopped, PAUSE_SECONDS)
    stopped.gateway.link.resume()
    for poster in (lost, busy):
        assert poster.result().json()["choices"][0]["token_ids"] == OUTPUT
