"""values.schema.json refuses what would not work, by name; derived files are up to date."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from baton_operator.settings import read_settings


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ("replica: 2", "replica"),
        ("image: {tagg: x}", "tagg"),
        ("image: {pullPolicy: Sometimes}", "pullPolicy"),
        ("image: {digest: abc}", "digest"),
        ("replicas: -1", "replicas"),
        ("operator: {workers: 0}", "workers"),
        ("operator: {logLevel: loud}", "logLevel"),
        ("operator: {leaseDurationSeconds: 5}", "leaseDurationSeconds"),
        ("crds: {enabled: maybe}", "enabled"),
        ("podMonitor: {interval: often}", "interval"),
        ("watchNamespace: Serving_1", "watchNamespace"),
        ("fullnameOverride: A_B", "fullnameOverride"),
        ("nodeSelector: {gpu: 1}", "gpu"),
        ("podLabels: {team: {a: b}}", "team"),
        ("extraEnv: [{value: x}]", "extraEnv"),
        ("networkPolicy: {metricsFrom: [{}]}", "metricsFrom"),
    ],
)
def test_wrong_values_are_refused_by_name(refusal, values, named):
    assert named in refusal(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("extraEnv: [{name: BATON_LOG_LEVEL, value: debug}]",
         "extraEnv: BATON_LOG_LEVEL is there already: set operator.logLevel"),
        ("extraEnv: [{name: BATON_LEASE_NAME, value: mine}]",
         "extraEnv: BATON_LEASE_NAME is there already: it is the release's full name"),
        ("extraEnv: [{name: A, value: b}, {name: A, value: c}]",
         "extraEnv: A is there already: extraEnv names it twice"),
        ("replicas: 2\nextraEnv: [{name: BATON_LEADER_ELECT, value: 'false'}]",
         "extraEnv: BATON_LEADER_ELECT is false and replicas is 2"),
        ("replicas: 2\nextraEnv: [{name: BATON_LEADER_ELECT, value: '0'}]",
         "extraEnv: BATON_LEADER_ELECT is 0 and replicas is 2"),
    ],
    ids=["the chart's", "the Lease's", "twice", "two writers", "two writers, 0"],
)  # fmt: skip
def test_a_variable_that_would_not_do_what_it_says_is_refused(refusal, values, words):
    """Of a variable that is there twice helm's next patch may drop both."""
    assert words in refusal(values)


SAYINGS = [
    (1, {"value": "false"}),
    (2, {"value": "true"}),
    (2, {"value": "1"}),
    (2, {"valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}),
]


@pytest.mark.parametrize(("replicas", "said"), SAYINGS, ids=str)
def test_leader_election_may_be_said(render, one, replicas, said):
    """In every way that the operator reads."""
    entry = {"name": "BATON_LEADER_ELECT"} | said
    values = yaml.safe_dump({"replicas": replicas, "extraEnv": [entry]})
    env = one(render(values), "Deployment")["spec"]["template"]["spec"]["containers"][0]["env"]
    assert env[-1] == entry


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ("crds: {keep: }", "keep"),
        ("crds: null", "crds"),
        ("networkPolicy: {enabled: true, apiServerPort: null}", "apiServerPort"),
        ("rbac: {watchSecrets: null}", "watchSecrets"),
        ("uninstall: {deleteResources: true, timeoutSeconds: null}", "timeoutSeconds"),
        ("operator: {workers: null}", "workers"),
        ("replicas: null", "replicas"),
    ],
)
def test_a_null_that_takes_a_default_away_is_refused_by_name(refusal, values, named):
    """What is not there is false: without `crds.keep` an uninstall would take every model along."""
    assert f"missing property '{named}'" in refusal(values)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ("image: {pullPolicy: null}", "imagePullPolicy"),
        ("podMonitor: {enabled: true, interval: null}", "interval"),
    ],
)
def test_a_null_leaves_kubernetes_or_prometheus_their_own_default(render, values, field):
    assert f'"{field}": "' not in json.dumps(render(values))


@pytest.mark.parametrize("name", ["nodeSelector", "extraEnv", "tolerations", "resources"])
def test_a_null_of_what_is_empty_by_default_says_nothing(render, name):
    assert render(f"{name}: null") == render()


def test_the_chart_lints(helm, chart):
    assert "0 chart(s) failed" in helm("lint", "--strict", str(chart))


def test_derived_files_are_up_to_date():
    script = Path(__file__).resolve().parents[2] / "tools" / "chart.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_value_is_documented(chart):
    text = (chart / "values.yaml").read_text()
    readme = (chart / "README.md").read_text()

    def leaves(values, path=""):
        for key, value in values.items():
            name = f"{path}{key}"
            if isinstance(value, dict) and value and f"| `{name}` |" not in readme:
                yield from leaves(value, f"{name}.")
            else:
                yield name

    missing = [name for name in leaves(yaml.safe_load(text)) if f"| `{name}` |" not in readme]
    assert not missing


def test_the_operator_reads_every_setting_that_the_chart_gives(render, one):
    env = one(render(), "Deployment")["spec"]["template"]["spec"]["containers"][0]["env"]
    given = {e["name"]: e.get("value", "from-the-pod") for e in env}
    settings = read_settings(given)
    known = {f"BATON_{name.upper()}" for name in settings.__slots__}
    assert set(given) <= known
    assert (settings.workers, settings.resync_seconds) == (8, 1800.0)


def test_dashboards_and_rules_ask_for_metrics_that_exist(chart):
    from prometheus_client import CollectorRegistry

    from baton_operator.metrics import OperatorMetrics

    registry = CollectorRegistry()
    OperatorMetrics(registry)
    known = set()
    for family in registry.collect():
        known |= {family.name, f"{family.name}_total", f"{family.name}_bucket"}
    text = (chart / "rules" / "operator.yaml").read_text()
    panels = json.loads((chart / "dashboards" / "operator.json").read_text())["panels"]
    targets = [target for panel in panels for target in panel.get("targets", [])]  # rows have none
    assert targets
    text += " ".join(target["expr"] for target in targets)
    asked = {word for word in _words(text) if word.startswith("baton_operator_")}
    assert asked
    assert asked <= known


def _words(text):
    return "".join(c if c.isalnum() or c == "_" else " " for c in text).split()
