"""Revisions: what makes one, and the record that keeps it.

The revision's name is a hash over what pods are made from, with defaults filled in and quantities
in one form, so that a manifest that means the same is the same. Replicas, scaling, budgets and pod
labels are left out: they never roll. The record holds what was rendered, so that an operator with a
newer renderer still runs an old revision as it was.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any, Literal

import msgspec

from baton_operator import names
from baton_operator.children.resources.config import worker_config
from baton_operator.children.resources.meta import Manifest, Owner, manifest
from baton_operator.children.resources.pods import (
    DEFAULTED,
    DEFAULTED_OF_WORKERS,
    pair_pod_template,
    worker_template,
)
from baton_operator.models import PDDeploymentSpec, RoleSpec
from baton_operator.models.engine import EngineSpec
from baton_operator.models.placement import HandoffSpec, Placement
from baton_operator.models.quantities import quantity
from baton_operator.models.spec import LogprobsSpec, ModelSpec, SpeculativeSpec
from baton_operator.names import WORKER_ROLES, Role

RENDER_VERSION = 3
"""Raised when `resources` renders worker pods differently: that is a new revision."""

_LATER = frozenset({"framework", "dtype", "gpu_memory_percent", "decode_prompt_chunk_tokens"})
"""Fields of the engine that came after revisions were first named."""

_TEMPLATES_KEY = "templates.json"


class RevisionRecord(msgspec.Struct, frozen=True):
    """What a revision's pods are made from, by role: file and pod template. Of pairs there is one
    template, under `pair`.

    `gateway` is what gateways of the revision take from it (`GatewayShare`), as it was written.
    `nodes` is what operators before render version 3 wrote instead. A record cannot be changed, so
    that one of theirs, or of a later schema, must be rendered as it was.
    """

    name: str
    configs: dict[str, str]
    templates: dict[str, Manifest]
    nodes: dict[str, int] = {}
    gateway: dict[str, Any] = {}


class _Shapes(msgspec.Struct, frozen=True, omit_defaults=True):
    templates: dict[str, Manifest]
    nodes: dict[str, int] = {}
    gateway: dict[str, Any] = {}


class GatewayShare(msgspec.Struct, frozen=True):
    """The part of a spec that gateways share with the workers they serve, and move with.

    All else (replicas, limits, their own image and template) is theirs alone and follows the spec.
    """

    image: str
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"]
    model: ModelSpec
    speculative: SpeculativeSpec
    logprobs: LogprobsSpec
    curve: bool
    restarted_at: str


def revision_name(spec: PDDeploymentSpec) -> str:
    """Return the revision that a spec asks for: 8 hexadecimal digits after an `r`."""
    roles = {role.name: _role_identity(role) for role in spec.roles}
    identity = {
        "render": RENDER_VERSION,
        "model": spec.model,
        "image": spec.image,
        "imagePullPolicy": spec.image_pull_policy,
        "speculative": spec.speculative,
        "logprobs": spec.logprobs,
        "engine": _engine_identity(spec.engine),
        "link": spec.link,
        "restartedAt": spec.restarted_at,
        "roles": roles,
    } | _asked_for(spec)
    return "r" + semantic_hash(identity, size=4)


def _asked_for(spec: PDDeploymentSpec) -> dict[str, Any]:
    """Return what came later than revisions were named, and somebody asked for."""
    later = {"placement": spec.placement, "handoff": _handoff_identity(spec.handoff)}
    defaults = {"placement": Placement.SEPARATE, "handoff": _handoff_identity(HandoffSpec())}
    return {key: value for key, value in later.items() if value != defaults[key]}


def _handoff_identity(handoff: HandoffSpec) -> dict[str, Any]:
    """Return the handoff's part, of `receiveBytes` only what is asked for, in bytes: an operator
    that did not know it, and another spelling, make the same.
    """
    asked = handoff.asked_room
    return {"require": handoff.require} | ({} if asked is None else {"receiveBytes": asked})


def _engine_identity(engine: EngineSpec) -> msgspec.Raw:
    """Return the engine's part in its own order, without what an older operator did not know and
    nobody asked for: an upgrade of the operator alone rolls no pods.
    """
    parts = ((field, getattr(engine, field.name)) for field in _fields(EngineSpec))
    said = {f.encode_name: p for f, p in parts if f.name not in _LATER or not _is_default(f, p)}
    return msgspec.Raw(msgspec.json.encode(said))


def semantic_hash(value: Any, *, size: int = 8) -> str:
    """Return a hash of JSON-like data in `size` bytes that ignores order of keys."""
    encoded = msgspec.json.encode(value, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=size).hexdigest()


def non_defaults(value: Any) -> Any:
    """Return what a spec says beyond defaults: a later schema's new fields leave it as it is."""
    if isinstance(value, msgspec.Struct):
        parts = ((f, getattr(value, f.name)) for f in _fields(type(value)))
        return {f.name: non_defaults(part) for f, part in parts if not _is_default(f, part)}
    return [non_defaults(item) for item in value] if isinstance(value, list) else value


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return a struct's fields; msgspec compiles the text of its annotations each time for that."""
    return msgspec.structs.fields(kind)


def _is_default(field: msgspec.structs.FieldInfo, value: Any) -> bool:
    if field.default_factory is not msgspec.NODEFAULT:
        return bool(value == field.default_factory())
    return field.default is not msgspec.NODEFAULT and bool(value == field.default)


def make_record(owner: Owner, spec: PDDeploymentSpec, revision: str) -> RevisionRecord:
    """Render what the revision's pods are made from."""
    share = GatewayShare(
        spec.image,
        spec.image_pull_policy,
        spec.model,
        spec.speculative,
        spec.logprobs,
        spec.link.curve,
        spec.restarted_at,
    )
    return RevisionRecord(
        name=revision,
        configs={r.value: worker_config(owner, spec, r, revision) for r in WORKER_ROLES},
        templates=_templates(owner, spec, revision),
        gateway=msgspec.to_builtins(share),
    )


def _templates(owner: Owner, spec: PDDeploymentSpec, revision: str) -> dict[str, Manifest]:
    """Return the revision's pod templates, by the role of the pod."""
    if spec.has_pairs:
        return {Role.PAIR.value: pair_pod_template(owner, spec, revision)}
    roles = [spec.role(role.value) for role in WORKER_ROLES]
    return {role.name: worker_template(owner, spec, role, revision) for role in roles}


def gateway_spec(spec: PDDeploymentSpec, record: RevisionRecord) -> PDDeploymentSpec | None:
    """Return the spec that gateways of a recorded revision are rendered from; None when the record
    does not tell, as those of operators before render version 3.
    """
    try:
        share = msgspec.convert(record.gateway, GatewayShare)
    except msgspec.ValidationError:
        return None
    return msgspec.structs.replace(
        spec,
        image=share.image,
        image_pull_policy=share.image_pull_policy,
        model=share.model,
        speculative=share.speculative,
        logprobs=share.logprobs,
        link=msgspec.structs.replace(spec.link, curve=share.curve),
        restarted_at=share.restarted_at,
    )


def record_manifest(owner: Owner, record: RevisionRecord) -> Manifest:
    """Return the immutable ConfigMap of a record; pods mount their role's file from it."""
    data = {f"{role}.yaml": text for role, text in record.configs.items()}
    shapes = _Shapes(record.templates, record.nodes, record.gateway)
    templates = msgspec.json.encode(shapes, order="deterministic").decode()
    return manifest(
        owner,
        "v1",
        "ConfigMap",
        names.revision_record(owner.name, record.name),
        revision=record.name,
        immutable=True,
        data=data | {_TEMPLATES_KEY: templates},
    )


def read_record(body: Manifest, revision: str) -> RevisionRecord:
    """Return the record in the ConfigMap that a revision names: its label may be taken away.

    Raises:
        ValueError: it is not one.
    """
    data = body.get("data") or {}
    try:
        shapes = msgspec.json.decode(data[_TEMPLATES_KEY], type=_Shapes)
        configs = {role.value: data[f"{role}.yaml"] for role in WORKER_ROLES}
    except (KeyError, msgspec.DecodeError) as error:
        raise ValueError(f"not a revision record: {error}") from error
    return RevisionRecord(revision, configs, shapes.templates, shapes.nodes, shapes.gateway)


def _role_identity(role: RoleSpec) -> dict[str, Any]:
    template = _without_labels(role.template)
    identity = {
        "image": role.image,
        "parallelism": role.parallelism,
        "drain": role.drain,
        "template": _normal(template),
    }
    kept = {"hooks": _has_hooks(template), "home": _has_home(template)}
    return identity | {key: "kept" for key, is_kept in kept.items() if is_kept}


def _has_hooks(template: Manifest) -> bool:
    """Whether workers get hooks of the user's: operators once made the revision without."""
    hooks = (worker.get("lifecycle") or {} for worker in _workers(template))
    return any(value for each in hooks for key, value in each.items() if key != "preStop")


def _has_home(template: Manifest) -> bool:
    """Whether workers get a HOME of the user's: operators once made the revision without."""
    entries = (entry for worker in _workers(template) for entry in worker.get("env") or [])
    return any(entry.get("name") == "HOME" for entry in entries)


def _workers(template: Manifest) -> list[Manifest]:
    containers = (template.get("spec") or {}).get("containers") or []
    return [each for each in containers if each.get("name") == names.CONTAINER_NAME]


def _without_labels(template: Manifest) -> Manifest:
    metadata = {k: v for k, v in (template.get("metadata") or {}).items() if k != "labels"}
    rest = {key: value for key, value in template.items() if key != "metadata"}
    return rest | ({"metadata": metadata} if metadata else {})


def _normal(value: Any, *, is_quantities: bool = False) -> Any:
    """Return JSON data with resource quantities in one form and empty members left out, but for
    those that say something where pods have a default of ours.
    """
    if isinstance(value, dict):
        members = {
            key: _normal(item, is_quantities=key in ("limits", "requests"))
            if key in ("limits", "requests")
            else _normal(item, is_quantities=is_quantities)
            for key, item in value.items()
        }
        return {k: v for k, v in members.items() if v not in (None, {}, []) or _says(value, k)}
    if isinstance(value, list):
        return [_normal(item) for item in value]
    return _quantity(value) if is_quantities else value


def _says(owner: Manifest, key: str) -> bool:
    """Whether an empty member is another wish than none: of other containers it is none."""
    is_ours = key in DEFAULTED_OF_WORKERS and owner.get("name") == names.CONTAINER_NAME
    return owner[key] is not None and (is_ours or key in DEFAULTED)


def _quantity(value: Any) -> Any:
    """Return a quantity as a plain number's text; anything else as it is."""
    number = quantity(str(value).strip())
    return value if number is None else format(number.normalize(), "f")
