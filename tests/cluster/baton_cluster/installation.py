"""The chart on a cluster, by helm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from baton_cluster.kubectl import Kubectl, KubectlError
from baton_cluster.progress import step
from baton_cluster.waiting import wait_until


class HelmError(Exception):
    """helm failed; the text is what it said."""


def helm(program: Path, kubectl: Kubectl, *words: str, timeout_seconds: float = 900) -> str:
    """Return helm's output.

    Raises:
        HelmError: it failed.
    """
    environment = os.environ | {"KUBECONFIG": str(kubectl.kubeconfig)}
    done = subprocess.run(
        [str(program), *words], env=environment, capture_output=True, text=True, check=False,
        timeout=timeout_seconds,
    )  # fmt: skip
    if done.returncode:
        raise HelmError(done.stdout + done.stderr)
    return done.stdout


def install_chart(
    program: Path, kubectl: Kubectl, chart: Path, namespace: str, *values: str, wait: bool = False
) -> None:
    """Install the chart as release `baton`; `values` are `key=value`."""
    words = ["install", "baton", str(chart), "-n", namespace, "--create-namespace"]
    for value in values:
        words += ["--set", value]
    if wait:
        words += ["--wait", "--timeout=600s"]
    with step("installing the chart"):
        helm(program, kubectl, *words)
        wait_until("the API serves the chart's kinds", lambda: _are_served(kubectl), 30, 0.1)


def _are_served(kubectl: Kubectl) -> bool:
    listing = ("api-resources", "--api-group=baton.dev", "--cached=false", "-o", "name")
    try:
        kubectl.run("explain", "pdd.spec")
        return len(kubectl.run(*listing).split()) == 2
    except KubectlError:
        return False
