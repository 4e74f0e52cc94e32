"""What of a pod template is Baton's own, and so may not be said in it: rendering would replace it.

Refused by name instead, with the field to say it in where there is one: what a user says is in the
pods, or the spec is invalid. `children.resources.pods` renders these parts.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from baton_operator import names
from baton_operator.models.spec import PDDeploymentSpec
from baton_operator.names import CONTAINER_NAME, Role

OWN_ENV = frozenset(
    {
        "BATON_NODE_NAME",
        "BATON_PAIR_GROUP",
        "BATON_POD_IP",
        "BATON_POD_NAME",
        "BATON_POD_NAMESPACE",
        "BATON_REVISION",
        "BATON_ROLE",
        "BATON_TENSOR_PARALLEL",
    }
)
"""Who a process is. Its HOME is ours as long as a template names none."""

_OF_EACH = {"config": names.FOLDER_CONFIG, "tmp": names.FOLDER_TEMPORARY}
_TOKEN = "mount a projected volume where a container of yours needs a token"  # noqa: S105
_NEVER = {
    "automountServiceAccountToken": f"Baton's pods have no token of the API: {_TOKEN}",
    "enableServiceLinks": "Baton's pods get no variables of Services: take it away",
}
"""Fields of a pod that are false."""


class OwnParts(NamedTuple):
    """What a pod and its container of ours have of us; `role` of a pair's pod is one of its two.

    `volumes` are names, `folders` mount paths, `ports` numbers by name. `fixed` are the values of
    fields of the container, with the field that says each. `grace` says the pod's grace period,
    `hook` the preStop hook, or "" where there is none of ours. `is_whole`: the template is all of a
    pod's; of a pair it is half, and the other half may say more of a container.
    """

    volumes: frozenset[str]
    folders: frozenset[str]
    ports: Mapping[str, int]
    fixed: Mapping[str, tuple[str, str]]
    grace: str
    hook: str
    is_whole: bool


def own_parts(spec: PDDeploymentSpec, role: Role) -> OwnParts:
    """Return what pods of a role have of us, by this spec; `role` is a process's."""
    folders = _folders(spec, role)
    volumes = set(folders)
    if spec.has_pairs and role is not Role.GATEWAY:
        shared = {"model", "kv"} & volumes
        volumes = shared | {f"{v}-{r}" for v in volumes - shared for r in names.WORKER_ROLES}
    field = "spec.gateway" if role is Role.GATEWAY else f"spec.roles[{role}]"
    image = spec.gateway.image if role is Role.GATEWAY else spec.role(role.value).image
    is_gateway = role is Role.GATEWAY
    return OwnParts(
        frozenset(volumes),
        frozenset(folders.values()),
        _ports(spec, role),
        {
            "image": (image or spec.image, f"{field}.image, or spec.image for all pods"),
            "imagePullPolicy": (spec.image_pull_policy, "spec.imagePullPolicy"),
        },
        grace=f"{field}.drainSeconds" if is_gateway else f"{field}.drain.graceSeconds",
        hook="" if is_gateway else f"{field}.drain.command",
        is_whole=is_gateway or not spec.has_pairs,
    )


def _ports(spec: PDDeploymentSpec, role: Role) -> Mapping[str, int]:
    if role is Role.GATEWAY:
        return names.GATEWAY_PORTS
    return names.PAIR_PORTS[role] if spec.has_pairs else names.WORKER_PORTS


def _folders(spec: PDDeploymentSpec, role: Role) -> dict[str, str]:
    """Return where volumes of ours are mounted, by what they are called before a pair's suffix."""
    folders = dict(_OF_EACH)
    if spec.model.pvc is not None or spec.model.image is not None:
        folders["model"] = names.FOLDER_MODEL
    if spec.link.curve:
        folders["curve"] = names.FOLDER_KEYS
    if role is not Role.GATEWAY:
        folders["control"] = names.FOLDER_CONTROL
    elif spec.gateway.api_keys_secret:
        folders["api-keys"] = names.FOLDER_API_KEYS
    if spec.has_pairs and role is not Role.GATEWAY:
        folders["kv"] = names.FOLDER_SHARED
    return folders


def check_own_parts(template: dict[str, Any], own: OwnParts) -> None:
    """Check that a template, whose shape is checked, says nothing that is ours.

    Raises:
        msgspec.ValidationError: it does; the text names it and the fix, and ends with its path.
    """
    metadata, pod = template.get("metadata") or {}, template.get("spec") or {}
    for field in ("labels", "annotations"):
        for key in metadata.get(field) or {}:
            if names.is_own_key(key):
                raise _own(key, "take it away", f"$.metadata.{field}")
    _check_fields(pod, own)
    for number, volume in enumerate(pod.get("volumes") or ()):
        if str(volume.get("name")) in own.volumes:
            raise _own(f"volume {volume['name']}", "rename yours", f"$.spec.volumes[{number}]")
    for number, container in enumerate(pod.get("containers") or ()):
        path = f"$.spec.containers[{number}]"
        if container["name"] == CONTAINER_NAME:
            _check_container(container, own, path)
        elif own.is_whole and not container.get("image"):
            fix = f"give it one, or call it {CONTAINER_NAME} if Baton's own is meant"
            raise _refused(f"container {container['name']} has no image: {fix}", path)


def _check_fields(pod: dict[str, Any], own: OwnParts) -> None:
    for field, fix in _NEVER.items():
        if pod.get(field):
            raise _refused(f"{field} is true, but {fix}", f"$.spec.{field}")
    if pod.get("serviceAccount") not in (None, "", pod.get("serviceAccountName")):
        text = "serviceAccount is an old name, which serviceAccountName wins over: say that"
        raise _refused(text, "$.spec.serviceAccount")
    if pod.get("terminationGracePeriodSeconds") is not None:
        fix = f"follows from {own.grace}: set that"
        raise _refused(f"the grace period {fix}", "$.spec.terminationGracePeriodSeconds")


def _check_container(container: dict[str, Any], own: OwnParts, path: str) -> None:
    for number, entry in enumerate(container.get("env") or ()):
        if str(entry.get("name")) in OWN_ENV:
            raise _own(f"variable {entry['name']}", "take it away", f"{path}.env[{number}]")
    for number, port in enumerate(container.get("ports") or ()):
        ours = own.ports.get(str(port.get("name")))
        told = (port.get("containerPort"), port.get("protocol") or "TCP")
        if ours is not None and (port.get("hostPort") or port.get("hostIP")):
            what = f"port {port['name']}, which has no port of its node,"
            raise _own(what, "take hostPort and hostIP away", f"{path}.ports[{number}]")
        if ours is not None and told != (ours, "TCP"):
            what = f"port {port['name']}, which is {ours}/TCP,"
            raise _own(what, "rename yours", f"{path}.ports[{number}]")
    for number, mount in enumerate(container.get("volumeMounts") or ()):
        folder = posixpath.normpath("/" + str(mount.get("mountPath")).lstrip("/"))
        if folder in own.folders:
            where = f"{path}.volumeMounts[{number}]"
            raise _own(f"folder {folder}", "mount yours elsewhere", where)
    for field, (value, where) in own.fixed.items():
        if container.get(field) not in (None, "", value):
            raise _refused(f"{field} is said in {where}: take it away here", f"{path}.{field}")
    if _is_empty(container.get("readinessProbe")):
        text = "a pod without one would be given requests before it can serve: name a probe"
        raise _refused(f"readinessProbe is empty, but {text}", f"{path}.readinessProbe")
    if own.hook and (container.get("lifecycle") or {}).get("preStop") is not None:
        fix = f"drains the worker: say another in {own.hook}"
        raise _refused(f"the hook {fix}", f"{path}.lifecycle.preStop")


def _is_empty(probe: Any) -> bool:
    """Whether a template has the probe and says nothing in it; null is no probe of the template."""
    return isinstance(probe, dict) and all(item is None for item in probe.values())


def _own(what: str, fix: str, path: str) -> msgspec.ValidationError:
    return _refused(f"{what} is Baton's own: {fix}", path)


def _refused(text: str, path: str) -> msgspec.ValidationError:
    return msgspec.ValidationError(f"{text} - at `{path}`")
