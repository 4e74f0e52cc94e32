"""A cluster's pods as a planner sees them: workloads that follow their desired counts.

Enforces what the workload controllers do: pods are created unready, removed unready first; a broken
revision's pods never become ready. Gateways of one revision stay until those of the next are ready,
and may then take their time to leave.
`TimedFleet` adds the time that pods take, the room that nodes have, and an operator that may be
away or have a clock that jumps.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from baton_operator.models import PDDeploymentSpec
from baton_operator.models.roles import RoleSpec, ScalingMode, ScalingSpec
from baton_operator.models.spec import ModelSpec, Pairs, RatioBounds, RatioSpec, RolloutSpec
from baton_operator.names import WORKER_ROLES, Role
from baton_operator.planning.gateways import Gateways
from baton_operator.planning.pairs import Counts, Revision, total
from baton_operator.planning.plan import Facts, Memory, make_plan


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
        self.gateways: Gateways | None = None
        self.answering = ""
        self.broken_gateways: set[str] = set()
        self.old_gateways_until = 0.0
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
        revisions = tuple(self.revision(name) for name in sorted(self.pods))
        left = self.old_gateways_until - self._clock()
        gateways = self.gateways and self.gateways._replace(others_leave_in=max(0.0, left))
        return Facts(revisions, self.asked, gateways=gateways)

    def _clock(self):
        return self.now

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
                self._follow(name, role, counts[role])
        if self.gateways is None or self.gateways.revision != self.plan.gateway:
            is_back = self.answering == self.plan.gateway
            self.gateways = Gateways(self.plan.gateway, is_rolled=is_back)
            self._gateways_begin()
        for name in self.plan.retired:
            assert self.revision(name).existing.is_zero
            del self.pods[name], self.desired[name]
        return self.plan

    def _gateways_begin(self):
        """New gateways are on their way."""

    def _follow(self, name, role, count):
        pods = sorted(self.pods[name][role], reverse=True)[:count]
        self.pods[name][role] = pods + [False] * (count - len(pods))

    def wait(self, seconds):
        """Let time pass with an operator at work: it looks again when its plan says."""
        end = self.now + seconds
        while True:
            plan = self.step()
            if self.now >= end:
                return plan
            self.now = min(end, self.now + (plan.look_in or seconds))

    def all_ready(self):
        """Let every healthy pod become ready, the gateways' too."""
        self.workers_ready()
        self.gateways_roll()

    def workers_ready(self):
        for name, roles in self.pods.items():
            if name not in self.broken:
                self.pods[name] = [[True] * len(role) for role in roles]

    def gateways_roll(self):
        """Replace the gateways' pods, which Kubernetes does once the new ones are ready."""
        if self.gateways and self.gateways.revision not in self.broken_gateways:
            self.gateways = self.gateways._replace(is_rolled=True)
            self.answering = self.gateways.revision

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
            before = self._state()
            self.step()
            self.all_ready()
            if self._state() == before and not self.plan.retired:
                return number
        raise AssertionError(f"no rest after {limit} steps: {self.desired}")

    def _state(self):
        pods = {name: [list(role) for role in roles] for name, roles in self.pods.items()}
        return self.desired.copy(), pods, self.gateways


@dataclass
class Pod:
    """A pod; `placed_at` is when it got room, None while there is none."""

    is_ready: bool = False
    placed_at: float | None = None


class TimedFleet(Fleet):
    """Pods that take `START` seconds from their place on a node to ready, and `DRAIN` to leave.

    `room` bounds the placed pods of a role, those that leave included. `now` is the operator's
    clock, `time` the one that pods live by.
    """

    START = 100.0
    DRAIN = 150.0
    GATEWAY_DRAIN = 700.0

    def __init__(self, spec, update="a"):
        super().__init__(spec, update)
        self.time = 0.0
        self.room = None
        self.leaving: list[list[float]] = [[], []]
        self.gateways_ready_at = 0.0

    def revision(self, name):
        pods = self.pods[name]
        ready = (sum(pod.is_ready for pod in p) for p in pods)
        return Revision(name, self.desired[name], Counts(*map(len, pods)), Counts(*ready))

    def ready(self):
        return total(self.revision(name).ready for name in self.pods)

    def total(self):
        return total(self.revision(name).existing for name in self.pods)

    def facts(self):
        facts = super().facts()
        homeless = {
            name
            for name, roles in self.pods.items()
            for role, pods in enumerate(roles)
            if self.leaving[role] and any(pod.placed_at is None for pod in pods)
        }
        return facts._replace(awaiting_room=frozenset(homeless))

    def _clock(self):
        return self.time

    def _gateways_begin(self):
        self.gateways_ready_at = self.time + self.START

    def gateways_roll(self):
        if self.gateways and not self.gateways.is_rolled and self.answering:
            self.old_gateways_until = self.time + self.GATEWAY_DRAIN
        super().gateways_roll()

    def _follow(self, name, role, count):
        pods = sorted(self.pods[name][role], key=lambda pod: pod.is_ready, reverse=True)
        gone = [pod for pod in pods[count:] if pod.placed_at is not None]
        self.leaving[role] += [self.time + self.DRAIN] * len(gone)
        self.pods[name][role] = pods[:count] + [Pod() for _ in range(count - len(pods))]
        self._place()

    def _place(self):
        for role in (0, 1):
            pods = [pod for roles in self.pods.values() for pod in roles[role]]
            taken = len(self.leaving[role]) + sum(pod.placed_at is not None for pod in pods)
            for pod in pods:
                if pod.placed_at is None and (self.room is None or taken < self.room[role]):
                    pod.placed_at, taken = self.time, taken + 1

    def evict(self, name, role):
        """Take a ready pod away; its workload makes another."""
        pods = self.pods[name][role]
        victim = next(pod for pod in pods if pod.is_ready)
        pods[pods.index(victim)] = Pod()
        self.leaving[role].append(self.time + self.DRAIN)
        self._place()

    def crash(self, name):
        """End every pod of a revision; in their places they never become ready again."""
        self.broken.add(name)
        for pod in (pod for role in self.pods[name] for pod in role):
            pod.is_ready = False

    def pass_time(self, seconds, look=None):
        """Let pods live on, and an operator that is there `look` when pods change and when due."""
        end = self.time + seconds
        while self.time < end:
            moments = [end, *self._changes()]
            if look is not None and self.plan is not None and self.plan.look_in is not None:
                moments.append(self.time + self.plan.look_in)
            passed = min(moments) - self.time
            self.time += passed
            self.now += passed
            self._live()
            if look is not None:
                look()

    def _changes(self):
        """Yield the moments at which a pod becomes ready or is gone."""
        for name, roles in self.pods.items():
            for pod in (pod for role in roles for pod in role):
                if not pod.is_ready and pod.placed_at is not None and name not in self.broken:
                    yield pod.placed_at + self.START
        for role in self.leaving:
            yield from role
        if self.time < self.gateways_ready_at:
            yield self.gateways_ready_at
        if self.time < self.old_gateways_until:
            yield self.old_gateways_until

    def _live(self):
        for name, roles in self.pods.items():
            for pod in (pod for role in roles for pod in role):
                is_due = pod.placed_at is not None and pod.placed_at + self.START <= self.time
                pod.is_ready = pod.is_ready or (is_due and name not in self.broken)
        self.leaving = [[end for end in role if end > self.time] for role in self.leaving]
        self._place()
        if self.gateways_ready_at <= self.time:
            self.gateways_roll()
