"""The spec of a PDDeployment: every field with its meaning, unit, default and bounds.

These docstrings and descriptions are what `kubectl explain pdd.spec` prints. Rules over several
fields are CEL, next to the struct they judge.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import field

from baton_operator.models.engine import ENGINE_RULES, EngineSpec
from baton_operator.models.fields import Model, RawObject, about, rules
from baton_operator.models.placement import HandoffSpec, ImmutablePlacement, Placement
from baton_operator.models.roles import RoleSpec

RATIO_PATTERN = "^[1-9][0-9]{0,3}:[1-9][0-9]{0,3}$"


class PvcSource(Model, frozen=True):
    """Weights on a PersistentVolumeClaim, mounted read-only."""

    claim_name: Annotated[
        str, about("Name of the claim, in the same namespace.", min_length=1, max_length=253)
    ]
    path: Annotated[
        str, about("Model folder inside the volume; empty is its root.", max_length=1024)
    ] = ""


class ImageSource(Model, frozen=True):
    """Weights in an OCI image, mounted read-only as an image volume."""

    reference: Annotated[
        str, about("Image reference, best with a digest.", min_length=1, max_length=512)
    ]
    pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"], about("When to pull the image.")
    ] = "IfNotPresent"
    path: Annotated[
        str, about("Model folder inside the image; empty is its root.", max_length=1024)
    ] = ""


class ModelSpec(Model, frozen=True):
    """Which weights to serve, and under which name."""

    served_name: Annotated[
        str,
        about(
            "Model name that clients use. Immutable: a client must never get another model "
            "under the same name.",
            min_length=1,
            max_length=253,
            extra_json_schema=rules(("self == oldSelf", "model.servedName is immutable")),
        ),
    ]
    pvc: Annotated[PvcSource | None, about("Weights on a PersistentVolumeClaim.")] = None
    image: Annotated[ImageSource | None, about("Weights in an OCI image volume.")] = None
    path: Annotated[
        str,
        about("Folder that the container already has: baked in, or mounted by the role's template.",
              max_length=1024),
    ] = ""  # fmt: skip
    revision: Annotated[
        str,
        about("Revision of the weights. A change rolls prefill and decode together.",
              max_length=128),
    ] = ""  # fmt: skip


class SpeculativeSpec(Model, frozen=True):
    """Speculative decoding. One block for both roles, so that they cannot differ."""

    method: Annotated[
        Literal["none", "ngram", "mtp", "mtp_ngram"],
        about("How drafts are made: mtp, by the model's own MTP layer; ngram, by repetition in the "
              "text, for any model; mtp_ngram, one by the layer, the rest by repetition; or none."),
    ] = "mtp"  # fmt: skip
    num_speculative_tokens: Annotated[
        int, about("K: drafts per step. 0 exactly when method is none.", ge=0, le=5)
    ] = 1


class LogprobsSpec(Model, frozen=True):
    """Logprobs that clients may ask for."""

    max_top_k: Annotated[
        int,
        about("Most alternatives per token (top_logprobs). 64 is the record format's limit.",
              ge=0, le=64),
    ] = 20  # fmt: skip


class LinkSpec(Model, frozen=True):
    """The record link between workers and gateways, and KV transfer between workers."""

    curve: Annotated[
        bool, about("Encrypt and authenticate with CURVE keys that the operator generates.")
    ] = True
    handoff_deadline_seconds: Annotated[
        int,
        about("How long prefill bears the silence of a decode worker that was asked for a place or "
              "is being sent KV.", ge=1, le=600),
    ] = 10  # fmt: skip


class GatewaySpec(Model, frozen=True):
    """The OpenAI-compatible entrance."""

    replicas: Annotated[int, about("Gateway pods.", ge=1, le=256)] = 1
    image: Annotated[
        str,
        about("Overrides spec.image for the gateway. It changes at once and stays in a rollback; "
              "without it gateways have the image of the revision that they serve.",
              max_length=512),
    ] = ""  # fmt: skip
    max_outstanding_requests: Annotated[
        int,
        about("Choices in hand per gateway; more wait in line for 10 s and then get 429.",
              ge=1, le=1 << 20),
    ] = 2048  # fmt: skip
    request_timeout_seconds: Annotated[
        int, about("Longest life of one request.", ge=1, le=86400)
    ] = 600
    api_keys_secret: Annotated[
        str,
        about("Secret with a key api-keys: one accepted API key a line. Empty needs no key.",
              max_length=253),
    ] = ""  # fmt: skip
    service_type: Annotated[
        Literal["ClusterIP", "NodePort", "LoadBalancer"], about("Type of the client Service.")
    ] = "ClusterIP"
    drain_seconds: Annotated[
        int, about("How long a leaving gateway finishes its streams.", ge=0, le=86400)
    ] = 600
    template: Annotated[
        RawObject,
        about("Pod template merged under the operator's own; what is Baton's own is refused."),
    ] = field(default_factory=dict)  # fmt: skip
    pair_across_revisions: Annotated[
        bool,
        about("Let prefill of one revision hand over to decode of another when weights, tokenizer "
              "and KV layout are equal. Off, every request stays within a revision."),
    ] = False  # fmt: skip
    decode_prompts_behind_tokens: Annotated[
        int,
        about("Decode workers that compute prompts (engine.decodePromptChunkTokens) get one when "
              "each prefill worker has more prompt tokens before it; 0: never.",
              ge=0, le=1 << 30),
    ] = 8192  # fmt: skip


class RatioBounds(Model, frozen=True):
    """Bounds of prefill replicas per decode replica, as `P:D`."""

    min: Annotated[
        str, about("Fewest prefill per decode, for example 1:4.", pattern=RATIO_PATTERN,
                   max_length=9)
    ] = "1:4096"  # fmt: skip
    max: Annotated[
        str, about("Most prefill per decode, for example 1:1.", pattern=RATIO_PATTERN,
                   max_length=9)
    ] = "4096:1"  # fmt: skip


class RatioSpec(Model, frozen=True):
    """The ratio that scaling must keep."""

    prefill_per_decode: Annotated[
        RatioBounds,
        about(
            "External roles are clamped to these bounds; the scaler's status says so.",
            extra_json_schema=rules(
                (
                    "int(self.min.split(':')[0]) * int(self.max.split(':')[1]) <= "
                    "int(self.max.split(':')[0]) * int(self.min.split(':')[1])",
                    "ratio.prefillPerDecode.min must not exceed max",
                )
            ),
        ),
    ] = RatioBounds()


class Pairs(Model, frozen=True):
    """A budget in pairs: one pair is the share of both roles that one step of a rollout moves."""

    pairs: Annotated[int, about("Number of pairs.", ge=0, le=4096)] = 0


class RolloutSpec(Model, frozen=True):
    """How a new revision replaces the old one. Prefill and decode move together."""

    max_surge: Annotated[Pairs, about("Pairs beyond the wanted count during a rollout.")] = Pairs(1)
    max_unavailable: Annotated[Pairs, about("Pairs that may be missing during a rollout.")] = Pairs(
        0
    )
    partition: Annotated[int, about("Pairs that stay on the old revision.", ge=0, le=4096)] = 0
    paused: Annotated[bool, about("Hold the rollout where it is; scaling goes on.")] = False
    min_ready_seconds: Annotated[
        int, about("How long a new pod must be ready to count.", ge=0, le=3600)
    ] = 0
    progress_deadline_seconds: Annotated[
        int,
        about("A rollout that has waited for pods for this long, without progress, has failed. "
              "Time in which it is held, or in which no operator runs, does not count.",
              ge=10, le=86400),
    ] = 1800  # fmt: skip
    auto_rollback: Annotated[bool, about("Return to the old revision when a rollout failed.")] = (
        True
    )

    @property
    def deadline_seconds(self) -> int:
        """The deadline that holds: pods get as long again as they must be ready to count."""
        return max(self.progress_deadline_seconds, 2 * self.min_ready_seconds)


class NetworkPolicySpec(Model, frozen=True):
    """Default-deny policies for every pod of the deployment."""

    enabled: Annotated[bool, about("Write NetworkPolicies.")] = True
    clients_from: Annotated[
        list[RawObject],
        about("NetworkPolicyPeers that may call the gateway's API; empty allows every pod of the "
                 "cluster.", max_length=32),
    ] = field(default_factory=list)  # fmt: skip
    metrics_from: Annotated[
        list[RawObject],
        about("NetworkPolicyPeers that may read the health ports: probes' answers and metrics. "
                 "Empty allows every pod of the cluster; the operator's always may.",
                 max_length=32),
    ] = field(default_factory=list)  # fmt: skip


class PDDeploymentSpec(Model, frozen=True):
    """A model served with prefill and decode in processes of their own."""

    model: Annotated[
        ModelSpec,
        about(
            "Which weights to serve.",
            extra_json_schema=rules(
                (
                    "(has(self.pvc) ? 1 : 0) + (has(self.image) ? 1 : 0) + "
                    "(has(self.path) && self.path != '' ? 1 : 0) == 1",
                    "exactly one of model.pvc, model.image and model.path must be set",
                )
            ),
        ),
    ]
    image: Annotated[
        str, about("Container image of every pod of this deployment.", min_length=1, max_length=512)
    ]
    roles: Annotated[
        list[RoleSpec],
        about(
            "The two sides of the pair.",
            max_length=2,
            extra_json_schema={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
                **rules(
                    (
                        "self.exists_one(r, r.name == 'prefill') && "
                        "self.exists_one(r, r.name == 'decode')",
                        "roles must hold exactly one prefill and one decode",
                    ),
                    (
                        "self.filter(r, r.name == 'decode').all(d, d.parallelism.tensor == 1 || "
                        "self.filter(r, r.name == 'prefill').all(p, "
                        "p.parallelism.tensor == d.parallelism.tensor))",
                        "decode's parallelism.tensor must equal prefill's, or be 1",
                    ),
                ),
            },
        ),
    ]
    placement: ImmutablePlacement = Placement.SEPARATE
    handoff: Annotated[HandoffSpec, about("How KV goes from prefill to decode.")] = HandoffSpec()
    suspend: Annotated[
        bool, about("Drain every worker and keep none; gateways, services and keys stay.")
    ] = False
    image_pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"], about("When to pull the container image.")
    ] = "IfNotPresent"
    speculative: Annotated[
        SpeculativeSpec,
        about(
            "Speculative decoding, one block for both roles.",
            extra_json_schema=rules(
                (
                    "(self.method == 'none') == (self.numSpeculativeTokens == 0)",
                    "speculative.numSpeculativeTokens must be 0 exactly when method is none",
                )
            ),
        ),
    ] = SpeculativeSpec()
    logprobs: Annotated[LogprobsSpec, about("Logprobs that clients may ask for.")] = LogprobsSpec()
    engine: Annotated[
        EngineSpec, about("Limits of the engine.", extra_json_schema=rules(*ENGINE_RULES))
    ] = EngineSpec()
    link: Annotated[LinkSpec, about("Links between the pods.")] = LinkSpec()
    gateway: Annotated[GatewaySpec, about("The OpenAI-compatible entrance.")] = GatewaySpec()
    ratio: Annotated[RatioSpec, about("The ratio that scaling must keep.")] = RatioSpec()
    rollout: Annotated[
        RolloutSpec,
        about(
            "How a new revision replaces the old one.",
            extra_json_schema=rules(
                (
                    "self.maxSurge.pairs + self.maxUnavailable.pairs > 0",
                    "rollout.maxSurge.pairs and rollout.maxUnavailable.pairs cannot both be 0",
                )
            ),
        ),
    ] = RolloutSpec()
    disruption_budget: Annotated[
        Literal["Auto", "Off"], about("PodDisruptionBudgets that follow the live counts.")
    ] = "Auto"
    network_policy: Annotated[NetworkPolicySpec, about("Default-deny NetworkPolicies.")] = (
        NetworkPolicySpec()
    )
    pod_monitor: Annotated[
        Literal["Auto", "Off"], about("PodMonitor, when the cluster has that API.")
    ] = "Auto"
    restarted_at: Annotated[
        str, about("Any change makes a new revision: a restart in lockstep.", max_length=64)
    ] = ""

    @property
    def has_pairs(self) -> bool:
        """Whether a pod holds prefill and decode."""
        return self.placement is Placement.SAME_POD

    def role(self, name: str) -> RoleSpec:
        """Return the role of this name; the schema guarantees that it is there."""
        return next(role for role in self.roles if role.name == name)
