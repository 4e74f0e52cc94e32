"""Decode tells prefill an address that can be connected to, in either family, or does not start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from baton_worker.config import (
    ConfigError,
    CurveConfig,
    HandoffConfig,
    LinkConfig,
    ModelConfig,
    ProcessConfig,
)
from baton_worker.handoff.address import advertised, check_advertised
from baton_worker.identity import Role
from baton_worker.roles.process import run_worker


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://*:5557"])
def test_every_address_is_no_address_to_connect_to(bind):
    with pytest.raises(ConfigError, match=r"handoff\.bind is .* set handoff\.advertise_host"):
        check_advertised(HandoffConfig(bind=bind))
    check_advertised(HandoffConfig(bind=bind, advertise_host="10.0.0.7"))
    check_advertised(HandoffConfig(bind=bind, advertise_host="fd00::7"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*"])
def test_every_address_is_not_advertised_by_name_either(host):
    with pytest.raises(ConfigError, match=r"handoff\.advertise_host is"):
        check_advertised(HandoffConfig(bind="tcp://0.0.0.0:1", advertise_host=host))


@pytest.mark.parametrize("host", ["decode..kv", "d" * 64, "decode kv"])
def test_what_no_host_can_be_called_is_not_advertised(host):
    with pytest.raises(ConfigError, match=r"handoff\.advertise_host is .* no host can be called"):
        check_advertised(HandoffConfig(bind="tcp://0.0.0.0:1", advertise_host=host))


@pytest.mark.parametrize("bind", ["tcp://::1:0", "ipc:///tmp/x", "tcp://:1", "tcp://a", "a:1"])
def test_what_is_no_tcp_address_is_refused_by_name(bind):
    with pytest.raises(ConfigError, match=r"handoff\.bind is .* tcp://host:port"):
        check_advertised(HandoffConfig(bind=bind))


@pytest.mark.parametrize(
    ("config", "bound", "told"),
    [
        (HandoffConfig(), "tcp://127.0.0.1:7", "tcp://127.0.0.1:7"),
        (HandoffConfig(), "tcp://[::1]:7", "tcp://[::1]:7"),
        (HandoffConfig(advertise_host="10.0.0.7"), "tcp://0.0.0.0:7", "tcp://10.0.0.7:7"),
        (HandoffConfig(advertise_host="fd00::7"), "tcp://[::]:7", "tcp://[fd00::7]:7"),
        (HandoffConfig(advertise_host="[fd00::7]"), "tcp://[::]:7", "tcp://[fd00::7]:7"),
        (HandoffConfig(advertise_host="decode-0.kv"), "tcp://[::]:7", "tcp://decode-0.kv:7"),
    ],
)
def test_what_is_told_can_be_connected_to(config, bound, told):
    assert advertised(config, bound) == told


def test_decode_refuses_before_it_loads_a_model(tmp_path: Path):
    config = ProcessConfig(
        model=ModelConfig(str(tmp_path / "no-such-model")),
        link=LinkConfig(gateways=("tcp://127.0.0.1:1",), curve=CurveConfig(enabled=False)),
        handoff=HandoffConfig(bind="tcp://0.0.0.0:5557"),
    )
    with pytest.raises(ConfigError, match=r"handoff\.advertise_host"):
        run_worker(config, Role.DECODE, on_ready=lambda ready: None)
    with pytest.raises(ConfigError, match=r"model"):
        run_worker(config, Role.PREFILL, on_ready=lambda ready: None)  # it takes no KV


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address")
@pytest.mark.parametrize(
    "config",
    [HandoffConfig(bind="tcp://[::1]:0"), HandoffConfig("tcp://[::]:0", advertise_host="::1")],
    ids=["loopback", "every-address"],
)
def test_a_handoff_crosses_ipv6(config, make_handoff, handoff_end):
    decode, prefill = handoff_end(config), handoff_end()
    assert decode.transport.endpoint.startswith("tcp://[::1]:")
    prefill.transport.offer(decode.target, make_handoff(), 10.0)
    assert decode.next().handoff.state == make_handoff().state
