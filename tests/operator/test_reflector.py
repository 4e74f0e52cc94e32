"""Lists and watches: what the store learns, and what counts as a sign of life."""

from __future__ import annotations

import asyncio

import pytest

from baton_operator.api import SERVICE, ApiError, Expired
from baton_operator.models import ObjectKey
from baton_operator.reflector import Reflector
from baton_operator.store import Change, ChildId, ChildStore

OWNER = ObjectKey("ns", "chat")


def service(name, owner="chat"):
    labels = {"app.kubernetes.io/managed-by": "baton-operator", "baton.dev/name": owner}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "ns", "labels": labels},
        "spec": {},
    }


class Bench:
    def __init__(self, kubes):
        self.kube, self.store, self.changes = kubes.FakeKube(), ChildStore(), []
        self.reflector = Reflector(
            self.kube,
            SERVICE,
            self.store,
            lambda owner, change: self.changes.append((owner, change)),
            is_metadata_only=True,
        )

    def knows(self, name):
        return self.store.entry(OWNER, ChildId("Service", name)) is not None


@pytest.fixture
def bench(kubes):
    return Bench(kubes)


def test_a_list_of_several_pages_is_read_to_its_end(bench):
    async def scenario():
        for number in range(12):
            await bench.kube.create(SERVICE, service(f"s{number}"), "x")
        await bench.reflector.list_all()

    asyncio.run(scenario())
    assert all(bench.knows(f"s{number}") for number in range(12))
    assert bench.reflector.health.has_synced.is_set()


def test_a_watch_follows_from_the_list(bench):
    async def scenario():
        version = await bench.reflector.list_all()
        await bench.kube.create(SERVICE, service("new"), "x")
        version = await bench.reflector.watch_once(version)
        assert bench.knows("new")
        bench.kube.remove(SERVICE, "new")
        await bench.reflector.watch_once(version)

    asyncio.run(scenario())
    assert not bench.knows("new")
    assert bench.changes == [(OWNER, Change.STATUS), (OWNER, Change.DRIFT)]


def test_an_expired_version_lists_again_and_finds_what_is_gone(bench):
    async def scenario():
        await bench.kube.create(SERVICE, service("old"), "x")
        version = await bench.reflector.list_all()
        bench.kube.remove(SERVICE, "old")
        bench.kube.forget_history()
        with pytest.raises(Expired):
            await bench.reflector.watch_once(version)
        await bench.reflector.list_all()

    asyncio.run(scenario())
    assert not bench.knows("old")


def test_a_stream_that_ends_without_a_word_is_a_sign_of_life(bench):
    async def silent(*args, **kwargs):
        return
        yield

    bench.kube.watch = silent
    assert asyncio.run(bench.reflector.watch_once("5")) == "5"
    assert bench.reflector.health.heard_at > 0


def test_a_server_that_cannot_be_reached_is_not(bench):
    async def broken(*args, **kwargs):
        raise ApiError(0, "Unreachable", "x")
        yield

    bench.kube.watch = broken
    with pytest.raises(ApiError):
        asyncio.run(bench.reflector.watch_once("5"))
    assert bench.reflector.health.heard_at == 0


def test_an_older_event_never_replaces_what_we_wrote(bench):
    async def scenario():
        version = await bench.reflector.list_all()
        await bench.kube.create(SERVICE, service("s"), "x")
        await bench.reflector.watch_once(version)
        newest = bench.store.entry(OWNER, ChildId("Service", "s")).child.version
        await bench.reflector.watch_once(version)
        assert bench.store.entry(OWNER, ChildId("Service", "s")).child.version == newest

    asyncio.run(scenario())
    assert bench.changes == [(OWNER, Change.STATUS)]
