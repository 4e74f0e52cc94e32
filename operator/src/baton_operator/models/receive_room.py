"""How much sent KV a decode worker takes at once: the field, its bounds, and what a pod must have.

KV that is sent lies in the memory of decode's container until the pool has room for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Annotated, Any, Final

from baton_operator.models.fields import about, rules
from baton_operator.models.quantities import quantity
from baton_operator.names import CONTAINER_NAME, Role

DEFAULT_ROOM: Final = "2Gi"
"""As a worker's own; an image of any version has it without being told."""
_LEAST, _MOST = "1Mi", "1Ti"
QUANTITY_OF_ROOM: Final = (
    f"handoff.receiveBytes must be a quantity from {_LEAST} to {_MOST}, such as 4Gi"
)

ReceiveRoom = Annotated[
    str,
    about(
        "Memory of a decode container for KV that is sent: prefill computes only prompts whose KV "
        "fits it, with all that is on its way there, or one. KV that decode reads in place needs "
        "none. Beside a memory limit it must be less than that.",
        max_length=32,
        extra_json_schema=rules(
            (
                f"isQuantity(self) && quantity(self).compareTo(quantity('{_LEAST}')) >= 0 && "
                f"quantity(self).compareTo(quantity('{_MOST}')) <= 0",
                QUANTITY_OF_ROOM,
            )
        ),
    ),
]


def room_bytes(text: str) -> int:
    """Return the room in bytes.

    Raises:
        ValueError: it is no quantity, or out of bounds; the text names the field and the fix.
    """
    found = quantity(text)
    if found is None or not _number(_LEAST) <= found <= _number(_MOST):
        raise ValueError(f"{QUANTITY_OF_ROOM}, and is {text!r}")
    return int(found)


def check_room(text: str, templates: Mapping[str, dict[str, Any]]) -> None:
    """Check that a room lies within what the templates of decode's pod, by role, limit memory to.

    The default is judged by nobody: small models never fill it, and nobody asked for it.

    Raises:
        ValueError: it does not; the text names the field and the fix.
    """
    room = room_bytes(text)
    if room == room_bytes(DEFAULT_ROOM):
        return
    limits = (each for role, own in templates.items() for each in _memory_limits(role, own))
    for path, limit in limits:
        found = quantity(str(limit))
        if found and found <= room:  # 0 is no limit to a kubelet
            raise ValueError(
                f"handoff.receiveBytes is {text}, but the memory that it is of is limited to "
                f"{limit}, and the worker itself lies there too: raise the limit or lower "
                f"handoff.receiveBytes - at `{path}`"
            )


def _number(text: str) -> Decimal:
    found = quantity(text)
    assert found is not None
    return found


def _memory_limits(role: str, template: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what limits decode's memory, of a template whose containers have been checked: of
    prefill's, where both are of one pod, what limits the pod.
    """
    pod = template.get("spec") or {}
    owners = [("spec", pod)]
    for number, container in enumerate(pod.get("containers") or ()):
        if role == Role.DECODE.value and container["name"] == CONTAINER_NAME:
            owners.append((f"spec.containers[{number}]", container))
    for path, owner in owners:
        limits = _within(_within(owner, "resources"), "limits")
        if limits.get("memory") is not None:
            field = f"spec.roles[{role}].template.{path}.resources.limits.memory"
            yield field, limits["memory"]


def _within(value: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a member that the API server has not judged yet."""
    inner = value.get(key)
    return inner if isinstance(inner, dict) else {}
