"""Images from our Dockerfiles by buildah, on a Debian root made locally: no registry is asked.

Archives are cached by the content that goes into them, and each Dockerfile's stage `needs` by the
files that it copies: a change of the code does not install Paddle again. Needs root.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_cluster.programs import cache_folder
from baton_cluster.progress import step
from baton_cluster.retry import apt_get, thrice

SUITE = "bookworm"
RUNTIME_PACKAGES = "python3,python3-venv,ca-certificates"
BUILD_PACKAGES = f"{RUNTIME_PACKAGES},g++,python3-dev"
PAUSE_IMAGE = "localhost/pause:dev"
TOOLS = ("buildah", "debootstrap", "iptables")
_PAUSE = Path(__file__).with_name("pause.c")


@dataclass(frozen=True, slots=True)
class Recipe:
    """An image: its name, Dockerfile, what of the repository goes into it, and what of that into
    its stage `needs`.
    """

    name: str
    dockerfile: str
    inputs: tuple[str, ...]
    needs: tuple[str, ...]


OPERATOR = Recipe(
    "localhost/baton-operator:dev", "operator/Dockerfile", ("operator",),
    ("operator/pyproject.toml",),
)  # fmt: skip
WORKER = Recipe(
    "localhost/baton-worker:dev", "worker/Dockerfile", ("worker", "ops", "examples/tiny-mtp"),
    ("worker/pyproject.toml", "ops/pyproject.toml", "ops/constraints-cuda.txt"),
)  # fmt: skip


class ImageError(Exception):
    """An image could not be built; the text is what the tool said."""


class ImageBuilder:
    """Builds OCI archives of one repository."""

    def __init__(self, repository: Path) -> None:
        """Use the repository's Dockerfiles."""
        self._repository = repository
        self._cache = cache_folder() / "images"
        store = cache_folder() / "buildah"
        self._buildah = [
            "buildah", "--root", str(store), "--runroot", str(store / "run"),
            "--storage-driver", "vfs",
        ]  # fmt: skip

    def archive(self, recipe: Recipe) -> Path:
        """Return the image's OCI archive, building it when its content changed."""
        path = self._cache / f"{_slug(recipe.name)}-{self._digest(recipe.inputs)}.tar"
        if path.is_file():
            return path
        _install_tools()
        self._cache.mkdir(parents=True, exist_ok=True)
        base = self._debian("localhost/baton-base:dev", RUNTIME_PACKAGES)
        build = self._debian("localhost/baton-build:dev", BUILD_PACKAGES)
        bases = ("--build-arg", f"BASE={base}", "--build-arg", f"BUILD_BASE={build}")
        needs = self._needs(recipe, bases)
        with step(f"building {recipe.name}"):
            context = f"needs=container-image://{needs}"
            self._build(recipe, recipe.name, *bases, "--build-context", context)
        self._push(recipe.name, path)
        return path

    def _needs(self, recipe: Recipe, bases: Sequence[str]) -> str:
        """Return the image of the stage that holds what the code needs, built when that changed."""
        digest = self._digest((*recipe.needs, recipe.dockerfile))
        name = f"localhost/{_slug(recipe.name)}-needs"
        if not self._has(f"{name}:{digest}"):
            for old in self._run("images", "-q", "--filter", f"reference={name}").split():
                self._run("rmi", old)
            options = (f"{name}:{digest}", *bases, "--target", "needs")
            with step(f"installing what {recipe.name} needs"):
                thrice(lambda: self._build(recipe, *options), ImageError)
        return f"{name}:{digest}"

    def _build(self, recipe: Recipe, name: str, *options: str) -> None:
        words = ["bud", "--isolation", "chroot", *_pip_volumes(), "-t", name, *options]
        words += ["-f", str(self._repository / recipe.dockerfile), str(self._repository)]
        self._run(*words)

    def pause(self) -> Path:
        """Return the archive of the pause image: one static program."""
        path = self._cache / "pause.tar"
        if path.is_file():
            return path
        _install_tools()
        folder = self._cache / "pause"
        folder.mkdir(parents=True, exist_ok=True)
        program = str(folder / "pause")
        subprocess.run(["gcc", "-static", "-Os", "-o", program, str(_PAUSE)], check=True)
        file = folder / "Dockerfile"
        file.write_text('FROM scratch\nCOPY pause /pause\nUSER 65535\nENTRYPOINT ["/pause"]\n')
        with step("building the pause image"):
            self._run(
                "bud", "--isolation", "chroot", "-t", PAUSE_IMAGE, "-f", str(file), str(folder)
            )
        self._push(PAUSE_IMAGE, path)
        return path

    def _debian(self, name: str, packages: str) -> str:
        if self._has(name):
            return name
        root = self._cache / f"root-{_slug(name)}"
        with step(f"making {name} by debootstrap"):
            thrice(lambda: _bootstrap(root, packages), ImageError)
            for leftover in ("var/cache/apt/archives", "var/lib/apt/lists"):
                shutil.rmtree(root / leftover)
            container = self._run("from", "scratch").strip()
            mounted = Path(self._run("mount", container).strip())
            _checked(["cp", "-a", f"{root}/.", f"{mounted}/"])
            self._run("commit", "--rm", container, name)
            shutil.rmtree(root)
        return name

    def _has(self, name: str) -> bool:
        words = [*self._buildah, "inspect", "--type", "image", name]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    def _push(self, name: str, path: Path) -> None:
        for old in self._cache.glob(f"{_slug(name)}-*.tar"):
            old.unlink()
        partial = path.with_suffix(".partial")
        self._run("push", name, f"oci-archive:{partial}:{name}")
        partial.rename(path)
        self._run("rmi", name)

    def _run(self, *words: str) -> str:
        return _checked([*self._buildah, *words])

    def _digest(self, inputs: Sequence[str]) -> str:
        listing = ["git", "ls-files", "-co", "--exclude-standard", *inputs]
        listing += ["constraints.txt"]
        done = subprocess.run(
            listing, cwd=self._repository, check=True, capture_output=True, text=True
        )
        digest = hashlib.sha256()
        for name in sorted(done.stdout.splitlines()):
            path = self._repository / name
            if path.is_file():
                digest.update(name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:12]


def _pip_volumes() -> list[str]:
    """Let pip in the build reach the package index as it does on this machine."""
    wanted = ("/etc/ssl/certs", "/etc/pip.conf", os.environ.get("PIP_FIND_LINKS", ""))
    found = [path for path in wanted if path and Path(path).exists()]
    return [word for path in found for word in ("-v", f"{path}:{path}:ro")]


def _install_tools() -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        with step(f"installing {', '.join(missing)}"):
            thrice(lambda: _apt_install(missing), ImageError)


def _apt_install(packages: Sequence[str]) -> None:
    """Try once. To apt an index that cannot be had is a warning, so each try asks for them anew."""
    for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        _check(apt_get(*words))


def _bootstrap(root: Path, packages: str) -> None:
    """Make a Debian root, anew where a try before, or one that was killed, left half of one."""
    if root.exists():
        shutil.rmtree(root)
    words = ["debootstrap", "--variant=minbase", f"--include={packages}", SUITE]
    _checked([*words, str(root), _mirror()])


def _mirror() -> str:
    """Return the Debian mirror that this machine uses."""
    done = _checked(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Origin: Debian"]
    )
    for line in done.splitlines():
        uri, _, suite = line.partition(" ")
        if suite == SUITE:
            return uri
    raise ImageError(f"no Debian mirror with {SUITE} in apt's sources")


def _checked(words: Sequence[str]) -> str:
    return _check(subprocess.run(words, capture_output=True, text=True, check=False))


def _check(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        said = (done.stdout + done.stderr)[-3000:]
        raise ImageError(f"{' '.join(done.args[:8])}: {said}")
    return done.stdout


def _slug(name: str) -> str:
    return name.rpartition("/")[2].replace(":", "-")
