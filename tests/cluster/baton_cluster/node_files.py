"""The configuration files of a node's programs, as text. Pure; reasons stand beside the values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from baton_cluster.certificates import Pair

NODE: Final = "baton-node"
BRIDGE: Final = "baton0"
POD_RANGE: Final = "10.244.0.0/24"
DNS_ADDRESS: Final = "10.244.0.1"
"""The bridge's own address: pods reach it without any Service."""


def containerd_config(folder: Path, socket: Path, runc: Path, cni: Path, pause: str) -> str:
    """Return containerd's TOML: every path below `folder`, nothing of the host is touched."""
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "{folder}/c"
state = "{folder}/cs"
[grpc]
address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
[{cri}]
sandbox_image = "{pause}"
disable_apparmor = true
# Without CAP_SYS_RESOURCE a lower OOM score is refused, and every sandbox would die at its start.
restrict_oom_score_adj = true
[{cri}.cni]
bin_dir = "{cni}"
conf_dir = "{folder}/cni"
[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[{cri}.containerd.runtimes.runc.options]
BinaryName = "{runc}"
SystemdCgroup = false
"""


def cni_config(folder: Path) -> str:
    """Return the pod network: a bridge with addresses kept below `folder`."""
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(folder / "ipam"),
            "ranges": [[{"subnet": POD_RANGE, "gateway": DNS_ADDRESS}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "0.4.0", "name": "baton", "plugins": [bridge, ports]})


def kubelet_config(
    socket: Path, serving: Pair, authority: Path, folder: Path, cgroup: str
) -> dict[str, Any]:
    """Return the kubelet's configuration for a small machine that is not a container host."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup,
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "tlsCertFile": str(serving.certificate),
        "tlsPrivateKeyFile": str(serving.key),
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "podLogsDir": str(folder / "pods"),
        "evictionHard": {"memory.available": "64Mi", "nodefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "serializeImagePulls": False,
        "healthzPort": 0,
        "enableDebuggingHandlers": True,
    }


def corefile(kubeconfig: Path) -> str:
    """Return coredns' configuration: the cluster's names on the bridge, nothing else."""
    return f""".:53 {{
    bind {DNS_ADDRESS}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
    }}
    cache 5
}}
"""
