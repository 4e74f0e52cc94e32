"""Libraries of kernels on the host are kept by what they are made of."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from baton_testing import host_cuda, host_heads, kept_builds


class Maker:
    """Makes a library at a place, and counts how often."""

    def __init__(self, kept: Path, to: Path) -> None:
        self.kept, self.to, self.n_made = kept, to, 0

    def take(self, name: str, content: bytes = b"library") -> bytes:
        def make() -> None:
            self.n_made += 1
            self.to.write_bytes(content)

        self.to.unlink(missing_ok=True)
        kept_builds.take("kind", name, self.to, make, self.kept)
        return self.to.read_bytes()


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    return Maker(tmp_path / "kept", tmp_path / "library.so")


def test_what_was_made_is_taken_again_and_is_a_file_of_its_own(maker: Maker) -> None:
    first = maker.take("a", b"first")
    assert (maker.take("a", b"second"), maker.n_made) == (first, 1)
    assert not maker.to.samefile(maker.kept / "a.so")
    assert (maker.take("b", b"third"), maker.n_made) == (b"third", 2)


def test_what_was_not_made_to_the_end_is_not_kept(maker: Maker) -> None:
    def fail() -> None:
        maker.to.write_bytes(b"half")
        raise ChildProcessError("it does not compile")

    with pytest.raises(ChildProcessError):
        kept_builds.take("kind", "a", maker.to, fail, maker.kept)
    assert maker.take("a", b"whole") == b"whole"


def test_those_that_were_not_taken_for_longest_go(maker: Maker) -> None:
    for nth in range(kept_builds.MOST_KEPT):
        maker.take(f"{nth}")
        os.utime(maker.kept / f"{nth}.so", ns=(nth, nth))
    maker.take("0")
    maker.take("new")
    names = {path.stem for path in maker.kept.glob("*.so")}
    assert len(names) == kept_builds.MOST_KEPT
    assert {"0", "new"} <= names
    assert "1" not in names


def test_what_others_forget_meanwhile_is_made_again_and_breaks_nobody(maker: Maker) -> None:
    """Who makes libraries of another kind forgets old ones of all: here it is listed, and gone."""
    maker.kept.mkdir()
    for name in ("wanted", "another"):
        (maker.kept / f"{name}.so").symlink_to(maker.kept / "gone")
    assert (maker.take("wanted", b"made"), maker.n_made) == (b"made", 1)
    assert (maker.take("wanted", b"not made"), maker.n_made) == (b"made", 1)


def test_a_name_tells_of_words_names_and_bytes(tmp_path: Path) -> None:
    one, two = tmp_path / "one.h", tmp_path / "two.h"
    one.write_bytes(b"1")
    two.write_bytes(b"1")
    names = [
        kept_builds.digest(["-O1"], [one]),
        kept_builds.digest(["-O2"], [one]),
        kept_builds.digest(["-O1"], [two]),
        kept_builds.digest(["-O1"], [one, two]),
    ]
    one.write_bytes(b"2")
    names.append(kept_builds.digest(["-O1"], [one]))
    assert len({*names}) == len(names)


@pytest.fixture
def name_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[host_cuda.Unit], str]:
    """The name by which a unit is kept, laid out anew in a folder of its own."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    taken: list[str] = []
    monkeypatch.setattr(kept_builds, "take", lambda kind, name, to, make: taken.append(name))

    def build(unit: host_cuda.Unit) -> str:
        folder = tmp_path / str(len(taken))
        folder.mkdir()
        host_cuda.build(compiler, folder, unit)
        return taken[-1]

    return build


def test_kernels_that_did_not_change_are_not_compiled_again(
    name_of: Callable[[host_cuda.Unit], str],
) -> None:
    """Rewritten for each folder and process anew, they are the same words."""
    first = name_of(host_heads.UNIT)
    assert name_of(host_heads.UNIT) == first
    assert name_of(host_cuda.SAMPLER) != first


def test_another_checkout_takes_the_same_kernels_and_its_own_when_they_change(
    name_of: Callable[[host_cuda.Unit], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = name_of(host_heads.UNIT)
    for name in ("HERE", "OPS"):
        copied = tmp_path / "checkout" / name
        shutil.copytree(getattr(host_cuda, name), copied, ignore=shutil.ignore_patterns("build"))
        monkeypatch.setattr(host_cuda, name, copied)
    assert name_of(host_heads.UNIT) == first
    with (host_cuda.HERE / "shims" / "fibers.h").open("a") as shim:
        shim.write("// A word more.\n")
    changed = name_of(host_heads.UNIT)
    assert changed != first
    with (host_cuda.OPS / "csrc" / "cuda" / "decoder_rows.cu").open("a") as source:
        source.write("// A word more.\n")
    assert name_of(host_heads.UNIT) not in (first, changed)
