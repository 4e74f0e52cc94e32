"""Chat templates: messages to prompt text, in a Jinja sandbox.

A template comes with the model's files, so it is code from outside: it runs in Jinja's immutable
sandbox, and its errors become errors of the request. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton_worker.config import ConfigError


class ChatTemplateError(ValueError):
    """The template refused these messages, or cannot render them."""


class ChatTemplate:
    """A compiled template; `special_tokens` (`bos_token`, ...) are among its variables."""

    __slots__ = ("_special_tokens", "_template")

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile.

        Raises:
            ConfigError: the template has a syntax error.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"model.path: chat template, line {error.lineno}: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text.

        Raises:
            ChatTemplateError: the template called `raise_exception`, or failed on these messages.
        """
        values = {
            **self._special_tokens,
            **(variables or {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(values)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is code from outside: it may raise anything
            raise ChatTemplateError(f"the chat template failed: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own `tojson` escapes HTML characters, which templates of chat models do not
    expect."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
