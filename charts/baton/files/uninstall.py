"""Before the operator leaves: delete every PDDeployment while it still works, and wait.

What is not gone in time loses the finalizers of baton.dev, so that no object and no namespace
hangs on an operator that is not there any more.
"""

import os
import sys

from kube_rest import PDDEPLOYMENTS, Api, wait

NAMESPACE = os.environ["WATCH_NAMESPACE"]
SECONDS = float(os.environ["TIMEOUT_SECONDS"])
SCOPE = f"{PDDEPLOYMENTS}/namespaces/{NAMESPACE}" if NAMESPACE else PDDEPLOYMENTS


def left(api):
    """Return the paths and finalizers of every object that is still there."""
    found = (api.send("GET", f"{SCOPE}/pddeployments") or {"items": []})["items"]
    return {
        f"{PDDEPLOYMENTS}/namespaces/{m['namespace']}/pddeployments/{m['name']}": m.get(
            "finalizers", []
        )
        for m in (item["metadata"] for item in found)
    }


def release(api):
    """Remove our finalizers from what is left."""
    for path, finalizers in left(api).items():
        others = [name for name in finalizers if not name.startswith("baton.dev/")]
        if others != finalizers:
            print(f"removing finalizers of {path}", flush=True)
            patch = {"metadata": {"finalizers": others}}
            api.send("PATCH", path, patch, "application/merge-patch+json")


def main():
    """Return 0 when nothing is left."""
    api = Api()
    for path in left(api):
        print(f"deleting {path}", flush=True)
        api.send("DELETE", f"{path}?propagationPolicy=Foreground")
    try:
        wait("every PDDeployment is gone", lambda: not left(api), SECONDS)
    except TimeoutError:
        release(api)
        wait("every PDDeployment is gone", lambda: not left(api), 30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
