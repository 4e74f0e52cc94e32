"""One pass over one PDDeployment: from what is known to what shall be, and one status.

Level-triggered: nothing here knows which event asked for the pass. A pass decides (observe, plan,
render, compare) and acts (write, report), each once. It decides again only on news: where a write
asks for a look at the object first, and that, or its children, turn out to have changed.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from baton_operator.children.apply import (
    Applier,
    Difference,
    Outcome,
    Result,
    Unwanted,
    WriteFailed,
    pause_if_asked,
)
from baton_operator.children.desired import Apis, RenderContext, RenderInputs
from baton_operator.children.renderer import Desired, Renderer
from baton_operator.children.resources.credentials import KeyPair
from baton_operator.children.resources.meta import Owner
from baton_operator.children.revision import make_record
from baton_operator.children.revision_records import RevisionRecords
from baton_operator.cluster.api import (
    CONFIG_MAP,
    DEPLOYMENT,
    PD_DEPLOYMENT,
    SECRET,
    KubeApi,
    NamespaceEnds,
)
from baton_operator.cluster.observe import Observed, observe
from baton_operator.cluster.parents import Invalid, ParentStore
from baton_operator.cluster.store import ChildId, ChildStore
from baton_operator.models import ObjectKey, PDDeployment
from baton_operator.models.placement import has_ways
from baton_operator.names import WORKER_ROLES, gateway
from baton_operator.planning.plan import Facts, Plan, Turn, make_plan
from baton_operator.pods.telemetry import Telemetry
from baton_operator.reconciling.outcomes import Patience, trouble_of
from baton_operator.reconciling.scale_in import PodProbe, mark_victims, shrinks
from baton_operator.reconciling.upgrades import LOOK_SECONDS, Upgrades
from baton_operator.status import events
from baton_operator.status.events import Notice
from baton_operator.status.report import Reporter
from baton_operator.status.scalers import scaler_statuses
from baton_operator.status.status import read_asked, read_memory

log = logging.getLogger(__name__)

FORGOTTEN = math.inf
"""Seconds until the next pass over an object that does not exist."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a pass works with; `now` is unix seconds, `clock` seconds that nobody sets."""

    kube: KubeApi
    parents: ParentStore
    children: ChildStore
    applier: Applier
    records: RevisionRecords
    reporter: Reporter
    probe: PodProbe
    telemetry: Telemetry
    upgrades: Upgrades
    make_pair: Callable[[], KeyPair]
    now: Callable[[], float]
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Decision:
    """What a pass found, and what it shall do; `recorded` names revisions with a record."""

    pdd: PDDeployment
    seen: Observed
    plan: Plan
    recorded: frozenset[str]
    desired: Desired
    difference: Difference


class Reconciler:
    """Runs passes, knowing the cluster's optional APIs and the operator's own namespace."""

    def __init__(
        self,
        tools: Tools,
        apis: Apis,
        operator_namespace: str = "",
        pod_monitor_labels: Mapping[str, str] | None = None,
    ) -> None:
        self._tools = tools
        context = RenderContext(apis, tools.make_pair, operator_namespace, pod_monitor_labels or {})
        self._renderer = Renderer(context)
        self._ending: dict[ObjectKey, str] = {}
        """The uid of each object whose namespace is being deleted."""
        self._patience = Patience(tools.clock)

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Run one pass; return seconds until the next one without an event, or None.

        `FORGOTTEN` says that there is no object, and so no next pass.

        1. Find the object as its watch told of it: one that is not known is gone or will be told
           of, and either way nothing is read. While it is deleted, only tell what is left of it.
           Leave alone one whose namespace is: in that nothing is made again, and it ends with it.
        2. Decide: observe, plan, and compare what is there with what shall be.
        3. Read the object again if children must be written for another reason than its own change:
           it may be gone, or another. Decide once more if it, or its children, have changed.
        4. Act: mark who leaves; write children; remove what is switched off or retired.
        5. Report, also when a write failed.

        Raises:
            WriteFailed: a child could not be written.
            Throttled: the server asks to be left alone for a while; the status does not say so.
            ApiError: reading failed, or the status could not be written.
        """
        try:
            return await self._reconcile(key)
        except NamespaceEnds as error:
            return self._leave(key, error)

    async def _reconcile(self, key: ObjectKey) -> float | None:
        parents = self._tools.parents
        is_fresh = parents.take_fresh(key)
        parent = parents.get(key)
        if isinstance(parent, Invalid):
            await self._tools.reporter.invalid(parent)
            return None
        if parent is None or parent.uid == self._ending.get(key):
            return self._left_alone(key)
        if parent.is_deleting:
            await self._tools.reporter.leaving(parent, self._observe(parent))
            return None
        decision = await self._decide(parent)
        if not is_fresh and not decision.difference.is_none:
            await self._read(parent)
            current = parents.get(key)
            if not isinstance(current, PDDeployment) or current.is_deleting:
                return self._left_alone(key)
            if current is not parent or self._has_news(decision.seen, key):
                decision = await self._decide(current)
        return await self._act(decision)

    def _leave(self, key: ObjectKey, error: NamespaceEnds) -> float | None:
        """Say that the object is left alone from now on, for its namespace is being deleted."""
        parent = self._tools.parents.get(key)
        if parent is not None:
            self._ending[key] = parent.uid
            self._tools.upgrades.leave(key)
            extra = {"object": str(key), "why": str(error)}
            log.info("left alone, its namespace is being deleted", extra=extra)
        return self._left_alone(key)

    def _left_alone(self, key: ObjectKey) -> float | None:
        if self._tools.parents.get(key) is not None:
            return None
        self._forget(key)
        return FORGOTTEN

    async def _decide(self, pdd: PDDeployment) -> _Decision:
        seen = self._observe(pdd)
        update, turn = await self._turn(pdd)
        plan = self._plan(pdd, seen, update, turn)
        recorded = await self._recorded(pdd, plan)
        inputs = RenderInputs(
            owner=_owner(pdd),
            spec=pdd.spec,
            update=plan.update,
            gateway=plan.gateway,
            target=plan.target,
            wanted=plan.step.wanted,
            asked=plan.asked,
            recorded=recorded,
            has_gateway=seen.gateway is not None,
        )
        records = partial(self._tools.records.unpacked, pdd.key, recorded)
        desired = self._renderer.desired(pdd.key, inputs, records)
        plan, desired = self._gateway_turn(pdd, plan, seen, desired)
        difference = self._tools.applier.difference(pdd.key, pdd.uid, desired.marks)
        return _Decision(pdd, seen, plan, recorded, desired, difference)

    async def _act(self, decision: _Decision) -> float | None:
        pdd, seen, plan = decision.pdd, decision.seen, decision.plan
        await self._mark(pdd.key, seen, plan)
        results = await self._write(decision)
        await self._tell_new_keys(pdd, seen, results)
        results += await self._scale_unrecorded(decision)
        results += await self._remove(decision, results)
        pause_if_asked(results)
        return await self._report(decision, results)

    async def _write(self, decision: _Decision) -> list[Result]:
        """Write what differs.

        Raises:
            Throttled: the server has too much to do: that is no trouble of the object.
        """
        pdd, difference = decision.pdd, decision.difference
        children = decision.desired.render() if difference.unsettled else []
        results = await self._tools.applier.apply_all(pdd.key, pdd.uid, difference, children)
        pause_if_asked(results)
        return results

    async def _remove(self, decision: _Decision, results: list[Result]) -> list[Result]:
        pdd, seen, applier = decision.pdd, decision.seen, self._tools.applier
        failed = await applier.remove_all(pdd.key, decision.difference.unwanted)
        failed += await self._retire(pdd.key, seen, decision.plan)
        files = _outdated_files(pdd.key.name, seen, decision.desired, results)
        return failed + await applier.remove_all(pdd.key, files)

    async def _report(self, decision: _Decision, results: list[Result]) -> float | None:
        """Report what is there after the writes; return when to look again, or None."""
        pdd, plan, seen = decision.pdd, decision.plan, decision.seen
        telemetry = self._tools.telemetry
        if self._has_news(seen, pdd.key):
            seen = self._observe(pdd)
        results = results + await self._tell_scalers(pdd, plan, seen)
        trouble = trouble_of(results)
        is_watched = has_ways(pdd.spec.placement, pdd.spec.handoff)
        ask_in = telemetry.refresh(pdd.key, seen.pods, has_ways=is_watched)
        sample = telemetry.sample(pdd.key, seen.pods)
        wait = await self._tools.reporter.report(pdd, plan, seen, trouble, sample)
        self._tools.upgrades.passed(pdd.key)
        pause_if_asked(results)
        free_in = self._patience.look_in(pdd.key, results)
        if trouble.failed:
            # Who tries ever more seldom is no reason that a deadline runs ever more slowly, or that
            # a name is taken later than it is free.
            raise WriteFailed("; ".join(trouble.failed), _soonest(wait, plan.look_in, free_in))
        turn_in = LOOK_SECONDS if plan.turn.why else None
        return _soonest(wait, plan.look_in, turn_in, ask_in, free_in)

    async def _tell_scalers(self, pdd: PDDeployment, plan: Plan, seen: Observed) -> list[Result]:
        """Write what scalers do not say yet; return what failed, which hides nothing else."""
        failed: list[Result] = []
        for name, status in scaler_statuses(pdd, plan, seen):
            failed += await self._tools.applier.tell(pdd.key, name, status)
        return failed

    def _observe(self, pdd: PDDeployment) -> Observed:
        return observe(self._tools.children, pdd.key, pdd.uid)

    def _has_news(self, seen: Observed, key: ObjectKey) -> bool:
        return self._tools.children.version(key) != seen.version

    async def _turn(self, pdd: PDDeployment) -> tuple[str, Turn]:
        """Return the revision to aim at: one that nobody knows how to make again cannot be kept."""
        update, turn = self._tools.upgrades.turn(pdd)
        if turn.waiting and not await self._tools.records.has(pdd.key, pdd.uid, update):
            return turn.waiting, Turn(is_upgrade=True)
        return update, turn

    def _gateway_turn(
        self, pdd: PDDeployment, plan: Plan, seen: Observed, desired: Desired
    ) -> tuple[Plan, Desired]:
        """Return both with the gateways' turn, when this operator makes them otherwise.

        What the user asks for, and another revision's, is for now; and so are gateways that are not
        there. In a rollout they stay, until they come to the new revision's anyway.
        """
        is_same = seen.gateway is not None and seen.gateway_revision == plan.gateway
        is_other = desired.outline.makes_gateways_otherwise(seen.gateway_made_from)
        has_news = is_same and is_other
        is_amid = plan.gateway != plan.update or bool(plan.turn.waiting)
        why = self._tools.upgrades.gateways(pdd, has_news=has_news and not is_amid)
        if has_news and not is_amid and not why:
            memory = plan.memory._replace(is_gateway_upgrade=True)
            return dataclasses.replace(plan, memory=memory), desired
        if why:
            text = f"gateways, as this operator makes them, wait for {why}"
            plan = dataclasses.replace(plan, turn=plan.turn._replace(why=text))
        return plan, dataclasses.replace(desired, keeps_gateways=has_news)

    def _plan(self, pdd: PDDeployment, seen: Observed, update: str, turn: Turn) -> Plan:
        asked = read_asked(pdd.status) | {
            role: scaler.wanted
            for role in WORKER_ROLES
            if (scaler := seen.scaler(role)) is not None
        }
        facts = Facts(
            seen.revisions,
            asked,
            awaiting_room=seen.awaiting_room(),
            gateways=seen.gateways,
            turn=turn,
        )
        memory = read_memory(pdd.status)
        return make_plan(pdd.spec, update, facts, memory, self._tools.now())

    async def _recorded(self, pdd: PDDeployment, plan: Plan) -> frozenset[str]:
        """Return which revisions that stay have a record; the goal's is made when there is none.

        An old revision without a record is scaled as it is: nobody knows any more what it was.
        """
        found, records = set(), self._tools.records
        for name in set(plan.step.wanted) - set(plan.retired):
            is_there = await records.has(pdd.key, pdd.uid, name)
            if not is_there and name == plan.update:
                records.keep(pdd.key, make_record(_owner(pdd), pdd.spec, name))
            if is_there or name == plan.update:
                found.add(name)
        return frozenset(found)

    async def _read(self, pdd: PDDeployment) -> None:
        """Learn what the object is now."""
        key, parents = pdd.key, self._tools.parents
        body = await self._tools.kube.get(PD_DEPLOYMENT, key.namespace, key.name)
        if body is None:
            parents.gone(key, pdd.uid)
        else:
            parents.seen(body, is_event=False)

    def _forget(self, key: ObjectKey) -> None:
        self._ending.pop(key, None)
        self._patience.forget(key)
        self._renderer.forget(key)
        self._tools.records.forget(key)
        self._tools.reporter.forget(key)
        self._tools.telemetry.forget(key)
        self._tools.upgrades.forget(key)

    async def _mark(self, key: ObjectKey, seen: Observed, plan: Plan) -> None:
        tools = self._tools
        for shrink in shrinks(seen, plan.step):
            leaving = await mark_victims(tools.kube, tools.probe, key, shrink)
            log.info("scaling in", extra={"object": str(key), "pods": leaving})

    async def _scale_unrecorded(self, decision: _Decision) -> list[Result]:
        failed: list[Result] = []
        for workload in decision.seen.workloads:
            wanted = decision.plan.step.wanted.get(workload.revision)
            if wanted is None or workload.revision in decision.recorded:
                continue
            replicas = wanted.of(workload.role)
            if replicas != workload.counts.desired:
                key = decision.pdd.key
                failed += await self._tools.applier.scale(key, workload.child, replicas)
        return failed

    async def _tell_new_keys(
        self, pdd: PDDeployment, seen: Observed, results: list[Result]
    ) -> None:
        """Say that pods run whose keys nobody has any more: they end nobody, and serve nobody."""
        created = {r.child.kind for r in results if r.outcome is Outcome.CREATED}
        if SECRET.kind not in created or seen.existing().is_zero:
            return
        text = (
            "the Secret with CURVE keys was gone and has new ones: running pods have the old, and "
            "are cut off; docs/security.md says how to replace keys"
        )
        log.warning("keys replaced", extra={"object": str(pdd.key), "what": text})
        notice = Notice("KeysReplaced", text, is_warning=True)
        await events.post(self._tools.kube, pdd, notice, self._tools.now())

    async def _retire(self, key: ObjectKey, seen: Observed, plan: Plan) -> list[Result]:
        """Delete what no revision in use needs: workloads first, then their records."""
        kept = set(plan.step.wanted) - set(plan.retired) | {plan.goal, plan.current, plan.gateway}
        applier = self._tools.applier
        retired = (w.child for w in seen.workloads if w.revision in plan.retired)
        failed = await applier.remove_all(key, (Unwanted(DEPLOYMENT, child) for child in retired))
        if failed:
            return failed
        records = [child for child in seen.records if child.revision not in kept]
        self._tools.records.drop(key, {child.revision for child in records})
        return await applier.remove_all(key, (Unwanted(CONFIG_MAP, child) for child in records))


def _owner(pdd: PDDeployment) -> Owner:
    return Owner(pdd.key.namespace, pdd.key.name, pdd.uid)


def _outdated_files(
    name: str, seen: Observed, desired: Desired, results: list[Result]
) -> list[Unwanted]:
    """Return files of gateways that are gone: every gateway is as it shall be, with a file of its
    own.
    """
    untouched = {r.child for r in results if r.outcome is Outcome.UNCHANGED}
    is_over = seen.gateway is not None and seen.gateway.is_rolled
    if not is_over or ChildId(DEPLOYMENT.kind, gateway(name)) not in untouched:
        return []
    kept = {child.name for child in desired.marks}
    return [Unwanted(CONFIG_MAP, file) for file in seen.gateway_files if file.name not in kept]


def _soonest(*waits: float | None) -> float | None:
    return min((wait for wait in waits if wait is not None), default=None)
