"""A tool call's arguments, as chat templates of both kinds take them.

OpenAI's clients send them as JSON text. Templates are written for one or the other: some walk
through a mapping (Qwen3-Coder, GLM-4.5) or make JSON of it (Llama 3, Qwen2.5), some put a text
between texts (DeepSeek-V3). So it is a mapping that is the client's own text where one is wanted.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec


class ToolArguments(dict[str, Any]):
    """A mapping that can be added to a text, and shows as its JSON."""

    def __init__(self, text: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def tool_arguments(given: str | dict[str, Any] | None) -> ToolArguments | str:
    """Return what a template gets: text that is no JSON object, as a model may have written it,
    stays text.
    """
    if isinstance(given, dict):
        return ToolArguments(json.dumps(given, ensure_ascii=False), given)
    if not given:
        return ToolArguments(given or "", {})
    try:
        return ToolArguments(given, msgspec.json.decode(given, type=dict[str, Any]))
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return given
