"""Typed models of the operator's API: what users write and what the operator answers.

The structs are the single source: `schema` derives the CRDs' structural schemas, descriptions and
defaults from them, and the reconciler parses objects into them.
"""

from __future__ import annotations

from baton_operator.models.engine import EngineSpec
from baton_operator.models.parse import InvalidSpec, ObjectKey, PDDeployment, parse_deployment
from baton_operator.models.roles import RoleSpec, ScalingMode
from baton_operator.models.scaler import PDRoleScaler, PDRoleScalerSpec, parse_scaler
from baton_operator.models.spec import (
    GatewaySpec,
    PDDeploymentSpec,
    RolloutSpec,
)

__all__ = [
    "EngineSpec",
    "GatewaySpec",
    "InvalidSpec",
    "ObjectKey",
    "PDDeployment",
    "PDDeploymentSpec",
    "PDRoleScaler",
    "PDRoleScalerSpec",
    "RoleSpec",
    "RolloutSpec",
    "ScalingMode",
    "parse_deployment",
    "parse_scaler",
]
