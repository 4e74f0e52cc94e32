"""Every command of docs/kubernetes.md in its order on a real node; the README has no others."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from baton_cluster.waiting import wait_until

pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """set -euxo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
"""


def commands(name: str) -> str:
    """Return the shell blocks of a page."""
    text = (ROOT / name).read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == text.count("```") // 2, "a block that is not run"
    return "".join(blocks)


def test_install_serve_scale_roll_drain_debug_and_uninstall(bare_cluster):
    environment = os.environ | {
        "KUBECONFIG": str(bare_cluster.plane.kubeconfig("admin")),
        "PATH": f"{bare_cluster.bin_folder()}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-c", PRELUDE + commands("docs/kubernetes.md")], cwd=ROOT, env=environment,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1500, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:]
    for said in ('"logprob":', "FIELD: roles", "deleted", 'release "baton" uninstalled'):
        assert said in done.stdout
    kubectl = bare_cluster.plane.kubectl
    wait_until("no pod is left", lambda: not kubectl.items("pods", "--all-namespaces"), 180, 0.5)
