"""A new operator makes gateways otherwise: models take that in turn, and users wait for nobody."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from baton_operator.children import desired as children
from baton_operator.children import revision
from baton_operator.cluster import api
from baton_operator.models import ObjectKey
from baton_operator.models.spec import GatewaySpec
from baton_operator.names import ANNOTATION_APPLIED, ANNOTATION_MADE_FROM
from baton_testing.fake_kube import Cluster

NAMES = ("a", "b", "c", "d")


class Fleet:
    """Four models that serve, and an operator of a later version that begins to lead."""

    def __init__(self, monkeypatch, limit=1):
        self.cluster = Cluster(upgrade_models=limit)
        self.monkeypatch = monkeypatch
        self.stuck = set()

    async def begin(self):
        for name in NAMES:
            await self.cluster.create(name)
            await self.cluster.settle(name)
        self.old = self.templates()

    async def upgrade(self):
        """Begin to lead as an operator that gives gateways a variable more."""
        render = children.gateway_template

        def with_a_variable_more(*args):
            template = render(*args)
            template["spec"]["containers"][0]["env"].append({"name": "NEW", "value": "1"})
            return template

        self.monkeypatch.setattr(children, "gateway_template", with_a_variable_more)
        await self.restart()

    async def restart(self):
        self.cluster.start()
        for name in NAMES:
            body = await self.cluster.kube.get(api.PD_DEPLOYMENT, "ns", name)
            self.cluster.parents.seen(body, is_event=True)

    def deployment(self, name):
        return self.cluster.kube.find(api.DEPLOYMENT, f"{name}-gateway")

    def templates(self):
        return {name: self.deployment(name)["spec"]["template"] for name in NAMES}

    def moved(self):
        return [name for name, now in self.templates().items() if now != self.old[name]]

    def rolling(self):
        """Return whose gateways have a template that their pods do not have yet."""
        found = []
        for name in NAMES:
            body = self.deployment(name)
            if body["status"]["observedGeneration"] < body["metadata"]["generation"]:
                found.append(name)
        return found

    async def look(self, *names, frozen=()):
        for name in names or NAMES:
            await self.cluster.reconcile(name)
        stuck = self.stuck | set(frozen)
        self.cluster.follow(frozen=[f"{name}-gateway" for name in stuck])

    def told(self, name):
        found = {c["type"]: c for c in self.cluster.status(name)["conditions"]}
        return found["Reconciling"]


@pytest.fixture
def fleet(monkeypatch):
    return Fleet(monkeypatch)


@pytest.mark.parametrize("limit", [1, 2])
async def test_no_more_models_than_the_limit_roll_their_gateways_at_once(monkeypatch, limit):
    fleet = Fleet(monkeypatch, limit)

    await fleet.begin()
    await fleet.upgrade()
    most = 0
    for _ in range(7):
        await fleet.look(*reversed(NAMES), frozen=NAMES)
        most = max(most, len(fleet.rolling()))
        await fleet.look(frozen=fleet.rolling()[1:])
        most = max(most, len(fleet.rolling()))
    assert most == limit
    assert fleet.moved() == list(NAMES)
    for name in NAMES:
        assert fleet.told(name)["reason"] == "UpToDate"
        assert "isGatewayUpgrade" not in fleet.cluster.status(name)["rollout"]


async def test_who_waits_serves_on_and_says_for_whom(fleet):
    await fleet.begin()
    await fleet.upgrade()
    fleet.stuck = {"a"}
    await fleet.look()
    await fleet.look()
    assert fleet.moved() == ["a"]
    assert fleet.cluster.status("a")["rollout"]["isGatewayUpgrade"] is True
    before = fleet.cluster.kube.version
    await fleet.look("d")
    assert fleet.cluster.kube.version == before
    assert fleet.cluster.condition("Ready", "d") == ("True", "PairsServing")
    assert fleet.told("d")["reason"] == "UpgradeWaits"
    expected = "gateways, as this operator makes them, wait for ns/a"
    assert fleet.told("d")["message"] == expected


async def test_gateways_that_do_not_get_ready_keep_their_place_also_for_the_next_leader(fleet):
    await fleet.begin()
    await fleet.upgrade()
    fleet.stuck = {"a"}
    for _ in range(5):
        await fleet.look()
    await fleet.restart()
    await fleet.look("b", "c", "d")
    await fleet.look()
    assert fleet.moved() == ["a"]
    fleet.stuck = set()
    fleet.cluster.follow()
    fleet.cluster.woken.clear()
    await fleet.look("a")
    assert [key.name for key in fleet.cluster.woken] == ["b"]


async def test_what_a_user_asks_of_gateways_waits_for_nobody(fleet):
    await fleet.begin()
    await fleet.upgrade()
    fleet.stuck = {"a"}
    await fleet.look()
    fleet.cluster.change("d", gateway={"drainSeconds": 77})
    await fleet.look()
    assert fleet.moved() == ["a", "d"]


async def test_what_a_user_asks_of_workers_takes_no_gateways_along(fleet):
    await fleet.begin()
    await fleet.upgrade()
    fleet.stuck = {"a"}
    await fleet.look()
    fleet.cluster.change("d", roles=[{"name": "prefill"}, {"name": "decode", "replicas": 3}])
    await fleet.look()
    await fleet.look()
    assert fleet.moved() == ["a"]
    assert 3 in fleet.cluster.replicas().values()


@pytest.mark.parametrize("hold", [{"suspend": True}, {"rollout": {"paused": True}}])
async def test_a_held_model_keeps_its_gateways_and_holds_nobody_up(fleet, hold):
    await fleet.begin()
    fleet.cluster.change("a", **hold)
    for _ in range(3):
        await fleet.look()
    await fleet.upgrade()
    for _ in range(8):
        await fleet.look()
    assert fleet.moved() == ["b", "c", "d"]
    fleet.cluster.change("a", suspend=False, rollout={"paused": False})
    for _ in range(4):
        await fleet.look()
    assert fleet.moved() == list(NAMES)


async def test_gateways_wait_with_the_workers_that_wait_and_come_with_them(fleet):
    """Pods of both kinds are made otherwise: gateways roll once, with their model's turn."""

    await fleet.begin()
    before = fleet.cluster.status("a")["updateRevision"]
    fleet.monkeypatch.setattr(revision, "RENDER_VERSION", revision.RENDER_VERSION + 1)
    await fleet.upgrade()
    rolled = {name: 0 for name in NAMES}
    seen = fleet.templates()
    for _ in range(25):
        await fleet.look(frozen=fleet.rolling()[1:])
        assert len(fleet.rolling()) <= 1
        now = fleet.templates()
        for name in NAMES:
            rolled[name] += now[name] != seen[name]
        seen = now
    assert rolled == dict.fromkeys(NAMES, 1)
    assert fleet.cluster.status("a")["currentRevision"] != before


async def test_gateways_of_an_operator_that_left_no_note_wait_too_and_their_pods_stay(fleet):
    await fleet.begin()
    for name in NAMES:
        notes = {ANNOTATION_MADE_FROM: None, ANNOTATION_APPLIED: "older"}
        older = {"metadata": {"annotations": notes}}
        fleet.cluster.kube.edit(api.DEPLOYMENT, f"{name}-gateway", older, "baton-operator")
    await fleet.restart()
    await fleet.cluster.pump()
    due, looks = [ObjectKey("ns", name) for name in NAMES], 0
    while due:  # passes run beside each other; who is not woken would wait for minutes
        fleet.cluster.woken.clear()
        await asyncio.gather(*map(fleet.cluster.reconciler.reconcile, due))
        due, looks = sorted(set(fleet.cluster.woken)), looks + 1
    assert looks > 1, "nobody had to wait"
    assert fleet.moved() == []
    for name in NAMES:
        assert ANNOTATION_MADE_FROM in fleet.deployment(name)["metadata"]["annotations"]
        assert fleet.told(name)["reason"] in ("UpToDate", "UpgradeWaits")


async def test_gateways_that_are_gone_are_made_at_once(fleet):
    await fleet.begin()
    await fleet.upgrade()
    fleet.stuck = {"a"}
    await fleet.look()
    fleet.cluster.kube.remove(api.DEPLOYMENT, "d-gateway")
    await fleet.look("d")
    assert fleet.moved() == ["a", "d"]


async def test_gateways_of_a_model_are_replaced_one_by_one_and_none_is_missing(fleet):
    await fleet.begin()
    strategy = fleet.deployment("a")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_a_later_schemas_new_field_is_not_taken_for_a_users_wish():
    class Later(GatewaySpec, frozen=True):
        colour: str = "red"
        hues: list[str] = msgspec.field(default_factory=list)

    assert revision.non_defaults(Later()) == revision.non_defaults(GatewaySpec()) == {}
    assert revision.non_defaults(Later(colour="blue")) == {"colour": "blue"}
    assert revision.non_defaults(GatewaySpec(replicas=3)) == {"replicas": 3}


def test_a_schema_is_looked_at_once_and_not_in_each_pass(monkeypatch):
    assert revision.non_defaults(GatewaySpec(replicas=2)) == {"replicas": 2}
    monkeypatch.delattr(msgspec.structs, "fields")
    assert revision.non_defaults(GatewaySpec(replicas=3)) == {"replicas": 3}
