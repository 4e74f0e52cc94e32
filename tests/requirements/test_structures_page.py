"""`docs/structures.md` tells a token's way in at most ten steps, by names that the code has, and
`docs/add-a-field.md` and `docs/add-a-column.md` name only what is there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "structures.md").read_text()
PAGES_OF_ADDING = ("add-a-field.md", "add-a-column.md")
ADDING = "\n".join((ROOT / "docs" / name).read_text() for name in PAGES_OF_ADDING)
PACKAGES = {
    "": ROOT / "worker" / "src" / "baton_worker",
    "baton_ops": ROOT / "ops" / "src" / "baton_ops",
}
NAME = re.compile(r"`(\w+(?:\.(?!py`|md`)\w+)+)`")
NAMES = sorted(set(NAME.findall(PAGE)))
FILES = sorted(set(re.findall(r"`(\w[\w/-]*\.(?:py|md))`", ADDING)))


def module_of(name: str) -> tuple[Path, list[str]]:
    """Return the file that the longest beginning of a name means, and what is left of it."""
    parts = name.split(".")
    root = PACKAGES[""]
    if parts[0] in PACKAGES:
        root, parts = PACKAGES[parts[0]], parts[1:]
    for n in range(len(parts), 0, -1):
        path = root.joinpath(*parts[:n]).with_suffix(".py")
        if path.is_file():
            return path, parts[n:]
    return root / "__init__.py", parts


def defined(body: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield each name that a body defines or imports, with the body of its own, if it has one."""
    for node in body:
        match node:
            case ast.ClassDef(name=name, body=inner):
                yield name, inner
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, []
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, []
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name, []
            case ast.ImportFrom(names=aliases):
                yield from ((alias.asname or alias.name, []) for alias in aliases)


@pytest.mark.parametrize("name", sorted({*NAMES, *NAME.findall(ADDING)}))
def test_every_name_on_the_page_is_in_the_code(name: str) -> None:
    path, rest = module_of(name)
    assert path.is_file(), f"no module for {name}"
    body = ast.parse(path.read_text()).body
    for part in rest:
        found = dict(defined(body))
        assert part in found, f"{path.relative_to(ROOT)} has no {part}"
        body = found[part]


@pytest.mark.parametrize("name", FILES)
def test_every_file_on_the_pages_of_adding_is_there(name: str) -> None:
    assert (ROOT / name).is_file() or (PACKAGES[""] / name).is_file()


def test_the_way_has_at_most_ten_numbered_steps() -> None:
    numbers = [int(n) for n in re.findall(r"^(\d+)\. \*\*", PAGE, re.M)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 5 <= len(numbers) <= 10
    assert len(NAMES) > 40


def test_each_step_names_what_it_makes() -> None:
    steps = re.split(r"^\d+\. ", PAGE, flags=re.M)[1:]
    for step in steps:
        assert "→" in step, step[:40]
