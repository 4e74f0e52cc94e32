"""Lists and watches: what the store learns, and what counts as a sign of life."""

from __future__ import annotations

import msgspec
import pytest

from baton_operator.cluster.api import SERVICE, ApiError, Expired
from baton_operator.cluster.reflector import Pace, Reflector
from baton_operator.cluster.store import Change, ChildId, ChildStore
from baton_operator.models import ObjectKey
from baton_testing.clocks import Pauses, Tired
from baton_testing.fake_kube import FakeKube

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
    def __init__(self):
        self.kube, self.store, self.changes = FakeKube(), ChildStore(), []
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
def bench():
    return Bench()


async def test_a_list_of_several_pages_is_read_to_its_end(bench):
    for number in range(12):
        await bench.kube.create(SERVICE, service(f"s{number}"), "x")
    await bench.reflector.list_all()
    assert all(bench.knows(f"s{number}") for number in range(12))
    assert bench.reflector.health.has_synced.is_set()


async def test_a_watch_follows_from_the_list(bench):
    version = await bench.reflector.list_all()
    await bench.kube.create(SERVICE, service("new"), "x")
    version = await bench.reflector.watch_once(version)
    assert bench.knows("new")
    bench.kube.remove(SERVICE, "new")
    await bench.reflector.watch_once(version)
    assert not bench.knows("new")
    assert bench.changes == [(OWNER, Change.STATUS), (OWNER, Change.DRIFT)]


async def test_an_expired_version_lists_again_and_finds_what_is_gone(bench):
    await bench.kube.create(SERVICE, service("old"), "x")
    version = await bench.reflector.list_all()
    bench.kube.remove(SERVICE, "old")
    bench.kube.forget_history()
    with pytest.raises(Expired):
        await bench.reflector.watch_once(version)
    await bench.reflector.list_all()
    assert not bench.knows("old")


async def test_a_stream_that_ends_without_a_word_is_a_sign_of_life(bench):
    async def silent(*args, **kwargs):
        return
        yield

    bench.kube.watch = silent
    assert await bench.reflector.watch_once("5") == "5"
    assert bench.reflector.health.heard_at > 0


async def test_a_server_that_cannot_be_reached_is_not(bench):
    async def broken(*args, **kwargs):
        raise ApiError(0, "Unreachable", "x")
        yield

    bench.kube.watch = broken
    with pytest.raises(ApiError):
        await bench.reflector.watch_once("5")
    assert bench.reflector.health.heard_at == 0


async def test_an_older_event_never_replaces_what_we_wrote(bench):
    version = await bench.reflector.list_all()
    await bench.kube.create(SERVICE, service("s"), "x")
    await bench.reflector.watch_once(version)
    newest = bench.store.entry(OWNER, ChildId("Service", "s")).child.version
    await bench.reflector.watch_once(version)
    assert bench.store.entry(OWNER, ChildId("Service", "s")).child.version == newest
    assert bench.changes == [(OWNER, Change.STATUS)]


class CountedPauses(Pauses):
    """And what was counted meanwhile."""

    def __init__(self, most):
        super().__init__(most)
        self.counted = []


def reflector_with(bench, pauses, watch):
    """Return a reflector whose watch is a plain generator of lines."""

    async def stream(*args, **kwargs):
        for line in watch():
            yield line

    bench.kube.watch = stream
    return Reflector(
        bench.kube,
        SERVICE,
        bench.store,
        lambda *_: None,
        is_metadata_only=True,
        count=lambda kind, why: pauses.counted.append((kind, why)),
        pace=Pace(pauses.clock, pauses.sleep, lambda low, high: 1.0),
    )


def expired():
    raise Expired(410, "Expired", "too old")
    yield


def broken():
    raise ApiError(0, "Unreachable", "x")
    yield


def empty():
    return iter(())


def only_a_bookmark():
    yield b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}}'


@pytest.mark.parametrize(
    ("watch", "why"),
    [(expired, "expired"), (broken, "error"), (empty, "empty"), (only_a_bookmark, "empty")],
)
async def test_what_ends_at_once_is_tried_again_ever_more_seldom_and_counted(bench, watch, why):
    pauses = CountedPauses(12)
    with pytest.raises(Tired):
        await reflector_with(bench, pauses, watch).run()
    assert pauses.taken[:4] == [0.2, 0.4, 0.8, 1.6]
    assert pauses.taken[-1] == 30.0
    assert pauses.counted == [("Service", why)] * 12
    assert bench.kube.reads["list", "Service"] <= 13


async def test_a_quiet_stream_that_lasts_is_opened_again_at_once_and_not_counted(bench):
    pauses = CountedPauses(1)

    def quiet():
        pauses.now += 90
        if pauses.now > 900:
            raise Tired
        return iter(())

    with pytest.raises(Tired):
        await reflector_with(bench, pauses, quiet).run()
    assert pauses.taken == []
    assert pauses.counted == []


async def test_news_end_the_back_off(bench):
    pauses = CountedPauses(4)

    def news():
        return iter([msgspec.json.encode({"type": "ADDED", "object": service("s")})])

    turns = iter([empty, empty, news, empty, empty])
    with pytest.raises(Tired):
        await reflector_with(bench, pauses, lambda: next(turns)()).run()
    assert pauses.taken == [0.2, 0.4, 0.2, 0.4]
