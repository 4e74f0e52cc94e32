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
OF_A_RESOURCE = "## A field of a PDDeployment"
ADDING = "\n".join(
    (ROOT / "docs" / name).read_text().partition(OF_A_RESOURCE)[0] for name in PAGES_OF_ADDING
)
SETTING = (ROOT / "docs" / "add-a-field.md").read_text().partition(OF_A_RESOURCE)[2]
WORKER = ROOT / "worker" / "src" / "baton_worker"
OPERATOR = ROOT / "operator" / "src" / "baton_operator"
OPS = ROOT / "ops" / "src" / "baton_ops"
NAME = re.compile(r"`(\w+(?:\.(?!py`|md`)\w+)+)`")
TOKEN, RESOURCE = re.split(r"^## .*$", PAGE, flags=re.M)[1:]
NAMED = sorted(
    {(WORKER, name) for name in NAME.findall(TOKEN + ADDING)}
    | {(OPERATOR, name) for name in NAME.findall(RESOURCE + SETTING)}
)
FILE = re.compile(r"`(\w[\w/-]*\.(?:py|md))`")
FILES = sorted(
    {(WORKER, name) for name in FILE.findall(ADDING)}
    | {(OPERATOR, name) for name in FILE.findall(SETTING)}
)


def module_of(root: Path, name: str) -> tuple[Path, list[str]]:
    """Return the file that the longest beginning of a name means, and what is left of it."""
    parts = name.split(".")
    if parts[0] == OPS.name:
        root, parts = OPS, parts[1:]
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


@pytest.mark.parametrize(("root", "name"), NAMED, ids=[name for _, name in NAMED])
def test_every_name_on_the_page_is_in_the_code(root: Path, name: str) -> None:
    path, rest = module_of(root, name)
    assert path.is_file(), f"no module for {name}"
    body = ast.parse(path.read_text()).body
    for part in rest:
        found = dict(defined(body))
        assert part in found, f"{name} of the page: {path.relative_to(ROOT)} has no {part}"
        body = found[part]


@pytest.mark.parametrize(("root", "name"), FILES, ids=[name for _, name in FILES])
def test_every_file_on_the_pages_of_adding_is_there(root: Path, name: str) -> None:
    found = (ROOT / name).is_file() or (root / name).is_file()
    assert found, f"{name} is neither in the repository's root nor in {root.relative_to(ROOT)}"


@pytest.mark.parametrize("way", [TOKEN, RESOURCE], ids=["token", "resource"])
def test_a_way_has_at_most_ten_numbered_steps_and_each_names_what_it_makes(way: str) -> None:
    numbers = [int(n) for n in re.findall(r"^(\d+)\. \*\*", way, re.M)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 5 <= len(numbers) <= 10
    assert len(set(NAME.findall(way))) > 40
    for step in re.split(r"^\d+\. ", way, flags=re.M)[1:]:
        assert "→" in step, step[:40]
