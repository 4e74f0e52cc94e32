"""Which pair is chosen: compatible, fitting, not full, least outstanding tokens."""

import functools
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_testing.scripted_link import worker_info
from baton_worker.gateway.request import ModelLimits
from baton_worker.gateway.serving.assignment import choose_all
from baton_worker.gateway.serving.balance import Needs, WorkerLoad, limits, unusable_reasons
from baton_worker.gateway.serving.capacity import most_choices
from baton_worker.gateway.serving.pairing import Pairing, WeightsIdentity
from baton_worker.gateway.serving.workers import LinkedWorkers
from baton_worker.identity import Role
from baton_worker.messages import WorkerInfo

NEEDS = Needs(prompt_tokens=10, max_tokens=20, logprobs_k=0)


def choose(loads, needs, *rules, **more):
    """Return the pair of a request of one choice."""
    pairs = choose_all(loads, [needs], *rules, **more)
    return pairs[0] if pairs else None


@pytest.fixture
def load():
    def make(name, role, outstanding=0, requests=0, **facts):
        return WorkerLoad(worker_info(name, role, **facts), 1, outstanding, requests)

    return make


def ids(pair):
    return pair.worker_ids if pair else None


def test_the_least_loaded_of_each_role_make_the_pair(load):
    loads = [
        load("p0", Role.PREFILL, 50),
        load("p1", Role.PREFILL, 10),
        load("d0", Role.DECODE, 5),
        load("d1", Role.DECODE, 90),
    ]
    assert ids(choose(loads, NEEDS)) == ("p1", "d0")


@pytest.mark.parametrize(
    "facts",
    [
        {"semantic_hash": 1},
        {"config_hash": "x"},
        {"model": "y"},
        {"wire_min": 2, "wire_max": 3},
        {"pair_group": "pod-b"},
    ],
)
def test_incompatible_workers_never_pair(load, facts):
    loads = [load("p", Role.PREFILL), load("d", Role.DECODE, **facts)]
    assert choose(loads, NEEDS) is None
    assert "differ in" in unusable_reasons(loads)[0]


def test_a_loaded_compatible_worker_is_chosen_over_an_idle_incompatible_one(load):
    loads = [
        load("p", Role.PREFILL),
        load("idle", Role.DECODE, config_hash="x"),
        load("busy", Role.DECODE, 500),
    ]
    assert ids(choose(loads, NEEDS)) == ("p", "busy")


def test_workers_of_one_pod_pair_with_each_other_alone_whoever_else_is_idle(load):
    loads = [
        load("a-prefill", Role.PREFILL, 0, pair_group="a"),
        load("a-decode", Role.DECODE, 500, pair_group="a"),
        load("b-prefill", Role.PREFILL, 300, pair_group="b"),
        load("b-decode", Role.DECODE, 0, pair_group="b"),
    ]
    assert ids(choose(loads, NEEDS)) == ("b-prefill", "b-decode")
    pairs = choose_all(loads, [NEEDS] * 40)
    assert {ids(pair) for pair in pairs} == {
        ("a-prefill", "a-decode"),
        ("b-prefill", "b-decode"),
    }


def test_a_pod_with_an_ejected_worker_is_the_last_choice_and_a_choice(load):
    loads = [load(f"{pod}-{role.label}", role, pair_group=pod)
             for pod in "ab" for role in (Role.PREFILL, Role.DECODE)]  # fmt: skip
    loads[0].is_ejected = True
    assert ids(choose(loads, NEEDS)) == ("b-prefill", "b-decode")
    loads[3].is_ejected = True
    assert choose(loads, NEEDS) is not None, "no failure makes an outage of what may still serve"


def test_wire_ranges_that_overlap_suffice(load):
    loads = [
        load("p", Role.PREFILL, wire_min=1, wire_max=2),
        load("d", Role.DECODE, wire_min=2, wire_max=3),
    ]
    assert ids(choose(loads, NEEDS)) == ("p", "d")


def test_a_mixed_worker_is_a_pair_of_one(load):
    loads = [load("p", Role.PREFILL, 20), load("d", Role.DECODE, 20), load("m", Role.MIXED, 30)]
    assert ids(choose(loads, NEEDS)) == ("m",)
    loads[2].outstanding_tokens = 41
    assert ids(choose(loads, NEEDS)) == ("p", "d")


def test_draining_workers_get_nothing(load):
    loads = [load("p", Role.PREFILL), load("d", Role.DECODE, draining=True)]
    assert choose(loads, NEEDS) is None
    assert unusable_reasons(loads) == ["every decode worker is draining"]


def test_full_workers_get_nothing(load):
    loads = [load("m", Role.MIXED, requests=3, max_running=1, max_waiting=2)]
    assert choose(loads, NEEDS) is None
    loads[0].outstanding_requests = 2
    assert ids(choose(loads, NEEDS)) == ("m",)


@pytest.mark.parametrize(
    "facts", [{"max_model_len": 29}, {"kv_capacity_tokens": 29}, {"max_top_k": -1}]
)
def test_workers_that_could_not_run_it_get_nothing(load, facts):
    assert choose([load("m", Role.MIXED, **facts)], NEEDS) is None


def test_a_worker_that_can_just_run_it_does(load):
    just = load("m", Role.MIXED, max_model_len=30, kv_capacity_tokens=30, max_top_k=5)
    assert ids(choose([just], NEEDS._replace(logprobs_k=5))) == ("m",)
    assert choose([just], NEEDS._replace(logprobs_k=6)) is None
    assert choose([just], NEEDS._replace(max_tokens=21)) is None


def test_choices_are_bound_by_the_role_with_less_room_whatever_is_in_hand(load):
    small, large = {"max_running": 2, "max_waiting": 1}, {"max_running": 8, "max_waiting": 2}
    loads = [
        load("p", Role.PREFILL, requests=9, **large),
        load("d0", Role.DECODE, requests=3, **small),
        load("d1", Role.DECODE, **small),
        load("d2", Role.DECODE, draining=True, **large),
        load("d3", Role.DECODE, max_model_len=20, **large),
        load("m", Role.MIXED, **small),
    ]
    assert most_choices(loads, NEEDS) == 6 + 3


def test_limits_are_the_roomiest_usable_pairs(load):
    loads = [
        load("p", Role.PREFILL, max_model_len=100),
        load("d", Role.DECODE, max_model_len=80, max_top_k=5),
        load("m", Role.MIXED, max_model_len=60),
    ]
    assert limits(loads[:2]) == ModelLimits(80, 512, 5)
    assert limits(loads[:1]) is None


def test_a_shorter_context_may_give_more_alternatives(load):
    """What the longest gives is no bound of what is asked in a context that others have, too."""
    loads = [
        load("p", Role.PREFILL, max_model_len=100, max_top_k=20),
        load("d", Role.DECODE, max_model_len=80, max_top_k=5),
        load("d-2", Role.DECODE, max_model_len=70, max_top_k=10),
        load("d-3", Role.DECODE, max_model_len=60, max_top_k=10),
        load("m", Role.MIXED, max_model_len=60, max_top_k=64),
    ]
    found = limits(loads)
    assert (found.context_tokens, found.max_top_k) == (80, 64)
    asked = (-1, 5, 6, 10, 11, 64)
    assert [found.context_with(k) for k in asked] == [80, 80, 70, 70, 60, 60]


FACTS = st.tuples(
    st.sampled_from([Role.PREFILL, Role.DECODE, Role.MIXED]),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from(["a", "b"]),
    st.booleans(),
)


@given(st.lists(FACTS, min_size=1, max_size=7))
def test_what_is_within_the_limits_fits_a_pair_and_what_is_not_fits_none(facts):
    loads = [
        WorkerLoad(
            worker_info(f"w-{i}", role, max_model_len=context, max_top_k=top_k,
                        revision=revision, draining=draining),
            1,
        )
        for i, (role, context, top_k, revision, draining) in enumerate(facts)
    ]  # fmt: skip
    found = limits(loads)
    for tokens, top_k in itertools.product(range(1, 6), range(-1, 5)):
        is_within = found is not None and top_k <= found.max_top_k
        is_within = is_within and tokens <= found.context_with(top_k)
        assert is_within == bool(most_choices(loads, Needs(tokens - 1, 1, top_k)))


def test_equal_workers_take_turns_and_accounts_return_to_zero():
    table = LinkedWorkers("tiny")
    for name, role in (("p", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        table.up(name, 1, worker_info(name, role))
    chosen = []
    for _ in range(4):
        pair = table.assign(NEEDS)
        chosen.append(pair.worker_ids[1])
        for worker_id in pair.worker_ids:
            table.release(worker_id, NEEDS)
    assert chosen == ["d0", "d1", "d0", "d1"]
    assert {load.outstanding_tokens for load in table.loads()} == {0}
    assert {load.outstanding_requests for load in table.loads()} == {0}


def test_a_worker_of_another_model_is_kept_out():
    table = LinkedWorkers("tiny")
    assert not table.up("m", 1, worker_info("m", Role.MIXED, model="other"))
    assert table.loads() == ()


def test_a_worker_with_another_tokenizer_is_turned_away_with_the_reason():
    table = LinkedWorkers("tiny", tokenizer_hash="ours")
    assert table.up("m", 1, worker_info("m", Role.MIXED, tokenizer_hash="ours"))
    assert not table.up("n", 7, worker_info("n", Role.MIXED, tokenizer_hash="theirs"))
    assert [load.info.worker_id for load in table.loads()] == ["m"]
    assert table.turned_away() == ["n has another tokenizer than this gateway"]
    table.forget("n", 6)
    assert len(table.turned_away()) == 1
    table.forget("n", 7)
    assert table.turned_away() == []


def test_workers_with_another_chat_template_are_the_second_choice():
    table = LinkedWorkers("tiny", chat_template_hash="ours")
    info = functools.partial(worker_info, role=Role.MIXED)
    table.up("theirs", 1, info("theirs", chat_template_hash="theirs"))
    assert ids(table.assign(NEEDS)) == ("theirs",), "better than no answer"
    assert table.turned_away() == []
    table.up("ours", 2, info("ours", chat_template_hash="ours", max_model_len=40))
    assert {ids(table.assign(NEEDS)) for _ in range(4)} == {("ours",)}
    assert table.limits.context_tokens == 40
    (told,) = table.turned_away()
    assert told.startswith("theirs has another chat template than this gateway")
    table.up("ours", 2, info("ours", chat_template_hash="ours", draining=True))
    assert ids(table.assign(NEEDS)) == ("theirs",)
    table.down("ours")
    assert ids(table.assign(NEEDS)) == ("theirs",)
    assert table.turned_away() == []


@pytest.mark.parametrize(("ours", "worker"), [("ours", ""), ("", "theirs"), ("same", "same")])
def test_a_chat_template_that_is_not_there_or_not_told_is_taken_on_trust(ours, worker):
    table = LinkedWorkers("tiny", chat_template_hash=ours)
    table.up("idle", 1, worker_info("idle", Role.MIXED, chat_template_hash=worker))
    table.up("ours", 1, worker_info("ours", Role.MIXED, chat_template_hash=ours))
    assert {ids(table.assign(NEEDS)) for _ in range(4)} == {("idle",), ("ours",)}


def test_prefill_is_charged_the_prompt_and_decode_the_output_too():
    table = LinkedWorkers("tiny")
    table.up("p", 1, worker_info("p", Role.PREFILL))
    table.up("d", 1, worker_info("d", Role.DECODE))
    table.assign(NEEDS)
    assert [load.outstanding_tokens for load in table.loads()] == [10, 30]


def differing(load, prefill, decode):
    return [load("p", Role.PREFILL, **prefill), load("d", Role.DECODE, **decode)]


A, B = "a" * 32, "b" * 32
APART = {
    "other weights of equal shapes": (
        {"model_fingerprint": A}, {"model_fingerprint": B},
        "p and d differ in model_fingerprint (aaaaaaaaaaaa, bbbbbbbbbbbb)",
    ),
    "another revision of the same weights": (
        {"model_fingerprint": A, "revision": "r1"}, {"model_fingerprint": A, "revision": "r2"},
        "p and d differ in revision (r1, r2)",
    ),
    "a revision and none": (
        {"model_fingerprint": A}, {"model_fingerprint": A, "revision": "r2"},
        "p and d differ in revision (none, r2)",
    ),
    "an older version of another revision": (
        {"revision": "r1"}, {"model_fingerprint": A, "revision": "r2"},
        "p and d differ in model_fingerprint (not said, aaaaaaaaaaaa), revision (r1, r2)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("prefill", "decode", "words"), APART.values(), ids=APART.keys())
def test_workers_of_other_weights_or_another_revision_never_pair(load, prefill, decode, words):
    loads = differing(load, prefill, decode)
    assert choose(loads, NEEDS) is None
    assert limits(loads) is None
    assert unusable_reasons(loads) == [words]


ACROSS = {
    "the same weights": ({"model_fingerprint": A}, {"model_fingerprint": A}, True),
    "other weights": ({"model_fingerprint": A}, {"model_fingerprint": B}, False),
    "weights that one does not tell": ({"model_fingerprint": A}, {}, False),
    "weights that none tells": ({}, {}, False),
}


@pytest.mark.parametrize(("prefill", "decode", "do_pair"), ACROSS.values(), ids=ACROSS.keys())
def test_revisions_pair_when_asked_for_and_told_to_be_of_the_same_weights(
    load, prefill, decode, do_pair
):
    loads = differing(load, {"revision": "r1"} | prefill, {"revision": "r2"} | decode)
    across = Pairing(across_revisions=True)
    assert (choose(loads, NEEDS, across) is not None) is do_pair
    assert (unusable_reasons(loads, across) == []) is do_pair


@pytest.mark.parametrize("across", [True, False])
def test_a_version_that_tells_no_weights_pairs_within_its_revision(load, across):
    old = load("p", Role.PREFILL, revision="r1")
    loads = [old, load("d", Role.DECODE, revision="r1", model_fingerprint=A)]
    assert ids(choose(loads, NEEDS, Pairing(across))) == ("p", "d")


def test_an_idle_worker_of_another_revision_hides_no_pair(load):
    loads = [
        load("p1", Role.PREFILL, revision="r1", model_fingerprint=A),
        load("p2", Role.PREFILL, 90, revision="r2", model_fingerprint=A),
        load("d2", Role.DECODE, 90, revision="r2", model_fingerprint=A),
    ]
    assert ids(choose(loads, NEEDS)) == ("p2", "d2")


def test_what_one_model_began_only_its_weights_go_on_with(load):
    loads = [
        load("other", Role.MIXED, model_fingerprint=B),
        load("same", Role.MIXED, 500, model_fingerprint=A, revision="r2"),
    ]
    begun = WeightsIdentity(loads[0].info.semantic_hash, A, "r1")
    assert ids(choose(loads, NEEDS._replace(weights=begun))) == ("same",)
    assert choose(loads[:1], NEEDS._replace(weights=begun)) is None


def test_a_hello_of_the_version_before_tells_no_weights(load):
    told = msgspec.to_builtins(load("p", Role.PREFILL, model_fingerprint=A).info)
    del told["model_fingerprint"]
    assert msgspec.convert(told, WorkerInfo).model_fingerprint == ""
