"""Libraries of kernels on the host are kept by what they are made of."""

from __future__ import annotations

import os
import shutil
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


def test_kernels_that_did_not_change_are_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewritten for each folder and process anew, they are the same words."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    taken = []
    monkeypatch.setattr(kept_builds, "take", lambda kind, name, to, make: taken.append(name))
    for folder, unit in (("a", host_heads.UNIT), ("b", host_heads.UNIT), ("c", host_cuda.SAMPLER)):
        (tmp_path / folder).mkdir()
        host_cuda.build(compiler, tmp_path / folder, unit)
    assert taken[0] == taken[1] != taken[2]
