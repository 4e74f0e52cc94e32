"""The choices of a request get what they would get one by one, at a cost that a fleet of any size
leaves small; and what no idle fleet could hold is known by counting.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_testing.scripted_link import worker_info
from baton_worker.gateway.serving.assignment import choose_all
from baton_worker.gateway.serving.balance import Needs, Pair, WorkerLoad, cost_tokens, fits
from baton_worker.gateway.serving.capacity import free, has_room, in_all, tiers, to_keep
from baton_worker.gateway.serving.pair_counts import most_pairs
from baton_worker.gateway.serving.pairing import Pairing, kind_of
from baton_worker.gateway.serving.workers import RETURN_SECONDS, LinkedWorkers
from baton_worker.identity import Role

# The oracle: one choice after the other, each by a look at every pair.


def trusted(loads):
    kinds = {kind_of(x.info) for x in loads if not (x.is_ejected or x.info.draining)}
    return [x for x in loads if not x.is_ejected or kind_of(x.info) not in kinds]


def pairs_of(loads, pairing):
    for first in loads:
        if first.info.role == Role.MIXED:
            yield Pair(first, None)
        elif first.info.role == Role.PREFILL:
            for other in loads:
                if other.info.role == Role.DECODE and pairing.allows(first.info, other.info):
                    yield Pair(first, other)


def rank(pair):
    parts = [part for part in pair if part]
    return (
        sum(part.is_ejected for part in parts),
        sum(part.outstanding_tokens for part in parts),
        sum(part.dispatched for part in parts),
        pair.worker_ids,
    )


def one_by_one(loads, needs, pairing, kept=()):
    """Return the ids of each choice's workers, or None; the loads are accounted to."""
    found = {}
    for i in sorted(range(len(needs)), key=lambda i: -needs[i].tokens):
        able = [
            load
            for load in trusted([load for load in loads if fits(load.info, needs[i])])
            if load.room > 0 and not load.info.draining and load.info.worker_id not in kept
        ]
        pair = min(pairs_of(able, pairing), key=rank, default=None)
        if pair is None:
            return None
        for part in filter(None, pair):
            part.outstanding_tokens += cost_tokens(part.info, needs[i])
            part.outstanding_requests += 1
            part.dispatched += 1
        found[i] = pair.worker_ids
    return [found[i] for i in range(len(needs))]


# Fleets.

PROMPTS = st.lists(st.sampled_from([5, 10, 20, 40]), min_size=1, max_size=8)
PAIRINGS = st.sampled_from([Pairing(), Pairing(across_revisions=True)])
WORKER = st.fixed_dictionaries(
    {
        "role": st.sampled_from(list(Role)),
        "max_running": st.integers(1, 4),
        "max_model_len": st.sampled_from([11, 21, 41]),
        "revision": st.sampled_from(["a", "b"]),
    },
    optional={
        "draining": st.booleans(),
        "max_top_k": st.sampled_from([-1, 20]),
        "config_hash": st.sampled_from(["c", "d"]),
    },
)
BOOKS = st.tuples(
    st.integers(0, 30), st.integers(0, 3), st.integers(0, 3), st.sampled_from([False, False, True])
)
FLEETS = st.lists(st.tuples(WORKER, BOOKS), min_size=1, max_size=8)
ODD = {
    "model_fingerprint": st.sampled_from(["", "f", "g"]),
    "wire_min": st.integers(1, 3),
    "revision": st.sampled_from(["a", "a", "b"]),
}
"""By these who pairs with whom need not fall into groups."""


def fleet_of(described):
    loads = []
    for n, (facts, (tokens, running, dispatched, is_ejected)) in enumerate(described):
        facts = {"max_waiting": 0, **facts}
        facts["wire_max"] = max(facts.get("wire_max", 1), facts.get("wire_min", 1))
        info = worker_info(f"w{n}", **facts)
        load = WorkerLoad(info, 1, tokens, running, dispatched)
        load.is_ejected = is_ejected
        loads.append(load)
    return loads


def needs_of(prompts):
    return [Needs(prompt, 1, 0) for prompt in prompts]


def ids(pairs):
    return None if pairs is None else [pair.worker_ids for pair in pairs]


@settings(max_examples=200, deadline=None)
@given(described=FLEETS, prompts=PROMPTS, pairing=PAIRINGS, kept=st.sets(st.integers(0, 7)))
def test_each_choice_gets_what_it_would_get_one_by_one(described, prompts, pairing, kept):
    needs, kept = needs_of(prompts), {f"w{n}" for n in kept}
    expected = one_by_one(fleet_of(described), needs, pairing, kept)
    loads = fleet_of(described)
    before = [(x.outstanding_tokens, x.outstanding_requests, x.dispatched) for x in loads]
    assert ids(choose_all(loads, needs, pairing, kept)) == expected
    after = [(x.outstanding_tokens, x.outstanding_requests, x.dispatched) for x in loads]
    assert after == before, "it is the caller who accounts"


@settings(max_examples=300, deadline=None)
@given(
    described=FLEETS,
    prompt=st.sampled_from([5, 10, 20, 40]),
    pairing=PAIRINGS,
    kept=st.sets(st.integers(0, 7), max_size=3),
)
def test_one_choice_alone_gets_the_least_loaded_pair(described, prompt, pairing, kept):
    needs, kept = needs_of([prompt]), {f"w{n}" for n in kept}
    expected = one_by_one(fleet_of(described), needs, pairing, kept)
    assert ids(choose_all(fleet_of(described), needs, pairing, kept)) == expected


def test_pairs_with_as_much_to_do_take_turns():
    """Of several kinds, too, among which names would always be in the same order."""
    facts = [("a", 2), ("b", 1)]
    loads = [
        WorkerLoad(worker_info(name, Role.MIXED, revision=name), 1, dispatched=n)
        for name, n in facts
    ]
    assert ids(choose_all(loads, needs_of([10]))) == [("b",)]


ROOMY = st.lists(
    st.tuples(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(list(Role)),
                "max_running": st.integers(3, 6),
                "max_model_len": st.sampled_from([21, 41, 41]),
            }
        ),
        BOOKS,
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(described=ROOMY, prompts=PROMPTS, kept=st.sets(st.integers(0, 7), max_size=2))
def test_so_it_is_where_there_is_room_for_most(described, prompts, kept):
    """Each worker gets several, so that what it was given before it decides who is next."""
    needs, kept = needs_of(prompts), {f"w{n}" for n in kept}
    expected = one_by_one(fleet_of(described), needs, Pairing(), kept)
    assert ids(choose_all(fleet_of(described), needs, Pairing(), kept)) == expected


def crossed(prefills, decodes, others=()):
    """A fleet in which p-f may pair with d alone, and p-g, which has less to do, with d-g too."""
    fleet = []
    names = {"p-f": "f", "p-g": "g", "d": "", "d-g": "g", "m": "f"}
    for name, n in (*prefills, *decodes, *others):
        role = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[name[0]]
        facts = {"max_running": n, "max_waiting": 0, "model_fingerprint": names[name]}
        facts["wire_max"] = 9  # the number of no role
        idle = name in ("p-g", "d")
        fleet.append(WorkerLoad(worker_info(name, role, **facts), 1, 0 if idle else 50))
    return fleet


def test_the_least_loaded_pair_is_taken_where_nobody_else_needs_it():
    fleet = crossed([("p-f", 1), ("p-g", 1)], [("d", 1), ("d-g", 1)], [("m", 1)])
    assert ids(choose_all(fleet, needs_of([10] * 2))) == [("p-g", "d"), ("m",)]


def test_pairs_are_spared_for_who_has_no_other():
    """p-f can pair with d alone: p-g leaves it one place there, and no more."""
    fleet = crossed([("p-f", 1), ("p-g", 2)], [("d", 2), ("d-g", 1)])
    found = Counter(ids(choose_all(fleet, needs_of([10] * 3))))
    assert found == {("p-f", "d"): 1, ("p-g", "d"): 1, ("p-g", "d-g"): 1}
    assert choose_all(fleet, needs_of([10] * 4)) is None


def test_a_mixed_worker_needs_nobody_to_be_spared():
    fleet = crossed([("p-f", 1), ("p-g", 2)], [("d", 2), ("d-g", 1)], [("m", 1)])
    found = Counter(ids(choose_all(fleet, needs_of([10] * 4))))
    assert found == {("p-f", "d"): 1, ("p-g", "d"): 1, ("p-g", "d-g"): 1, ("m",): 1}


def test_pairs_are_spared_among_ejected_workers_where_their_kind_has_no_others():
    fleet = crossed([("p-f", 1), ("p-g", 1)], [("d", 1), ("d-g", 1)])
    for load in fleet:
        load.is_ejected = load.info.worker_id == "d-g"
    assert Counter(ids(choose_all(fleet, needs_of([10] * 2)))) == {
        ("p-f", "d"): 1,
        ("p-g", "d-g"): 1,
    }


@settings(max_examples=200, deadline=None)
@given(
    described=st.lists(
        st.tuples(WORKER.flatmap(lambda w: st.fixed_dictionaries(ODD).map(lambda o: w | o)), BOOKS),
        min_size=1,
        max_size=7,
    ),
    prompts=PROMPTS,
    pairing=PAIRINGS,
)
def test_so_it_is_where_pairing_is_no_matter_of_groups_and_no_less_is_found(
    described, prompts, pairing
):
    needs = needs_of(prompts)
    expected = one_by_one(fleet_of(described), needs, pairing)
    found = ids(choose_all(fleet_of(described), needs, pairing))
    if expected is not None:
        assert found == expected
    elif found is not None:
        loads = {load.info.worker_id: load for load in fleet_of(described)}
        assert len(found) == len(needs)
        given_each = Counter(itertools.chain(*found))
        assert all(
            loads[one].room >= n and not loads[one].info.draining for one, n in given_each.items()
        )
        for workers, one in zip(found, needs, strict=True):
            assert all(fits(loads[worker].info, one) for worker in workers)
            if len(workers) == 2:
                assert pairing.allows(*(loads[worker].info for worker in workers))


# What there is room for.


def most_by_trying(loads, one, pairing, places):
    """Return the most such choices at once: every way to give them is tried."""
    able = [x for x in loads if fits(x.info, one) and not x.info.draining]
    names = [pair.worker_ids for pair in pairs_of(able, pairing)]
    room = {load.info.worker_id: places(load) for load in able}

    def most(first):
        best = 0
        for at in range(first, len(names)):
            if all(room[worker] > 0 for worker in names[at]):
                for worker in names[at]:
                    room[worker] -= 1
                best = max(best, 1 + most(at))
                for worker in names[at]:
                    room[worker] += 1
        return best

    return most(0)


SMALL = WORKER.flatmap(
    lambda w: st.fixed_dictionaries(ODD | {"max_running": st.integers(1, 2)}).map(lambda o: w | o)
)


@settings(max_examples=80, deadline=None)
@given(
    described=st.lists(st.tuples(SMALL, BOOKS), min_size=1, max_size=4),
    prompts=PROMPTS,
    pairing=PAIRINGS,
    places=st.sampled_from([in_all, free]),
)
def test_the_count_of_a_tier_is_the_most_that_any_way_of_giving_finds(
    described, prompts, pairing, places
):
    loads, needs = fleet_of(described), needs_of(prompts)
    found = tiers(loads, needs, pairing, places)
    assert found[0].n_choices == len(needs)
    for tier in found:
        assert tier.n_choices == sum(one.tokens >= tier.shortest.tokens for one in needs)
        assert tier.most == most_by_trying(loads, tier.shortest, pairing, places)
    for one in needs:  # those of a tier are told apart by no worker
        own = [tier.shortest for tier in found if tier.shortest.tokens <= one.tokens][-1]
        able = [load.info for load in loads if not load.info.draining]
        assert [fits(info, one) for info in able] == [fits(info, own) for info in able]


@pytest.mark.parametrize(("others", "most"), [([2], 2), ([0], 0), ([], 5)])
def test_places_of_ejected_workers_count_where_their_kind_has_no_others(others, most):
    loads = [
        WorkerLoad(worker_info(f"m-{n}", Role.MIXED, max_running=n, max_waiting=0), 1)
        for n in (5, *others)
    ]
    loads[0].is_ejected = True
    needs = needs_of([10])
    assert tiers(loads, needs, spares_ejected=True)[0].most == most
    assert tiers(loads, needs)[0].most == 5 + sum(others)


def test_places_of_pairs_and_of_mixed_workers_add_up_with_those_that_wait():
    facts = [("p", Role.PREFILL), ("d", Role.DECODE), ("m", Role.MIXED)]
    loads = [WorkerLoad(worker_info(n, r, max_running=1, max_waiting=2), 1) for n, r in facts]
    (tier,) = tiers(loads, needs_of([10]))
    assert tier.most == 6


@settings(max_examples=200, deadline=None)
@given(
    described=st.lists(st.tuples(SMALL, BOOKS), min_size=1, max_size=6),
    n=st.integers(1, 8),
    pairing=PAIRINGS,
)
def test_equal_choices_are_placed_just_when_there_are_places_for_them(described, n, pairing):
    loads, needs = fleet_of(described), needs_of([10]) * n
    for load in loads:
        load.is_ejected = False
    (tier,) = tiers(loads, needs, pairing, free)
    assert (choose_all(loads, needs, pairing) is not None) == (n <= tier.most)


@settings(max_examples=150, deadline=None)
@given(
    prefills=st.dictionaries(st.sampled_from("pqrs"), st.integers(0, 5)),
    decodes=st.dictionaries(st.sampled_from("wxyz"), st.integers(0, 5)),
    edges=st.sets(st.tuples(st.sampled_from("pqrs"), st.sampled_from("wxyz"))),
)
def test_as_many_pairs_are_made_as_what_parts_them_allows(prefills, decodes, edges):
    """The least of all cuts: by a theorem it is the most, and it is found without any flow."""
    partners = {p: [d for d in decodes if (p, d) in edges] for p in prefills}
    made = most_pairs(prefills, decodes, partners)
    cuts = (
        sum(n for p, n in prefills.items() if p not in some)
        + sum(decodes[d] for d in {d for p in some for d in partners[p]})
        for k in range(len(prefills) + 1)
        for some in itertools.combinations(prefills, k)
    )
    assert made.total() == min(cuts)
    assert all(d in partners[p] for (p, d), n in made.items() if n)
    assert all(n >= 0 for n in made.values())
    for kind, most in (prefills | decodes).items():
        assert sum(n for pair, n in made.items() if kind in pair) <= most


def test_pairs_are_made_anew_along_a_row_of_any_length():
    """c can have x alone, whom a has; a can have y, whom b has; and nobody else wants z."""
    partners = {"a": ["x", "y"], "b": ["y", "z"], "c": ["x"]}
    ones = [Counter("abc"), Counter("xyz")]
    assert +most_pairs(*ones, partners) == Counter([("c", "x"), ("a", "y"), ("b", "z")])


def test_a_request_that_no_revision_could_hold_is_too_many_however_many_places_there_are():
    table = LinkedWorkers("tiny")
    for revision, prefills, decodes in (("a", 10, 1), ("b", 1, 10)):
        for role, n in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
            name = f"{role.label}-{revision}"
            facts = {"max_running": n, "max_waiting": 0, "revision": revision}
            table.up(name, 1, worker_info(name, role, **facts))
    assert table.too_many(needs_of([10] * 2)) is None
    assert table.assign_all(needs_of([10] * 2)) is not None, "one choice on each"
    assert table.too_many(needs_of([10] * 3)).most == 2
    assert table.most_choices(needs_of([10])[0]) == 2


def test_workers_that_may_be_back_count_until_they_are_given_up():
    now = 0.0
    table = LinkedWorkers("tiny", clock=lambda: now)
    facts = {"max_running": 2, "max_waiting": 0}
    for epoch, name in enumerate(("m-0", "m-1")):
        table.up(name, epoch, worker_info(name, Role.MIXED, **facts))
    assert not table.may_have_room(needs_of([10] * 5))
    table.down("m-1")
    assert table.too_many(needs_of([10] * 4)).most == 2
    assert table.may_have_room(needs_of([10] * 4))
    assert not table.may_have_room(needs_of([10] * 5))
    now = RETURN_SECONDS + 1
    assert not table.may_have_room(needs_of([10] * 4))
    table.up("m-1", 7, worker_info("m-1", Role.MIXED, **facts))
    table.up("m-0", 0, worker_info("m-0", Role.MIXED, draining=True, **facts))
    assert table.too_many(needs_of([10] * 4)).most == 2
    assert table.may_have_room(needs_of([10] * 4))
    assert not table.may_have_room(needs_of([10] * 5)), "nobody is counted twice"


def test_a_kind_that_nothing_pairs_with_is_no_room():
    facts = [("p", Role.PREFILL, "a"), ("d", Role.DECODE, "b"), ("m", Role.MIXED, "a")]
    loads = [
        WorkerLoad(worker_info(n, role, revision=r, model_fingerprint="f"), 1)
        for n, role, r in facts
    ]
    assert has_room(loads, set())
    assert not has_room(loads, {"m"})
    assert has_room(loads, {"m"}, Pairing(across_revisions=True))


@settings(max_examples=200, deadline=None)
@given(described=FLEETS, prompts=PROMPTS)
def test_what_is_kept_leaves_each_kind_as_many_places_as_a_tier_has_choices(described, prompts):
    loads, needs = fleet_of(described), needs_of(prompts)
    for load in loads:
        load.is_ejected = False
    kept = to_keep(loads, needs)
    for one in needs:
        n = sum(other.tokens >= one.tokens for other in needs)
        pools = {}
        for load in loads:
            if fits(load.info, one) and not load.info.draining:
                pools.setdefault(kind_of(load.info), []).append(load)
        for pool in pools.values():
            if sum(map(free, pool)) <= n:
                assert {load.info.worker_id for load in pool} <= kept
    assert not any(load.info.draining for load in loads if load.info.worker_id in kept)


# What it costs.


def steps_of(work):
    """Return how many instructions of the interpreter some work takes: the same on any machine."""
    n = 0

    def count(frame, event, _):
        nonlocal n
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        n += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return n


def table_of(n_workers, n_left, *, of="pairs"):
    """A fleet whose workers are full but for `n_left` places of each role."""
    table = LinkedWorkers("tiny")
    for n in range(n_workers):
        role = Role.PREFILL if n % 2 else Role.DECODE
        facts = {"max_running": 32, "max_waiting": 32}
        if of == "contexts":
            facts["max_model_len"] = 103 + 256 * 2 * (n // 2 + 1) // n_workers
        if of == "revisions":
            facts["revision"] = str(n // 2 % 2)
        table.up(f"w{n}", 1, worker_info(f"w{n}", role, **facts))
    for role in (Role.PREFILL, Role.DECODE):
        ours = [load for load in table.loads() if load.info.role == role]
        each, more = divmod(n_left, len(ours))
        for n, load in enumerate(ours):
            load.outstanding_requests = 64 - each - (n < more)
    return table


def try_to_begin(table, needs):
    """Do what a try of a request does in `dispatch`; returns whether it has its workers."""
    if table.assign_all(needs) is not None:
        return True
    table.missing_features(needs[0])
    table.most_choices(max(needs))
    table.too_many(needs)
    if table.are_usable(needs):
        table.has_room(table.to_keep(needs))
    return False


STEPS_EACH = 1400
"""Of a worker or a choice in one try; a look at every worker takes some 50 for each."""


@pytest.mark.parametrize("of", ["pairs", "contexts", "revisions"])
@pytest.mark.parametrize("n_left", [255, 1024])
@pytest.mark.parametrize("n_workers", [8, 64, 128])
def test_a_try_costs_steps_for_each_worker_and_choice_and_not_for_each_of_both(
    of, n_left, n_workers
):
    n_left = min(n_left, 32 * n_workers)
    table = table_of(n_workers, n_left, of=of)
    needs = [Needs(100 + n, 4, -1) for n in range(256)]
    begun = []
    steps = steps_of(lambda: begun.append(try_to_begin(table, needs)))
    assert begun == [n_left >= 256]
    assert steps <= STEPS_EACH * (n_workers + len(needs)), "one by one it is millions"


def test_many_revisions_and_reasons_are_no_product_of_workers():
    table = LinkedWorkers("tiny")
    for n in range(128):
        role = Role.PREFILL if n % 2 else Role.DECODE
        table.up(f"w{n}", 1, worker_info(f"w{n}", role, revision=str(n)))
    words = []
    assert steps_of(lambda: words.extend(table.unusable_reasons())) < 128 * 1000
    assert 1 <= len(words) <= 8
