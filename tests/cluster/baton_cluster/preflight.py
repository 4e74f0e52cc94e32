"""What a real node needs of its machine, each need tried and named when it is missing.

Tries in earnest (mounts, namespaces, a bridge, a firewall table), for a capability that is listed
may still be refused; leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_CONTROLLERS = ("cpu", "memory", "pids")
COMMANDS = ("ip", "setpriv", "openssl", "gcc", "git", "apt-get", "dpkg-deb", "mount", "unshare")
_GIB = 1 << 30
_FREE_DISK_BYTES = 12 * _GIB
_FREE_MEMORY_BYTES = 3 * _GIB


class MachineError(Exception):
    """The machine cannot run a node; the text names each need."""


def require_machine(*, is_room_asked: bool = False) -> None:
    """Return when this machine can run a node.

    Args:
        is_room_asked: ask for free disk and memory too, most of which programs and images take: a
            question for the time before they are made.

    Raises:
        MachineError: it cannot; one line for each thing that is missing.
    """
    missing = missing_needs()
    if is_room_asked:
        missing += _room()
    if missing:
        lines = "\n".join(f"  - {each}" for each in missing)
        raise MachineError(f"a real node cannot run on this machine:\n{lines}")


def missing_needs() -> list[str]:
    """Return what is missing but room, in words."""
    if os.geteuid() != 0:
        return ["root: run as root, or in a virtual machine of your own"]
    missing = [f"the command {name}" for name in COMMANDS if shutil.which(name) is None]
    if missing:
        return missing
    tries: tuple[Callable[[], Iterator[str]], ...] = (
        _cgroups, _namespaces, _overlay, _bridge, _firewall,
    )  # fmt: skip
    return [each for attempt in tries for each in attempt()]


def _cgroups() -> Iterator[str]:
    root = Path("/sys/fs/cgroup")
    unified = root / "cgroup.controllers"
    present = unified.read_text().split() if unified.is_file() else [e.name for e in root.iterdir()]
    for name in _CONTROLLERS:
        if name not in present:
            yield f"the cgroup controller {name}"
    top = root if unified.is_file() else root / "cpu"
    trial = top / f"baton-trial-{os.getpid()}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        yield f"writable cgroups: {error}"


def _namespaces() -> Iterator[str]:
    words = ["unshare", "--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "true"]
    if reason := _refusal(words):
        yield f"new namespaces: {reason}"


def _overlay() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        for name in ("lower", "upper", "work", "merged"):
            (Path(folder) / name).mkdir()
        options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
        merged = f"{folder}/merged"
        if reason := _refusal(["mount", "-t", "overlay", "overlay", "-o", options, merged]):
            yield f"overlay mounts below /var/tmp: {reason}"
        else:
            subprocess.run(["umount", merged], check=True, capture_output=True)


def _bridge() -> Iterator[str]:
    name = f"btrial{os.getpid() % 1000000}"
    if reason := _refusal(["ip", "link", "add", name, "type", "bridge"]):
        yield f"a network bridge: {reason}"
    else:
        subprocess.run(["ip", "link", "del", name], check=True, capture_output=True)


def _firewall() -> Iterator[str]:
    if shutil.which("iptables") is None:
        return  # installed with the image tools; its own words tell when it cannot work
    if reason := _refusal(["iptables", "-w", "-t", "nat", "-S"]):
        yield f"iptables with a nat table: {reason}"


def _room() -> Iterator[str]:
    free = shutil.disk_usage("/var/tmp").free
    if free < _FREE_DISK_BYTES:
        yield f"{_FREE_DISK_BYTES // _GIB} GiB of free disk below /var/tmp: {free / _GIB:.1f} left"
    text = Path("/proc/meminfo").read_text()
    line = next(each for each in text.splitlines() if each.startswith("MemAvailable"))
    available = int(line.split()[1]) * 1024
    if available < _FREE_MEMORY_BYTES:
        wanted = _FREE_MEMORY_BYTES // _GIB
        yield f"{wanted} GiB of free memory: {available / _GIB:.1f} left"


def _refusal(words: list[str]) -> str:
    """Return why a command failed, or an empty string."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
