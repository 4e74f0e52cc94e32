"""Every pod of the chart passes the restricted standard; labels follow the rules."""

from __future__ import annotations

import pytest
import yaml

ALL_ON = """
podDisruptionBudget: {enabled: true}
networkPolicy: {enabled: true}
podMonitor: {enabled: true}
serviceMonitor: {enabled: true}
prometheusRule: {enabled: true}
dashboards: {enabled: true}
uninstall: {deleteResources: true}
"""


def pod_specs(objects):
    for body in objects:
        if body["kind"] == "Pod":
            yield body["spec"]
        elif body["kind"] in ("Deployment", "Job"):
            yield body["spec"]["template"]["spec"]


def test_every_pod_is_restricted(render):
    specs = list(pod_specs(render(ALL_ON)))
    assert len(specs) == 3
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_every_object_has_the_recommended_labels(render):
    for body in render(ALL_ON):
        labels = body["metadata"]["labels"]
        for name in ("name", "instance", "version", "component", "part-of", "managed-by"):
            assert labels[f"app.kubernetes.io/{name}"], body["metadata"]["name"]


def test_selectors_hold_no_version(render, one):
    deployment = one(render(), "Deployment")
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert set(selector) == {
        f"app.kubernetes.io/{name}" for name in ("name", "instance", "component")
    }


def test_hook_pods_do_not_count_as_the_operator(render, one):
    objects = render(ALL_ON)
    selector = one(objects, "Deployment")["spec"]["selector"]["matchLabels"]
    test = one(objects, "Pod")["metadata"]["labels"]
    job = one(objects, "Job")["spec"]["template"]["metadata"]["labels"]
    assert not selector.items() <= test.items()
    assert not selector.items() <= job.items()


@pytest.mark.parametrize("script", ["helm_test.py", "uninstall.py", "kube_rest.py"])
def test_hook_scripts_arrive_whole(render, chart, script):
    maps = [b for b in render(ALL_ON) if b["kind"] == "ConfigMap" and script in b["data"]]
    assert maps
    for body in maps:
        assert body["data"][script] == (chart / "files" / script).read_text()
        compile(body["data"][script], script, "exec")


def test_rendered_crds_equal_the_operators(render):
    from baton_operator.models.crd import render_crds

    rendered = {
        b["metadata"]["name"]: b["spec"]
        for b in render()
        if b["kind"] == "CustomResourceDefinition"
    }
    wanted = {b["metadata"]["name"]: b["spec"] for b in yaml.safe_load_all(render_crds())}
    assert rendered == wanted


def test_a_hook_that_succeeded_leaves_nothing_not_even_rights(render):
    hooks = [b for b in render(ALL_ON) if "helm.sh/hook" in b["metadata"].get("annotations", {})]
    assert {b["kind"] for b in hooks} >= {"Pod", "Job", "ConfigMap", "ServiceAccount"}
    for body in hooks:
        policy = body["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
        assert "hook-succeeded" in policy, (body["kind"], body["metadata"]["name"])
