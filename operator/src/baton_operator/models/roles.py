"""One side of the pair in a PDDeployment's spec: replicas, scaling, draining, pod template."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import field

from baton_operator.models.fields import Model, RawObject, about, rules

NOT_OVER_NODES: Final = (
    "parallelism.nodes must be 1: a replica over several nodes is not supported; "
    "use parallelism.tensor for ranks on one node, and more replicas"
)

GPU_RANKS: Final = (1, 2, 4, 8)
RANKS_OF_DEVICES: Final = (
    "roles[].parallelism.tensor must be 1, 2, 4 or 8 with engine.device gpu, and 1 with sim"
)


class ParallelismSpec(Model, frozen=True):
    """How one replica is spread."""

    tensor: Annotated[int, about("Ranks of tensor parallelism per replica.", ge=1, le=1024)] = 1
    nodes: Annotated[
        int,
        about("Pods per replica. Must be 1: a replica's ranks run on one node.", ge=1, le=64),
    ] = 1


class ScalingMode(StrEnum):
    """Who decides a role's replicas."""

    STATIC = "Static"
    EXTERNAL = "External"


class ScalingSpec(Model, frozen=True):
    """Who decides a role's replicas, and within which bounds."""

    mode: Annotated[
        ScalingMode,
        about("Static: roles[].replicas. External: the role's PDRoleScaler, which kubectl scale, "
              "HPA and KEDA write; roles[].replicas is then only its first value."),
    ] = ScalingMode.STATIC  # fmt: skip
    min: Annotated[int, about("Fewest replicas when External.", ge=1, le=4096)] = 1
    max: Annotated[int, about("Most replicas when External.", ge=1, le=4096)] = 64


class DrainSpec(Model, frozen=True):
    """How a pod leaves. The pod's termination grace is derived: this budget plus 15 seconds."""

    grace_seconds: Annotated[
        int,
        about("Longest wait for requests in flight and KV not yet taken over.", ge=0, le=86400),
    ] = 300
    command: Annotated[
        list[Annotated[str, about("One word of the command.", max_length=4096)]],
        about(
            "preStop command of another engine; empty drains through the worker's control socket.",
            max_length=32,
        ),
    ] = field(default_factory=list)


class RoleSpec(Model, frozen=True):
    """One side of the pair."""

    name: Annotated[Literal["prefill", "decode"], about("Which side of the pair this is.")]
    replicas: Annotated[
        int,
        about("Replicas when scaling.mode is Static, else the scaler's first value. "
              "Never makes a new revision.", ge=1, le=4096),
    ] = 1  # fmt: skip
    image: Annotated[str, about("Overrides spec.image for this role.", max_length=512)] = ""
    parallelism: Annotated[
        ParallelismSpec,
        about(
            "How one replica is spread.",
            extra_json_schema=rules(("self.nodes == 1", NOT_OVER_NODES)),
        ),
    ] = ParallelismSpec()
    scaling: Annotated[
        ScalingSpec,
        about(
            "Who decides the replicas.",
            extra_json_schema=rules(
                ("self.min <= self.max", "scaling.min must not exceed scaling.max")
            ),
        ),
    ] = ScalingSpec()
    drain: Annotated[DrainSpec, about("How a pod of this role leaves.")] = DrainSpec()
    template: Annotated[
        RawObject,
        about("Pod template merged under the operator's own: resources, node selectors, "
                 "tolerations, DRA claims, volumes, secrets. The container named worker is ours. "
                 "What is Baton's own is refused by name; an empty startupProbe or livenessProbe "
                 "means none."),
    ] = field(default_factory=dict)  # fmt: skip
