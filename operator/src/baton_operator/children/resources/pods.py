"""Pod templates: the user's template with ours merged over it, under restricted pod security.

What only the user can know passes through (resources, nodes, tolerations, claims, volumes, extra
containers). What the pod contract needs is ours (configuration, ports, drain), and a template that
says it is refused before it comes here (`models.own_parts`), so that nothing of it is lost here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_operator import names
from baton_operator.children.resources import config
from baton_operator.children.resources.drain import EXIT_HEADROOM_SECONDS, drain_command
from baton_operator.children.resources.meta import Manifest, Owner, child_labels
from baton_operator.models import PDDeploymentSpec, RoleSpec
from baton_operator.models.pair_template import pair_template
from baton_operator.names import ANNOTATION_RESTARTED, CONTAINER_NAME, Role

POD_GROUP_ID = 65532
_HOME = "HOME"
_SECRET_MODE = 0o440
_STARTUP_SECONDS = 3600
_SOCKETS: Manifest = {"medium": "Memory", "sizeLimit": "1Mi"}
"""Of a pair's shared volume: it holds a Unix socket, and no KV."""
DEFAULTED = frozenset({"capabilities", "seccompProfile"})
"""Fields that have a default of ours: an empty one in a template is another wish than none."""
DEFAULTED_OF_WORKERS = frozenset(
    {"command", "args", "startupProbe", "livenessProbe", "readinessProbe"}
)
"""Those that have one in the workers' own container alone."""
_TEXTS = frozenset({"annotations", "labels", "matchLabels", "nodeSelector", "volumeAttributes"})
"""Maps of texts, in which null is "" and no absence: a node selector without a value selects."""

_PREFILL_DECODE_KEYS = ("gateway.public", "workers.allowed")


def worker_template(
    owner: Owner, spec: PDDeploymentSpec, role: RoleSpec, revision: str
) -> Manifest:
    """Return the pod template of a prefill or decode worker."""
    template = _base(owner, Role(role.name), role.template, revision)
    pod = template["spec"]
    pod["terminationGracePeriodSeconds"] = role.drain.grace_seconds + EXIT_HEADROOM_SECONDS
    _worker(pod, _container(pod), owner, spec, role, revision)
    return template


def pair_pod_template(owner: Owner, spec: PDDeploymentSpec, revision: str) -> Manifest:
    """Return the pod template of a pair: a container of either role, called by it.

    Each drains by itself, and the pod waits for both. What a process alone may see (its keys, its
    control socket) is in volumes that only its own container mounts.
    """
    roles = [spec.role(role.value) for role in names.WORKER_ROLES]
    user = pair_template({role.name: role.template for role in roles})
    template = _base(owner, Role.PAIR, user, revision, tuple(role.name for role in roles))
    pod = template["spec"]
    longest = max(role.drain.grace_seconds for role in roles)
    pod["terminationGracePeriodSeconds"] = longest + EXIT_HEADROOM_SECONDS
    for container, role in zip(pod["containers"], roles, strict=False):
        _worker(pod, container, owner, spec, role, revision)
        _mount(pod, container, "kv", {"emptyDir": _SOCKETS}, config.SHARED_FOLDER, readOnly=False)
    return template


def _worker(
    pod: Manifest,
    container: Manifest,
    owner: Owner,
    spec: PDDeploymentSpec,
    role: RoleSpec,
    revision: str,
) -> None:
    """Make a container of a pod the worker of a role."""
    kind = Role(role.name)
    suffix = f"-{kind}" if spec.has_pairs else ""
    ports = names.PAIR_PORTS[kind] if spec.has_pairs else names.WORKER_PORTS
    _contract(container, spec, kind, role.image)
    container["ports"] = _ports(container, ports)
    command = role.drain.command or drain_command(role.drain.grace_seconds)
    hooks = container.get("lifecycle") or {}
    container["lifecycle"] = {**hooks, "preStop": {"exec": {"command": command}}}
    _probes(container)
    _env(container, _identity(kind, revision, is_paired=spec.has_pairs) + _ranks(role))
    record = names.revision_record(owner.name, revision)
    _mount_config(pod, container, record, f"{kind}.yaml", suffix)
    folder = config.CONTROL_FOLDER
    _mount(pod, container, f"control{suffix}", {"emptyDir": {}}, folder, readOnly=False)
    _mount_model(pod, container, spec)
    _mount_keys(pod, container, owner, spec, kind, suffix)


def gateway_template(owner: Owner, spec: PDDeploymentSpec, config_map: str) -> Manifest:
    """Return the gateway's pod template; `config_map` holds its configuration."""
    gateway = spec.gateway
    template = _base(owner, Role.GATEWAY, gateway.template, "")
    if spec.restarted_at:
        annotations = template["metadata"].get("annotations") or {}
        restarted = {ANNOTATION_RESTARTED: spec.restarted_at}
        template["metadata"]["annotations"] = annotations | restarted
    pod = template["spec"]
    leaving = config.GATEWAY_SETTLE_SECONDS + gateway.drain_seconds
    pod["terminationGracePeriodSeconds"] = leaving + EXIT_HEADROOM_SECONDS
    container = _container(pod)
    _contract(container, spec, Role.GATEWAY, gateway.image)
    container["ports"] = _ports(container, names.GATEWAY_PORTS)
    _probes(container)
    _env(container, _identity(Role.GATEWAY, ""))
    _mount_config(pod, container, config_map, config.CONFIG_FILE)
    _mount_model(pod, container, spec)
    _mount_keys(pod, container, owner, spec, Role.GATEWAY)
    if gateway.api_keys_secret:
        source = {"secretName": gateway.api_keys_secret, "defaultMode": _SECRET_MODE}
        _mount(pod, container, "api-keys", {"secret": source}, config.API_KEYS_FOLDER)
    return template


def _base(
    owner: Owner,
    role: Role,
    user: Manifest,
    revision: str,
    ours: tuple[str, ...] = (CONTAINER_NAME,),
) -> Manifest:
    """Return the user's template with the containers that are `ours` first, none configured yet."""
    template: Manifest = _without_nulls(user)
    metadata = template["metadata"] = template.get("metadata") or {}
    labels = metadata.get("labels") or {}
    recommended = child_labels(owner.name, role, revision)
    own = {key: value for key, value in recommended.items() if names.is_own_key(key)}
    metadata["labels"] = {**recommended, **labels, **own}
    pod = template["spec"] = template.get("spec") or {}
    pod.setdefault("serviceAccountName", names.service_account(owner.name))
    pod["automountServiceAccountToken"] = False
    pod["enableServiceLinks"] = False
    pod["securityContext"] = {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": POD_GROUP_ID,
        **(pod.get("securityContext") or {}),
    }
    pod["containers"] = [_restricted(c) for c in _ours_first(pod.get("containers") or [], ours)]
    if pod.get("initContainers"):
        pod["initContainers"] = [_restricted(c) for c in pod["initContainers"]]
    return template


def _without_nulls(value: Any, *, is_texts: bool = False) -> Any:
    """Return a copy of JSON data: a field that is null is one that is not there, as for the server,
    and so gets the default; but a key of a map of texts is there, and the server reads "".
    """
    if isinstance(value, dict):
        if is_texts:
            return {key: "" if item is None else item for key, item in value.items()}
        return {
            key: _without_nulls(item, is_texts=key in _TEXTS)
            for key, item in value.items()
            if item is not None
        }
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _ours_first(containers: list[Manifest], ours: tuple[str, ...]) -> list[Manifest]:
    """Return the containers with the workers' first, which need not be among them yet."""
    named = {c.get("name"): c for c in reversed(containers)}
    first = [named.get(name, {"name": name}) for name in ours]
    return first + [c for c in containers if c.get("name") not in ours]


def _restricted(container: Manifest) -> Manifest:
    context = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        **(container.get("securityContext") or {}),
    }
    return {**container, "securityContext": context}


def _container(pod: Manifest) -> Manifest:
    first: Manifest = pod["containers"][0]
    return first


def _contract(container: Manifest, spec: PDDeploymentSpec, role: Role, image: str) -> None:
    container["image"] = image or spec.image
    container["imagePullPolicy"] = spec.image_pull_policy
    container.setdefault("command", ["baton-worker"])
    path = f"{config.CONFIG_FOLDER}/{config.CONFIG_FILE}"
    container.setdefault("args", ["--log-format", "json", role.value, "--config", path])
    # Its last lines then say in the pod's status, and so in ours, why it ended.
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")


def _ports(container: Manifest, ours: Mapping[str, int]) -> list[Manifest]:
    user = [p for p in container.get("ports") or [] if str(p.get("name")) not in ours]
    mine = [{"name": n, "containerPort": p, "protocol": "TCP"} for n, p in ours.items()]
    return mine + user


def _probes(container: Manifest) -> None:
    """Add the probes that the template does not have; an empty one there means none."""
    live = {"httpGet": {"path": "/healthz", "port": "health"}, "timeoutSeconds": 5}
    ready = {"httpGet": {"path": "/readyz", "port": "health"}, "timeoutSeconds": 5}
    period = 2
    container.setdefault(
        "startupProbe",
        {**live, "periodSeconds": period, "failureThreshold": _STARTUP_SECONDS // period},
    )
    container.setdefault("livenessProbe", {**live, "periodSeconds": 10, "failureThreshold": 6})
    container.setdefault("readinessProbe", {**ready, "periodSeconds": 2, "failureThreshold": 2})
    for kind in ("startupProbe", "livenessProbe"):
        if container[kind] == {}:
            del container[kind]


def _identity(role: Role, revision: str, *, is_paired: bool = False) -> list[Manifest]:
    """Return who a process is: of a pair, one that pairs within its pod alone."""
    own_name = "BATON_PAIR_GROUP" if is_paired else "BATON_POD_NAME"
    from_pod = {
        own_name: "metadata.name",
        "BATON_POD_NAMESPACE": "metadata.namespace",
        "BATON_POD_IP": "status.podIP",
        "BATON_NODE_NAME": "spec.nodeName",
    }
    fields = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in from_pod.items()
    ]
    home = names.FOLDER_TEMPORARY
    fixed = {"BATON_ROLE": role.value, "BATON_REVISION": revision, _HOME: home}
    if is_paired:  # the variable that it names stands before it, as the kubelet wants
        fixed["BATON_POD_NAME"] = names.worker_id(f"$({own_name})", role, is_paired=True)
    return fields + [{"name": name, "value": value} for name, value in fixed.items()]


def _ranks(role: RoleSpec) -> list[Manifest]:
    return [{"name": "BATON_TENSOR_PARALLEL", "value": str(role.parallelism.tensor)}]


def _env(container: Manifest, ours: list[Manifest]) -> None:
    """Put ours before the user's, of which only a HOME may be otherwise: nothing of ours needs it.

    What else has a name of ours is no valid spec (`models.own_parts`).
    """
    said = {str(entry.get("name")) for entry in container.get("env") or []}
    ours = [entry for entry in ours if entry["name"] != _HOME or _HOME not in said]
    taken = {entry["name"] for entry in ours}
    user = [e for e in container.get("env") or [] if str(e.get("name")) not in taken]
    container["env"] = ours + user


def _mount(
    pod: Manifest, container: Manifest, name: str, source: Manifest, path: str, **mount: Any
) -> None:
    volumes = [v for v in pod.get("volumes") or [] if v.get("name") != name]
    pod["volumes"] = [*volumes, {"name": name, **source}]
    mounts = [m for m in container.get("volumeMounts") or [] if m.get("mountPath") != path]
    mine = {"name": name, "mountPath": path, "readOnly": True, **mount}
    container["volumeMounts"] = [*mounts, mine]


def _mount_config(
    pod: Manifest, container: Manifest, config_map: str, key: str, suffix: str = ""
) -> None:
    source = {"name": config_map, "items": [{"key": key, "path": config.CONFIG_FILE}]}
    _mount(pod, container, f"config{suffix}", {"configMap": source}, config.CONFIG_FOLDER)
    _mount(pod, container, f"tmp{suffix}", {"emptyDir": {}}, names.FOLDER_TEMPORARY, readOnly=False)


def _mount_model(pod: Manifest, container: Manifest, spec: PDDeploymentSpec) -> None:
    if spec.model.pvc is not None:
        claim = {"claimName": spec.model.pvc.claim_name, "readOnly": True}
        _mount(pod, container, "model", {"persistentVolumeClaim": claim}, config.MODEL_MOUNT)
    elif spec.model.image is not None:
        image = spec.model.image
        source = {"image": {"reference": image.reference, "pullPolicy": image.pull_policy}}
        _mount(pod, container, "model", source, config.MODEL_MOUNT)


def _mount_keys(
    pod: Manifest,
    container: Manifest,
    owner: Owner,
    spec: PDDeploymentSpec,
    role: Role,
    suffix: str = "",
) -> None:
    """Mount this role's key pair and what it may trust; never another role's secret key."""
    if not spec.link.curve:
        return
    shared = ("workers.allowed",) if role is Role.GATEWAY else _PREFILL_DECODE_KEYS
    items = [{"key": f"{role}.{half}", "path": f"own.{half}"} for half in ("public", "secret")]
    items += [{"key": key, "path": key} for key in shared]
    source = {
        "secretName": names.curve_secret(owner.name),
        "items": items,
        "defaultMode": _SECRET_MODE,
    }
    _mount(pod, container, f"curve{suffix}", {"secret": source}, config.KEYS_FOLDER)
