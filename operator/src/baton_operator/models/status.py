"""The status of a PDDeployment: what the operator reports.

Only the schema comes from these structs; `status` builds the values. Everything is optional:
absent means not yet observed, never zero.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from baton_operator.models.fields import Model, about


class StatusCondition(Model, frozen=True):
    """A condition after KEP-1623."""

    type: Annotated[str, about("Name of the condition, positive.", max_length=316)]
    status: Annotated[str, about("True, False or Unknown.", max_length=16)]
    reason: Annotated[str, about("One CamelCase word for machines.", max_length=1024)]
    message: Annotated[str, about("A sentence for people.", max_length=32768)] = ""
    observed_generation: Annotated[int, about("Generation of the spec that was judged.")] = 0
    last_transition_time: Annotated[
        str, about("When status last changed.", extra_json_schema={"format": "date-time"})
    ] = ""


class RoleStatus(Model, frozen=True):
    """Counts of one role, over all revisions."""

    name: Annotated[str, about("The role.", max_length=16)]
    desired: Annotated[int, about("Replicas aimed at, after scaling and clamping.")] = 0
    replicas: Annotated[int, about("Replicas that exist.")] = 0
    ready: Annotated[int, about("Replicas that are available.")] = 0
    updated: Annotated[int, about("Replicas of the update revision.")] = 0
    asked: Annotated[
        int, about("Replicas that the role's scaler last asked for; absent for a static role.")
    ] = 0


class RolloutStatus(Model, frozen=True):
    """Where the rollout stands."""

    phase: Annotated[
        str, about("Complete, Progressing, Paused, Partitioned, Suspended, Failed, RollingBack, "
              "RollbackFailed or RolledBack.",
                   max_length=32)
    ] = ""  # fmt: skip
    step: Annotated[
        int,
        about("Pairs on the revision that is rolled to: updateRevision, in a rollback "
              "currentRevision."),
    ] = 0  # fmt: skip
    steps: Annotated[int, about("Pairs in all.")] = 0
    reached: Annotated[
        int,
        about("Most pairs that the revision which is rolled to has served since its pods were all "
              "ready."),
    ] = 0  # fmt: skip
    failed_revision: Annotated[
        str, about("Revision that missed its progress deadline.", max_length=63)
    ] = ""
    failed_reason: Annotated[
        str,
        about("What kept the failed revision's pods from serving when it failed; kept as long as "
              "failedRevision is.",
              max_length=2048),
    ] = ""  # fmt: skip
    progress_time: Annotated[
        str,
        about("When the rollout last moved.", extra_json_schema={"format": "date-time"}),
    ] = ""
    is_upgrade: Annotated[
        bool, about("The update revision is new because the operator is; no user asked for it.")
    ] = False
    is_gateway_upgrade: Annotated[
        bool, about("Gateways roll because the operator is new; no user asked for it.")
    ] = False
    answering_revision: Annotated[
        str,
        about("Revision that every gateway pod was last of; it keeps a pair until all are of the "
              "next.",
              max_length=63),
    ] = ""  # fmt: skip
    waiting_revision: Annotated[
        str,
        about("Revision that this operator makes of the same spec, and that waits its turn.",
              max_length=63),
    ] = ""  # fmt: skip
    waited_seconds: Annotated[
        int, about("Time without progress that counts towards the progress deadline.")
    ] = 0
    waiting_since: Annotated[
        str,
        about("Since when time is counted beyond waitedSeconds; absent while none is.",
              extra_json_schema={"format": "date-time"}),
    ] = ""  # fmt: skip


class WireStatus(Model, frozen=True):
    """The record format that ready workers speak."""

    range: Annotated[str, about("Versions accepted, as MIN-MAX.", max_length=32)] = ""
    config_hash: Annotated[
        str, about("Hash of what prefill and decode must share.", max_length=64)
    ] = ""


class SpeculativeStatus(Model, frozen=True):
    """What speculative decoding achieves."""

    acceptance: Annotated[str, about("Share of drafts accepted, 0 to 1.", max_length=16)] = ""


class TransportStatus(Model, frozen=True):
    """Pairs of workers that hand KV over one way."""

    name: Annotated[str, about("The transport: nvlink, shm, nixl or zmq.", max_length=16)]
    pairs: Annotated[int, about("Pairs of workers between which KV goes so.")] = 0


class HandoffStatus(Model, frozen=True):
    """Which way KV goes, as prefill workers say; only where there are several."""

    summary: Annotated[
        str, about("Transports with their pairs, for the column.", max_length=256)
    ] = ""
    transports: Annotated[
        list[TransportStatus],
        about("Pairs by transport.", max_length=16, extra_json_schema={
            "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = field(default_factory=list)  # fmt: skip
    reason: Annotated[
        str, about("Why one of them has no faster way; absent where all have.", max_length=1024)
    ] = ""


class PDDeploymentStatus(Model, frozen=True):
    """What the operator last observed."""

    observed_generation: Annotated[int, about("Generation of the spec that was acted on.")] = 0
    current_revision: Annotated[
        str,
        about("Revision that a rollback returns to: the last one that was rolled out fully, until "
              "the next one is. Before the first, one that serves pairs while another is rolled "
              "to; absent or empty without either.",
              max_length=63),
    ] = ""  # fmt: skip
    update_revision: Annotated[
        str,
        about("Revision that the spec asks for; behind a rollback not the one that serves.",
              max_length=63),
    ] = ""  # fmt: skip
    gateway_revision: Annotated[
        str, about("Revision whose image, tokenizer and chat template gateways have.",
                   max_length=63)
    ] = ""  # fmt: skip
    ready: Annotated[str, about("Ready, for the column.", max_length=16)] = ""
    prefill: Annotated[str, about("Prefill ready/desired, for the column.", max_length=32)] = ""
    decode: Annotated[str, about("Decode ready/desired, for the column.", max_length=32)] = ""
    roles: Annotated[
        list[RoleStatus],
        about("Counts by role.", max_length=2, extra_json_schema={
            "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = field(default_factory=list)  # fmt: skip
    rollout: Annotated[RolloutStatus | None, about("Where the rollout stands.")] = None
    wire: Annotated[WireStatus | None, about("The record format in use.")] = None
    handoff: Annotated[HandoffStatus | None, about("Which way KV goes.")] = None
    speculative: Annotated[SpeculativeStatus | None, about("Speculative decoding.")] = None
    conditions: Annotated[
        list[StatusCondition],
        about("Ready, Reconciling, Stalled and what they rest on.", max_length=32,
              extra_json_schema={"x-kubernetes-list-type": "map",
                                 "x-kubernetes-list-map-keys": ["type"]}),
    ] = field(default_factory=list)  # fmt: skip
