"""Finding gateways: fixed lists, names, and addresses that come and go."""

from __future__ import annotations

import socket
import threading

import pytest

from baton_worker.config import ConfigError
from baton_worker.link import endpoints
from baton_worker.link.api import GatewayLost, GatewayUp
from baton_worker.link.contexts import is_by_name
from baton_worker.link.endpoints import (
    Resolver,
    has_only_ipv6,
    over_ipv6,
    resolve,
    static_endpoints,
)
from baton_worker.link.worker import ZmqWorkerLink


def test_a_static_list_names_each_address_once(link_config) -> None:
    config = link_config(gateways=("tcp://a:1", "tcp://[::1]:1", "tcp://a:1", "tcp://b.c-d_e:1"))
    assert static_endpoints(config) == ("tcp://a:1", "tcp://[::1]:1", "tcp://b.c-d_e:1")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gateways": ("tcp://a:1",), "dns": "gw"},
        {"gateways": ("ipc:///tmp/x",)},
        {"gateways": ("tcp://gateway",)},
        {"gateways": ("tcp://gateway:0",)},
        {"gateways": ("tcp://gateway:65536",)},
        {"gateways": ("tcp://::1:5555",)},
        {"gateways": ("tcp://gate way:5555",)},
        {"gateways": ("tcp://gateway..svc:5555",)},
        {"gateways": (f"tcp://{'g' * 64}:5555",)},
    ],
    ids=[
        "neither",
        "both",
        "not-tcp",
        "no-port",
        "port-0",
        "port-high",
        "bare-ipv6",
        "space",
        "empty-part",
        "long-part",
    ],
)
def test_gateways_that_cannot_be_found_are_a_configuration_error(
    link_config, fields: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=r"link\.gateways"):
        static_endpoints(link_config(**fields))


@pytest.mark.parametrize("name", ["gateway..svc", "g" * 64, f"{'g' * 50}." * 6, "a b", ".svc"])
def test_a_name_that_no_host_can_have_is_a_configuration_error(link_config, name: str) -> None:
    """As of a template whose namespace was left empty: looked up, it ended the process."""
    with pytest.raises(ConfigError, match=r"^link\.dns is .* which no host can be called"):
        static_endpoints(link_config(dns=name))


@pytest.mark.parametrize(
    "name", ["gateway", "gw.ns.svc.cluster.local.", "gw_1", "::1", "bücher.de"]
)
def test_a_name_that_a_host_can_have_is_looked_up(link_config, name: str) -> None:
    assert static_endpoints(link_config(dns=name)) == ()


def test_a_name_resolves_to_addresses_of_one_family() -> None:
    found = resolve("localhost", 5555)
    assert len({endpoint.startswith("tcp://[") for endpoint in found}) == 1
    assert all(endpoint.endswith(":5555") for endpoint in found)


@pytest.mark.parametrize(
    ("families", "only_ipv6"),
    [
        ([socket.AF_INET6], True),
        ([socket.AF_INET], False),
        ([socket.AF_INET6, socket.AF_INET], False),
        (OSError("no such name"), False),
    ],
    ids=["ipv6", "ipv4", "both", "unknown"],
)
def test_a_gateways_name_is_called_over_ipv6_only_where_it_has_nothing_else(
    monkeypatch, families, only_ipv6: bool
) -> None:
    def lookup(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        assert host == "gateway"
        if isinstance(families, OSError):
            raise families
        return [(family, socket.SOCK_STREAM, 6, "", ("address", 0)) for family in families]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert has_only_ipv6("tcp://gateway:5555") is only_ipv6


def test_a_resolver_reports_changes_only_and_outlives_failures(monkeypatch) -> None:
    answers = iter([{"tcp://a:1"}, {"tcp://a:1"}, OSError("down"), {"tcp://a:1", "tcp://b:1"}])
    done = threading.Event()
    seen = []

    def answer(name: str, port: int) -> frozenset[str]:
        try:
            found = next(answers)
        except StopIteration:
            done.set()
            raise OSError("no more answers") from None
        if isinstance(found, OSError):
            raise found
        return frozenset(found)

    monkeypatch.setattr(endpoints, "resolve", answer)
    resolver = Resolver("gw", 1, seen.append, resolve_seconds=0.001)
    resolver.start()
    assert done.wait(60)
    resolver.close()
    assert seen == [{"tcp://a:1"}, {"tcp://a:1", "tcp://b:1"}]


def test_gateways_are_called_as_their_name_lists_them_and_left_when_gone(
    start_gateway, link_config, new_info, new_factory, monkeypatch
) -> None:
    # One that was silent and has left the name is dropped without waiting for its goodbye.
    never_silent = {"dead_after_seconds": 600.0}
    first, second = start_gateway(11, **never_silent), start_gateway(12, **never_silent)
    listed = {"now": {first.link.endpoint}}
    monkeypatch.setattr(endpoints, "resolve", lambda name, port: frozenset(listed["now"]))
    config = link_config(dns="gw", **never_silent)
    link = ZmqWorkerLink(config, new_info(), new_factory(), resolve_seconds=0.02)
    events, changed = [], threading.Condition()

    def hear(event: object) -> None:
        with changed:
            events.append(event)
            changed.notify_all()

    def wait_for(event: object) -> None:
        with changed:
            assert changed.wait_for(lambda: event in events, 60), events

    link.start(hear)
    try:
        wait_for(GatewayUp(11, first.link.endpoint))
        listed["now"] = {first.link.endpoint, second.link.endpoint}
        wait_for(GatewayUp(12, second.link.endpoint))
        listed["now"] = {second.link.endpoint}
        first.link.close()
        wait_for(GatewayLost(11, "bye"))
        assert link.linked_gateways() == 1
    finally:
        link.close(0.0)


def test_all_names_are_looked_up_at_once(monkeypatch) -> None:
    """Each waits until all are asked for, as a name server that is slow makes them."""
    asked = threading.Barrier(3)

    def lookup(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.wait(60.0)
        family = socket.AF_INET6 if host == "b" else socket.AF_INET
        return [(family, socket.SOCK_STREAM, 6, "", ("address", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert over_ipv6(("tcp://a:1", "tcp://b:1", "tcp://c:1")) == {"tcp://b:1"}
    assert over_ipv6(()) == frozenset()


@pytest.mark.parametrize(
    ("endpoint", "by_name"),
    [
        ("tcp://10.0.0.1:5555", False),
        ("tcp://[::1]:5555", False),
        ("tcp://[fe80::1%eth0]:5555", False),
        ("tcp://gateway-0.gw.ns.svc:5555", True),
        ("tcp://localhost:5555", True),
        ("tcp://10.0.0.1:0;gateway:5555", True),
        ("no endpoint", True),
    ],
)
def test_what_must_be_looked_up_is_told_from_an_address(endpoint: str, by_name: bool) -> None:
    assert is_by_name(endpoint) is by_name
