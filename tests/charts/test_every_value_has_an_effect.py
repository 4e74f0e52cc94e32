"""No value is dead: each one in values.yaml changes what is rendered."""

from __future__ import annotations

import copy

import pytest
import yaml

ENABLED = """
podDisruptionBudget: {enabled: true}
networkPolicy: {enabled: true}
podMonitor: {enabled: true}
serviceMonitor: {enabled: true}
prometheusRule: {enabled: true}
dashboards: {enabled: true}
uninstall: {deleteResources: true}
"""
"""Everything optional is on, so that each setting of an optional part shows."""

CHANGES = {
    "image.repository": "r/o",
    "image.tag": "v9",
    "image.digest": "sha256:" + "0" * 64,
    "image.pullPolicy": "Always",
    "imagePullSecrets": [{"name": "s"}],
    "nameOverride": "other",
    "fullnameOverride": "mine",
    "replicas": 2,
    "crds.enabled": False,
    "crds.keep": False,
    "watchNamespace": "models",
    "rbac.create": False,
    "rbac.watchSecrets": False,
    "rbac.aggregate": False,
    "serviceAccount.create": False,
    "serviceAccount.name": "theirs",
    "serviceAccount.annotations": {"iam": "role"},
    "operator.workers": 3,
    "operator.writeConcurrency": 5,
    "operator.upgradeModels": 7,
    "operator.resyncSeconds": 60,
    "operator.statusIntervalSeconds": 2,
    "operator.leaseDurationSeconds": 30,
    "operator.logLevel": "debug",
    "operator.logFormat": "text",
    "extraEnv": [{"name": "A", "value": "b"}],
    "resources": {"limits": {"memory": "200Mi"}},
    "nodeSelector": {"a": "b"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [{"maxSkew": 1}],
    "priorityClassName": "high",
    "podAnnotations": {"p": "q"},
    "podLabels": {"team": "a"},
    "podDisruptionBudget.enabled": False,
    "networkPolicy.enabled": False,
    "networkPolicy.metricsFrom": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
    "networkPolicy.apiServerPort": 8443,
    "podMonitor.enabled": False,
    "podMonitor.labels": {"team": "a"},
    "podMonitor.interval": "7s",
    "serviceMonitor.enabled": False,
    "serviceMonitor.labels": {"team": "a"},
    "serviceMonitor.interval": "7s",
    "prometheusRule.enabled": False,
    "prometheusRule.labels": {"team": "a"},
    "dashboards.enabled": False,
    "dashboards.labels.grafana_dashboard": "2",
    "dashboards.annotations": {"folder": "LLM"},
    "helmTest.timeoutSeconds": 7,
    "uninstall.deleteResources": False,
    "uninstall.timeoutSeconds": 7,
}
NEEDS = {"serviceAccount.create": {"serviceAccount.name": "theirs"}}
"""What must be set beside a value for it to be allowed."""


def leaves(values, path=()):
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield ".".join((*path, key))


def changed(values, changes):
    result = copy.deepcopy(values)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = result
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    return yaml.safe_dump(result)


def test_every_value_is_tried(chart):
    values = yaml.safe_load((chart / "values.yaml").read_text())
    assert set(CHANGES) == set(leaves(values))


@pytest.mark.parametrize("path", CHANGES)
def test_it_changes_what_is_rendered(render, path):
    on = yaml.safe_load(ENABLED)
    before = NEEDS.get(path, {})
    assert render(changed(on, before)) != render(changed(on, before | {path: CHANGES[path]}))
