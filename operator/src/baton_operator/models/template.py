"""The shape of a role's pod template, as far as rendering and writing read it.

The API server judges a template only when it is part of a child. Rendering merges ours into it
before that, so what it walks through must be there in the right shape: a template that is not is an
invalid spec, never a pass that breaks. So is one that names something twice in a list that the
server keeps by key: such a child can be created, but every later apply of it is refused. What is
Baton's own in it is refused by `own_parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from baton_operator.names import CONTAINER_NAME


class _Shape(msgspec.Struct, frozen=True, rename="camel"):
    """Base of the shapes: fields that rendering does not read may be anything."""


class _Metadata(_Shape, frozen=True):
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Container(_Shape, frozen=True):
    name: str
    env: list[dict[str, Any]] | None = None
    ports: list[dict[str, Any]] | None = None
    volume_mounts: list[dict[str, Any]] | None = None
    security_context: dict[str, Any] | None = None
    lifecycle: dict[str, Any] | None = None


class _Pod(_Shape, frozen=True):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    volumes: list[dict[str, Any]] | None = None
    security_context: dict[str, Any] | None = None
    image_pull_secrets: list[dict[str, Any]] | None = None
    host_aliases: list[dict[str, Any]] | None = None


class _Template(_Shape, frozen=True):
    metadata: _Metadata | None = None
    spec: _Pod | None = None


Items = list[dict[str, Any]]


PortsOf = Mapping[str, Mapping[str, int]]
"""By container: the ports that it gets of us, by name."""


def check_template(template: dict[str, Any], ports: PortsOf) -> None:
    """Check the shape of a template; `ports` are those that containers of ours get.

    Raises:
        msgspec.ValidationError: it cannot be rendered; the text ends with the path of the field.
    """
    pod = msgspec.convert(template, _Template).spec or _Pod()
    _check_unique(pod.volumes, _name, "$.spec.volumes")
    _check_containers(pod)
    _check_unique(pod.image_pull_secrets, _name, "$.spec.imagePullSecrets")
    _check_unique(pod.host_aliases, lambda alias: str(alias.get("ip")), "$.spec.hostAliases")
    for field, containers in (
        ("containers", pod.containers),
        ("initContainers", pod.init_containers),
    ):
        for number, container in enumerate(containers or ()):
            path = f"$.spec.{field}[{number}]"
            ours = ports.get(container.name, {}) if field == "containers" else {}
            _check_unique(container.env, _name, f"{path}.env")
            all_ports = _with_ours(container.ports, ours)
            _check_unique(all_ports, _port, f"{path}.ports")


def _check_containers(pod: _Pod) -> None:
    """Check that no two containers have one name, be it of a container of ours."""
    said = [("containers", c.name) for c in pod.containers or ()]
    said += [("initContainers", c.name) for c in pod.init_containers or ()]
    seen = {CONTAINER_NAME} - {c.name for c in pod.containers or ()}
    for field, name in said:
        if name in seen:
            text = f"another container is called {name}, rename this one"
            raise msgspec.ValidationError(f"{text} - at `$.spec.{field}`")
        seen.add(name)


def _with_ours(items: Items | None, ports: Mapping[str, int]) -> Items:
    """Return the ports as rendered: one under a name of ours gives way."""
    ours = [{"name": name, "containerPort": port} for name, port in ports.items()]
    return ours + [item for item in items or () if _name(item) not in ports]


def _name(item: dict[str, Any]) -> str:
    return str(item.get("name"))


def _port(item: dict[str, Any]) -> str:
    return f"{item.get('containerPort')}/{item.get('protocol') or 'TCP'}"


def _check_unique(items: Items | None, key: Callable[[dict[str, Any]], str], path: str) -> None:
    seen: set[str] = set()
    for name in map(key, items or ()):
        if name in seen:
            raise msgspec.ValidationError(f"{name} is there twice, take one away - at `{path}`")
        seen.add(name)
