"""A worker that nobody named has a name of its own, also beside others on one host."""

from __future__ import annotations

import socket

import msgspec
import pytest

from baton_worker.config import ConfigError, ModelConfig, ProcessConfig, load_config
from baton_worker.identity import Role
from baton_worker.main import build_parser, effective_config
from baton_worker.roles.process import with_name

UNNAMED = ProcessConfig(model=ModelConfig(path="m"))


def test_workers_of_one_host_are_told_apart_by_role_and_port() -> None:
    names = {
        with_name(UNNAMED, role, port).worker_id
        for role in (Role.PREFILL, Role.DECODE)
        for port in (8080, 8081)
    }
    assert names == {
        f"{role}-{socket.gethostname()}-{port}"
        for role in ("prefill", "decode")
        for port in (8080, 8081)
    }


def test_a_name_that_was_given_stays() -> None:
    named = msgspec.structs.replace(UNNAMED, worker_id="decode-7")
    assert with_name(named, Role.DECODE, 8080).worker_id == "decode-7"


def test_a_pod_is_called_by_its_own_name(tmp_path, monkeypatch) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: m}\ncontrol: {socket: /run/x}\n")
    options = build_parser().parse_args(["decode", "--config", str(path)])
    assert effective_config(options).worker_id == "", "named by role, host and port later"
    monkeypatch.setenv("BATON_POD_NAME", "chat-decode-x7k2p")
    assert effective_config(options).worker_id == "chat-decode-x7k2p"


def test_a_pod_with_both_roles_is_a_group_unless_the_file_names_another(
    tmp_path, monkeypatch
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: m}\ncontrol: {socket: /run/x}\n")
    options = build_parser().parse_args(["decode", "--config", str(path)])
    assert effective_config(options).pair_group == ""
    monkeypatch.setenv("BATON_PAIR_GROUP", "chat-pair-x7k2p")
    assert effective_config(options).pair_group == "chat-pair-x7k2p"
    path.write_text(path.read_text() + "pair_group: mine\n")
    assert effective_config(options).pair_group == "mine"


@pytest.mark.parametrize("name", ["two words", "line\\nbreak", "\u00e9", "x" * 254])
def test_a_name_that_no_gateway_would_take_is_a_configuration_error(tmp_path, name) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f'model: {{path: m}}\nworker_id: "{name}"\n')
    with pytest.raises(ConfigError, match="worker_id is"):
        load_config(path)
