"""Settings come from the environment; a bad one names its variable."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from baton_operator.main import EXIT_BAD_SETTING
from baton_operator.process import run_operator
from baton_operator.settings import SettingError, Settings, labels_of, read_settings
from baton_worker.ports import port_of, reserve_port

ROOT = Path(__file__).resolve().parents[2]


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
        ("BATON_HTTP_PORT", "65536"),
        ("BATON_RESYNC_SECONDS", "nan"),
        ("BATON_STUCK_SECONDS", "inf"),
        ("BATON_WATCH_NAMESPACE", "one,two"),
        ("BATON_WATCH_NAMESPACE", "Serving"),
        ("BATON_LEASE_NAMESPACE", "x" * 64),
        ("BATON_POD_MONITOR_LABELS", "release"),
        ("BATON_POD_MONITOR_LABELS", "release=a b"),
        ("BATON_POD_MONITOR_LABELS", "a=b,"),
        ("BATON_POD_MONITOR_LABELS", "a=" + "x" * 64),
        ("BATON_POD_MONITOR_LABELS", "x" * 64 + "=a"),
        ("BATON_POD_MONITOR_LABELS", "a=b,a=c"),
        ("BATON_POD_MONITOR_LABELS", "baton.dev/name=b"),
    ],
)
def test_a_bad_value_names_its_variable(variable, value):
    with pytest.raises(SettingError, match=rf"^{variable} is .*{value[:20]}.*; "):
        read_settings({variable: value})


def test_labels_of_monitors_may_have_a_prefix_and_no_value():
    text = "release=kube-prometheus,example.com/Team_1=,x=" + "y" * 63
    labels = labels_of(read_settings({"BATON_POD_MONITOR_LABELS": text}).pod_monitor_labels)
    assert labels == {"release": "kube-prometheus", "example.com/Team_1": "", "x": "y" * 63}
    assert labels_of("") == {}


@pytest.mark.parametrize("value", ["65535", "1"])
def test_every_port_may_be_named(value):
    assert read_settings({"BATON_HTTP_PORT": value}).http_port == int(value)


@pytest.mark.parametrize("name", ["", "a", "0-b", "x" * 63])
def test_every_namespace_may_be_named(name):
    assert read_settings({"BATON_WATCH_NAMESPACE": name}).watch_namespace == name


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("BATON_WATCH_NAMESPACES", "BATON_WATCH_NAMESPACE"),
        ("BATON_LOGLEVEL", "BATON_LOG_LEVEL"),
        ("BATON_LEADER_ELECTION", "BATON_LEADER_ELECT"),
    ],
)
def test_a_misspelt_setting_is_refused_and_not_left_at_its_default(variable, meant):
    with pytest.raises(SettingError, match=rf"^{variable} is no setting: did you mean {meant}\?$"):
        read_settings({variable: "x"})


OF_OTHERS = ("BATON_POD_NAMESPACE", "BATON_POD_NAME", "BATON_CLUSTER", "BATON_NODE_NAME",
             "BATON_EXPLORE", "WATCH_NAMESPACES")  # fmt: skip


@pytest.mark.parametrize("variable", OF_OTHERS)
def test_a_variable_of_somebody_else_is_left_alone(variable):
    assert read_settings({variable: "x"}) == read_settings({})


@pytest.mark.parametrize("field", [field.name for field in fields(Settings)])
def test_each_setting_is_on_the_operators_page(field):
    page = (ROOT / "docs" / "operator.md").read_text()
    name = f"BATON_{field.upper()}"
    tail = {"LEASE_NAMESPACE": "_NAMESPACE", "LEASE_RENEW_SECONDS": "_RENEW_",
            "LEASE_RETRY_SECONDS": "_RETRY_"}.get(field.upper())  # fmt: skip
    assert f"`{name}`" in page or (tail and f"`{tail}`" in page)


async def test_a_taken_port_is_a_setting_and_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = replace(
            read_settings({}), http_host="127.0.0.1", http_port=taken.getsockname()[1]
        )
        with pytest.raises(SettingError, match=r"BATON_HTTP_PORT \d+: cannot listen .*in use"):
            await run_operator(settings)


@pytest.mark.slow
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
