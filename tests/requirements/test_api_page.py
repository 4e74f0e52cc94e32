"""`docs/api.md` has a row for each field that the gateway reads, with its type, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from baton_worker.gateway.intake.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from baton_worker.sampling import MAX_PRIORITY

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
WORDS = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "list",
    dict: "object",
}
OF = {
    "Both generation endpoints": (GenerationBody,),
    "Chat alone": (ChatBody,),
    "Completions alone": (CompletionBody,),
    "Tokenize and detokenize": (TokenizeBody, DetokenizeBody),
}


def rows_of(title: str) -> dict[str, list[str]]:
    section = PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", section, re.M)
    found = {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in rows}
    assert len(found) == len(rows), "a field has two rows"
    return found


def fields_of(kinds: tuple[Any, ...]) -> dict[str, Any]:
    """Return the fields that these have and what they all extend has not."""
    hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
    shared = [kind for kind in kinds if kind.__base__ is GenerationBody]
    above = set(GenerationBody.__struct_fields__) if shared else set()
    return {name: hint for name, hint in hints.items() if name not in above}


def words_of(kind: Any) -> set[str]:
    """Return the JSON types of a field's annotation."""
    if get_origin(kind) is UnionType:
        return {word for part in get_args(kind) for word in words_of(part)}
    base = get_origin(kind) or kind
    return set() if base is NoneType else {WORDS.get(base, "object")}


@pytest.mark.parametrize("title", OF)
def test_each_field_that_is_read_has_a_row_and_no_other_has(title):
    told, read = set(rows_of(title)), set(fields_of(OF[title]))
    assert sorted(read - told) == [], f"docs/api.md, {title!r}, needs a row of each"
    assert sorted(told - read) == [], f"docs/api.md, {title!r}, tells of what nobody reads"


@pytest.mark.parametrize("title", OF)
def test_each_row_tells_the_type_that_is_read(title):
    rows = rows_of(title)
    for name, kind in fields_of(OF[title]).items():
        if name not in rows:
            continue  # the test above says so
        told = rows[name][0]
        missing = [word for word in words_of(kind) if word not in told]
        assert not missing, f"{name}: {told!r} does not say {missing}"
        wrong = [w for w in WORDS.values() if told.startswith(w) and w not in words_of(kind)]
        assert not wrong, f"{name}: {told!r}, but it is {words_of(kind)}"


def test_the_page_tells_the_priorities_and_codes_that_there_are():
    (cells,) = [rows["priority"] for rows in map(rows_of, OF) if "priority" in rows]
    assert cells[0] == f"integer, -{MAX_PRIORITY} to {MAX_PRIORITY}"
    (codes,) = re.findall(r"^\| 400 \| (.*) and others, or none \|", PAGE, re.M)
    assert {"`context_length_exceeded`", "`body_too_large`"} <= set(codes.split(", "))


@pytest.mark.parametrize("title", OF)
def test_each_row_says_whose_the_field_is(title):
    for name, cells in rows_of(title).items():
        assert len(cells) == 4, name
        assert cells[3].startswith(("OpenAI", "vLLM", "Baton")), name
