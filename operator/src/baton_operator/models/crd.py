"""Both CustomResourceDefinitions, as YAML for the chart and for `kubectl apply`.

Owns names, printer columns and subresources; field schemas come from the models.
"""

from __future__ import annotations

from typing import Any

import yaml

from baton_operator.models.fields import rules
from baton_operator.models.placement import PLACEMENT_RULES
from baton_operator.models.roles import RANKS_OF_DEVICES
from baton_operator.models.scaler import PDRoleScalerSpec, PDRoleScalerStatus
from baton_operator.models.schema import Json, structural_schema
from baton_operator.models.spec import PDDeploymentSpec
from baton_operator.models.status import PDDeploymentStatus
from baton_operator.names import GROUP, MAX_NAME_LENGTH, NAME_PATTERN, NAME_RULE, VERSION


def _column(name: str, path: str, kind: str = "string", *, is_wide: bool = False) -> Json:
    column: Json = {"name": name, "type": kind, "jsonPath": path}
    return column | ({"priority": 1} if is_wide else {})


_AGE = _column("Age", ".metadata.creationTimestamp", "date")

_DEPLOYMENT_COLUMNS = [
    _column("Ready", ".status.ready"),
    _column("Reason", ".status.conditions[?(@.type=='Ready')].reason"),
    _column("Prefill", ".status.prefill"),
    _column("Decode", ".status.decode"),
    _column("Accept", ".status.speculative.acceptance"),
    _column("Rollout", ".status.rollout.phase"),
    # What serves first, as people ask that of a model that was rolled back; behind it what the
    # spec asks for.
    _column("Revision", ".status.currentRevision"),
    _column("Update", ".status.updateRevision"),
    _AGE,
    _column("Wire", ".status.wire.range", is_wide=True),
    _column("KV", ".status.handoff.summary", is_wide=True),
    _column("K", ".spec.speculative.numSpeculativeTokens", "integer", is_wide=True),
    _column("Model", ".spec.model.servedName", is_wide=True),
]

_SCALER_COLUMNS = [
    _column("Role", ".spec.targetRef.role"),
    _column("Wanted", ".spec.replicas", "integer"),
    _column("Desired", ".status.desired", "integer"),
    _column("Replicas", ".status.replicas", "integer"),
    _column("Clamped", ".status.clampedBy"),
    _AGE,
]


def deployment_crd() -> Json:
    """Return the CustomResourceDefinition of PDDeployment."""
    schema = _object_schema(
        "A model served with prefill and decode in processes of their own.",
        PDDeploymentSpec,
        PDDeploymentStatus,
    )
    schema["x-kubernetes-validations"] = [
        {
            "rule": f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
            "message": f"metadata.name must have at most {MAX_NAME_LENGTH} characters",
        },
        {
            "rule": f"self.metadata.name.matches('^{NAME_PATTERN}$')",
            "message": NAME_RULE,
        },
    ]
    schema["properties"]["spec"] |= rules(
        (
            "self.engine.device == 'cpu' || self.roles.all(r, r.parallelism.tensor == 1 || "
            "(self.engine.device == 'gpu' && r.parallelism.tensor in [2, 4, 8]))",
            RANKS_OF_DEVICES,
        ),
        *PLACEMENT_RULES,
    )
    names = ("PDDeployment", "pddeployments", "pdd")
    return _crd(names, schema, _DEPLOYMENT_COLUMNS, {"status": {}})


def scaler_crd() -> Json:
    """Return the CustomResourceDefinition of PDRoleScaler."""
    schema = _object_schema(
        "The scale subresource of one role of a PDDeployment.",
        PDRoleScalerSpec,
        PDRoleScalerStatus,
    )
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    names = ("PDRoleScaler", "pdrolescalers", "pdrs")
    return _crd(names, schema, _SCALER_COLUMNS, {"status": {}, "scale": scale})


def render_crds() -> str:
    """Return both definitions as one YAML stream."""
    return yaml.safe_dump_all([deployment_crd(), scaler_crd()], sort_keys=False, width=100)


def _object_schema(description: str, spec: type, status: type) -> Json:
    return {
        "type": "object",
        "description": description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "API version of this object."},
            "kind": {"type": "string", "description": "Kind of this object."},
            "metadata": {"type": "object"},
            "spec": structural_schema(spec),
            "status": structural_schema(status, has_defaults=False),
        },
    }


def _crd(
    names: tuple[str, str, str], schema: Json, columns: list[Json], subresources: Json
) -> dict[str, Any]:
    kind, plural, short = names
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                "categories": ["serving"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": subresources,
                    "additionalPrinterColumns": columns,
                }
            ],
        },
    }
