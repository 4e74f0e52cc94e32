"""From an object of the API server to a typed PDDeployment, or one error that names the field.

The schema refuses most bad specs at admission; a spec can still slip past (an older CRD, an object
stored before a rule existed), so everything the code relies on is checked again here.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from baton_operator.models import placement
from baton_operator.models.engine import (
    BFLOAT16_ON_GPUS,
    CHUNK_OR_NONE,
    LEAST_CHUNK,
    TORCH_ON_GPUS,
)
from baton_operator.models.own_parts import OwnParts, check_own_parts, own_parts
from baton_operator.models.pair_template import UnlikeTemplatesError, pair_template
from baton_operator.models.receive_room import check_room
from baton_operator.models.roles import GPU_RANKS, NOT_OVER_NODES
from baton_operator.models.spec import PDDeploymentSpec
from baton_operator.models.template import PortsOf, check_template
from baton_operator.names import (
    CONTAINER_NAME,
    MAX_NAME_LENGTH,
    NAME_PATTERN,
    NAME_RULE,
    PAIR_PORTS,
    Role,
)

DEEPEST_SPEC = 100
"""Levels of a spec that may be served: what renders one walks down all of them."""


class ObjectKey(NamedTuple):
    """Where an object of a known kind lives."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class InvalidSpec(ValueError):
    """The spec cannot be served; the message names the field. Only an edit helps, no retry."""


class PDDeployment(msgspec.Struct, frozen=True):
    """A PDDeployment as the reconciler sees it. `status` is the last one written, untyped."""

    key: ObjectKey
    uid: str
    generation: int
    resource_version: str
    is_deleting: bool
    spec: PDDeploymentSpec
    status: dict[str, Any]


def parse_deployment(body: dict[str, Any]) -> PDDeployment:
    """Return the typed object.

    Raises:
        InvalidSpec: the spec breaks the schema or a rule over several fields.
    """
    metadata = body["metadata"]
    if _is_deeper(body.get("spec"), DEEPEST_SPEC):
        raise InvalidSpec(f"spec is nested deeper than {DEEPEST_SPEC} levels, as no pod is")
    try:
        spec = msgspec.convert(body.get("spec") or {}, PDDeploymentSpec)
    except msgspec.ValidationError as error:
        raise InvalidSpec(f"spec: {error}") from error
    _check(metadata["name"], spec)
    return PDDeployment(
        key=ObjectKey(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        resource_version=metadata.get("resourceVersion", ""),
        is_deleting="deletionTimestamp" in metadata,
        spec=spec,
        status=body.get("status") or {},
    )


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether JSON data nests in more levels; asked level by level, for it may be many."""
    layer = [value] if isinstance(value, (dict, list)) else []
    for _ in range(levels):
        inside = (each.values() if isinstance(each, dict) else each for each in layer)
        layer = [part for each in inside for part in each if isinstance(part, (dict, list))]
    return bool(layer)


def parse_ratio(text: str) -> tuple[int, int]:
    """Return `P:D` as two numbers."""
    prefill, decode = text.split(":")
    return int(prefill), int(decode)


def _check(name: str, spec: PDDeploymentSpec) -> None:
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidSpec(f"metadata.name has {len(name)} characters, at most {MAX_NAME_LENGTH}")
    if not re.fullmatch(NAME_PATTERN, name):
        raise InvalidSpec(f"{NAME_RULE}, and is {name!r}")
    names = sorted(role.name for role in spec.roles)
    if names != ["decode", "prefill"]:
        raise InvalidSpec(f"spec.roles has {names}; it must hold one prefill and one decode")
    sources = [spec.model.pvc is not None, spec.model.image is not None, bool(spec.model.path)]
    if sum(sources) != 1:
        raise InvalidSpec("spec.model: exactly one of pvc, image and path must be set")
    if (spec.speculative.method == "none") != (spec.speculative.num_speculative_tokens == 0):
        raise InvalidSpec(
            "spec.speculative.numSpeculativeTokens must be 0 exactly when method is none"
        )
    _check_engine(spec)
    _check_parallelism(spec)
    if spec.rollout.max_surge.pairs + spec.rollout.max_unavailable.pairs == 0:
        raise InvalidSpec("spec.rollout: maxSurge.pairs and maxUnavailable.pairs are both 0")
    low, high = (
        parse_ratio(spec.ratio.prefill_per_decode.min),
        parse_ratio(spec.ratio.prefill_per_decode.max),
    )
    if low[0] * high[1] > high[0] * low[1]:
        raise InvalidSpec("spec.ratio.prefillPerDecode.min exceeds max")
    _check_scaling(spec)
    _check_placement(spec, low, high)
    for role in spec.roles:
        own = own_parts(spec, Role(role.name))
        _check_users_template(f"spec.roles[{role.name}].template", role.template, own)
    own = own_parts(spec, Role.GATEWAY)
    _check_users_template("spec.gateway.template", spec.gateway.template, own)
    _check_room(spec)
    if spec.has_pairs:
        _check_pair(spec)


def _check_parallelism(spec: PDDeploymentSpec) -> None:
    for role in spec.roles:
        if role.parallelism.nodes != 1:
            raise InvalidSpec(f"spec.roles[{role.name}].{NOT_OVER_NODES}")
        known = {"gpu": GPU_RANKS, "sim": (1,)}.get(spec.engine.device)
        if known is not None and role.parallelism.tensor not in known:
            told = " or ".join(
                ", ".join(map(str, part)) for part in (known[:-1], known[-1:]) if part
            )
            raise InvalidSpec(
                f"spec.roles[{role.name}].parallelism.tensor is {role.parallelism.tensor}: with "
                f"engine.device {spec.engine.device} it must be {told}"
            )
    prefill, decode = spec.role("prefill"), spec.role("decode")
    if decode.parallelism.tensor not in (1, prefill.parallelism.tensor):
        raise InvalidSpec("spec.roles: decode's parallelism.tensor must equal prefill's, or be 1")


def _check_engine(spec: PDDeploymentSpec) -> None:
    engine = spec.engine
    if engine.device != "gpu" and engine.framework == "torch":
        raise InvalidSpec(f"spec: {TORCH_ON_GPUS}")
    if engine.device != "gpu" and engine.dtype == "bfloat16":
        raise InvalidSpec(f"spec: {BFLOAT16_ON_GPUS}")
    if 0 < engine.decode_prompt_chunk_tokens < LEAST_CHUNK:
        raise InvalidSpec(f"spec: {CHUNK_OR_NONE}")


def _check_scaling(spec: PDDeploymentSpec) -> None:
    for role in spec.roles:
        if role.scaling.min > role.scaling.max:
            raise InvalidSpec(f"spec.roles[{role.name}].scaling.min exceeds max")


def _check_placement(spec: PDDeploymentSpec, low: tuple[int, int], high: tuple[int, int]) -> None:
    prefill, decode = spec.role("prefill"), spec.role("decode")
    requires = spec.handoff.require
    broken = {
        placement.EQUAL_REPLICAS: spec.has_pairs and prefill.replicas != decode.replicas,
        placement.EQUAL_SCALING: spec.has_pairs and prefill.scaling != decode.scaling,
        placement.RATIO_OF_PAIRS: spec.has_pairs and not (low[0] <= low[1] and high[0] >= high[1]),
        placement.PAIR_OF_ONE_REVISION: spec.has_pairs and spec.gateway.pair_across_revisions,
        placement.NVLINK_BETWEEN_GPUS: requires == "nvlink"
        and not (spec.has_pairs and spec.engine.device == "gpu"),
        placement.RDMA_BETWEEN_PODS: requires == "rdma" and spec.has_pairs,
        placement.RANKS_OF_GPUS: requires == "rdma"
        and spec.engine.device != "gpu"
        and any(role.parallelism.tensor > 1 for role in spec.roles),
    }
    for rule, is_broken in broken.items():
        if is_broken:
            raise InvalidSpec(f"spec: {rule}")


def _check_room(spec: PDDeploymentSpec) -> None:
    is_sent = spec.handoff.require == "any"  # else a request fails before any of its KV is sent
    roles = [role for role in spec.roles if is_sent and (spec.has_pairs or role.name == "decode")]
    try:
        check_room(spec.handoff.receive_bytes, {role.name: role.template for role in roles})
    except ValueError as error:
        raise InvalidSpec(f"spec: {error}") from error


def _check_pair(spec: PDDeploymentSpec) -> None:
    field = "spec.roles[].template"
    try:
        template = pair_template({role.name: role.template for role in spec.roles})
    except UnlikeTemplatesError as error:
        raise InvalidSpec(f"{field}: {error}") from error
    ports = {role.value: ports for role, ports in PAIR_PORTS.items()}
    _check_template(f"{field} of the pair", template, ports)
    for container in (template.get("spec") or {}).get("containers") or ():
        if container["name"] not in ports and not container.get("image"):
            text = f"container {container['name']} has no image: give it one"
            raise InvalidSpec(f"{field} of the pair: {text}, or call it {CONTAINER_NAME}")


def _check_users_template(field: str, template: dict[str, Any], own: OwnParts) -> None:
    try:
        check_template(template, {CONTAINER_NAME: own.ports})
        check_own_parts(template, own)
    except msgspec.ValidationError as error:
        raise InvalidSpec(f"{field}: {error}") from error


def _check_template(field: str, template: dict[str, Any], ports: PortsOf) -> None:
    try:
        check_template(template, ports)
    except msgspec.ValidationError as error:
        raise InvalidSpec(f"{field}: {error}") from error
