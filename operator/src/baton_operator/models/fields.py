"""Building blocks of the models: field types that carry description, bounds and CEL rules.

`Meta.extra_json_schema` holds what Kubernetes reads beyond JSON Schema; `schema` passes it on.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

_KEEP: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}

RawObject = Annotated[dict[str, Any], Meta(extra_json_schema=_KEEP)]
"""JSON of an API that is not ours (a pod template, a peer), kept as it is: the API server judges it
when it becomes part of a child."""


class Model(msgspec.Struct, frozen=True, rename="camel", omit_defaults=False):
    """Base of every section of a spec. Unknown keys are pruned by the API server."""


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """Return the schema extension with these (rule, message) pairs."""
    return {
        "x-kubernetes-validations": [{"rule": rule, "message": text} for rule, text in pairs],
    }


def about(text: str, **bounds: Any) -> Meta:
    """Return a description, with bounds named as in `msgspec.Meta`."""
    return Meta(description=text, **bounds)
