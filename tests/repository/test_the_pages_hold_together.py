"""Pages link to what exists, and the README stays short and tells no command of its own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT, check=True, capture_output=True, text=True,
).stdout.split()  # fmt: skip
PAGES = [name for name in LISTED if (ROOT / name).exists()]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)")
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
MAX_README_WORDS = 1000


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that hosts make of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {"#" + heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_of_a_page_leads_somewhere(name):
    page = ROOT / name
    for target, anchor in LINK.findall(BLOCK.sub("", page.read_text())):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{name} links to {target}"
        if anchor:
            assert anchor in anchors_of(found), f"{name} links to {target}{anchor}"


def test_every_page_of_docs_can_be_reached_from_the_readme():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached:
            continue
        reached.add(page)
        links = (page.parent / target for target, _ in LINK.findall(page.read_text()) if target)
        todo += [link.resolve() for link in links if link.suffix == ".md"]
    docs = {ROOT / name for name in PAGES if name.startswith("docs/")}
    assert docs <= reached


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("docs/")])
def test_the_first_words_of_a_page_say_who_needs_it(name):
    first = (ROOT / name).read_text().split("\n\n")[1]
    assert first.startswith("For "), f"{name} begins: {first[:60]}"


def test_the_readme_can_be_read_at_once():
    assert len((ROOT / "README.md").read_text().split()) <= MAX_README_WORDS


def test_the_readmes_commands_for_kubernetes_are_those_that_a_real_node_runs():
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs/kubernetes.md").read_text()
    section = readme.split("\n## On Kubernetes\n", 1)[1].split("\n## ", 1)[0]
    (block,) = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    told = [line for line in block.splitlines() if line]
    run = page.splitlines()
    assert told
    assert [line for line in told if line not in run] == []


def uneven_rows(text: str) -> list[int]:
    """Return the lines of tables that have other cells than their first row."""
    found, width, is_code = [], 0, False
    for number, line in enumerate(text.splitlines(), start=1):
        is_code ^= line.lstrip().startswith("```")
        if is_code or not line.startswith("|"):
            width = 0
            continue
        bare = re.sub(r"`[^`]*`", lambda code: re.sub(r"\\?\|", "", code[0]), line)
        cells = len(re.findall(r"(?<!\\)\|", bare))
        width = width or cells
        if cells != width:
            found.append(number)
    return found


@pytest.mark.parametrize("name", PAGES)
def test_every_row_of_a_table_has_its_cells(name):
    assert uneven_rows((ROOT / name).read_text()) == []


def test_a_row_that_was_put_into_another_is_found():
    table = "| a | b |\n|---|---|\n| 1 | 2 | 3 |\n| `x|y` | 2 |\n\n| c |\n|---|\n"
    assert uneven_rows(table) == [3]
