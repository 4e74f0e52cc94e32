"""Programs from Debian packages, unpacked into the cache.

Unpacked and not installed: the packages of etcd and containerd would start daemons of the host.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from baton_cluster.progress import step
from baton_cluster.retry import apt_get, thrice

DEBIAN_PROGRAMS = {
    "etcd": ("etcd-server", "usr/bin/etcd"),
    "containerd": ("containerd", "usr/bin/containerd"),
    "ctr": ("containerd", "usr/bin/ctr"),
    "runc": ("runc", "usr/sbin/runc"),
    "bridge": ("containernetworking-plugins", "usr/lib/cni/bridge"),
}
"""Program: Debian package, path inside it."""


def extracted(program: str, cache: Path, *, is_download_allowed: bool) -> Path | None:
    """Return the program's path, its package unpacked when allowed; None when it is not there."""
    package, inside = DEBIAN_PROGRAMS[program]
    folder = cache / "debian" / package
    if not (folder / inside).is_file() and is_download_allowed:
        with step(f"unpacking {package}"):
            _unpack(package, folder)
    path = folder / inside
    return path if path.is_file() else None


def _unpack(package: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not _download(package, folder):
        thrice(lambda: _download_anew(package, folder), OSError)
    for archive in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True, capture_output=True)
        archive.unlink()


def _download_anew(package: str, folder: Path) -> None:
    """Download what apt's lists may name otherwise by now."""
    apt_get("update")
    if not _download(package, folder):
        raise OSError(f"apt-get download {package} failed: see `apt-cache policy {package}`")


def _download(package: str, folder: Path) -> bool:
    # As root, apt reads the file as another user unless told otherwise, and warns.
    options = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
    return apt_get(*options, "download", package, folder=folder).returncode == 0
