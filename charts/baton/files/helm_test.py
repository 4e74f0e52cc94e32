"""`helm test`: does the operator reconcile? A suspended PDDeployment must get its gateway, a
deleted child must come back, and a deleted PDDeployment must leave nothing. No pod is started.
"""

import json
import os
import sys
import urllib.parse

from kube_rest import PDDEPLOYMENTS, Api, wait

NAMESPACE = os.environ["TEST_NAMESPACE"]
NAME = os.environ["TEST_NAME"]
SECONDS = float(os.environ["TEST_TIMEOUT_SECONDS"])
COLLECTION = f"{PDDEPLOYMENTS}/namespaces/{NAMESPACE}/pddeployments"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
MANIFEST = {
    "apiVersion": "baton.dev/v1alpha1",
    "kind": "PDDeployment",
    "metadata": {"name": NAME},
    "spec": {
        "suspend": True,
        "image": "never-pulled",
        "model": {"servedName": "helm-test", "path": "/none"},
        "roles": [{"name": "prefill"}, {"name": "decode"}],
        "gateway": {"template": {"spec": {"nodeSelector": {"baton.dev/helm-test": "never"}}}},
    },
}


def children(api):
    """Return the uids of the test object's Deployments by their role."""
    selector = urllib.parse.quote(f"baton.dev/name={NAME}")
    found = api.send("GET", f"{DEPLOYMENTS}?labelSelector={selector}")["items"]
    live = [item["metadata"] for item in found if "deletionTimestamp" not in item["metadata"]]
    return {meta["labels"]["baton.dev/role"]: (meta["name"], meta["uid"]) for meta in live}


def is_observed(api):
    """Return whether the operator has reported on the object as it is."""
    body = api.send("GET", f"{COLLECTION}/{NAME}")
    seen = body.get("status", {}).get("observedGeneration")
    return seen == body["metadata"]["generation"]


def check(api):
    """Walk through the life of one object."""
    api.send("POST", COLLECTION, MANIFEST)
    wait("the gateway's Deployment exists", lambda: set(children(api)) == {"gateway"}, SECONDS)
    wait("status is reported", lambda: is_observed(api), SECONDS)
    name, uid = children(api)["gateway"]
    api.send("DELETE", f"{DEPLOYMENTS}/{name}")
    wait("a deleted child comes back", lambda: children(api).get("gateway", (0, uid))[1] != uid,
         SECONDS)  # fmt: skip


def main():
    """Return 0 when the operator works."""
    api = Api()
    api.send("DELETE", f"{COLLECTION}/{NAME}")
    wait("no object of an earlier test is left", lambda: not children(api), SECONDS)
    try:
        check(api)
    except (TimeoutError, RuntimeError) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        print(json.dumps(api.send("GET", f"{COLLECTION}/{NAME}"), indent=2), file=sys.stderr)
        return 1
    finally:
        api.send("DELETE", f"{COLLECTION}/{NAME}")
    wait("a deleted object leaves nothing", lambda: not children(api), SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
