"""A new operator makes pods otherwise: models take that in turn, and users wait for nobody."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from baton_operator.children import revision
from baton_operator.children.apply import WriteFailed
from baton_operator.cluster import api
from baton_operator.models import ObjectKey
from baton_operator.reconciling.upgrades import LOOK_SECONDS
from baton_testing.fake_kube import Cluster

NAMES = ("a", "b", "c", "d")
EXTERNAL = [{"name": "prefill"}, {"name": "decode", "scaling": {"mode": "External", "max": 9}}]


class Fleet:
    """Four models that serve, and an operator of a later version that begins to lead."""

    def __init__(self, monkeypatch, limit=1):
        self.cluster = Cluster(upgrade_models=limit)
        self.monkeypatch = monkeypatch

    async def begin(self, **spec):
        for name in NAMES:
            await self.cluster.create(name, **spec)
            await self.cluster.settle(name)
        self.old = self.updates()

    async def upgrade(self):
        self.monkeypatch.setattr(revision, "RENDER_VERSION", revision.RENDER_VERSION + 1)
        self.cluster.start()
        for name in NAMES:
            body = await self.cluster.kube.get(api.PD_DEPLOYMENT, "ns", name)
            self.cluster.parents.seen(body, is_event=True)

    def updates(self):
        return {name: self.cluster.status(name)["updateRevision"] for name in NAMES}

    def moved(self):
        """Return whose revision is not the old one any more."""
        return [name for name, update in self.updates().items() if update != self.old[name]]

    async def look(self, *names, ready=True):
        for name in names or NAMES:
            await self.cluster.reconcile(name)
        self.cluster.follow(ready)


@pytest.fixture
def fleet(monkeypatch):
    return Fleet(monkeypatch)


async def test_models_roll_one_after_the_other_in_order_of_name(fleet):
    def fleet_revisions(name):
        names = fleet.cluster.kube.names(api.CONFIG_MAP)
        return {n.removeprefix(f"{name}-") for n in names if n.startswith(f"{name}-r")}

    def done(name):
        status = fleet.cluster.status(name)
        return status["currentRevision"] == status["updateRevision"] != fleet.old[name]

    await fleet.begin()
    await fleet.upgrade()
    order = []
    for _ in range(200):
        await fleet.look(*reversed(NAMES))
        rolling = [
            name
            for name in NAMES
            if len({r for r, _ in fleet.cluster.replicas() if r in fleet_revisions(name)}) > 1
        ]
        assert len(rolling) <= 1
        order += [name for name in fleet.moved() if name not in order]
        if len(order) == 4 and all(done(name) for name in NAMES):
            break
    assert order == list(NAMES)
    assert all(done(name) for name in NAMES)


async def test_who_waits_serves_on_and_says_for_whom(fleet):
    await fleet.begin()
    await fleet.upgrade()
    await fleet.look()
    before = fleet.cluster.kube.version
    await fleet.look("d")
    assert fleet.cluster.kube.version == before
    assert fleet.moved() == ["a"]
    assert fleet.cluster.condition("Ready", "d") == ("True", "PairsServing")
    assert fleet.cluster.condition("Reconciling", "d") == ("False", "UpgradeWaits")
    told = {c["type"]: c["message"] for c in fleet.cluster.status("d")["conditions"]}
    waiting = fleet.cluster.status("d")["rollout"]["waitingRevision"]
    assert told["Reconciling"] == f"{waiting}, as this operator makes it, waits for ns/a"
    assert await fleet.cluster.reconcile("d") == LOOK_SECONDS


async def test_the_end_of_a_rollout_wakes_the_next(fleet):
    await fleet.begin()
    await fleet.upgrade()
    await fleet.look()
    fleet.cluster.woken.clear()
    await fleet.cluster.settle("a")
    assert fleet.cluster.woken == [ObjectKey("ns", "b")]


async def test_a_model_whose_scalers_status_is_refused_holds_nobody(fleet, monkeypatch):
    await fleet.begin(roles=EXTERNAL)
    await fleet.upgrade()
    await fleet.look()
    merge = fleet.cluster.kube.merge

    async def refused(kind, namespace, name, *words):
        if kind is api.SCALER:
            raise api.ApiError(403, "Forbidden", "admission webhook denied the request")
        return await merge(kind, namespace, name, *words)

    monkeypatch.setattr(fleet.cluster.kube, "merge", refused)
    fleet.cluster.kube.edit(api.SCALER, "a-decode", {"spec": {"replicas": 3}}, "hpa", "scale")
    fleet.cluster.woken.clear()
    for _ in range(20):
        with contextlib.suppress(WriteFailed, api.ApiError):
            await fleet.cluster.reconcile("a")
        fleet.cluster.follow()
    assert fleet.cluster.status("a")["currentRevision"] == fleet.updates()["a"] != fleet.old["a"]
    assert fleet.cluster.woken == [ObjectKey("ns", "b")]


async def test_the_end_of_a_model_wakes_the_next(fleet):
    await fleet.begin()
    await fleet.upgrade()
    await fleet.look()
    fleet.cluster.woken.clear()
    uid = fleet.cluster.kube.find(api.PD_DEPLOYMENT, "a")["metadata"]["uid"]
    fleet.cluster.parents.gone(ObjectKey("ns", "a"), uid)
    await fleet.cluster.reconciler.reconcile(ObjectKey("ns", "a"))
    assert fleet.cluster.woken == [ObjectKey("ns", "b")]


async def test_a_model_whose_namespace_ends_holds_nobody(fleet, monkeypatch):
    await fleet.begin()
    await fleet.upgrade()
    create = fleet.cluster.kube.create

    async def refused(kind, manifest, manager):
        told_of = manifest.get("involvedObject", {}).get("name")
        if manifest["metadata"]["name"].startswith("a-") or told_of == "a":
            raise api.NamespaceEnds(403, "Forbidden", "it is being terminated")
        return await create(kind, manifest, manager)

    monkeypatch.setattr(fleet.cluster.kube, "create", refused)
    for _ in range(60):
        await fleet.look()
        fleet.cluster.now += LOOK_SECONDS
    assert fleet.moved() == ["b", "c", "d"]


async def test_what_a_user_changes_waits_for_nobody(fleet):
    await fleet.begin()
    await fleet.upgrade()
    await fleet.look()
    fleet.cluster.change("d", image="worker:2")
    await fleet.look()
    assert fleet.moved() == ["a", "d"]
    assert "isUpgrade" not in fleet.cluster.status("d")["rollout"]
    assert fleet.cluster.status("a")["rollout"]["isUpgrade"]


async def test_a_change_that_rolls_nothing_does_not_jump_the_queue(fleet):
    await fleet.begin()
    await fleet.upgrade()
    await fleet.look()
    fleet.cluster.change("d", roles=[{"name": "prefill"}, {"name": "decode", "replicas": 3}])
    await fleet.look()
    assert fleet.moved() == ["a"]
    assert fleet.cluster.replicas()[fleet.old["d"], "decode"] == 3


async def test_a_rollout_that_failed_keeps_its_place(fleet):
    await fleet.begin()
    await fleet.upgrade()
    await fleet.look()
    fleet.cluster.broken.add(fleet.updates()["a"])
    for _ in range(60):
        fleet.cluster.now += 90
        await fleet.look()
    assert fleet.cluster.status("a")["rollout"]["phase"] == "RolledBack"
    assert fleet.moved() == ["a"]


async def test_a_new_leader_goes_on_where_the_last_one_was(fleet):
    await fleet.begin()
    await fleet.upgrade()
    await fleet.look()
    fleet.cluster.start()
    for name in NAMES:
        body = await fleet.cluster.kube.get(api.PD_DEPLOYMENT, "ns", name)
        fleet.cluster.parents.seen(body, is_event=True)
    await fleet.look("b", "c", "d")
    assert fleet.moved() == ["a"]


async def test_a_paused_or_suspended_model_holds_nobody_up(fleet):
    await fleet.begin()
    fleet.cluster.change("a", suspend=True)
    fleet.cluster.change("b", rollout={"paused": True})
    await fleet.look()
    await fleet.look()
    await fleet.upgrade()
    await fleet.look()
    assert "c" in fleet.moved()
    assert "d" not in fleet.moved()


async def test_a_revision_that_nobody_can_make_again_is_not_kept(fleet):
    await fleet.begin()
    await fleet.upgrade()
    fleet.cluster.kube.remove(api.CONFIG_MAP, f"d-{fleet.old['d']}")
    await fleet.look()
    assert fleet.moved() == ["a", "d"]


@pytest.mark.parametrize("limit", [2, 4])
async def test_so_many_roll_at_once_as_the_setting_says(monkeypatch, limit):
    fleet = Fleet(monkeypatch, limit)

    await fleet.begin()
    await fleet.upgrade()
    await fleet.look(ready=False)
    await fleet.look(ready=False)
    assert fleet.moved() == list(NAMES[:limit])


async def test_models_that_are_told_of_one_by_one_at_a_start_do_not_all_find_nobody_ahead(fleet):
    """The watch tells of each in its own time, and a pass takes time before its status says so."""

    await fleet.begin()
    fleet.monkeypatch.setattr(revision, "RENDER_VERSION", revision.RENDER_VERSION + 1)
    fleet.cluster.start()
    passes = []
    for name in reversed(NAMES):
        body = await fleet.cluster.kube.get(api.PD_DEPLOYMENT, "ns", name)
        fleet.cluster.parents.seen(body, is_event=True)
        passes.append(asyncio.create_task(fleet.cluster.reconcile(name)))
        await asyncio.sleep(0)
    await asyncio.gather(*passes)
    assert fleet.moved() == ["d"]
