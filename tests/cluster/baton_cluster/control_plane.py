"""A control plane: etcd, kube-apiserver, controller-manager, scheduler, and kwok when wanted.

Owns their flags and the order of their start. Nothing of it listens beyond loopback unless a node
address is given; nothing of it is left when it is stopped.
"""

from __future__ import annotations

import secrets
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton_cluster.certificates import Authority
from baton_cluster.kubectl import Kubectl, write_kubeconfig
from baton_cluster.ports import reserve_port
from baton_cluster.processes import Processes
from baton_cluster.progress import step
from baton_cluster.waiting import wait_until

SERVICE_RANGE = "10.96.0.0/16"
SERVICE_ADDRESS = "10.96.0.1"
FEATURES = "ImageVolume=true,WatchList=false"
"""ImageVolume: OCI images as model volumes are off by default in this version. WatchList: etcd 3.4
lacks what it needs, and each client then loses many seconds per watch before it falls back."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a cluster keeps its files. `node_address` opens the API server to pods, else empty."""

    folder: Path
    node_address: str = ""
    is_detached: bool = False


class ControlPlane:
    """A running control plane; `start` returns when its API answers and service accounts exist."""

    def __init__(self, programs: Mapping[str, Path], layout: Layout) -> None:
        """Prepare files; start nothing."""
        self._programs = programs
        self.layout = layout
        self.folder = layout.folder
        self.processes = Processes(self.folder / "logs", is_detached=layout.is_detached)
        self.authority = Authority(self.folder / "certificates")
        self.port = reserve_port()
        self.tokens = {user: secrets.token_urlsafe(32) for user in ("admin", "kubelet")}
        self.kubectl = Kubectl(programs["kubectl"], self.kubeconfig("admin"))

    @property
    def server(self) -> str:
        """Return the API server's URL."""
        return f"https://{self.layout.node_address or '127.0.0.1'}:{self.port}"

    def kubeconfig(self, user: str) -> Path:
        """Return the kubeconfig file of the admin or the kubelet."""
        path = self.folder / f"{user}.kubeconfig"
        if path.is_file():
            return path
        return self.write_kubeconfig(path, self.tokens[user])

    def write_kubeconfig(self, path: Path, token: str) -> Path:
        """Write a kubeconfig for any token of this cluster."""
        return write_kubeconfig(path, self.server, self.authority.root.certificate, token)

    def start(self) -> None:
        """Start everything and wait until it serves."""
        self.start_api()
        self.start_controllers()

    def start_api(self) -> None:
        """Start etcd and the API server alone: objects are kept, nothing acts on them."""
        with step("starting etcd and the API server"):
            self._start_api(self._start_etcd())

    def start_controllers(self) -> None:
        """Start controller-manager and scheduler, and wait until they act."""
        with step("starting the controllers and the scheduler"):
            self._start_controllers()
            wait_until("the default service account exists", self._has_account, 60, 0.1, self._dead)

    def start_kwok(self) -> None:
        """Start kwok for every node; pods on its nodes become ready and leave at once."""
        self.processes.start(
            "kwok",
            [
                self._programs["kwok"],
                f"--kubeconfig={self.kubeconfig('admin')}",
                "--manage-all-nodes=true",
                "--node-lease-duration-seconds=40",
            ],
        )

    def stop(self) -> None:
        """End every process and remove every file."""
        self.processes.stop_all()
        shutil.rmtree(self.folder)

    def _start_etcd(self) -> str:
        client, peer = (f"http://127.0.0.1:{reserve_port()}" for _ in range(2))
        self.processes.start(
            "etcd",
            [
                self._programs["etcd"],
                f"--data-dir={self.folder / 'etcd'}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--log-level=warn",
            ],
        )
        return client

    def _start_api(self, etcd: str) -> None:
        names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        addresses = ["127.0.0.1", SERVICE_ADDRESS, *filter(None, [self.layout.node_address])]
        alternative = [f"DNS:{name}" for name in names] + [f"IP:{ip}" for ip in addresses]
        serving = self.authority.issue("apiserver", "/CN=kube-apiserver", alternative)
        to_kubelet = self.authority.issue("to-kubelet", "/O=system:masters/CN=kube-apiserver")
        signing = self.authority.signing_key("service-accounts")
        flags = {
            "etcd-servers": etcd,
            "bind-address": "0.0.0.0" if self.layout.node_address else "127.0.0.1",
            "advertise-address": self.layout.node_address or "127.0.0.1",
            "secure-port": self.port,
            "cert-dir": self.folder / "certificates",
            "tls-cert-file": serving.certificate,
            "tls-private-key-file": serving.key,
            "client-ca-file": self.authority.root.certificate,
            "token-auth-file": self._token_file(),
            "authorization-mode": "Node,RBAC",
            "service-cluster-ip-range": SERVICE_RANGE,
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": signing,
            "service-account-signing-key-file": signing,
            "kubelet-client-certificate": to_kubelet.certificate,
            "kubelet-client-key": to_kubelet.key,
            "kubelet-certificate-authority": self.authority.root.certificate,
            "kubelet-preferred-address-types": "InternalIP",
            "allow-privileged": "true",
            "feature-gates": FEATURES,
        }
        self.processes.start("kube-apiserver", _command(self._programs["kube-apiserver"], flags))
        wait_until("the API server is ready", self._is_ready, 90, 0.1, self._dead)

    def _start_controllers(self) -> None:
        admin = self.kubeconfig("admin")
        shared = {"kubeconfig": admin, "leader-elect": "false", "secure-port": 0}
        manager = shared | {
            "service-account-private-key-file": self.folder / "certificates/service-accounts.key",
            "root-ca-file": self.authority.root.certificate,
            # Its own throttle (20 a second) would be what a test with hundreds of pods measures.
            "kube-api-qps": 200,
            "kube-api-burst": 400,
        }
        for name, flags in (
            ("kube-controller-manager", manager),
            ("kube-scheduler", shared),
        ):
            self.processes.start(name, _command(self._programs[name], flags))

    def _token_file(self) -> Path:
        path = self.folder / "tokens.csv"
        path.touch(mode=0o600)
        rows = [
            f'{self.tokens["admin"]},admin,admin,"system:masters"',
            f'{self.tokens["kubelet"]},system:node:baton-node,kubelet,"system:nodes"',
        ]
        path.write_text("\n".join(rows) + "\n")
        return path

    def _is_ready(self) -> bool:
        context = ssl.create_default_context(cafile=str(self.authority.root.certificate))
        try:
            with urllib.request.urlopen(f"{self.server}/readyz", timeout=5, context=context) as r:
                return bool(r.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _has_account(self) -> bool:
        return self.kubectl.get("serviceaccount", "default") is not None

    def _dead(self) -> str:
        return self.processes.dead()


def _command(program: Path, flags: Mapping[str, object]) -> list[str]:
    return [str(program), *(f"--{name}={value}" for name, value in flags.items())]
