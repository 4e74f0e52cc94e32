"""Every child that a PDDeployment shall have now, in the order in which writes are started.

The order shortens the way to a served model, and leaves none open: first what pods need to be
admitted and what guards them, then the pods, then what they wait for, then the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from baton_operator import names
from baton_operator.children.resources import config, extras, services
from baton_operator.children.resources.credentials import KeyPair, curve_secret
from baton_operator.children.resources.disruption import disruption_budgets
from baton_operator.children.resources.meta import Manifest, Owner, manifest
from baton_operator.children.resources.pods import gateway_template
from baton_operator.children.resources.policies import network_policies
from baton_operator.children.resources.workloads import gateway_workload, worker_workload
from baton_operator.children.revision import (
    RevisionRecord,
    gateway_spec,
    record_manifest,
    said,
    semantic_hash,
)
from baton_operator.children.wish import Wave, Wish
from baton_operator.models import PDDeploymentSpec, RoleSpec, ScalingMode
from baton_operator.names import WORKER_ROLES, Role
from baton_operator.planning.pairs import Counts
from baton_operator.planning.plan import Plan


class Apis(NamedTuple):
    """Optional APIs that the cluster serves."""

    has_pod_monitor: bool = False


@dataclass(frozen=True, slots=True)
class Inputs:
    """What rendering needs. `records` holds every revision whose workloads shall be written, `home`
    is the operator's namespace, `has_gateway` says that there are gateways, of whatever revision.
    """

    owner: Owner
    spec: PDDeploymentSpec
    plan: Plan
    records: Mapping[str, RevisionRecord]
    apis: Apis
    make_pair: Callable[[], KeyPair]
    home: str = ""
    has_gateway: bool = False


def wishes(inputs: Inputs) -> list[Wish]:
    """Return every child; see the module for the order."""
    owner, spec = inputs.owner, inputs.spec
    guards = [extras.service_account(owner), *network_policies(owner, spec, inputs.home)]
    plain: list[Manifest] = [
        services.link_service(owner),
        services.client_service(owner, spec),
        *disruption_budgets(owner, spec, inputs.plan.target),
    ]
    if inputs.apis.has_pod_monitor and spec.pod_monitor == "Auto":
        plain.append(extras.pod_monitor(owner))
    return [
        *(Wish(each, wave=Wave.GUARDS) for each in guards),
        *_secret(inputs),
        *(Wish(workload, wave=Wave.WORKLOADS) for workload in _workloads(inputs)),
        *_gateway(inputs),
        *(Wish(record_manifest(owner, inputs.records[name])) for name in sorted(inputs.records)),
        *(Wish(each) for each in plain),
        *(
            _scaler(owner, role, inputs.plan.asked)
            for role in spec.roles
            if role.scaling.mode is ScalingMode.EXTERNAL
        ),
    ]


def _workloads(inputs: Inputs) -> Iterator[Manifest]:
    for revision, counts in inputs.plan.step.wanted.items():
        record = inputs.records.get(revision)
        if record is not None:
            yield from _of_revision(inputs, record, counts)


def _of_revision(inputs: Inputs, record: RevisionRecord, counts: Counts) -> Iterator[Manifest]:
    for role, replicas in zip(WORKER_ROLES, counts, strict=True):
        template = record.templates[role.value]
        yield worker_workload(inputs.owner, inputs.spec, role, record.name, template, replicas)


def _gateway(inputs: Inputs) -> Iterator[Wish]:
    """Yield the gateways and their file, made from what the plan has them serve.

    Where nobody knows any more what they were made from, they stay as they are.
    """
    owner, plan, revision = inputs.owner, inputs.plan, inputs.plan.gateway
    spec: PDDeploymentSpec | None = inputs.spec
    if revision != plan.update:
        record = inputs.records.get(revision)
        spec = None if record is None else gateway_spec(inputs.spec, record)
    if spec is None:
        if inputs.has_gateway:
            return
        spec, revision = inputs.spec, plan.update
    text = config.gateway_config(spec)
    name = names.gateway_file(owner.name, semantic_hash(text, size=4))
    template = gateway_template(owner, spec, name)
    workload = gateway_workload(owner, inputs.spec, template, revision)
    made_from = f"{_asked_of_gateways(spec)}.{semantic_hash(template, size=4)}"
    workload["metadata"]["annotations"] = {names.ANNOTATION_MADE_FROM: made_from}
    yield Wish(workload, wave=Wave.WORKLOADS)
    yield Wish(
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


def of_gateways(wanted: Iterable[Wish]) -> list[Wish]:
    """Return what gateways' pods are made from: their Deployment and their file."""
    kinds = ("Deployment", "ConfigMap")
    return [
        wish
        for wish in wanted
        if wish.manifest["kind"] in kinds
        and wish.manifest["metadata"]["labels"].get(names.LABEL_ROLE) == Role.GATEWAY
    ]


def is_made_otherwise(pods: Iterable[Wish], before: str) -> bool:
    """Whether gateways are made otherwise of what was asked for already; `before` is their
    annotation. What an operator that wrote none made of it nobody knows, so that it may be.
    """
    notes = (wish.manifest["metadata"].get("annotations") or {} for wish in pods)
    now = next((note[names.ANNOTATION_MADE_FROM] for note in notes if note), "")
    asked = now.partition(".")[0]
    return bool(now) and now != before and (not before or before.partition(".")[0] == asked)


def _asked_of_gateways(spec: PDDeploymentSpec) -> str:
    """Return a hash of what the spec says about gateways, whatever is made of it."""
    share = [spec.image, spec.image_pull_policy, spec.restarted_at]
    parts = [spec.gateway, spec.model, spec.speculative, spec.logprobs, spec.link]
    return semantic_hash([*share, *map(said, parts)], size=4)


def _secret(inputs: Inputs) -> list[Wish]:
    if not inputs.spec.link.curve:
        return []
    bare = manifest(
        inputs.owner, "v1", "Secret", names.curve_secret(inputs.owner.name), type="Opaque"
    )
    seed = partial(curve_secret, inputs.owner, inputs.make_pair)
    return [Wish(bare, seed=seed, wave=Wave.GUARDS)]


def _scaler(owner: Owner, role: RoleSpec, asked: Mapping[Role, int]) -> Wish:
    """Return a role's scaler; one that is made again asks for what the last one did."""
    bare = extras.role_scaler(owner, role)
    replicas = asked.get(Role(role.name), role.replicas)
    seeded = {**bare, "spec": {**bare["spec"], "replicas": replicas}}
    return Wish(bare, seed=lambda: seeded)
