"""Write what the chart derives from elsewhere; with --check, fail when a file is out of date.

CRDs come from `baton-operator crds`; values.schema.json and README.md from values.yaml: types from
the defaults, descriptions from the comments that begin with `--`, bounds from `BOUNDS`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "baton"
KEEP = "helm.sh/resource-policy"

_TEXTS = {"additionalProperties": {"type": "string"}}
_NAME = {"pattern": "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", "maxLength": 63}

BOUNDS: dict[str, dict[str, Any]] = {
    "image.repository": {"minLength": 1},
    "image.digest": {"pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "imagePullSecrets": {"items": {"type": "object", "required": ["name"]}},
    "nameOverride": _NAME,
    "fullnameOverride": _NAME,
    "watchNamespace": _NAME,
    "serviceAccount.annotations": _TEXTS,
    "extraEnv": {"items": {"type": "object", "required": ["name"]}},
    "nodeSelector": _TEXTS,
    "podAnnotations": _TEXTS,
    "podLabels": _TEXTS,
    "podMonitor.labels": _TEXTS,
    "serviceMonitor.labels": _TEXTS,
    "prometheusRule.labels": _TEXTS,
    "dashboards.labels": _TEXTS,
    "dashboards.annotations": _TEXTS,
    "replicas": {"minimum": 0, "maximum": 10},
    "operator.workers": {"minimum": 1, "maximum": 256},
    "operator.writeConcurrency": {"minimum": 1, "maximum": 1024},
    "operator.upgradeModels": {"minimum": 1, "maximum": 4096},
    "operator.resyncSeconds": {"minimum": 1, "maximum": 86400},
    "operator.statusIntervalSeconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 3600},
    "operator.leaseDurationSeconds": {"minimum": 9, "maximum": 3600},
    "operator.logLevel": {"enum": ["debug", "info", "warning", "error"]},
    "operator.logFormat": {"enum": ["text", "json"]},
    "networkPolicy.metricsFrom": {"items": {"type": "object", "minProperties": 1}},
    "networkPolicy.apiServerPort": {"minimum": 1, "maximum": 65535},
    "podMonitor.interval": {"pattern": "^[0-9]+(ms|s|m|h)$"},
    "serviceMonitor.interval": {"pattern": "^[0-9]+(ms|s|m|h)$"},
    "helmTest.timeoutSeconds": {"minimum": 1, "maximum": 3600},
    "uninstall.timeoutSeconds": {"minimum": 0, "maximum": 86400},
}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}

INTRO = """# baton

Installs the operator that serves `PDDeployment`s, and its CustomResourceDefinitions.
Generated from `values.yaml` by `make chart`.

```sh
helm install baton charts/baton -n baton-system --create-namespace \\
  --set image.repository=REGISTRY/baton-operator
helm test -n baton-system baton          # creates, repairs and deletes a suspended PDDeployment
helm upgrade baton charts/baton -n baton-system --reset-then-reuse-values
helm uninstall -n baton-system baton     # CRDs and served models stay unless values say otherwise
```

The CRDs are templates, so `helm upgrade` upgrades them. `crds.enabled=false` leaves them to you:
`baton-operator crds | kubectl apply --server-side -f -`.

Replicas beyond one stand by for the Lease. With `watchNamespace` the operator needs a Role in that
namespace and no ClusterRole (set `rbac.aggregate=false` too, or have someone else grant it).
A cluster has the CRDs once: set `crds.enabled=false` in every release but one. No object may be
served by two releases: one that serves every namespace goes with no other.

## What KV's ways need of pods

The chart grants and mounts nothing for these: they are fields of a PDDeployment. But for `rdma` no
pod needs a privilege; none needs a namespace of the host or a host path, and the operator makes no
claims and reads none.

- `zmq` (KV is sent): nothing, and a network between pods.
- `shm` (read on a CPU): `placement: samePod`; the operator adds a folder of 1 MiB in memory.
- `nvlink` (read on GPUs): `placement: samePod`, and one claim of all GPUs of both roles in their
  templates, as in `examples/same-pod-gpus.yaml`: `resource.k8s.io/v1`, which Kubernetes serves from
  1.34 on, and a DRA driver for GPUs. A limit `nvidia.com/gpu` shows each container its own alone.
- `rdma`: `placement: separate`, `handoff.require: rdma`, an image with `baton-worker[nixl]`, and in
  the roles' templates what the devices' own driver wants, and memory that may be locked: an
  unlimited `memlock`, or `IPC_LOCK`, which restricted pod security refuses.

## Values

| key | default | meaning |
|---|---|---|
"""


class Value(NamedTuple):
    """A documented value: dotted key, its default, its comment."""

    key: str
    default: Any
    comment: str


def documented(text: str) -> Iterator[Value]:
    """Yield every value that has a `--` comment, in the file's order."""
    defaults = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    comment = ""
    for line in text.splitlines():
        word = line.strip()
        indent = len(line) - len(line.lstrip())
        if word.startswith("# -- "):
            comment = word.removeprefix("# -- ")
        elif word and not word.startswith("#") and ":" in word:
            path = [(depth, name) for depth, name in path if depth < indent]
            path.append((indent, word.partition(":")[0]))
            if comment:
                yield Value(".".join(name for _, name in path), _find(defaults, path), comment)
                comment = ""


def _find(values: Any, path: list[tuple[int, str]]) -> Any:
    for _, name in path:
        values = values[name]
    return values


def schema(text: str) -> str:
    """Return values.schema.json."""
    comments = {value.key: value.comment for value in documented(text)}
    body = _schema_of(yaml.safe_load(text), "", comments)
    body["properties"]["global"] = {"type": "object", "description": "Set by a parent chart."}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "baton"}
    return json.dumps(head | body, indent=2) + "\n"


NULLABLE = frozenset({"image.pullPolicy", "podMonitor.interval", "serviceMonitor.interval"})
"""Where null asks for Kubernetes' or Prometheus' own default."""


def _schema_of(default: Any, key: str, comments: dict[str, str]) -> dict[str, Any]:
    about = {"description": comments[key]} if key in comments else {}
    if isinstance(default, dict):
        if key in comments:
            return {"type": "object", **about, **BOUNDS.get(key, {})}
        prefix = f"{key}." if key else ""
        children = {k: _schema_of(v, prefix + k, comments) for k, v in default.items()}
        # A null takes a default away, and what is not there is false: `crds.keep` must not be.
        needed = [k for k, v in default.items() if _is_needed(v, prefix + k, comments)]
        rest = {"additionalProperties": False, "required": needed, "properties": children}
        return {"type": "object", **about, **rest}
    return {"type": _TYPES[type(default)], **about, **BOUNDS.get(key, {})}


def _is_needed(default: Any, key: str, comments: dict[str, str]) -> bool:
    """Whether a default says something: that of a section, or one that is not empty."""
    if key in NULLABLE:
        return False
    return key not in comments if isinstance(default, dict) else default not in ("", [])


def readme(text: str) -> str:
    """Return README.md."""
    rows = [f"| `{v.key}` | `{json.dumps(v.default)}` | {v.comment} |" for v in documented(text)]
    return INTRO + "\n".join(rows) + "\n"


def crds() -> str:
    """Return the CRDs as a template with the switch crds.enabled.

    helm deletes what a release has no more, on an upgrade too, and with the CRDs every model: so
    to helm they are always to be kept. Where `crds.keep` is false, the uninstall's hook deletes
    them.
    """
    program = Path(sys.executable).with_name("baton-operator")
    done = subprocess.run([str(program), "crds"], check=True, capture_output=True, text=True)
    parts = []
    for definition in yaml.safe_load_all(done.stdout):
        body = yaml.safe_dump(definition, sort_keys=False, width=100)
        if "{{" in body:
            raise ValueError(f"{definition['metadata']['name']} holds template brackets")
        name = f"  name: {definition['metadata']['name']}\n"
        head = (
            f'{name}  labels: {{{{- include "baton.labels" $ | nindent 4 }}}}\n'
            f"  annotations:\n    {KEEP}: keep\n"
        )
        parts.append(body.replace(name, head, 1))
    return "{{- if .Values.crds.enabled }}\n" + "---\n".join(parts) + "{{- end }}\n"


def main() -> int:
    """Write or check every derived file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 when out of date")
    options = parser.parse_args()
    text = (CHART / "values.yaml").read_text()
    wanted = {
        CHART / "templates" / "crds.yaml": crds(),
        CHART / "values.schema.json": schema(text),
        CHART / "README.md": readme(text),
    }
    stale = [
        path for path, body in wanted.items() if not path.is_file() or path.read_text() != body
    ]
    for path in stale:
        sys.stdout.write(
            f"{path.relative_to(ROOT)} {'is out of date' if options.check else 'written'}\n"
        )
        if not options.check:
            path.write_text(wanted[path])
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
