"""A real node beside a control plane: containerd, kubelet, kube-proxy, coredns. Needs root.

Owns their settings and what they leave on the host: mounts, a bridge, iptables rules, cgroups. All
of it is gone after `stop`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import yaml

from baton_cluster.control_plane import SERVICE_RANGE, ControlPlane
from baton_cluster.host import HostState, node_address
from baton_cluster.images import PAUSE_IMAGE
from baton_cluster.node_files import (
    BRIDGE,
    DNS_ADDRESS,
    NODE,
    POD_RANGE,
    cni_config,
    containerd_config,
    corefile,
    kubelet_config,
)
from baton_cluster.ports import reserve_port
from baton_cluster.processes import Processes
from baton_cluster.progress import step
from baton_cluster.waiting import wait_until

SOCKET = "c.sock"


class Node:
    """A running node; `start` returns when it is Ready."""

    def __init__(self, plane: ControlPlane, programs: Mapping[str, Path]) -> None:
        """Prepare; `plane` must have been given this machine's address."""
        self._plane = plane
        self._programs = programs
        self._folder = node_folder(plane.folder)
        self._socket = self._folder / SOCKET
        self._host = HostState(self._folder, BRIDGE, SOCKET)

    def start(self, archives: list[Path]) -> None:
        """Start everything, import the images, and wait until the node is Ready."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._host.prepare(f"{DNS_ADDRESS}/24", SERVICE_RANGE)
        with step("starting containerd and importing images"):
            self._start_containerd()
            for archive in archives:
                self._ctr("images", "import", str(archive))
        with step("starting kubelet, kube-proxy and coredns"):
            self._start_kubelet()
            self._start_proxy()
            self._start_dns()
            wait_until("the node is Ready", self._is_ready, 90, 0.2, self._plane.processes.dead)

    def stop(self) -> None:
        """End every container and process of the node, and undo what it did to the host."""
        stop_node(self._plane.processes, self._folder, self._programs)

    def _start_containerd(self) -> None:
        binaries = self._programs["containerd"].parent
        path = f"{binaries}:{self._programs['runc'].parent}:{os.environ['PATH']}"
        cni = self._folder / "cni"
        cni.mkdir(exist_ok=True)
        (cni / "10-baton.conflist").write_text(cni_config(self._folder))
        config = self._folder / "containerd.toml"
        config.write_text(
            containerd_config(
                self._folder, self._socket, self._programs["runc"],
                self._programs["bridge"].parent, PAUSE_IMAGE,
            )
        )  # fmt: skip
        self._plane.processes.start(
            "containerd",
            [self._programs["containerd"], "--config", config],
            {**os.environ, "PATH": path},
        )
        wait_until("containerd answers", self._answers, 30, 0.1, self._plane.processes.dead)

    def _start_kubelet(self) -> None:
        address = node_address()
        serving = self._plane.authority.issue(
            "kubelet", f"/CN=system:node:{NODE}", [f"IP:{address}", f"DNS:{NODE}"]
        )
        config = self._folder / "kubelet.yaml"
        authority = self._plane.authority.root.certificate
        config.write_text(
            yaml.safe_dump(
                kubelet_config(
                    self._socket, serving, authority, self._folder, f"/{self._host.cgroup}"
                )
            )
        )
        self._plane.processes.start(
            "kubelet",
            [
                self._programs["kubelet"],
                f"--config={config}",
                f"--kubeconfig={self._plane.kubeconfig('kubelet')}",
                f"--hostname-override={NODE}",
                f"--node-ip={address}",
                f"--root-dir={self._folder / 'k'}",
                f"--cert-dir={self._folder / 'pki'}",
            ],
        )

    def _start_proxy(self) -> None:
        self._plane.processes.start(
            "kube-proxy",
            [
                self._programs["kube-proxy"],
                f"--kubeconfig={self._plane.kubeconfig('admin')}",
                "--proxy-mode=iptables",
                f"--cluster-cidr={POD_RANGE}",
                f"--hostname-override={NODE}",
                "--conntrack-max-per-core=0",
                "--conntrack-tcp-timeout-established=0",
                "--conntrack-tcp-timeout-close-wait=0",
                "--oom-score-adj=0",
                f"--healthz-bind-address=127.0.0.1:{reserve_port()}",
                f"--metrics-bind-address=127.0.0.1:{reserve_port()}",
            ],
        )

    def _start_dns(self) -> None:
        path = self._folder / "Corefile"
        path.write_text(corefile(self._plane.kubeconfig("admin")))
        self._plane.processes.start("coredns", [self._programs["coredns"], "-conf", path])

    def _is_ready(self) -> bool:
        body = self._plane.kubectl.get("node", NODE) or {}
        conditions = body.get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def _answers(self) -> bool:
        words = [*self._ctr_words(), "version"]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    def _ctr(self, *words: str) -> str:
        done = subprocess.run(
            [*self._ctr_words(), *words], capture_output=True, text=True, check=True
        )
        return done.stdout

    def _ctr_words(self) -> list[str]:
        return _ctr_words(self._programs, self._socket)


def node_folder(cluster: Path) -> Path:
    """Return the folder of a cluster's node; the name is short, for sockets lie deep below it."""
    return cluster / "n"


def stop_node(processes: Processes, folder: Path, programs: Mapping[str, Path]) -> None:
    """Stop the node whose files are in `folder`; the API server may be gone already."""
    processes.stop_named("kubelet")
    ctr = _ctr_words(programs, folder / SOCKET)
    if processes.is_alive("containerd"):
        tasks = subprocess.run(
            [*ctr, "tasks", "ls", "-q"], capture_output=True, text=True, check=False
        )
        for task in tasks.stdout.split():
            subprocess.run([*ctr, "tasks", "rm", "-f", task], capture_output=True, check=False)
    for name in ("coredns", "kube-proxy", "containerd"):
        processes.stop_named(name)
    HostState(folder, BRIDGE, SOCKET).restore()


def _ctr_words(programs: Mapping[str, Path], socket: Path) -> list[str]:
    return [str(programs["ctr"]), "-a", str(socket), "-n", "k8s.io"]
