"""Every child that a PDDeployment shall have now, in the order in which writes are started.

The order shortens the way to a served model, and leaves none open: first what pods need to be
admitted and what guards them, then the pods, then what they wait for, then the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import cached_property, partial
from typing import NamedTuple

from baton_operator import names
from baton_operator.children.resources import config, policies, services
from baton_operator.children.resources.credentials import KeyPair, curve_secret
from baton_operator.children.resources.disruption import disruption_budgets
from baton_operator.children.resources.meta import Manifest, Owner, manifest
from baton_operator.children.resources.pods import gateway_template
from baton_operator.children.resources.workloads import (
    gateway_workload,
    role_scaler,
    worker_workload,
)
from baton_operator.children.revision import (
    RevisionRecord,
    gateway_spec,
    non_defaults,
    record_manifest,
    semantic_hash,
)
from baton_operator.cluster.store import ChildId
from baton_operator.models import PDDeploymentSpec, RoleSpec, ScalingMode
from baton_operator.models.placement import pod_roles
from baton_operator.names import Role
from baton_operator.planning.pairs import Counts


class Wave(IntEnum):
    """What is written when: a wave begins when the one before it is answered.

    A server that has everything at once answers everything late, so what pods wait for longest is
    sent before the rest. What guards them is sent before they can exist: no pod is ever open.
    """

    GUARDS = auto()
    WORKLOADS = auto()
    REST = auto()


class Mark(NamedTuple):
    """A child's hash, and a number for the labels and notes that it must still have."""

    hash: str
    marks: int


@dataclass(frozen=True)
class DesiredChild:
    """A child that shall exist: its manifest, and how it begins.

    Seeded children (a Secret's keys, a scaler's replicas) are created once from `seed()` and
    afterwards applied without what was seeded.
    """

    manifest: Manifest
    seed: Callable[[], Manifest] | None = None
    wave: Wave = Wave.REST

    @cached_property
    def child_id(self) -> ChildId:
        """Which child this is."""
        return ChildId(self.manifest["kind"], self.manifest["metadata"]["name"])

    @cached_property
    def manifest_hash(self) -> str:
        """What a written child is annotated with, and known by."""
        return semantic_hash(self.manifest)

    @property
    def mark(self) -> Mark:
        """What shows that a child is as it was written."""
        metadata = self.manifest["metadata"]
        marks = names.marks(metadata["labels"], metadata.get("annotations") or {})
        return Mark(self.manifest_hash, marks)


class Apis(NamedTuple):
    """Optional APIs that the cluster serves."""

    has_pod_monitor: bool = False


@dataclass(frozen=True, slots=True)
class RenderInputs:
    """All that the children of an object rest on: equal inputs render equal children.

    `recorded` names the revisions whose records are at hand, of a plan's `update`, `gateway`,
    `target`, `asked` and the pods `wanted` of each revision. `has_gateway` says that there are
    gateways, of whatever revision.
    """

    owner: Owner
    spec: PDDeploymentSpec
    update: str
    gateway: str
    target: Counts
    wanted: Mapping[str, Counts]
    asked: Mapping[Role, int]
    recorded: frozenset[str]
    has_gateway: bool


@dataclass(frozen=True, slots=True)
class RenderContext:
    """What stays the same as long as the operator runs.

    `operator_namespace` is "" outside of a cluster; `pod_monitor_labels` are those that whoever
    runs the operator asks for.
    """

    apis: Apis
    make_pair: Callable[[], KeyPair]
    operator_namespace: str = ""
    pod_monitor_labels: Mapping[str, str] = field(default_factory=dict)


Records = Mapping[str, RevisionRecord]


def children_of(
    inputs: RenderInputs, records: Records, context: RenderContext
) -> list[DesiredChild]:
    """Return every child; see the module for the order. `records` has the `recorded` ones."""
    owner, spec = inputs.owner, inputs.spec
    guards = [
        policies.service_account(owner),
        *policies.network_policies(owner, spec, context.operator_namespace),
    ]
    plain: list[Manifest] = [
        services.link_service(owner),
        services.client_service(owner, spec),
        *disruption_budgets(owner, spec, inputs.target),
    ]
    if context.apis.has_pod_monitor and spec.pod_monitor == "Auto":
        plain.append(services.pod_monitor(owner, context.pod_monitor_labels))
    return [
        *(DesiredChild(each, wave=Wave.GUARDS) for each in guards),
        *_secret(inputs, context.make_pair),
        *(DesiredChild(each, wave=Wave.WORKLOADS) for each in _workloads(inputs, records)),
        *_gateway(inputs, records),
        *(DesiredChild(record_manifest(owner, records[name])) for name in sorted(records)),
        *(DesiredChild(each) for each in plain),
        *(_scaler(owner, role, of, inputs.asked) for role, of in _scaled(spec)),
    ]


def _workloads(inputs: RenderInputs, records: Records) -> Iterator[Manifest]:
    for revision, counts in inputs.wanted.items():
        record = records.get(revision)
        if record is not None:
            yield from _of_revision(inputs, record, counts)


def _of_revision(
    inputs: RenderInputs, record: RevisionRecord, counts: Counts
) -> Iterator[Manifest]:
    for name, template in sorted(record.templates.items(), reverse=True):
        role = Role(name)
        replicas = counts.of(role)
        yield worker_workload(inputs.owner, inputs.spec, role, record.name, template, replicas)


def _gateway(inputs: RenderInputs, records: Records) -> Iterator[DesiredChild]:
    """Yield the gateways and their file, made from what the plan has them serve.

    Where nobody knows any more what they were made from, they stay as they are.
    """
    owner, revision = inputs.owner, inputs.gateway
    spec: PDDeploymentSpec | None = inputs.spec
    if revision != inputs.update:
        record = records.get(revision)
        spec = None if record is None else gateway_spec(inputs.spec, record)
    if spec is None:
        if inputs.has_gateway:
            return
        spec, revision = inputs.spec, inputs.update
    text = config.gateway_config(spec)
    name = names.gateway_file(owner.name, semantic_hash(text, size=4))
    template = gateway_template(owner, spec, name)
    workload = gateway_workload(owner, inputs.spec, template, revision)
    made_from = f"{_asked_of_gateways(spec)}.{semantic_hash(template, size=4)}"
    workload["metadata"]["annotations"] = {names.ANNOTATION_MADE_FROM: made_from}
    yield DesiredChild(workload, wave=Wave.WORKLOADS)
    yield DesiredChild(
        manifest(
            owner,
            "v1",
            "ConfigMap",
            name,
            role=Role.GATEWAY,
            revision=revision,
            immutable=True,
            data={config.CONFIG_FILE: text},
        )
    )


def _asked_of_gateways(spec: PDDeploymentSpec) -> str:
    """Return a hash of what the spec says about gateways, whatever is made of it."""
    share = [spec.image, spec.image_pull_policy, spec.restarted_at]
    parts = [spec.gateway, spec.model, spec.speculative, spec.logprobs, spec.link]
    return semantic_hash([*share, *map(non_defaults, parts)], size=4)


def _secret(inputs: RenderInputs, make_pair: Callable[[], KeyPair]) -> list[DesiredChild]:
    if not inputs.spec.link.curve:
        return []
    bare = manifest(
        inputs.owner, "v1", "Secret", names.curve_secret(inputs.owner.name), type="Opaque"
    )
    seed = partial(curve_secret, inputs.owner, make_pair)
    return [DesiredChild(bare, seed=seed, wave=Wave.GUARDS)]


def _scaled(spec: PDDeploymentSpec) -> Iterator[tuple[Role, RoleSpec]]:
    """Yield whose replicas others decide: roles, or pairs, which either role speaks for."""
    for role in pod_roles(spec.placement):
        of = spec.role(Role.PREFILL if role is Role.PAIR else role)
        if of.scaling.mode is ScalingMode.EXTERNAL:
            yield role, of


def _scaler(owner: Owner, kind: Role, role: RoleSpec, asked: Mapping[Role, int]) -> DesiredChild:
    """Return a role's scaler; one that is made again asks for what the last one did."""
    bare = role_scaler(owner, kind)
    replicas = asked.get(Role(role.name), role.replicas)
    seeded = {**bare, "spec": {**bare["spec"], "replicas": replicas}}
    return DesiredChild(bare, seed=lambda: seeded)
