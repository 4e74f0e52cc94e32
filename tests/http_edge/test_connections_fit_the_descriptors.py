"""A listener takes no more connections than its process can have open."""

import pytest

from baton_worker.config import HealthConfig, HttpConfig
from baton_worker.http_edge import server


@pytest.fixture
def limit(monkeypatch):
    """`limit(soft, hard)` sets what the kernel allows; returns what the process then asked for."""
    asked = []

    def set_to(soft, hard):
        monkeypatch.setattr(server.resource, "getrlimit", lambda what: (soft, hard))
        monkeypatch.setattr(server.resource, "setrlimit", lambda what, to: asked.append(to))
        return asked

    return set_to


def test_the_soft_limit_is_raised_as_far_as_needed(limit):
    asked = limit(1024, 1 << 20)
    assert server.reachable_connections(8192) == 8192
    assert asked == [(8192 + 256, 1 << 20)]


def test_where_it_is_high_enough_it_stays(limit):
    for soft in (1 << 20, server.resource.RLIM_INFINITY):
        asked = limit(soft, server.resource.RLIM_INFINITY)
        assert server.reachable_connections(8192) == 8192
        assert asked == []


def test_a_hard_limit_bounds_the_connections_and_is_told(limit, caplog):
    asked = limit(1024, 4096)
    assert server.reachable_connections(8192) == 4096 - 256
    assert asked == [(4096, 4096)]
    assert [record.message for record in caplog.records] == [
        "fewer files may be open than max_connections needs"
    ]


def test_probes_and_scrapers_leave_descriptors_to_the_others():
    assert HealthConfig().limits.max_connections + 256 <= 1024
    assert HttpConfig().limits.max_connections > HealthConfig().limits.max_connections
