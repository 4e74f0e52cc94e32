"""A prefill worker keeps a connection for each decode worker that it needs, and for no other."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from baton_worker.engine.api import Handoff
from baton_worker.handoff import dealers as dealers_module
from baton_worker.handoff import sender
from baton_worker.handoff.api import HandoffArrived, HandoffDelivered
from baton_worker.handoff.dealers import UNUSED_SECONDS, Dealers
from baton_worker.handoff.offers import Address
from baton_worker.identity import RequestKey

PATIENCE_SECONDS = 60.0

GONE, BUSY, FRESH, NEW = (Address(f"tcp://127.0.0.1:{port}", "") for port in (6, 7, 8, 9))


@pytest.fixture
def poller() -> zmq.Poller:
    return zmq.Poller()


@pytest.fixture
def dealers(poller: zmq.Poller) -> Iterator[Dealers]:
    context: zmq.Context[Any] = zmq.Context()

    def new_socket(its: zmq.Context[Any]) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = its.socket(zmq.DEALER)
        socket.linger = 0
        return socket

    made = Dealers(context, new_socket, lambda socket, key: None, poller)
    yield made
    made.close()
    assert poller.sockets == []
    context.term()  # waits for ever for a socket that was forgotten


def test_an_address_has_one_connection(dealers: Dealers) -> None:
    assert dealers.to(GONE, 0.0) is dealers.to(GONE, 1.0)


def test_a_name_is_looked_up_beside_all_other_connections(dealers: Dealers) -> None:
    """And two of one name share what they wait for."""
    by_address = dealers.to(GONE, 0.0).context
    named = Address("tcp://localhost:6", "")
    by_name = dealers.to(named, 0.0).context
    assert by_name is not by_address
    assert dealers.to(named._replace(public_key="k"), 0.0).context is by_name
    assert dealers.to(named._replace(endpoint="tcp://localhost:7"), 0.0).context is not by_name
    assert dealers.to(BUSY, 0.0).context is by_address


def test_a_process_with_other_keys_at_an_endpoint_has_its_own(dealers: Dealers) -> None:
    assert dealers.to(GONE, 0.0) is not dealers.to(GONE._replace(public_key="k"), 0.0)


def test_connections_that_nobody_needs_any_more_are_given_back(
    dealers: Dealers, poller: zmq.Poller
) -> None:
    for address in (GONE, BUSY):
        dealers.to(address, 0.0)
    fresh = dealers.to(FRESH, 1.0)
    dealers.close_unused(UNUSED_SECONDS, (BUSY,))
    assert len(dealers) == 2, "all but the one without use and without an open offer"
    assert dealers.to(FRESH, UNUSED_SECONDS) is fresh
    assert len(poller.sockets) == 2 * len(dealers)


def test_they_are_given_back_although_no_other_connection_is_made(
    handoff_end: Callable[..., Any],
    make_handoff: Callable[..., Handoff],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dealers_module, "UNUSED_SECONDS", 0.0)
    monkeypatch.setattr(sender, "TIDY_SECONDS", 0.0)
    prefill, decode = handoff_end(), handoff_end()
    prefill.transport.offer(decode.target, make_handoff(), 600.0)
    arrived = decode.next()
    assert isinstance(arrived, HandoffArrived)
    state = arrived.handoff.state
    decode.transport.acknowledge(RequestKey(state.handle, state.attempt))
    assert isinstance(prefill.next(), HandoffDelivered)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(prefill.transport._sender._carrying):
        assert time.monotonic() < deadline, "it is kept for ever"
        time.sleep(0.01)


def test_an_address_that_cannot_be_connected_to_leaves_nothing(dealers: Dealers) -> None:
    with pytest.raises(zmq.ZMQError):
        dealers.to(Address("not an endpoint", ""), 0.0)
    assert len(dealers) == 0


def test_a_connection_that_no_descriptor_is_left_for_leaves_nothing(
    dealers: Dealers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(dealers_module, "monitor", too_many)
    with pytest.raises(zmq.ZMQError):
        dealers.to(FRESH, 0.0)
    assert len(dealers) == 0
