"""PDRoleScaler: the scale subresource of one role, so that `kubectl scale` and HPA work on it.

The operator makes one for each External role and never writes its replicas again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from baton_operator.models.fields import Model, about, rules
from baton_operator.models.parse import ObjectKey


class TargetRef(Model, frozen=True):
    """Which role of which PDDeployment is scaled."""

    name: Annotated[
        str, about("The PDDeployment, in the same namespace.", min_length=1, max_length=253)
    ]
    role: Annotated[
        Literal["prefill", "decode", "pair"], about("The role of it; pair: pods that hold both.")
    ]


class PDRoleScalerSpec(Model, frozen=True):
    """The wanted replicas of one role."""

    target_ref: Annotated[
        TargetRef,
        about(
            "What is scaled.",
            extra_json_schema=rules(("self == oldSelf", "targetRef is immutable")),
        ),
    ]
    replicas: Annotated[
        int,
        about("Wanted replicas. Bounds and ratio of the PDDeployment may clamp it: see status.",
              ge=0, le=4096),
    ] = 1  # fmt: skip


class PDRoleScalerStatus(Model, frozen=True):
    """What became of the wanted replicas."""

    replicas: Annotated[int, about("Replicas that exist.")] = 0
    desired: Annotated[int, about("Replicas that the operator aims at, after clamping.")] = 0
    selector: Annotated[str, about("Label selector of the role's pods, for HPA.")] = ""
    clamped_by: Annotated[str, about("Min, Max or Ratio when clamped, else empty.")] = ""


class PDRoleScaler(msgspec.Struct, frozen=True):
    """A PDRoleScaler as the reconciler sees it; `status` as last written."""

    key: ObjectKey
    uid: str
    target: str
    role: str
    replicas: int
    status: dict[str, Any]


def parse_scaler(body: dict[str, Any]) -> PDRoleScaler:
    """Return the typed object.

    Raises:
        msgspec.ValidationError: it breaks its schema.
    """
    spec = msgspec.convert(body.get("spec") or {}, PDRoleScalerSpec)
    metadata = body["metadata"]
    return PDRoleScaler(
        key=ObjectKey(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        target=spec.target_ref.name,
        role=spec.target_ref.role,
        replicas=spec.replicas,
        status=body.get("status") or {},
    )
