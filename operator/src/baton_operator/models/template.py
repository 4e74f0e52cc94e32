"""The shape of a role's pod template, as far as rendering reads it.

The API server judges a template only when it is part of a child. Rendering merges ours into it
before that, so what it walks through must be there in the right shape: a template that is not is an
invalid spec, never a pass that breaks.
"""

from __future__ import annotations

from typing import Any

import msgspec


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


class _Pod(_Shape, frozen=True):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    volumes: list[dict[str, Any]] | None = None
    security_context: dict[str, Any] | None = None


class _Template(_Shape, frozen=True):
    metadata: _Metadata | None = None
    spec: _Pod | None = None


def check_template(template: dict[str, Any]) -> None:
    """Check the shape of a template.

    Raises:
        msgspec.ValidationError: it cannot be rendered; the text ends with the path of the field.
    """
    msgspec.convert(template, _Template)
