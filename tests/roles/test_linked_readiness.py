"""A worker is ready when its gateways can give it work, all of them where that is possible."""

import pytest

from baton_worker.roles.linked import PATIENCE_SECONDS, LinkedReadiness


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


def test_without_any_gateway_it_is_not_ready_until_one_is_back(counts):
    readiness = counts.readiness()
    counts.known = counts.linked = 1
    assert readiness.is_ready()
    counts.linked = 0
    assert not readiness.is_ready()
    counts.linked = 1
    assert readiness.is_ready()
