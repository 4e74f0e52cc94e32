"""In a namespace that is being deleted nothing can be made again: the operator says so once."""

from __future__ import annotations

import pytest

from baton_cluster.kubectl import KubectlError
from baton_cluster.waiting import wait_until

A_PASS = 14
"""Children that one pass may find missing at once; and it is told by the first refusal."""


@pytest.fixture
def kept(kubectl, namespace):
    """Let nobody delete the namespace's models, so that they outlive their children in it."""
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": namespace},
        "spec": {
            "matchConstraints": {
                "resourceRules": [
                    {
                        "apiGroups": ["baton.dev"],
                        "apiVersions": ["*"],
                        "operations": ["DELETE"],
                        "resources": ["pddeployments"],
                    }
                ]
            },
            "validations": [{"expression": f"request.namespace != '{namespace}'"}],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": namespace},
        "spec": {"policyName": namespace, "validationActions": ["Deny"]},
    }
    kubectl.apply(policy, binding)
    yield
    kinds = "validatingadmissionpolicybinding", "validatingadmissionpolicy"
    kubectl.run("delete", *(f"{kind}/{namespace}" for kind in kinds))


def test_a_model_that_stays_in_it_is_told_of_once_and_left_alone(
    kubectl, operator, namespace, pdd, ready, kept
):
    kubectl.apply(pdd(), namespace=namespace)
    ready("demo")
    wait_until("deletions are refused", lambda: not is_free(kubectl, namespace), 60, 0.5)
    before = refused(operator)
    kubectl.run("delete", "namespace", namespace, "--wait=false")
    wait_until("it is told", lambda: told(operator, namespace), 120, 0.2)
    count = refused(operator)
    assert before < count <= before + A_PASS
    passes = operator.metric("baton_operator_reconcile_total")
    kubectl.run("annotate", "pdd", "demo", "-n", namespace, "a=b")
    wait_until(
        "the operator looked again",
        lambda: operator.metric("baton_operator_reconcile_total") > passes, 60, 0.05,
    )  # fmt: skip
    assert refused(operator) == count
    assert told(operator, namespace) == 1
    assert f"failed object={namespace}/" not in operator.log(4000)


def is_free(kubectl, namespace):
    """Whether the model could be deleted."""
    try:
        kubectl.run("delete", "pdd", "demo", "-n", namespace, "--dry-run=server")
    except KubectlError:
        return False
    return True


def told(operator, namespace):
    lines = operator.log(4000).splitlines()
    return sum("its namespace is being deleted" in each and namespace in each for each in lines)


def refused(operator):
    """Return how many requests the server forbade."""
    lines = operator.get("/metrics")[1].splitlines()
    counted = [each for each in lines if each.startswith("baton_operator_api_requests_total{")]
    return sum(float(each.rpartition(" ")[2]) for each in counted if 'status="403"' in each)
