"""The configuration's file as plain data, and what YAML lets pass that is a slip all the same.

Owns three of these: a field that is written twice, of which YAML keeps the last, and with a section
all that the first one said; a name that is no text, as `on` or a number; and a zero byte, which no
path and no name can have. Knows no section.
"""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class DocumentError(ValueError):
    """A file is no YAML document, or one with a slip; the message has the field."""


def read_document(content: bytes) -> Any:
    """Return what a file holds.

    Raises:
        DocumentError: see the module.
    """
    try:
        document = msgspec.yaml.decode(content)
    except msgspec.DecodeError as error:
        raise DocumentError(str(error)) from error
    if document is None:
        raise DocumentError("it is empty: model.path at least is required")
    _check_names(yaml.compose(content, Loader=_LOADER), "", set())
    return document


def _check_names(node: yaml.Node | None, place: str, seen: set[int]) -> None:
    if node is None or id(node) in seen:  # an alias, of what was looked at where it is anchored
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        if "\0" in node.value:
            raise DocumentError(f"{place} is {node.value!r}: it must hold no zero byte")
    elif isinstance(node, yaml.SequenceNode):
        for index, each in enumerate(node.value):
            _check_names(each, f"{place}[{index}]", seen)
    elif isinstance(node, yaml.MappingNode):
        names = set[str]()
        for name, value in node.value:
            field = f"{place}.{name.value}" if place else str(name.value)
            if name.tag == "tag:yaml.org,2002:merge":
                continue
            if name.tag != "tag:yaml.org,2002:str":
                raise DocumentError(f"{field} is no field: the names of fields are text")
            if name.value in names:
                first = next(key for key, _ in node.value if key.value == name.value)
                raise DocumentError(
                    f"{field} is there twice, in lines {first.start_mark.line + 1} and "
                    f"{name.start_mark.line + 1}: the first would count for nothing"
                )
            names.add(name.value)
            _check_names(value, field, seen)
