"""A cluster's pods as a planner sees them: workloads that follow their desired counts.

Enforces what the workload controllers do: pods are created unready, removed unready first; a broken
revision's pods never become ready.
"""

from __future__ import annotations

import msgspec

from baton_operator.models import PDDeploymentSpec
from baton_operator.models.roles import RoleSpec, ScalingMode, ScalingSpec
from baton_operator.models.spec import ModelSpec, Pairs, RatioBounds, RatioSpec, RolloutSpec
from baton_operator.names import WORKER_ROLES, Role
from baton_operator.pairs import Counts, Revision
from baton_operator.plan import Facts, Memory, make_plan


def make_spec(prefill=1, decode=1, *, surge=1, unavailable=0, **rollout):
    return PDDeploymentSpec(
        model=ModelSpec(served_name="m", path="/m"),
        image="i",
        roles=[RoleSpec("prefill", replicas=prefill), RoleSpec("decode", replicas=decode)],
        rollout=RolloutSpec(Pairs(surge), Pairs(unavailable), **rollout),
    )


class Fleet:
    """Pods by revision and role: a list of booleans, ready or not."""

    def __init__(self, spec, update="a"):
        self.spec = spec
        self.update = update
        self.memory = Memory()
        self.now = 1000.0
        self.pods: dict[str, list[list[bool]]] = {}
        self.desired: dict[str, Counts] = {}
        self.broken: set[str] = set()
        self.asked: dict[Role, int] = {}
        self.plan = None

    def revision(self, name):
        pods = self.pods[name]
        return Revision(
            name,
            self.desired[name],
            Counts(*(len(p) for p in pods)),
            Counts(*(sum(p) for p in pods)),
        )

    def facts(self):
        return Facts(tuple(self.revision(name) for name in sorted(self.pods)), self.asked)

    def ready(self):
        return Counts(*(sum(sum(p[r]) for p in self.pods.values()) for r in (0, 1)))

    def total(self):
        return Counts(*(sum(len(p[r]) for p in self.pods.values()) for r in (0, 1)))

    def step(self):
        """Plan once and let the workloads follow."""
        self.plan = make_plan(self.spec, self.update, self.facts(), self.memory, self.now)
        self.memory = self.plan.memory
        for name, counts in self.plan.step.wanted.items():
            self.pods.setdefault(name, [[], []])
            self.desired[name] = counts
            for role in (0, 1):
                pods = sorted(self.pods[name][role], reverse=True)[: counts[role]]
                self.pods[name][role] = pods + [False] * (counts[role] - len(pods))
        for name in self.plan.retired:
            assert self.revision(name).existing.is_zero
            del self.pods[name], self.desired[name]
        return self.plan

    def all_ready(self):
        for name, roles in self.pods.items():
            if name not in self.broken:
                self.pods[name] = [[True] * len(role) for role in roles]

    def set_ready(self, name, role, index, is_ready):
        pods = self.pods.get(name, [[], []])[role]
        if pods and not (is_ready and name in self.broken):
            pods[index % len(pods)] = is_ready

    def scale(self, prefill, decode):
        roles = [RoleSpec("prefill", replicas=prefill), RoleSpec("decode", replicas=decode)]
        self.spec = msgspec.structs.replace(self.spec, roles=roles)

    def scale_from_outside(self, prefill, decode, lowest, highest):
        """Ask through scalers, within a ratio."""
        external = ScalingSpec(mode=ScalingMode.EXTERNAL)
        roles = [RoleSpec(role.value, scaling=external) for role in WORKER_ROLES]
        ratio = RatioSpec(RatioBounds(lowest, highest))
        self.spec = msgspec.structs.replace(self.spec, roles=roles, ratio=ratio)
        self.asked = dict(zip(WORKER_ROLES, (prefill, decode), strict=True))

    def rollout(self, **changes):
        rollout = msgspec.structs.replace(self.spec.rollout, **changes)
        self.spec = msgspec.structs.replace(self.spec, rollout=rollout)

    def settle(self, limit=200):
        """Run to rest with every healthy pod ready; return how many steps it took."""
        for number in range(limit):
            before = (self.desired.copy(), {n: [list(r) for r in p] for n, p in self.pods.items()})
            self.step()
            self.all_ready()
            if (self.desired, self.pods) == before and not self.plan.retired:
                return number
        raise AssertionError(f"no rest after {limit} steps: {self.desired}")
