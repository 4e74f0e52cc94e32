"""What a node changes on the host (bridge, iptables, sysctls, mounts, cgroups), and its undoing."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from baton_cluster.waiting import wait_until

_SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    "net/bridge/bridge-nf-call-iptables": "1",
}
_KUBELETS_SYSCTLS = (
    "vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
)  # fmt: skip
"""The kubelet sets these for the whole machine, without being asked."""
_CGROUPS = Path("/sys/fs/cgroup")
_CPU_SHARE = {"cpu.shares": "8192", "cpu.weight": "800"}
"""As much as eight processes of a busy machine: all pods together would else count as one."""
_TABLES = ("iptables", "ip6tables")


def node_address() -> str:
    """Return this machine's address on the way out; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


CLAIM = Path("/run/baton-cluster-node")
"""Names the folder of the node that changed this host; there can be one at a time."""


_RUNTIMES_FOLDERS = tuple(
    map(Path, ("/run/containerd", "/run/netns", "/var/lib/cni", "/var/lib/kubelet",
               "/var/log/containers"))
)  # fmt: skip
"""The programs of a node write here, whatever their flags say."""
_ABSENT = "absent-folders"

_IDLE_CHAIN = re.compile(r"COMMIT$|\*|:[A-Z]+ ACCEPT ")
"""Lines of a firewall table that holds no rule: they come when a table is first looked at."""

_NODE_PROGRAMS = (
    "kubelet", "kube-proxy", "coredns", "containerd", "containerd-shim-runc-v2", "pause",
)  # fmt: skip


class HostBusyError(Exception):
    """Another node runs on this host."""


def traces(folder: Path) -> dict[str, list[str]]:
    """Return what a cluster in `folder` could leave on a host; equal before and after."""
    found = {
        table: [
            line
            for line in _output(f"{table}-save").splitlines()
            if not line.startswith("#") and not _IDLE_CHAIN.match(line)
        ]
        for table in _TABLES
    }
    found["links"] = [line.split(": ")[1] for line in _output("ip", "-o", "link").splitlines()]
    found["mounts"] = sorted(
        line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()
    )
    found["namespaces"] = sorted(str(path) for path in Path("/run/netns").glob("*"))
    found["folders"] = [str(path) for path in _RUNTIMES_FOLDERS if path.exists()]
    found["cgroups"] = [str(path) for top in _cgroup_tops() if (path := top / folder.name).exists()]
    found["processes"] = sorted(
        os.fsdecode(words[0])
        for _, words in _command_lines()
        if Path(os.fsdecode(words[0])).name in _NODE_PROGRAMS
        or any(os.fsencode(folder) in word for word in words)
    )
    found["sysctls"] = [
        f"{name}={path.read_text().strip()}"
        for name in (*_SYSCTLS, *_KUBELETS_SYSCTLS)
        if (path := Path("/proc/sys") / name).exists()
    ]
    return found


class HostState:
    """Saves what is there, lets a node change it, and puts it back; `folder` is the node's."""

    def __init__(self, folder: Path, bridge: str, runtime_socket: str) -> None:
        """Keep what was there below `folder`, where containerd's socket has this name."""
        self._folder = folder
        self._bridge = bridge
        self._socket = runtime_socket

    @property
    def cgroup(self) -> str:
        """Return the cgroup that holds every pod of this node, and of no other."""
        return self._folder.parent.name

    def prepare(self, address: str, services: str) -> None:
        """Save firewall and sysctls, then make the bridge and let packets pass it.

        `services` is the range of the services' addresses: what no rule sends to a pod goes to the
        bridge and ends there, never out of the machine. Removes what a killed node left.

        Raises:
            HostBusyError: another node runs; nothing was changed.
        """
        self._claim()
        for table in _TABLES:
            rules = subprocess.run([f"{table}-save"], capture_output=True, text=True, check=True)
            (self._folder / f"{table}.rules").write_text(rules.stdout)
        for top in _cgroup_tops():
            (top / self.cgroup).mkdir()
            for name, value in _CPU_SHARE.items():
                if (knob := top / self.cgroup / name).exists():
                    knob.write_text(value)
        absent = [str(path) for path in _RUNTIMES_FOLDERS if not path.exists()]
        (self._folder / _ABSENT).write_text("\n".join(absent))
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", address, "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        _ip("route", "add", services, "dev", self._bridge)
        for name in (*_SYSCTLS, *_KUBELETS_SYSCTLS):
            path = Path("/proc/sys") / name
            if path.exists():
                (self._folder / name.replace("/", ".")).write_text(path.read_text())
                path.write_text(_SYSCTLS.get(name) or path.read_text())

    def restore(self) -> None:
        """Undo everything; safe after a start that failed half-way, and when nothing was done."""
        if not CLAIM.is_file() or CLAIM.read_text() != str(self._folder):
            return
        _end_shims(self._folder / self._socket)
        _unmount(str(self._folder))
        _remove_network_namespaces()
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)
        for table in _TABLES:
            saved = self._folder / f"{table}.rules"
            if saved.is_file():
                _restore_rules(table, saved.read_text())
        for name in (*_SYSCTLS, *_KUBELETS_SYSCTLS):
            saved = self._folder / name.replace("/", ".")
            if saved.is_file():
                (Path("/proc/sys") / name).write_text(saved.read_text())
        remove_cgroups(self.cgroup)
        absent = self._folder / _ABSENT
        for path in absent.read_text().splitlines() if absent.is_file() else ():
            shutil.rmtree(path, ignore_errors=True)
        CLAIM.unlink()

    def _claim(self) -> None:
        if CLAIM.is_file():
            other = Path(CLAIM.read_text())
            if _is_running(other):
                raise HostBusyError(f"the node in {other} has this host: stop it first")
            HostState(other, self._bridge, self._socket).restore()
            shutil.rmtree(other, ignore_errors=True)
        CLAIM.write_text(str(self._folder))


def _is_running(folder: Path) -> bool:
    """Return whether the containerd of a node's folder runs."""
    inside = os.fsencode(folder) + b"/"
    return any(
        words[0].endswith(b"/containerd") and any(word.startswith(inside) for word in words)
        for _, words in _command_lines()
    )


def _command_lines() -> Iterator[tuple[int, list[bytes]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue


def _output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _restore_rules(table: str, saved: str) -> None:
    """Put a table back; one that held nothing is flushed, for then the file names no table."""
    for name in ("nat", "mangle", "filter"):
        for action in ("-F", "-X"):
            subprocess.run([table, "-t", name, action], capture_output=True, check=False)
    subprocess.run([f"{table}-restore"], input=saved, text=True, capture_output=True, check=True)


def _end_shims(runtime_socket: Path) -> None:
    """End the shims that our containerd left; each names its socket on its command line."""
    for pid, words in _command_lines():
        is_shim = words[0].endswith(b"containerd-shim-runc-v2")
        if is_shim and os.fsencode(runtime_socket) in words:
            os.kill(pid, signal.SIGKILL)


def _unmount(prefix: str) -> None:
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for path in reversed(mounts):
        if path.startswith(prefix):
            subprocess.run(["umount", "-l", path], capture_output=True, check=False)


def _remove_network_namespaces() -> None:
    for path in Path("/run/netns").glob("cni-*"):
        subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)
        path.unlink(missing_ok=True)


def _cgroup_tops() -> list[Path]:
    """Return the top folder of each hierarchy: one in version 2, one a controller in version 1."""
    if (_CGROUPS / "cgroup.controllers").is_file():
        return [_CGROUPS]
    return [path for path in _CGROUPS.iterdir() if path.is_dir() and not path.is_symlink()]


def remove_cgroups(name: str) -> None:
    """End what still runs in a cgroup, and remove it with all below it from every hierarchy.

    Raises:
        NotReadyError: a process in it does not end.
    """
    for top in _cgroup_tops():
        for folder, _, _ in os.walk(top / name, topdown=False):
            cgroup = Path(folder)
            wait_until(f"{cgroup} can be removed", lambda cgroup=cgroup: _is_removed(cgroup), 60)


def _is_removed(cgroup: Path) -> bool:
    try:
        cgroup.rmdir()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        _kill_members(cgroup)
        return False
    return True


def _kill_members(cgroup: Path) -> None:
    """Kill the processes of a cgroup; one that is dying still counts until the kernel is done."""
    for pid in (cgroup / "cgroup.procs").read_text().split():
        if pid != "0":  # of a process that this namespace cannot see
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
