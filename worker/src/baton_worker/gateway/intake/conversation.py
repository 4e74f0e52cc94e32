"""What a chat request says, as the model's template is given it.

Owns which roles there are, what a message must have, and which of its parts a template sees. Knows
no template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton_worker.gateway.errors import bad_request
from baton_worker.gateway.intake.schema import ChatMessage, ToolCall
from baton_worker.gateway.text.tool_arguments import tool_arguments

_ROLES = ("system", "developer", "user", "assistant", "tool")
_LONG_VALUES = 256
"""Messages, and values in tools, calls and variables: a template may look at each."""

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat before it is a prompt.

    Attributes:
        tools: what the template shall show; None for none.
        variables: `chat_template_kwargs`.
    """

    messages: Sequence[ChatMessage]
    tools: Tools | None
    add_generation_prompt: bool | None
    variables: Mapping[str, Any] | None

    @property
    def fields(self) -> list[str]:
        """Those of a request that have values which a template looks at."""
        others = {"tools": self.tools, "chat_template_kwargs": self.variables}
        return ["messages", *(name for name, value in others.items() if value)]

    @property
    def is_long(self) -> bool:
        """Whether a template may have much to do."""
        left = _LONG_VALUES - len(self.messages)
        calls = (call.function.arguments for m in self.messages for call in m.tool_calls or ())
        for value in (self.tools, self.variables, *calls):
            left -= _n_values(value, left)
            if left < 0:
                return True
        return left < 0


def shown_tools(tools: Tools | None, choice: str | Mapping[str, Any] | None) -> Tools | None:
    """Return the tools that the template is given: none where the choice is `none`, for a model
    that knows of no tool calls none.

    Raises:
        ApiError: 400: a tool that is no function, or a call that would have to be enforced.
    """
    if choice not in (None, "", {}, "none", "auto"):
        raise bad_request(
            "tool_choice",
            "tool_choice can be none or auto: which tool is called, and whether one is, is the"
            " model's to write",
            "unsupported_parameter",
        )
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise bad_request(f"tools[{i}]", f"tools[{i}] must have type function and a function")
        if not isinstance(function.get("name"), str):
            field = f"tools[{i}].function.name"
            raise bad_request(field, f"{field} must be a string")
    return None if choice == "none" else tools or None


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Refuse a conversation of none, which templates make a prompt of all the same.

    Raises:
        ApiError: 400.
    """
    if not messages:
        raise bad_request("messages", "messages must not be empty")


def turns(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as a template finds them.

    Raises:
        ApiError: 400: an unknown role, a message without content, a part that is not text.
    """
    return [_turn(f"messages[{i}]", message) for i, message in enumerate(messages)]


def without_text_arguments(
    made: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return `turns` with an empty object for the arguments of a call that are none, and the paths
    of those.
    """
    found, paths = [], []
    for i, turn in enumerate(made):
        calls = []
        for j, call in enumerate(turn.get("tool_calls", ())):
            function = call["function"]
            if isinstance(function["arguments"], str):
                paths.append(f"messages[{i}].tool_calls[{j}].function.arguments")
                function = {**function, "arguments": tool_arguments(None)}
            calls.append({**call, "function": function})
        found.append({**turn, "tool_calls": calls} if calls else turn)
    return found, paths


def _turn(place: str, message: ChatMessage) -> dict[str, Any]:
    role = message.role
    if role not in _ROLES:
        raise bad_request(f"{place}.role", f"{place}.role is {role!r}: not one of {_ROLES}")
    turn: dict[str, Any] = {"role": role, "content": _content(place, message)}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            _call(f"{place}.tool_calls[{j}]", call) for j, call in enumerate(message.tool_calls)
        ]
    reasoning = _reasoning(place, message)
    if reasoning:
        turn["reasoning_content"] = turn["reasoning"] = reasoning
    return turn


def _content(place: str, message: ChatMessage) -> str | list[dict[str, str]] | None:
    content, field = message.content, f"{place}.content"
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            # An answer that was cut within its reasoning, or was nothing, is sent back so. What
            # templates make of no text where nothing is called, as "None", nobody means.
            return None if message.tool_calls else ""
        raise bad_request(field, f"{field} is missing")
    for j, part in enumerate(content):
        if part.type != "text":
            raise bad_request(
                f"{field}[{j}]", f"{field}[{j}]: only parts of type text are supported"
            )
        if part.text is None:
            raise bad_request(f"{field}[{j}].text", f"{field}[{j}].text is missing")
    return [{"type": "text", "text": part.text or ""} for part in content]


def _call(place: str, call: ToolCall) -> dict[str, Any]:
    if call.type not in (None, "function"):
        raise bad_request(f"{place}.type", f"{place}.type is {call.type!r}: it must be function")
    function = {
        "name": call.function.name,
        "arguments": tool_arguments(call.function.arguments),
    }
    made = {"id": call.id} if call.id is not None else {}
    return {**made, "type": "function", "function": function}


def _reasoning(place: str, message: ChatMessage) -> str | None:
    """Return how an earlier answer came about, by vLLM's old name or its new one."""
    old, new = message.reasoning_content, message.reasoning
    if old and new and old != new:
        field = f"{place}.reasoning"
        raise bad_request(field, f"{field} and reasoning_content differ: give one")
    return old or new


def _n_values(value: Any, most: int) -> int:
    """Return how many values there are within one, or some number above `most`; 64 characters of a
    text count as one.
    """
    found, waiting = 0, [value]
    while waiting and found <= most:
        item = waiting.pop()
        found += 1
        inner: Iterable[Any] = ()
        if isinstance(item, str):
            found += len(item) >> 6
        elif isinstance(item, Mapping):
            inner = item.values()
        elif isinstance(item, list):
            inner = item
        waiting.extend(inner)
    return found
