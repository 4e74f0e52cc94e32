"""How a model folder's configuration is refused: by field, value and what is supported."""

from __future__ import annotations

from typing import NoReturn


class ModelShapeError(ValueError):
    """A model folder's configuration is unreadable or unsupported; the message names the field."""


def refuse(field: str, value: object, supported: str) -> NoReturn:
    """Raise ModelShapeError in the words that all refusals share."""
    raise ModelShapeError(f"{field} is {value!r}, supported is {supported}")
