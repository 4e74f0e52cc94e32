"""Settings come from the environment; a bad one names its variable."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from baton_operator.main import EXIT_BAD_SETTING
from baton_operator.process import run_operator
from baton_operator.settings import SettingError, read_settings
from baton_worker.ports import port_of, reserve_port


def test_the_environment_is_read_by_name_and_type():
    settings = read_settings(
        {"BATON_WORKERS": "3", "BATON_LEADER_ELECT": "false", "BATON_RESYNC_SECONDS": "60"}
    )
    assert (settings.workers, settings.leader_elect, settings.resync_seconds) == (3, False, 60.0)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BATON_WORKERS", "many"),
        ("BATON_WORKERS", "0"),
        ("BATON_LEADER_ELECT", "perhaps"),
        ("BATON_LEASE_RENEW_SECONDS", "30"),
        ("BATON_LOG_FORMAT", "xml"),
        ("BATON_LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_names_its_variable(variable, value):
    with pytest.raises(SettingError, match=variable):
        read_settings({variable: value})


def test_a_taken_port_is_a_setting_and_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = replace(
            read_settings({}), http_host="127.0.0.1", http_port=taken.getsockname()[1]
        )
        with pytest.raises(SettingError, match=r"BATON_HTTP_PORT \d+: cannot listen .*in use"):
            asyncio.run(run_operator(settings))


def test_a_cluster_that_nothing_names_ends_the_operator_with_a_sentence(tmp_path):
    missing = str(tmp_path / "none")
    environment = {**os.environ, "KUBECONFIG": missing, "BATON_HTTP_HOST": "127.0.0.1"}
    with reserve_port("127.0.0.1") as keeper:
        environment["BATON_HTTP_PORT"] = str(port_of(keeper))
        ended = subprocess.run(
            [sys.executable, "-m", "baton_operator.main", "run"],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert ended.returncode == EXIT_BAD_SETTING
    assert f"baton-operator: KUBECONFIG is {missing!r}: " in ended.stderr
    assert "Traceback" not in ended.stderr
