"""A port that is kept for a program goes to nobody else, and the program can listen on it."""

import socket

import pytest

from baton_cluster.ports import reserve_port


def test_no_other_search_and_no_connection_takes_it():
    port = reserve_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


@pytest.mark.parametrize("address", ["127.0.0.1", ""], ids=["loopback", "every address"])
def test_its_program_can_listen_and_is_reached(address):
    port = reserve_port()
    with (
        socket.create_server((address, port)),
        socket.create_connection(("127.0.0.1", port), timeout=30),
    ):
        pass


def test_two_are_never_alike():
    ports = [reserve_port() for _ in range(100)]
    assert len(set(ports)) == len(ports)
