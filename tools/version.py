"""Keep the one version of Baton, in the file VERSION, where others must repeat it.

Without an argument: name each place that says another, exit 1 if there is one (`make lint` does
so). With a version: write it everywhere, the changelog apart, whose heading a person writes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What packagers and Helm read cannot point to a file above its own folder: so these are copies.
PLACES = {
    "worker/src/baton_worker/__init__.py": r'(?m)^__version__ = "(.*)"$',
    "operator/src/baton_operator/__init__.py": r'(?m)^__version__ = "(.*)"$',
    "ops/pyproject.toml": r'(?m)^version = "(.*)"$',
    "charts/baton/Chart.yaml": r"(?m)^(?:version|appVersion): (.*)$",
}
HEADING = r"(?m)^## (\d\S*)"
# What Python packages and Helm both take: numbers alone.
VERSION = re.compile(r"\d+\.\d+\.\d+")


def the_version(root: Path = ROOT) -> str:
    """Return what VERSION says.

    Raises:
        ValueError: when that is no version of three numbers.
    """
    text = (root / "VERSION").read_text().strip()
    if not VERSION.fullmatch(text):
        raise ValueError(f"VERSION says {text!r}: three numbers with dots between are needed")
    return text


def disagreements(root: Path = ROOT) -> Iterator[str]:
    """Yield each place that does not repeat VERSION, and a changelog that does not know it."""
    wanted = the_version(root)
    for name, pattern in PLACES.items():
        found = re.findall(pattern, (root / name).read_text())
        if not found:
            yield f"{name}: no line that matches {pattern}"
        yield from (f"{name}: {v}, but VERSION says {wanted}" for v in found if v != wanted)
    if wanted not in re.findall(HEADING, (root / "CHANGELOG.md").read_text()):
        yield f"CHANGELOG.md: no heading '## {wanted}'"


def write(version: str, root: Path = ROOT) -> None:
    """Write a version to VERSION and every place that repeats it.

    Raises:
        ValueError: for anything but three numbers with dots between.
    """
    if not VERSION.fullmatch(version):
        raise ValueError(f"{version!r}: three numbers with dots between are needed, as 1.2.3")
    (root / "VERSION").write_text(version + "\n")
    for name, pattern in PLACES.items():
        path = root / name
        path.write_text(re.sub(pattern, lambda m: m[0].replace(m[1], version), path.read_text()))


def main(words: list[str]) -> int:
    """Check, or write the version given."""
    if len(words) > 1 or any(word.startswith("-") for word in words):
        sys.stdout.write(f"usage: python tools/version.py [1.2.3]\n\n{__doc__}")
        return 0 if words in (["-h"], ["--help"]) else 2
    try:
        if words:
            write(words[0])
        problems = list(disagreements())
    except ValueError as error:
        problems = [str(error)]
    sys.stdout.writelines(f"{line}\n" for line in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
