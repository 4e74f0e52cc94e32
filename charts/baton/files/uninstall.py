"""Before the operator leaves: delete every PDDeployment while it still works, and wait; then the
definitions, where the values do not keep them: helm itself is told to keep them always. They are
the cluster's: a release that serves one namespace leaves them while another one has an object.

An object is gone when its pods are, and those may drain for as long as their own object says: so
long is waited, or as long as the values say. What is not gone then loses the finalizers of
baton.dev, so that no object and no namespace hangs on an operator that is not there any more.
"""

import os
import sys

from kube_rest import PDDEPLOYMENTS, Api, wait

NAMESPACE = os.environ["WATCH_NAMESPACE"]
SECONDS = float(os.environ["TIMEOUT_SECONDS"])
DEFINITIONS = os.environ["DEFINITIONS"].split()
SCOPE = f"{PDDEPLOYMENTS}/namespaces/{NAMESPACE}" if NAMESPACE else PDDEPLOYMENTS

HEADROOM = 60
"""Seconds beyond the drains: what pods get to exit (20 at most), and who collects them."""


def left(api, scope=SCOPE):
    """Return every object that is still there, by path."""
    found = (api.send("GET", f"{scope}/pddeployments") or {"items": []})["items"]
    places = (item["metadata"] for item in found)
    paths = [
        f"{PDDEPLOYMENTS}/namespaces/{m['namespace']}/pddeployments/{m['name']}" for m in places
    ]
    return dict(zip(paths, found, strict=True))


def drain_seconds(spec):
    """Return the longest drain of an object's pods, by default that of the definition."""
    roles = [role.get("drain", {}).get("graceSeconds", 300) for role in spec.get("roles", [])]
    return max([*roles, spec.get("gateway", {}).get("drainSeconds", 600)])


def patience(objects):
    """Return how long to wait for what was deleted, in seconds."""
    drains = [drain_seconds(each.get("spec", {})) for each in objects.values()]
    return SECONDS or max(drains, default=0) + HEADROOM


def release(api):
    """Remove our finalizers from what is left."""
    for path, body in left(api).items():
        finalizers = body["metadata"].get("finalizers", [])
        others = [name for name in finalizers if not name.startswith("baton.dev/")]
        if others != finalizers:
            print(f"removing finalizers of {path}", flush=True)
            patch = {"metadata": {"finalizers": others}}
            api.send("PATCH", path, patch, "application/merge-patch+json")


def main():
    """Return 0 when nothing is left, 1 when something is."""
    api = Api()
    objects = left(api)
    seconds = patience(objects)
    for path in objects:
        print(f"deleting {path}", flush=True)
        api.send("DELETE", f"{path}?propagationPolicy=Foreground")
    if objects:
        print(f"waiting {seconds:g} s at most, as long as pods may drain: give helm uninstall as "
              f"long, --timeout {seconds + HEADROOM:g}s", flush=True)  # fmt: skip
    try:
        wait("every PDDeployment is gone", lambda: not left(api), seconds)
    except TimeoutError:
        release(api)
        try:
            wait("every PDDeployment is gone", lambda: not left(api), 30)
        except TimeoutError:
            return told_of(left(api))
    return undefine(api)


def undefine(api):
    """Delete the definitions; return 0 when they are gone or others need them, 1 when something
    holds one.
    """
    paths = [f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{n}" for n in DEFINITIONS]
    others = left(api, PDDEPLOYMENTS) if paths and NAMESPACE else {}
    if others:
        print(f"keeping the definitions, for {len(others)} PDDeployments of other namespaces would "
              f"go with them: {', '.join(sorted(others)[:5])}", flush=True)  # fmt: skip
        return 0
    for path in paths:
        print(f"deleting {path}", flush=True)
        api.send("DELETE", path)
    if not paths:
        return 0
    try:
        is_gone = lambda: all(api.send("GET", path) is None for path in paths)  # noqa: E731
        wait("every definition is gone", is_gone, HEADROOM)
    except TimeoutError:
        print("still there: a definition; objects with finalizers hold it", flush=True)
        return 1
    return 0


def told_of(objects):
    """Say what is still there, and return the exit code for that."""
    for path, body in objects.items():
        finalizers = ", ".join(body["metadata"].get("finalizers", []))
        print(f"still there: {path}, whose finalizers are {finalizers}; it goes when its pods have "
              "ended: then uninstall again", flush=True)  # fmt: skip
    return 1 if objects else 0


if __name__ == "__main__":
    sys.exit(main())
