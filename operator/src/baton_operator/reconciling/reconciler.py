"""One pass over one PDDeployment: from what is known to what shall be, and one status.

Level-triggered: nothing here knows which event asked for the pass. Every decision is `plan`'s; this
module fetches what deciding needs, writes what was decided, and hands over to `report`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton_operator.children.apply import Applier, Outcome, Result, Unwanted
from baton_operator.children.desired import Apis, Inputs, is_made_otherwise, of_gateways, wishes
from baton_operator.children.resources.credentials import KeyPair
from baton_operator.children.resources.meta import Owner
from baton_operator.children.revision import RevisionRecord, make_record
from baton_operator.children.revision_records import RevisionRecords
from baton_operator.children.wish import Wish
from baton_operator.cluster.api import (
    CONFIG_MAP,
    DEPLOYMENT,
    PD_DEPLOYMENT,
    SECRET,
    KubeApi,
    Throttled,
)
from baton_operator.cluster.observe import Observed, observe
from baton_operator.cluster.parents import Invalid, Parent, ParentStore
from baton_operator.cluster.store import ChildId, ChildStore
from baton_operator.models import ObjectKey, PDDeployment
from baton_operator.names import WORKER_ROLES, gateway
from baton_operator.planning.plan import Facts, Plan, Turn, make_plan
from baton_operator.pods.telemetry import Telemetry
from baton_operator.reconciling.scale_in import PodProbe, mark_victims, shrinks
from baton_operator.reconciling.upgrades import LOOK_SECONDS, Upgrades
from baton_operator.status import events
from baton_operator.status.events import Notice
from baton_operator.status.report import Reporter
from baton_operator.status.status import Trouble, read_asked, read_memory

log = logging.getLogger(__name__)

_LEAVING_RETRY_SECONDS = 1.0
_FOREIGN_RETRY_SECONDS = 30.0

FORGOTTEN = math.inf
"""Seconds until the next pass over an object that does not exist."""


class WriteFailed(Exception):
    """Some children could not be written; status says which. The pass is worth repeating."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a pass works with."""

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


class Reconciler:
    """Runs passes, knowing the cluster's optional APIs and the operator's own namespace."""

    def __init__(self, tools: Tools, apis: Apis, home: str = "") -> None:
        self._tools = tools
        self._apis = apis
        self._home = home

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Run one pass; return seconds until the next one without an event, or None.

        `FORGOTTEN` says that there is no object, and so no next pass.

        1. Find the object as its watch told of it: one that is not known is gone or will be told
           of, and either way nothing is read. Leave it alone while it is deleted.
        2. Observe, and plan.
        3. Read it again if children must be written for another reason than its own change.
        4. Mark who leaves; write children; remove what is switched off or retired.
        5. Report, also when a write failed.

        Raises:
            WriteFailed: a child could not be written.
            Throttled: the server asks to be left alone for a while; the status does not say so.
            ApiError: reading failed, or the status could not be written.
        """
        tools = self._tools
        is_fresh = tools.parents.take_fresh(key)
        parent = tools.parents.get(key)
        if parent is None:
            self._forget(key)
            return FORGOTTEN
        if isinstance(parent, Invalid):
            await tools.reporter.invalid(parent)
            return None
        if parent.is_deleting:
            return None
        return await self._pass(parent, is_fresh=is_fresh)

    async def _pass(self, pdd: PDDeployment, *, is_fresh: bool) -> float | None:
        seen = self._observe(pdd)
        update, turn = await self._turn(pdd)
        plan = self._plan(pdd, seen, update, turn)
        records = await self._records(pdd, plan)
        inputs = self._inputs(pdd, plan, records, has_gateway=seen.gateway is not None)
        plan, wanted = self._gateway_turn(pdd, plan, seen, wishes(inputs))
        applier = self._tools.applier
        extras = applier.unwished(pdd.key, pdd.uid, wanted)
        if not is_fresh and (extras or not applier.are_settled(pdd.key, pdd.uid, wanted)):
            return await self._again(pdd)
        await self._mark(pdd.key, seen, plan)
        results = await applier.apply_all(pdd.key, pdd.uid, wanted)
        _raise_throttled(results)
        await self._tell_new_keys(pdd, seen, results)
        await self._scale_unrecorded(pdd, seen, plan, records)
        await applier.remove_all(pdd.key, extras)
        await self._retire(pdd.key, seen, plan)
        await applier.remove_all(pdd.key, _outdated_files(pdd.key.name, seen, wanted, results))
        trouble = _trouble(results)
        seen = self._observe(pdd)
        self._tools.telemetry.refresh(pdd.key, seen.pods)
        sample = self._tools.telemetry.sample(pdd.key)
        wait = await self._tools.reporter.report(pdd, plan, seen, trouble, sample)
        self._tools.upgrades.passed(pdd.key)
        if trouble.failed:
            raise WriteFailed("; ".join(trouble.failed))
        turn_in = LOOK_SECONDS if plan.turn.why else None
        return _soonest(wait, plan.look_in, turn_in, _retry_in(results))

    def _observe(self, pdd: PDDeployment) -> Observed:
        return observe(self._tools.children, pdd.key, pdd.uid, self._tools.now())

    async def _turn(self, pdd: PDDeployment) -> tuple[str, Turn]:
        """Return the revision to aim at: one that nobody knows how to make again cannot be kept."""
        update, turn = self._tools.upgrades.turn(pdd)
        if turn.waiting and await self._tools.records.find(pdd.key, pdd.uid, update) is None:
            return turn.waiting, Turn(is_upgrade=True)
        return update, turn

    def _gateway_turn(
        self, pdd: PDDeployment, plan: Plan, seen: Observed, wanted: list[Wish]
    ) -> tuple[Plan, list[Wish]]:
        """Return plan and wishes with the gateways' turn, when this operator makes them otherwise.

        What the user asks for, and another revision's, is for now; and so are gateways that are not
        there. In a rollout they stay, until they come to the new revision's anyway.
        """
        pods = of_gateways(wanted)
        is_same = seen.gateway is not None and seen.gateway_revision == plan.gateway
        has_news = is_same and is_made_otherwise(pods, seen.gateway_made_from)
        is_amid = plan.gateway != plan.update or bool(plan.turn.waiting)
        why = self._tools.upgrades.gateways(pdd, has_news=has_news and not is_amid)
        if has_news and not is_amid and not why:
            memory = plan.memory._replace(is_gateway_upgrade=True)
            return dataclasses.replace(plan, memory=memory), wanted
        if why:
            text = f"gateways, as this operator makes them, wait for {why}"
            plan = dataclasses.replace(plan, turn=plan.turn._replace(why=text))
        return plan, [wish for wish in wanted if not has_news or wish not in pods]

    def _plan(self, pdd: PDDeployment, seen: Observed, update: str, turn: Turn) -> Plan:
        asked = read_asked(pdd.status) | {
            role: scaler.wanted
            for role in WORKER_ROLES
            if (scaler := seen.scaler(role)) is not None
        }
        facts = Facts(
            seen.revisions(),
            asked,
            awaiting_room=seen.awaiting_room(),
            gateways=seen.gateways(),
            turn=turn,
        )
        memory = read_memory(pdd.status)
        return make_plan(pdd.spec, update, facts, memory, self._tools.now())

    async def _records(self, pdd: PDDeployment, plan: Plan) -> dict[str, RevisionRecord]:
        """Return the records of every revision that stays; the goal's is made when there is none.

        An old revision without a record is scaled as it is: nobody knows any more what it was.
        """
        found: dict[str, RevisionRecord] = {}
        for name in set(plan.step.wanted) - set(plan.retired):
            record = await self._tools.records.find(pdd.key, pdd.uid, name)
            if record is None and name == plan.update:
                record = make_record(_owner(pdd), pdd.spec, name)
                self._tools.records.keep(pdd.key, record)
            if record is not None:
                found[name] = record
        return found

    def _inputs(
        self,
        pdd: PDDeployment,
        plan: Plan,
        records: dict[str, RevisionRecord],
        *,
        has_gateway: bool,
    ) -> Inputs:
        return Inputs(
            owner=_owner(pdd),
            spec=pdd.spec,
            plan=plan,
            records=records,
            apis=self._apis,
            make_pair=self._tools.make_pair,
            home=self._home,
            has_gateway=has_gateway,
        )

    async def _read(self, pdd: PDDeployment) -> Parent | None:
        key, parents = pdd.key, self._tools.parents
        body = await self._tools.kube.get(PD_DEPLOYMENT, key.namespace, key.name)
        if body is None:
            parents.gone(key, pdd.uid)
            return None
        parents.seen(body, is_event=False)
        return parents.get(key)

    async def _again(self, pdd: PDDeployment) -> float | None:
        """Plan once more on the object as it is now: it may be gone, or another."""
        parent = await self._read(pdd)
        if parent is None:
            self._forget(pdd.key)
            return FORGOTTEN
        if isinstance(parent, Invalid) or parent.is_deleting:
            return None
        return await self._pass(parent, is_fresh=True)

    def _forget(self, key: ObjectKey) -> None:
        self._tools.records.forget(key)
        self._tools.reporter.forget(key)
        self._tools.telemetry.forget(key)
        self._tools.upgrades.forget(key)

    async def _mark(self, key: ObjectKey, seen: Observed, plan: Plan) -> None:
        tools = self._tools
        for shrink in shrinks(seen, plan.step):
            leaving = await mark_victims(tools.kube, tools.probe, key, shrink)
            log.info("scaling in", extra={"object": str(key), "pods": leaving})

    async def _scale_unrecorded(
        self,
        pdd: PDDeployment,
        seen: Observed,
        plan: Plan,
        records: dict[str, RevisionRecord],
    ) -> None:
        for workload in seen.workloads:
            wanted = plan.step.wanted.get(workload.revision)
            if wanted is None or workload.revision in records:
                continue
            replicas = wanted[WORKER_ROLES.index(workload.role)]
            if replicas != workload.counts.desired:
                patch = {"metadata": {"uid": workload.child.uid}, "spec": {"replicas": replicas}}
                name = workload.child_id.name
                await self._tools.kube.merge(DEPLOYMENT, pdd.key.namespace, name, patch)

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

    async def _retire(self, key: ObjectKey, seen: Observed, plan: Plan) -> None:
        """Delete what no revision in use needs: workloads first, then their records."""
        kept = set(plan.step.wanted) - set(plan.retired) | {plan.goal, plan.current, plan.gateway}
        applier = self._tools.applier
        await applier.remove_all(
            key,
            (Unwanted(DEPLOYMENT, w.child) for w in seen.workloads if w.revision in plan.retired),
        )
        records = [child for child in seen.records if child.revision not in kept]
        await applier.remove_all(key, (Unwanted(CONFIG_MAP, child) for child in records))
        self._tools.records.drop(key, {child.revision for child in records})


def _owner(pdd: PDDeployment) -> Owner:
    return Owner(pdd.key.namespace, pdd.key.name, pdd.uid)


def _trouble(results: list[Result]) -> Trouble:
    return Trouble(
        foreign=_named(results, Outcome.FOREIGN),
        failed=_errors(r for r in results if r.error),
        refused=_errors(r for r in results if r.error and r.error.is_refusal),
    )


def _outdated_files(
    name: str, seen: Observed, wanted: list[Wish], results: list[Result]
) -> list[Unwanted]:
    """Return files of gateways that are gone: every gateway is as it shall be, with a file of its
    own.
    """
    untouched = {r.child for r in results if r.outcome is Outcome.UNCHANGED}
    is_over = seen.gateway is not None and seen.gateway.is_rolled
    if not is_over or ChildId(DEPLOYMENT.kind, gateway(name)) not in untouched:
        return []
    kept = {wish.child_id.name for wish in wanted}
    return [Unwanted(CONFIG_MAP, file) for file in seen.gateway_files if file.name not in kept]


def _errors(results: Iterable[Result]) -> tuple[str, ...]:
    return tuple(f"{r.child.kind} {r.child.name}: {r.error}" for r in results)


def _named(results: list[Result], outcome: Outcome) -> tuple[str, ...]:
    return tuple(f"{r.child.kind} {r.child.name}" for r in results if r.outcome is outcome)


def _raise_throttled(results: list[Result]) -> None:
    """Give way to a server that has too much to do: that is no trouble of the object."""
    asked = [r.error for r in results if isinstance(r.error, Throttled)]
    if asked:
        raise max(asked, key=lambda error: error.retry_after_seconds)


def _retry_in(results: list[Result]) -> float | None:
    outcomes = {result.outcome for result in results}
    if Outcome.LEAVING in outcomes:
        return _LEAVING_RETRY_SECONDS
    return _FOREIGN_RETRY_SECONDS if Outcome.FOREIGN in outcomes else None


def _soonest(*waits: float | None) -> float | None:
    return min((wait for wait in waits if wait is not None), default=None)
