"""Which transport each pair really uses: asked of prefill pods, summed up, and told when slower."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_operator.cluster import api
from baton_operator.cluster.observe import PodRef
from baton_operator.cluster.partial_objects import PodView
from baton_operator.pods.kv_ways import KvWays, Way, WaysByPod, read_ways
from baton_testing.fake_kube import Cluster

WHY = "of another user"


def readiness(**ways):
    return json.dumps({"ready": True, "kv_transports": ways}).encode()


def pod(name, role="pair", *, is_ready=True, is_deleting=False):
    return PodRef(name, role, "a", PodView(is_ready, is_deleting, "10.0.0.1", "", ""))


def test_the_transport_and_why_it_is_no_better_are_read():
    answer = readiness(**{"d0": "nvlink", "d1": f"zmq: {WHY}"})
    assert read_ways(answer) == {"d0": Way("nvlink"), "d1": Way("zmq", WHY)}


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"kv_transports": 3}',
        b'{"kv_transports": {"a": 3}}',
        json.dumps({"kv_transports": {str(n): "zmq" for n in range(4097)}}).encode(),
    ],
)
def test_other_answers_say_nothing(answer):
    assert read_ways(answer) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.mark.hypothesis
@given(
    answer=st.binary()
    | JSON.map(lambda value: json.dumps({"kv_transports": value}).encode())
    | st.dictionaries(st.text(), st.text()).map(lambda ways: readiness(**ways))
)
def test_any_bytes_are_ways_that_a_status_may_show_or_nothing(answer):
    told = read_ways(answer)
    assert told is None or isinstance(told, dict)
    for way in (told or {}).values():
        assert 0 < len(way.transport) <= 16
        assert way.transport.isascii()
        assert len(way.why) <= 300
        assert way.why.isprintable()


def test_an_older_worker_says_nothing_of_ways():
    assert read_ways(b'{"ready": true}') == {}


def test_words_of_a_pod_are_one_short_line_and_its_transports_are_names():
    told = read_ways(
        readiness(**{"d": "zmq: a\n\x1b[31mb" + "c" * 9000, "e": "a b", "f": "A" * 99})
    )
    assert set(told) == {"d"}
    assert told["d"].why.startswith("a [31mbccc")
    assert len(told["d"].why) <= 300


def test_as_many_ways_as_the_largest_deployment_has_are_read():
    told = read_ways(readiness(**{str(n): "zmq: far" for n in range(4096)}))
    assert told is not None
    assert len(told) == 4096


def test_words_are_cut_where_a_status_has_no_more_room_and_not_before():
    told = read_ways(readiness(d="zmq:" + "x" * 300, e="zmq:" + "x" * 301))
    assert told is not None
    assert {len(way.why) for way in told.values()} == {300}


def test_no_more_transports_are_told_than_there_may_be_in_a_status():
    ways = WaysByPod()
    ways.due([pod("p", "prefill")], 1, 1.0)
    ways.keep("p", {f"d{n}": Way(f"t{n}") for n in range(9)} | {"more": Way("t8")})
    decodes = [pod(f"d{n}", "decode") for n in range(9)] + [pod("more", "decode")]
    told = dict(ways.sum_up([pod("p", "prefill"), *decodes]).pairs)
    assert len(told) == 8
    assert told["t8"] == 2, "the rarest are left out"


def test_workers_that_leave_and_those_of_no_decode_do_not_count():
    ways = WaysByPod()
    ways.due([pod("p", "prefill")], 1, 1.0)
    ways.keep("p", {name: Way("zmq") for name in ("d", "leaving", "p", "g")})
    pods = [pod("d", "decode"), pod("leaving", "decode", is_deleting=True), pod("p", "prefill"),
            pod("g", "gateway")]  # fmt: skip
    assert ways.sum_up(pods).pairs == (("zmq", 1),)


def test_a_prefill_worker_that_is_gone_or_leaves_does_not_count_until_the_next_are_asked():
    prefills = [pod(name, "prefill") for name in ("p", "gone", "leaving")]
    ways = WaysByPod()
    ways.due(prefills, 3, 1.0)
    ways.keep("p", {"d": Way("rdma")})
    ways.keep("gone", {"d": Way("zmq", WHY)})
    ways.keep("leaving", {"d": Way("zmq", WHY)})
    pods = [pod("d", "decode"), prefills[0], pod("leaving", "prefill", is_deleting=True)]
    assert ways.sum_up(pods) == KvWays((("rdma", 1),))


def test_more_is_awaited_for_ten_minutes_from_prefill_workers_that_have_said_nothing():
    pods = [pod("p", "prefill"), pod("d", "decode")]
    ways = WaysByPod()
    assert ways.awaits_more(pods, 1.0), "of one that was not asked yet"
    ways.due(pods, 1, 1.0)
    assert ways.awaits_more(pods, 600.5)
    assert not ways.awaits_more(pods, 601.0)
    assert not ways.awaits_more(pods[1:], 1.0), "decode has nothing to say"
    ways.due([*pods, pod("q", "prefill")], 2, 700.0)
    assert ways.awaits_more([*pods, pod("q", "prefill")], 1299.5)
    ways.keep("q", {"d": Way("zmq")})
    assert not ways.awaits_more([*pods, pod("q", "prefill")], 1299.5)


def test_pairs_are_counted_by_transport_and_one_that_is_slower_is_named():
    pods = [pod("a"), pod("b"), pod("c")]
    ways = WaysByPod()
    assert [p.name for p in ways.due(pods, 9, 1.0)] == ["a", "b", "c"]
    ways.keep("a", {"a-decode": Way("nvlink")})
    ways.keep("b", {"b-decode": Way("zmq", WHY), "gone-decode": Way("zmq", "it hung up")})
    ways.keep("c", {"c-decode": Way("nvlink")})
    assert ways.sum_up(pods) == KvWays((("nvlink", 2), ("zmq", 1)), f"b to b-decode by zmq: {WHY}")
    assert ways.sum_up(pods[:1]).pairs == (("nvlink", 1),), "of decode workers that are there"


def test_pods_take_turns_and_those_that_are_gone_are_forgotten():
    pods = [pod(name) for name in "abc"] + [pod("d", is_ready=False), pod("e", role="decode")]
    ways = WaysByPod()
    asked = [[p.name for p in ways.due(pods, 2, now)] for now in (1.0, 2.0, 3.0)]
    assert asked == [["a", "b"], ["c", "a"], ["b", "a"]]
    ways.keep("a", {"a-decode": Way("shm")})
    ways.due(pods[1:], 2, 4.0)
    assert ways.sum_up(pods) == KvWays()
    assert not ways.keep("a", {"a-decode": Way("shm")}), "an answer that comes after its pod's end"


async def add_pod(cluster, name, ip):
    labels = {
        "app.kubernetes.io/managed-by": "baton-operator",
        "baton.dev/name": "chat",
        "baton.dev/role": "pair",
        "baton.dev/revision": cluster.status()["updateRevision"],
    }
    metadata = {"name": name, "namespace": "ns", "labels": labels}
    await cluster.kube.create(
        api.POD,
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": "n"}},
        "cm",
    )
    status = {"podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]}
    cluster.kube.edit(api.POD, name, {"status": status}, "cm", "status")


async def look(cluster):
    """Let a pass ask, its questions be answered, and a pass report."""
    cluster.now += 30
    await cluster.reconcile()
    for _ in range(5):
        await asyncio.sleep(0)
    await cluster.reconcile()


async def serving(**spec):
    cluster = Cluster()
    both = [{"name": role, "replicas": 2} for role in ("prefill", "decode")]
    await cluster.create(placement="samePod", roles=both, **spec)
    await cluster.settle()
    for number, name in enumerate("ab"):
        await add_pod(cluster, name, f"10.0.0.{number}")
    return cluster


def events(cluster):
    found = (cluster.kube.find(api.EVENT, name) for name in cluster.kube.names(api.EVENT))
    return {body["reason"]: body["message"] for body in found}


async def test_status_tells_the_ways_of_all_pairs_once_they_are_known():
    cluster = await serving()
    assert cluster.condition("HandoffFellBack") == ("Unknown", "NotObserved")
    assert "handoff" not in cluster.status()
    for number, name in enumerate("ab"):
        cluster.probe.ways[f"10.0.0.{number}", 8080] = readiness(**{f"{name}-decode": "shm"})
    await look(cluster)
    assert cluster.woken, "which way KV goes is told by no event"
    assert cluster.status()["handoff"] == {
        "summary": "shm 2",
        "transports": [{"name": "shm", "pairs": 2}],
    }
    assert cluster.condition("HandoffFellBack") == ("False", "AsExpected")
    assert "HandoffFellBack" not in events(cluster)


@pytest.mark.parametrize(
    ("require", "reason", "effect"),
    [("any", "Slower", "KV is sent instead"), ("nvlink", "NotAsRequired", "its requests fail")],
)
async def test_a_pair_that_fell_back_is_told_with_its_reason_and_an_event(require, reason, effect):
    cluster = await serving(engine={"device": "gpu"}, handoff={"require": require})
    cluster.probe.ways["10.0.0.0", 8080] = readiness(**{"a-decode": "nvlink"})
    cluster.probe.ways["10.0.0.1", 8080] = readiness(**{"b-decode": f"zmq: {WHY}"})
    await look(cluster)
    assert cluster.status()["handoff"]["summary"] == "nvlink 1, zmq 1"
    assert cluster.condition("HandoffFellBack") == ("True", reason)
    assert events(cluster)["HandoffFellBack"] == (
        f"1 of 2 pairs not by nvlink, {effect}: b to b-decode by zmq: {WHY}"
    )


async def test_pods_are_asked_in_bounded_turns_and_less_often_when_all_is_known():
    cluster = await serving()
    asked = []
    answer = cluster.probe.readiness

    async def readiness_of(ip, port):
        asked.append(ip)
        return await answer(ip, port)

    cluster.probe.readiness = readiness_of
    for number in range(2, 12):
        await add_pod(cluster, f"p{number}", f"10.0.0.{number}")
    for _ in range(3):
        asked.clear()
        await look(cluster)
        assert 0 < len(asked) <= 4
    assert await cluster.reconcile() == 30, "somebody is soon to say more"
    cluster.now += 1000
    for _ in range(9):
        await look(cluster)
    cluster.now += 1000
    await look(cluster)
    assert await cluster.reconcile() == 300, "nobody hands anything over here"


async def test_nothing_is_looked_at_again_while_nobody_can_be_asked():
    cluster = Cluster()
    await cluster.create(placement="samePod", suspend=True)
    await cluster.settle()
    assert await cluster.reconcile() is None


async def test_where_there_is_one_way_nobody_is_asked_and_nothing_is_looked_at_again():
    cluster = Cluster()
    await cluster.create()
    await cluster.settle()
    assert await cluster.reconcile() is None
    assert "HandoffFellBack" not in {c["type"] for c in cluster.status()["conditions"]}
