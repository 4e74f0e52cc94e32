"""One pod template of two roles' templates, for a pod that holds both.

What is of a container stays with its role: the container `worker` of either template takes the
role's name. What is of the pod must be said once, or the same twice: a pod has one node, and two
wishes for it that differ are a mistake that nobody may guess away. Pure; knows no contract of ours.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import msgspec

from baton_operator.names import CONTAINER_NAME, WORKER_ROLES

Template = dict[str, Any]

_KEYS = ("name", "ip")
"""What tells the items of a list apart; a list of others is one thing, as nodeSelectorTerms are."""
_KEYS_OF = {"volumeMounts": ("mountPath",), "volumeDevices": ("devicePath",)}
"""The same of lists whose items may share a name."""
_ONE_THING = ("volumes", "env")
"""Lists whose items have a name and one thing more: a volume of two sources is none."""
_NAMED = 2
_SHOWN_CHARACTERS = 200
_SETS = ("tolerations",)
"""Lists without such a key in which each item stands for itself."""


class UnlikeTemplatesError(ValueError):
    """Two templates want a pod that cannot be both; the message names the field and both values."""


def pair_template(templates: Mapping[str, Template]) -> Template:
    """Return the pod template of a pair, of the templates by role.

    Containers called `worker` are called by their roles in it. Lists are joined: items of a name
    are one item, equal ones too.

    Raises:
        UnlikeTemplatesError: they contradict each other, or a container has a role's name.
    """
    merged: Template = {}
    for role in WORKER_ROLES:
        own = _renamed(copy.deepcopy(templates[role.value]), role.value)
        merged = _merged(merged, own, "template")
    return merged


def _renamed(template: Template, role: str) -> Template:
    pod = template.get("spec") or {}
    for field in ("containers", "initContainers"):
        for container in pod.get(field) or ():
            if container["name"] in WORKER_ROLES:
                raise UnlikeTemplatesError(
                    f"a container is called {container['name']}, as one of a pair's own: rename it"
                )
            if field == "containers" and container["name"] == CONTAINER_NAME:
                container["name"] = role
    return template


def _merged(ours: Any, theirs: Any, path: str) -> Any:
    if ours is None or theirs is None or ours == theirs:
        return theirs if ours is None else ours
    if isinstance(ours, dict) and isinstance(theirs, dict):
        both = {**theirs, **ours}
        return {k: _merged(ours.get(k), theirs.get(k), f"{path}.{k}") for k in both}
    if isinstance(ours, list) and isinstance(theirs, list) and _are_joinable(ours + theirs, path):
        return _joined(ours, theirs, path)
    raise _unlike(ours, theirs, path)


def _unlike(ours: Any, theirs: Any, path: str) -> UnlikeTemplatesError:
    return UnlikeTemplatesError(
        f"{path} is {_shown(ours)} for prefill and {_shown(theirs)} for decode, but placement "
        "samePod gives both one pod: let them be equal, or say it for one role"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _are_joinable(items: list[Any], path: str) -> bool:
    return path.endswith(_SETS) or all(_key(item, path) is not None for item in items)


def _joined(ours: list[Any], theirs: list[Any], path: str) -> list[Any]:
    joined = list(ours)
    known = set(map(_text, ours))  # a template may have as many items as an object has room for
    keys = (_key(item, path) for item in ours)
    places = {key: place for place, key in enumerate(keys) if key is not None}
    for item in theirs:
        key = _key(item, path)
        if key is not None and key in places:
            place, where = places[key], f"{path}[{key[1]}]"
            before = joined[place]
            if path.endswith(_ONE_THING) and before != item and len({*before, *item}) > _NAMED:
                raise _unlike(before, item, where)
            joined[place] = _merged(before, item, where)
        elif (text := _text(item)) not in known:
            known.add(text)
            joined.append(item)
    return joined


def _text(item: Any) -> bytes:
    return msgspec.json.encode(item, order="deterministic")


def _key(item: Any, path: str) -> tuple[str, str] | None:
    if not isinstance(item, dict):
        return None
    keys = _KEYS_OF.get(path.rpartition(".")[2], _KEYS)
    return next(((key, item[key]) for key in keys if isinstance(item.get(key), str)), None)
