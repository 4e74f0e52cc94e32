"""A worker is ready when its gateways can give it work, all of them where that is possible."""

import pytest

from baton_worker.roles.linked import ABSENCE_SECONDS, PATIENCE_SECONDS, LinkedReadiness


class Counts:
    def __init__(self):
        self.known, self.linked, self.now = 0, 0, 100.0

    def readiness(self):
        return LinkedReadiness(lambda: self.known, lambda: self.linked, lambda: self.now)


@pytest.fixture
def counts():
    return Counts()


def test_it_waits_for_every_known_gateway(counts):
    readiness = counts.readiness()
    assert not readiness.is_ready()
    counts.known, counts.linked = 2, 1
    assert not readiness.is_ready()
    counts.linked = 2
    assert readiness.is_ready()


def test_an_unreachable_gateway_holds_it_up_for_a_bounded_time(counts):
    readiness = counts.readiness()
    counts.known, counts.linked = 2, 1
    assert not readiness.is_ready()
    counts.now += PATIENCE_SECONDS
    assert readiness.is_ready()


def test_a_gateway_that_comes_later_does_not_make_it_unready(counts):
    readiness = counts.readiness()
    counts.known = counts.linked = 1
    assert readiness.is_ready()
    counts.known = 3
    assert readiness.is_ready()


def test_the_last_gateway_may_be_replaced_before_it_is_unready(counts):
    readiness = counts.readiness()
    counts.known = counts.linked = 1
    assert readiness.is_ready()
    counts.now += 1000
    assert readiness.is_ready()
    counts.linked = 0
    counts.now += ABSENCE_SECONDS - 1
    assert readiness.is_ready()
    counts.linked = 1
    assert readiness.is_ready()
    counts.linked = 0
    counts.now += ABSENCE_SECONDS - 1
    assert readiness.is_ready()


def test_gateways_that_stay_away_make_it_unready_until_one_is_back(counts):
    readiness = counts.readiness()
    counts.known = counts.linked = 1
    assert readiness.is_ready()
    counts.linked = 0
    counts.now += ABSENCE_SECONDS
    assert not readiness.is_ready()
    counts.linked = 1
    assert readiness.is_ready()


def test_a_worker_that_was_never_ready_has_no_gateway_to_wait_for(counts):
    readiness = counts.readiness()
    counts.known, counts.linked = 2, 1
    assert not readiness.is_ready()
    counts.linked = 0
    assert not readiness.is_ready()
