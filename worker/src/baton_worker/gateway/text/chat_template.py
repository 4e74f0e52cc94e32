"""Chat templates: messages to prompt text, in a sandbox.

A template comes with the model's files, so it is code from outside: it runs in `sandbox`, and its
errors become errors of the request. It finds what transformers would give it: `messages`, `tools`
and `documents` (None where there are none), `add_generation_prompt`, the special tokens that the
model names, `raise_exception`, `strftime_now`, and a `tojson` that escapes nothing. Knows nothing
of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes

from baton_worker.config import ConfigError
from baton_worker.gateway.text.sandbox import TemplateSandbox

_PROBE = "a text of its own"


class ChatTemplateError(ValueError):
    """The template refused these messages, or cannot render them."""


class ChatTemplate:
    """A model's template, and the one it has beside it for requests with tools.

    Attributes:
        shows_tools: whether tools of a request would come to stand in the prompt.
    """

    __slots__ = ("_default", "_special_tokens", "_tool_use", "shows_tools")

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_use: str | None = None
    ) -> None:
        """Compile; `special_tokens` (`bos_token`, ...) are among the variables.

        Raises:
            ConfigError: a template has a syntax error, or cannot be compiled.
        """
        self._special_tokens = dict(special_tokens)
        self._default = _Compiled(source, self._special_tokens)
        self._tool_use = (
            self._default if tool_use is None else _Compiled(tool_use, self._special_tokens)
        )
        self.shows_tools = self._tool_use.names_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text.

        Args:
            messages: `role` and what else each has; `content` is a text, text parts, or None.
            tools: as the request has them; none and no list are the same.
            add_generation_prompt: end with the beginning of an answer.
            variables: what else the template may name.

        Raises:
            ChatTemplateError: the template called `raise_exception`, failed on these messages, or
                takes too long for them.
        """
        template = self._tool_use if tools else self._default
        return template.render(
            {
                **self._special_tokens,
                "documents": None,
                **(variables or {}),
                "messages": [template.fitting(message) for message in messages],
                "tools": list(tools) if tools else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )


class _Compiled:
    """One template, with what it makes of a message's content.

    Attributes:
        names_tools: whether it looks at `tools`.
    """

    __slots__ = ("_asks_for_null", "_environment", "_takes_parts", "_template", "names_tools")

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._environment = _environment()
        try:
            with self._environment.bounded({}):  # constants are made while it is compiled
                tree = self._environment.parse(source)
                self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"model.path: chat template, line {error.lineno}: {error}") from error
        except Exception as error:  # Python's own compiler comes behind Jinja's
            raise ConfigError(f"model.path: chat template: {_reason(error)}") from error
        self.names_tools = any(name.name == "tools" for name in tree.find_all(nodes.Name))
        self._asks_for_null = any(map(_is_about_null_content, tree.find_all(nodes.Test)))
        self._takes_parts = self._is_the_same_in_parts(special_tokens)

    def fitting(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its content as this template takes it: parts as one text, and no
        content as an empty one, unless it knows either.
        """
        content = message.get("content", "")
        is_result = message.get("role") == "tool"  # templates have other parts there, if any
        if isinstance(content, list) and (is_result or not self._takes_parts):
            content = "\n".join(part["text"] for part in content)
        if content is None and not self._asks_for_null:
            content = ""
        return {**message, "content": content}

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text."""
        try:
            with self._environment.bounded(values):
                return self._template.render(values)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is code from outside: it may raise anything
            raise ChatTemplateError(f"the chat template failed: {error}") from error

    def _is_the_same_in_parts(self, special_tokens: Mapping[str, str]) -> bool:
        """Whether it says the same of a text as of a list with that text as its only part."""
        values = {**special_tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        parts = [{"type": "text", "text": _PROBE}]
        try:
            as_parts, as_text = (
                self.render({**values, "messages": [{"role": "user", "content": content}]})
                for content in (parts, _PROBE)
            )
        except ChatTemplateError:
            return False
        return as_parts == as_text


def _environment() -> TemplateSandbox:
    environment = TemplateSandbox()
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _reason(error: Exception) -> str:
    """Return what is wrong, without a line of the code that Jinja made of a template."""
    return f"{error.msg if isinstance(error, SyntaxError) else error}"


def _is_about_null_content(test: nodes.Test) -> bool:
    """Whether a test is `message.content is none` or its like."""
    about = test.node
    if isinstance(about, nodes.Getattr):
        name: Any = about.attr
    elif isinstance(about, nodes.Getitem) and isinstance(about.arg, nodes.Const):
        name = about.arg.value
    else:
        return False
    return test.name == "none" and name == "content"


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes HTML characters, which templates of chat models do not
    expect."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
