"""PodDisruptionBudgets, sized from the live counts.

An eviction may take what one pair of a rollout may take, never more: of T_r pods in N pairs,
ceil(T_r / N) times the larger of one pair and the rollout's own budget. A single pod can always be
evicted: a budget that forbids it would only block node maintenance for ever.
"""

from __future__ import annotations

from baton_operator import names
from baton_operator.children.resources.meta import Manifest, Owner, manifest, selector_labels
from baton_operator.models import PDDeploymentSpec
from baton_operator.models.placement import pod_roles
from baton_operator.names import Role
from baton_operator.planning.pairs import Counts, pairs_of


def min_available(target: Counts, unavailable_pairs: int) -> Counts:
    """Return the fewest ready pods of each role that evictions must leave."""
    n = pairs_of(target)
    pairs = max(1, unavailable_pairs)
    if not n:
        return Counts()
    return Counts(*(max(0, size - -(-size * pairs // n)) for size in target))


def disruption_budgets(owner: Owner, spec: PDDeploymentSpec, target: Counts) -> list[Manifest]:
    """Return the budgets of both roles or of pairs, and of the gateway with more than one pod."""
    if spec.disruption_budget == "Off":
        return []
    least = min_available(target, spec.rollout.max_unavailable.pairs)
    budgets = [_budget(owner, role, least.of(role)) for role in pod_roles(spec.placement)]
    if spec.gateway.replicas > 1:
        budgets.append(_budget(owner, Role.GATEWAY, spec.gateway.replicas - 1))
    return budgets


def _budget(owner: Owner, role: Role, least: int) -> Manifest:
    return manifest(
        owner,
        "policy/v1",
        "PodDisruptionBudget",
        names.of_role(owner.name, role),
        role=role,
        spec={
            "minAvailable": least,
            "selector": {"matchLabels": selector_labels(owner.name, role)},
            # A pod that never became ready serves nobody: it must not block a node's drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    )
