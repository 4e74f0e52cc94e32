"""What the GPU suite last ran on: a hash of the code that computes there, its results, the machine.

Owns which files those are, what the stamp holds, and what has changed since. Runs nothing on a GPU.
Without an argument: name what has moved on since the stamp. With `--release`: exit 1 for that, and
for a stamp with failures or without the whole suite.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STAMP = ROOT / "docs" / "benchmarks" / "results" / "gpu-stamp.json"
ENGINE = "worker/src/baton_worker/engine"
WATCHED: Mapping[str, tuple[str, ...]] = {
    "kernels": ("ops/csrc/cuda", "ops/include", "ops/cmake/cuda.cmake"),
    "ops": ("ops/src/baton_ops",),
    "engine": (
        f"{ENGINE}/backends/device",
        f"{ENGINE}/backends/torch",
        f"{ENGINE}/backends/kernels.py",
    ),
}
"""Whose bytes decide what a GPU computes, by the part that they are of."""
NOT_WATCHED = ("ops/include/baton_ops/cpu/",)
SUFFIXES = (".py", ".cu", ".cuh", ".cc", ".h", ".cmake")
SHOWN = 8
KINDS = {"commit": str, "content": str, "files": dict, "machine": dict, "digests": dict}


@dataclass(frozen=True)
class Results:
    """How the suite went.

    Attributes:
        names_failed: ids of the tests that failed, in the order of the run.
        whole: nothing of the suite was left out.
    """

    passed: int
    failed: int
    skipped: int
    names_failed: tuple[str, ...] = ()
    whole: bool = True


@dataclass(frozen=True)
class Stamp:
    """One run of the GPU suite.

    Attributes:
        files: 16 hex digits of each watched file's SHA-256, by its path.
        machine: gpu, driver, cuda, torch, python.
        digests: 64 hex digits of all that a named workload said, equal on every GPU of a kind.
    """

    commit: str
    content: str
    files: Mapping[str, str]
    results: Results
    machine: Mapping[str, str]
    digests: Mapping[str, str] = field(default_factory=dict)


def watched_files(root: Path = ROOT) -> Iterator[Path]:
    """Yield the watched files that there are, in order."""
    for places in WATCHED.values():
        for place in (root / name for name in places):
            found = sorted(place.rglob("*")) if place.is_dir() else [place]
            for path in found:
                name = path.relative_to(root).as_posix()
                if path.is_file() and name.endswith(SUFFIXES) and not name.startswith(NOT_WATCHED):
                    yield path


def hashes(root: Path = ROOT) -> dict[str, str]:
    """Return 16 hex digits for each watched file."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in watched_files(root)
    }


def content_of(files: Mapping[str, str]) -> str:
    """Return one hash of all files: their names and theirs."""
    text = json.dumps(sorted(files.items()), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def moved(stamp: Stamp, files: Mapping[str, str]) -> list[str]:
    """Return a line for each file that is not what it was."""
    lines = [
        f"{name}: changed" for name in files if stamp.files.get(name, "") not in ("", files[name])
    ]
    lines += [f"{name}: new" for name in files if name not in stamp.files]
    lines += [f"{name}: gone" for name in stamp.files if name not in files]
    return sorted(lines)


def unlike(one: Stamp, other: Stamp) -> list[str]:
    """Return the workloads that two runs of the same code on GPUs of a kind were told otherwise.

    Runs of other code, or on other kinds of GPUs, may differ: nothing is said of them.
    """
    if one.content != other.content or one.machine.get("gpu") != other.machine.get("gpu"):
        return []
    both = one.digests.keys() & other.digests.keys()
    return sorted(name for name in both if one.digests[name] != other.digests[name])


def in_the_way_of_a_release(stamp: Stamp | None, files: Mapping[str, str]) -> list[str]:
    """Return why what is here may not be released; empty when it may."""
    if stamp is None:
        return ["the GPU suite has left no stamp: run `make gpu-test` on a machine with a GPU"]
    results = stamp.results
    lines = [f"{name} failed on the GPU" for name in results.names_failed]
    if results.failed > len(lines):
        lines.append(f"{results.failed} tests failed on the GPU")
    if not results.passed:
        lines.append("no test passed on the GPU")
    if not results.whole:
        lines.append("a part of the GPU suite was left out")
    return lines + moved(stamp, files)


def note(stamp: Stamp | None, files: Mapping[str, str]) -> str:
    """Return what `make lint` says of the stamp, "" for nothing."""
    if stamp is None:
        return "the GPU suite has left no stamp"
    lines = moved(stamp, files)
    if not lines:
        return ""
    rest = f", and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return (
        f"the code has moved on since the GPU suite ran at {stamp.commit}: "
        + ", ".join(lines[:SHOWN])
        + rest
    )


def read(path: Path = STAMP) -> Stamp | None:
    """Return the stamp, None where there is none.

    Raises:
        ValueError: the file is no stamp.
    """
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        results = found.pop("results")
        names = tuple(results.pop("names_failed"))
        stamp = Stamp(results=Results(names_failed=names, **results), **found)
        if wrong := [
            name for name, kind in KINDS.items() if not isinstance(getattr(stamp, name), kind)
        ]:
            raise TypeError(f"{', '.join(wrong)}: of another kind than the suite writes")
        return stamp
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no stamp: {error!r}") from error


def place_of(stamp: Stamp, path: Path = STAMP) -> Path:
    """Return where a stamp goes: `path`, but for one of a part that would replace one of the whole
    suite. That goes beside it.

    Raises:
        ValueError: what is at `path` is no stamp.
    """
    before = read(path)
    if stamp.results.whole or before is None or not before.results.whole:
        return path
    return part_of(path)


def part_of(path: Path) -> Path:
    """Return where the stamp of a part lies beside that of the whole suite."""
    return path.with_suffix(f".part{path.suffix}")


def write(stamp: Stamp, path: Path = STAMP) -> None:
    """Write the stamp, as a file whose changes can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(stamp), indent=1, sort_keys=True) + "\n")


def main() -> int:
    """Say what has moved on since the stamp; with `--release`, refuse it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", action="store_true", help="exit 1 for anything that is open")
    options = parser.parse_args()
    try:
        stamp, files = read(), hashes()
    except ValueError as error:
        sys.exit(f"[release] {error}: run `make gpu-test` on a machine with a GPU")
    if options.release:
        lines = in_the_way_of_a_release(stamp, files)
        sys.stdout.writelines(f"[release] {line}\n" for line in lines)
        return 1 if lines else 0
    sys.stdout.write((note(stamp, files) or "the stamp is of this code") + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
