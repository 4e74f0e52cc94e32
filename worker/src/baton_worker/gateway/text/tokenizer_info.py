"""What clients are told of the tokenizer, so that they need no copy of it: vLLM's shape.

Owns which of `tokenizer_config.json` is told: all but the places of files. Tokens that the file has
as objects are told by their text. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PLACES = (
    "merges_file",
    "name_or_path",
    "special_tokens_map_file",
    "tokenizer_file",
    "vocab_file",
)
_CLASS = "PreTrainedTokenizerFast"
"""What a folder with a tokenizer.json is, where its configuration names no class."""


def tokenizer_info(config: Mapping[str, Any], chat_template: str | None) -> dict[str, Any]:
    """Return the configuration as it is told; `chat_template` is the one that chats are made by."""
    info = {name: _told(value) for name, value in config.items() if name not in _PLACES}
    info.setdefault("tokenizer_class", _CLASS)
    info.pop("chat_template", None)
    if chat_template is not None:
        info["chat_template"] = chat_template
    return info


def _told(value: Any) -> Any:
    """Return a value with each token that is an object (`content`, `lstrip`, ...) as its text."""
    if isinstance(value, dict):
        content = value.get("content")
        if isinstance(content, str):
            return content
        return {name: _told(item) for name, item in value.items()}
    return [_told(item) for item in value] if isinstance(value, list) else value
