"""Where prefill and decode run, which way KV must go between them, and what fits with what.

A pair in one pod is one unit: it scales, rolls and leaves whole, and hands over to itself alone.
Owns these fields and the rules that follow, as CEL for the schema; `parse` checks the same again.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from baton_operator.models.fields import Model, about, rules
from baton_operator.models.receive_room import DEFAULT_ROOM, ReceiveRoom, room_bytes
from baton_operator.names import WORKER_ROLES, Role

IMMUTABLE_PLACEMENT: Final = (
    "placement is immutable, because a rollout moves pods of one kind: make another PDDeployment"
)
EQUAL_REPLICAS: Final = (
    "roles[].replicas must be equal with placement samePod: it is the number of pods, "
    "each with one prefill and one decode"
)
EQUAL_SCALING: Final = (
    "roles[].scaling must be equal with placement samePod: pairs scale as one, by one PDRoleScaler"
)
RATIO_OF_PAIRS: Final = (
    "ratio.prefillPerDecode must allow 1:1 with placement samePod: "
    "a pod holds one prefill and one decode"
)
PAIR_OF_ONE_REVISION: Final = (
    "gateway.pairAcrossRevisions must be false with placement samePod: "
    "a pair is of one pod, and a pod of one revision"
)
NVLINK_BETWEEN_GPUS: Final = (
    "handoff.require nvlink is for placement samePod with engine.device gpu: "
    "only containers of one pod share what it needs; else let it be any"
)
RDMA_BETWEEN_PODS: Final = (
    "handoff.require rdma is for placement separate: KV does not leave a pod of a pair"
)
RANKS_OF_GPUS: Final = (
    "handoff.require rdma with roles[].parallelism.tensor above 1 is for engine.device gpu: "
    "NIXL reads no KV of several ranks of a cpu"
)


class Placement(StrEnum):
    """Where prefill and decode run."""

    SEPARATE = "separate"
    SAME_POD = "samePod"


def pod_roles(placement: Placement) -> tuple[Role, ...]:
    """Return who worker pods are: those of a role each, or pairs."""
    return (Role.PAIR,) if placement is Placement.SAME_POD else WORKER_ROLES


ImmutablePlacement = Annotated[
    Placement,
    about(
        "Where prefill and decode run. separate: in pods of their own. samePod: as two containers "
        "of one pod, which scale, roll and leave as one; KV stays on the host.",
        extra_json_schema=rules(("self == oldSelf", IMMUTABLE_PLACEMENT)),
    ),
]


class HandoffSpec(Model, frozen=True):
    """How KV goes from prefill to decode."""

    require: Annotated[
        Literal["any", "nvlink", "rdma"],
        about("Which way KV must go: any is the best there is. With another one a request whose KV "
              "would go a slower way fails instead, and condition HandoffFellBack says why."),
    ] = "any"  # fmt: skip
    receive_bytes: ReceiveRoom = DEFAULT_ROOM

    @property
    def asked_room(self) -> int | None:
        """Bytes of `receive_bytes`; None where it is the default, however it is spelled."""
        asked = room_bytes(self.receive_bytes)
        return None if asked == room_bytes(DEFAULT_ROOM) else asked


def has_ways(placement: Placement, handoff: HandoffSpec) -> bool:
    """Whether KV may go another way than one hopes: which it goes is then watched."""
    return placement is Placement.SAME_POD or handoff.require != "any"


_IS_PAIR: Final = "self.placement != 'samePod' || "
_LOW, _HIGH = "self.ratio.prefillPerDecode.min", "self.ratio.prefillPerDecode.max"

PLACEMENT_RULES: Final = (
    (
        f"{_IS_PAIR}self.roles.all(r, r.replicas == self.roles[0].replicas)",
        EQUAL_REPLICAS,
    ),
    (
        f"{_IS_PAIR}self.roles.all(r, r.scaling == self.roles[0].scaling)",
        EQUAL_SCALING,
    ),
    (
        f"{_IS_PAIR}(int({_LOW}.split(':')[0]) <= int({_LOW}.split(':')[1]) && "
        f"int({_HIGH}.split(':')[0]) >= int({_HIGH}.split(':')[1]))",
        RATIO_OF_PAIRS,
    ),
    (f"{_IS_PAIR}!self.gateway.pairAcrossRevisions", PAIR_OF_ONE_REVISION),
    (
        "self.handoff.require != 'nvlink' || "
        "(self.placement == 'samePod' && self.engine.device == 'gpu')",
        NVLINK_BETWEEN_GPUS,
    ),
    (f"{_IS_PAIR}self.handoff.require != 'rdma'", RDMA_BETWEEN_PODS),
    (
        "self.handoff.require != 'rdma' || self.engine.device == 'gpu' || "
        "self.roles.all(r, r.parallelism.tensor == 1)",
        RANKS_OF_GPUS,
    ),
)
"""Of a whole spec, as (rule, message)."""
