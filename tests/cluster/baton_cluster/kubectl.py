"""kubectl and kubeconfig files, typed."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

PATIENCE_SECONDS = 300.0
"""How long reading is tried while the API server or etcd has no time."""
_PAUSE_SECONDS = 1.0
_FOR_A_MOMENT = {"GOGC": "off", "GOMEMLIMIT": "512MiB"}
"""Go's settings for a process that ends before its garbage matters: collecting it is two fifths of
what it costs to start kubectl (measured: 0.085 s of a processor, and 0.05 without).
"""
_NO_TIME = (
    "etcdserver: request timed out", "etcdserver: leader changed", "TLS handshake timeout",
    "connection refused", "was refused - did you specify", "i/o timeout",
)  # fmt: skip


class KubectlError(Exception):
    """kubectl failed; the text is what it said."""


class Kubectl:
    """Runs kubectl against one cluster as one user."""

    def __init__(self, program: Path, kubeconfig: Path) -> None:
        """Use this program and this kubeconfig file."""
        self.program = program
        self.kubeconfig = kubeconfig

    def run(self, *words: str, stdin: str | None = None, timeout_seconds: float = 300.0) -> str:
        """Return what kubectl printed.

        Raises:
            KubectlError: it failed; the text is its standard error.
        """
        cache = self.kubeconfig.parent / "kubectl-cache"
        environment = os.environ | _FOR_A_MOMENT
        environment |= {"KUBECONFIG": str(self.kubeconfig), "KUBECACHEDIR": str(cache)}
        done = subprocess.run(
            [str(self.program), *words], input=stdin, env=environment,
            capture_output=True, text=True, timeout=timeout_seconds, check=False,
        )  # fmt: skip
        if done.returncode:
            raise KubectlError(done.stderr.strip())
        return done.stdout

    def apply(self, *manifests: Json, namespace: str = "default") -> None:
        """Apply manifests on the server's side."""
        text = yaml.safe_dump_all(manifests, sort_keys=False)
        self.run("apply", "--server-side", "-n", namespace, "-f", "-", stdin=text)

    def get(self, *words: str, namespace: str = "default") -> Json | None:
        """Return an object or a list, or None when it is not there.

        Reading changes nothing, so it is tried again while the server has no time for it.
        """
        listing = ("get", "-n", namespace, "-o", "json", *words)
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                found: Json = json.loads(self.run(*listing, timeout_seconds=60))
            except KubectlError as error:
                if "NotFound" in str(error):
                    return None
                if not any(text in str(error) for text in _NO_TIME) or time.monotonic() > until:
                    raise
            except subprocess.TimeoutExpired:
                if time.monotonic() > until:
                    raise
            else:
                return found
            threading.Event().wait(_PAUSE_SECONDS)

    def items(self, *words: str, namespace: str = "default") -> list[Json]:
        """Return the objects of a list."""
        return list((self.get(*words, namespace=namespace) or {}).get("items", []))

    def token(self, account: str, namespace: str) -> str:
        """Return a fresh token of a service account."""
        return self.run("create", "token", account, "-n", namespace, "--duration=8h").strip()


def write_kubeconfig(path: Path, server: str, authority: Path, token: str) -> Path:
    """Write a kubeconfig for a bearer token and return its path."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "baton",
                "cluster": {"server": server, "certificate-authority": str(authority)},
            }
        ],
        "users": [{"name": "user", "user": {"token": token}}],
        "contexts": [{"name": "baton", "context": {"cluster": "baton", "user": "user"}}],
        "current-context": "baton",
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(config))
    return path


def server_of(kubeconfig: Path) -> tuple[str, Path]:
    """Return the server's URL and its authority's file, from a kubeconfig that we wrote."""
    cluster = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]
    return cluster["server"], Path(cluster["certificate-authority"])
