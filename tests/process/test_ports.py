"""A reserved port is nobody's but the server's that names it, before it comes and after it dies."""

from __future__ import annotations

import errno
import socket
import struct

import pytest
import zmq

from baton_worker import addresses
from baton_worker.config import ConfigError, GatewayConfig, HealthConfig, HttpConfig
from baton_worker.gateway.process import _check_sharing
from baton_worker.local.command import _taken_for_sharing
from baton_worker.main import main
from baton_worker.ports import port_of, reserve_port
from baton_worker.readiness import EXIT_BAD_CONFIG

HOST = "127.0.0.1"
IP_LOCAL_PORT_RANGE = 51
"""Socket option of Linux 6.3 that Python does not name: which ports a socket may be given."""


@pytest.fixture
def port():
    with reserve_port(HOST) as keeper:
        yield port_of(keeper)


def test_servers_come_and_go_at_a_reserved_port(port):
    for _ in range(2):
        with socket.create_server((HOST, port)) as server, socket.create_connection((HOST, port)):
            server.accept()[0].close()  # the server's end lingers in TIME_WAIT
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"tcp://{HOST}:{port}")


def test_a_port_of_every_address_can_be_kept_too():
    with (
        reserve_port(addresses.bindable_host("*")) as keeper,
        addresses.listen("*", port_of(keeper), 1) as server,
        socket.create_connection((HOST, port_of(keeper))),
    ):
        server.accept()[0].close()


def is_given(port: int, use) -> bool:
    """Say whether a socket that may have this port alone gets it from `use`."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        only = struct.pack("I", port << 16 | port)
        try:
            other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, only)
        except OSError:
            pytest.skip("the kernel cannot narrow the ports that a socket is given")
        try:
            use(other)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
            return False
        return True


@pytest.mark.parametrize("listening", [0, 1, 2])
def test_those_who_share_a_port_listen_together_and_nobody_else_does(port, listening):
    """Also while some of them, or all, do not listen yet."""
    with addresses.join_port(HOST, port) as one, addresses.join_port(HOST, port) as other:
        for each in (one, other)[:listening]:
            each.listen(1)
        with pytest.raises(OSError, match="in use"):
            addresses.listen(HOST, port, 1)
        with pytest.raises(OSError, match="in use"):
            reserve_port(HOST, port)


def test_gateways_that_share_a_port_share_it_with_no_other_deployment(tmp_path, capsys, port):
    with addresses.join_port(HOST, port):
        words = ["local", "--model", str(tmp_path), "--gateways", "2", "--port", str(port)]
        assert main(words) == EXIT_BAD_CONFIG
    assert f"--host: cannot listen on {HOST}:{port}" in capsys.readouterr().err


def test_deployments_that_share_a_port_among_gateways_begin_on_it_one_at_a_time(port):
    with _taken_for_sharing(port):
        with pytest.raises(ConfigError, match=f"--port is {port}, .* another deployment share"):
            _taken_for_sharing(port)
        _taken_for_sharing(port + 1).close()
    _taken_for_sharing(port).close()


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"http": HttpConfig(port=0), "health": HealthConfig()}, r"gateway\.http\.port 0"),
        ({"http": HttpConfig(port=8000)}, r"without gateway\.health"),
    ],
)
def test_gateways_that_share_a_port_need_one_and_a_place_for_metrics(facts, why):
    with pytest.raises(ConfigError, match=why):
        _check_sharing(GatewayConfig(shares_port=True, **facts))


def free_port() -> int:
    with reserve_port(HOST) as keeper:
        return port_of(keeper)


def test_neither_a_server_nor_a_client_is_given_a_reserved_port(port):
    with socket.create_server((HOST, 0)) as server:
        for use in (
            lambda other: other.bind((HOST, 0)),
            lambda other: other.connect(server.getsockname()),
        ):
            assert not is_given(port, use)
            assert any(is_given(free_port(), use) for _ in range(20)), "ports that nobody keeps"


def test_an_address_of_another_machine_is_refused_by_name(tmp_path, capsys):
    assert main(["local", "--model", str(tmp_path), "--host", "192.0.2.1", "--port", "0"]) == (
        EXIT_BAD_CONFIG
    )
    assert "--host" in capsys.readouterr().err
