"""The programs of a cluster: found ready, or built once from their pinned Go modules.

A program is taken from the folder KUBEBUILDER_ASSETS when it is there, else from the cache
(${XDG_CACHE_HOME:-~/.cache}/baton-cluster), else built into the cache. The cache's key is the
module's go.mod and go.sum and the toolchain: a change of a pin builds anew. Owns sources, versions
and build flags; knows no flag of any program.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton_cluster.debian import DEBIAN_PROGRAMS, extracted
from baton_cluster.progress import say, step

SOURCES_FOLDER = Path(__file__).resolve().parent.parent / "sources"

_VERSION_PACKAGE = "k8s.io/component-base/version"
_KUBERNETES_VERSION = "v1.34.4"


@dataclass(frozen=True, slots=True)
class Source:
    """A Go module with the packages of its programs and the linker flags that name its version."""

    name: str
    packages: tuple[str, ...]
    linker_flags: str = ""

    def package_of(self, program: str) -> str | None:
        """Return the package that builds this program."""
        return next((p for p in self.packages if p.rpartition("/")[2] == program), None)


SOURCES = (
    Source(
        "kubernetes",
        tuple(
            f"k8s.io/kubernetes/cmd/{name}"
            for name in (
                "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl",
                "kubelet", "kube-proxy",
            )
        ),
        f"-X {_VERSION_PACKAGE}.gitVersion={_KUBERNETES_VERSION} "
        f"-X {_VERSION_PACKAGE}.gitMajor=1 -X {_VERSION_PACKAGE}.gitMinor=34",
    ),
    Source(
        "helm",
        ("helm.sh/helm/v3/cmd/helm",),
        # Without these, helm renders and lints for Kubernetes 1.20.
        "-X helm.sh/helm/v3/internal/version.version=v3.22.0 "
        + " ".join(
            f"-X helm.sh/helm/v3/pkg/{package}.k8sVersion{part}={value}"
            for package in ("chartutil", "lint/rules")
            for part, value in (("Major", 1), ("Minor", 34))
        ),
    ),
    Source("kwok", ("sigs.k8s.io/kwok/cmd/kwok",)),
    Source("coredns", ("github.com/coredns/coredns",)),
)  # fmt: skip

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
FAKE_PODS = ("kwok",)
CHART = ("helm",)
NODE = ("kubelet", "kube-proxy", "coredns", "containerd", "runc", "ctr", "bridge")
ALL = CONTROL_PLANE + FAKE_PODS + CHART + NODE


class MissingProgramError(Exception):
    """A program is neither ready nor buildable here."""


def cache_folder() -> Path:
    """Return the cache's folder; it is made when first used."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "baton-cluster"


def ready_program(name: str) -> Path | None:
    """Return a program that needs no work: from KUBEBUILDER_ASSETS, or built before."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets and (path := Path(assets) / name).is_file():
        return path
    if name in DEBIAN_PROGRAMS:
        return extracted(name, cache_folder(), is_download_allowed=False)
    source = _source_of(name)
    if source is None or shutil.which("go") is None:
        return None
    path = _folder(source) / name
    return path if path.is_file() else None


def programs(names: Sequence[str]) -> dict[str, Path]:
    """Return the path of each program, building those that are not ready.

    Raises:
        MissingProgramError: no Go toolchain, or a build failed.
    """
    found = {name: ready_program(name) for name in names}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        with _locked(cache_folder() / "lock"):
            for name in missing:
                found[name] = ready_program(name) or _made(name)
    return {name: path for name, path in found.items() if path is not None}


def _made(name: str) -> Path:
    if name in DEBIAN_PROGRAMS:
        path = extracted(name, cache_folder(), is_download_allowed=True)
        if path is None:
            raise MissingProgramError(f"{name}: its Debian package has no such file")
        return path
    source = _source_of(name)
    if source is None:
        raise MissingProgramError(f"{name}: no source builds it")
    return _build(source, name)


def _source_of(program: str) -> Source | None:
    return next((source for source in SOURCES if source.package_of(program)), None)


def _folder(source: Source) -> Path:
    module = SOURCES_FOLDER / source.name
    digest = hashlib.sha256(source.linker_flags.encode())
    for name in ("go.mod", "go.sum"):
        digest.update((module / name).read_bytes())
    return cache_folder() / f"{source.name}-{digest.hexdigest()[:12]}"


def _build(source: Source, program: str) -> Path:
    if shutil.which("go") is None:
        raise MissingProgramError(
            f"{program}: needs Go 1.24 or newer to build, or KUBEBUILDER_ASSETS"
        )
    folder = _folder(source)
    for old in cache_folder().glob(f"{source.name}-*"):
        if old != folder:
            say(f"removing {old}: built from other pins")
            shutil.rmtree(old)
    with step(f"building {program}"):
        _install(source, program, folder)
    return folder / program


def _install(source: Source, program: str, folder: Path) -> None:
    """Build one program into the folder.

    Downloads fail now and then, and what was compiled stays in Go's own cache: a failed build is
    repeated, and goes on where it broke. The program appears whole or not at all.
    """
    command = [
        "nice", "-n", "10", "go", "install", "-trimpath",
        "-ldflags", f"-s -w {source.linker_flags}", str(source.package_of(program)),
    ]  # fmt: skip
    unfinished = folder / "unfinished"
    environment = os.environ | {"GOBIN": str(unfinished)}
    for pause in (*_RETRY_PAUSES_SECONDS, None):
        done = subprocess.run(
            command, cwd=SOURCES_FOLDER / source.name, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            (unfinished / program).replace(folder / program)
            return
        if pause is None:
            raise MissingProgramError(f"{program}: go install failed:\n{done.stderr[-4000:]}")
        say(f"building {program} failed, again in {pause:.0f} s:\n{done.stderr[-1000:]}")
        time.sleep(pause)


_RETRY_PAUSES_SECONDS = (5.0, 30.0)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with step("waiting for another build"):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
