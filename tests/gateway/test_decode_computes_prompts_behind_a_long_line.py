"""Decode computes a prompt alone where prefill's line is long, decode says it will, and nowhere
else; a simulated clock shows what that does to first tokens.
"""

from __future__ import annotations

import heapq
import json
import random
import socket
import statistics
from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_testing.scripted_link import RowSpec, worker_info
from baton_worker.config_decode_prompts import DecodePromptsConfig
from baton_worker.gateway.serving.balance import Needs, WorkerLoad
from baton_worker.gateway.serving.ejection import BACKOFF_SECONDS, EJECT_AFTER, Circuit
from baton_worker.gateway.serving.helping import HelpRule, helper_of
from baton_worker.gateway.serving.pairing import Pairing
from baton_worker.gateway.serving.workers import LinkedWorkers
from baton_worker.identity import Role
from baton_worker.messages import DECODE_PROMPTS, FEATURES, Abort, Submit
from baton_worker.records.columns import ErrorCode, Finish

WILLING = {"features": (*FEATURES, DECODE_PROMPTS)}
RULE = HelpRule(behind_tokens=100, slowness=2.0)
NEEDS = Needs(prompt_tokens=80, max_tokens=20, logprobs_k=0)


def load(name, role, line=0, **facts):
    states = ("is_ejected", "outstanding_requests", "prompt_tokens")
    state = {key: facts.pop(key) for key in states if key in facts}
    if "is_ejected" in state:
        state["circuit"] = Circuit(is_ejected=True)
    return WorkerLoad(worker_info(name, role, **facts), 1, line_tokens=line, **state)


def helper(*loads, needs=NEEDS, rule=RULE, **more):
    found = helper_of(loads, needs, rule, **more)
    return found and found.info.worker_id


def long_line(*others, line=400):
    return load("p", Role.PREFILL, line), *others


def test_decode_takes_a_prompt_when_it_would_be_done_sooner_there():
    needs, idle = NEEDS._replace(prompt_tokens=150), load("d", Role.DECODE, **WILLING)
    assert helper(load("p", Role.PREFILL, 150), idle, needs=needs) is None, "as soon at prefill"
    assert helper(load("p", Role.PREFILL, 151), idle, needs=needs) == "d"
    busy = load("d", Role.DECODE, 60, **WILLING)
    assert helper(load("p", Role.PREFILL, 270), busy, needs=needs) is None
    assert helper(load("p", Role.PREFILL, 271), busy, needs=needs) == "d"


def test_a_short_prompt_waits_for_no_less_than_the_bound():
    short, willing = NEEDS._replace(prompt_tokens=1), load("d", Role.DECODE, **WILLING)
    assert helper(load("p", Role.PREFILL, 100), willing, needs=short) is None
    assert helper(load("p", Role.PREFILL, 101), willing, needs=short) == "d"


@pytest.mark.parametrize(
    "facts",
    [
        {"features": FEATURES},
        {"draining": True},
        {"is_ejected": True},
        {"max_model_len": 99},
        {"max_top_k": -1},
        {"kv_capacity_tokens": 99},
        {"outstanding_requests": 64},
        {"kv_capacity_tokens": 150, "prompt_tokens": 71},
        {"pair_group": "another pod"},
        {"revision": "next"},
        {"model_fingerprint": "other", "semantic_hash": 1},
    ],
    ids=str,
)
def test_who_could_not_be_the_decode_of_a_pair_or_has_no_place_now_takes_none(facts):
    assert helper(*long_line(load("d", Role.DECODE, **WILLING))) == "d"
    able = load("other", Role.DECODE)
    assert helper(*long_line(able, load("d", Role.DECODE, **(WILLING | facts)))) is None


def test_a_decode_has_a_place_up_to_its_last_slot_and_the_last_token_of_its_pool():
    last_slot = {"max_running": 2, "outstanding_requests": 1}
    last_token = {"kv_capacity_tokens": 150, "prompt_tokens": 70}
    assert helper(*long_line(load("d", Role.DECODE, **last_slot, **WILLING))) == "d"
    assert helper(*long_line(load("d", Role.DECODE, **last_token, **WILLING))) == "d"


def test_a_decode_that_is_ejected_with_all_of_its_kind_is_a_pairs_last_resort_and_no_help():
    assert helper(*long_line(load("d", Role.DECODE, is_ejected=True, **WILLING))) is None


def test_a_feature_that_decode_lacks_leaves_the_request_to_others():
    needs = NEEDS._replace(features=("new",))
    able = load("other", Role.DECODE, features=(*FEATURES, "new"))
    prefill = load("p", Role.PREFILL, 400, features=(*FEATURES, "new"))
    assert helper(prefill, able, load("d", Role.DECODE, **WILLING), needs=needs) is None


def test_whose_room_is_kept_for_others_takes_none():
    workers = long_line(load("d", Role.DECODE, **WILLING))
    assert helper(*workers, kept={"d"}) is None
    assert helper(*workers, load("idle", Role.PREFILL), kept={"idle"}) == "d"


@pytest.mark.parametrize(("behind", "line"), [(100, 100), (0, 400)])
def test_while_no_line_is_long_nobody_is_looked_at_for_help(behind, line):
    class Unread:
        def __contains__(self, worker_id):
            raise AssertionError(f"whether {worker_id} is kept was asked")

    workers = long_line(load("d", Role.DECODE, **WILLING), line=line)
    assert helper(*workers, rule=HelpRule(behind), kept=Unread()) is None
    with pytest.raises(AssertionError, match="is kept was asked"):
        helper(*long_line(load("d", Role.DECODE, **WILLING)), kept=Unread())


def test_of_several_the_one_with_the_shortest_line_takes_it():
    two = (load("d0", Role.DECODE, 30, **WILLING), load("d1", Role.DECODE, 20, **WILLING))
    assert helper(*long_line(*two)) == "d1"


def test_the_pods_own_prefill_being_away_decode_takes_none_for_others():
    """Workers of a pod serve together: a decode whose prefill drains is no way around it."""
    alone = load("d-a", Role.DECODE, pair_group="a", **WILLING)
    gone = load("p-a", Role.PREFILL, pair_group="a", draining=True)
    others = [load(f"{r.label}-b", r, 400, pair_group="b") for r in (Role.PREFILL, Role.DECODE)]
    assert helper(alone, gone, *others) is None
    assert helper(alone, load("p-a", Role.PREFILL, 300, pair_group="a"), *others) == "d-a"


LINES = st.integers(0, 600)
FLEET = st.lists(
    st.tuples(
        st.sampled_from(list(Role)),
        LINES,
        st.booleans(),
        st.sampled_from(["", "a", "b"]),
        st.sampled_from(["", "draining", "ejected", "full", "no slot"]),
    ),
    max_size=7,
)
STATES = {
    "": {},
    "draining": {"draining": True},
    "ejected": {"is_ejected": True},
    "full": {"max_waiting": 0, "max_running": 1, "outstanding_requests": 1},
    "no slot": {"max_running": 1, "outstanding_requests": 1},
}


@given(FLEET, st.integers(0, 300), st.floats(1, 8), st.integers(1, 300))
def test_whatever_the_fleet_decode_is_chosen_only_as_the_rule_says(fleet, behind, slowness, n):
    loads = [
        load(f"w{i}", role, line, pair_group=group,
             **(WILLING if is_willing else {}), **STATES[state])
        for i, (role, line, is_willing, group, state) in enumerate(fleet)
    ]  # fmt: skip
    needs = Needs(n, 20, 0)
    chosen = helper_of(loads, needs, HelpRule(behind, slowness))
    if chosen is None:
        return
    pairing, i = Pairing(), loads.index(chosen)
    role, line, is_willing, _, state = fleet[i]
    assert behind
    assert (role, is_willing, state) == (Role.DECODE, True, "")
    usable = [
        one
        for one, (*_, of) in zip(loads, fleet, strict=True)
        if one.info.role != Role.DECODE and of in ("", "no slot")
    ]
    decodes = [
        one
        for one, (role, *_, of) in zip(loads, fleet, strict=True)
        if role is Role.DECODE and of in ("", "no slot")
    ]
    computing = [
        one
        for one in usable
        if one.info.role == Role.MIXED or any(pairing.allows(one.info, d.info) for d in decodes)
    ]
    assert any(pairing.allows(p.info, chosen.info) for p in loads if p.info.role == Role.PREFILL)
    for one in computing:
        assert one.line_tokens > behind, "never while a worker that could has less before it"
        assert slowness * (line + n) < one.line_tokens + n


@given(LINES, LINES, st.integers(1, 600), st.floats(1, 8))
def test_a_longer_line_never_takes_a_prompt_back_from_decode(line, more, n, slowness):
    rule = HelpRule(100, slowness)
    if rule.prefers(n, line, 0):
        assert rule.prefers(n, line + more, 0)
        assert not HelpRule(0, slowness).prefers(n, line + more, 0), "0 is never"
    if not rule.prefers(n, line, 0):
        assert not rule.prefers(n, line, more), "nor does a longer one there"


def linked(rule=RULE, willing=True):
    workers = LinkedWorkers("tiny", help_rule=rule)
    workers.up("p", 1, worker_info("p", Role.PREFILL))
    workers.up("d", 2, worker_info("d", Role.DECODE, **(WILLING if willing else {})))
    return workers


def lines(workers):
    return {one.info.worker_id: (one.line_tokens, one.prompt_tokens) for one in workers.loads()}


@pytest.mark.parametrize(("rule", "willing"), [(HelpRule(0), True), (RULE, False)])
def test_it_is_off_unless_both_gateway_and_decode_say_otherwise(rule, willing):
    workers = linked(rule, willing)
    pairs = [workers.assign(NEEDS) for _ in range(20)]
    assert {pair.worker_ids for pair in pairs} == {("p", "d")}


def test_lines_are_counted_until_the_first_token_and_prompts_until_the_end():
    workers = linked()
    pairs = [workers.assign(NEEDS) for _ in range(4)]
    assert [pair.worker_ids for pair in pairs] == [("p", "d"), ("p", "d"), ("d",), ("p", "d")]
    assert lines(workers) == {"p": (240, 240), "d": (80, 320)}
    workers.prompt_computed("d", NEEDS)
    assert lines(workers) == {"p": (240, 240), "d": (0, 320)}
    assert workers.assign(NEEDS).worker_ids == ("d",)
    workers.unassign(pairs[3], NEEDS)
    assert lines(workers) == {"p": (160, 160), "d": (80, 320)}
    assert workers.assign(NEEDS).worker_ids == ("p", "d"), "as soon there"
    for worker_id in ("d", "d"):
        workers.release(worker_id, NEEDS)
    workers.prompt_computed("gone", NEEDS)
    assert lines(workers) == {"p": (240, 240), "d": (80, 240)}


def test_choices_of_one_prompt_stay_with_pairs_and_a_line_counts_it_for_each():
    workers = linked()
    pairs = workers.assign_all([NEEDS] * 8)
    assert {pair.worker_ids for pair in pairs} == {("p", "d")}
    assert lines(workers) == {"p": (640, 640), "d": (0, 640)}
    assert {pair.worker_ids for pair in workers.assign_all([NEEDS] * 2)} == {("p", "d")}


def behind_a_line(workers, *more):
    """Link also `more`, each a decode's name and facts, and make prefill's line a long one."""
    for epoch, (name, facts) in enumerate(more, 3):
        workers.up(name, epoch, worker_info(name, Role.DECODE, **facts))
    for _ in range(3):
        pair = workers.assign(NEEDS, frozenset({"d"}))
        assert pair.worker_ids == ("p", more[0][0])
    return workers


def test_who_is_avoided_is_not_asked_for_help():
    workers = behind_a_line(linked(), ("able", {}))
    assert workers.assign(NEEDS, frozenset({"d"})).worker_ids == ("p", "able")
    assert workers.assign(NEEDS).worker_ids == ("d",)
    assert workers.assign(NEEDS, frozenset({"d", "able"})) is None


def test_whose_room_is_kept_is_not_asked_for_help_by_newcomers():
    workers = behind_a_line(linked(), ("able", {}))
    (pair,) = workers.assign_all([NEEDS], kept=frozenset({"d"}))
    assert pair.worker_ids == ("p", "able")
    (pair,) = workers.assign_all([NEEDS], kept=frozenset({"able"}))
    assert pair.worker_ids == ("d",)


@pytest.mark.parametrize("across", [False, True])
def test_a_decode_of_the_next_revision_helps_where_it_may_pair(across):
    workers = LinkedWorkers("tiny", pairing=Pairing(across_revisions=across), help_rule=RULE)
    same = {"model_fingerprint": "same"}
    workers.up("p", 1, worker_info("p", Role.PREFILL, **same))
    behind_a_line(workers, ("able", same), ("d", WILLING | same | {"revision": "next"}))
    assert workers.assign(NEEDS).worker_ids == (("d",) if across else ("p", "able"))


def test_who_is_on_trial_is_tried_by_a_pair_and_no_help():
    now = 0.0
    workers = LinkedWorkers("tiny", clock=lambda: now, help_rule=RULE)
    workers.up("p", 1, worker_info("p", Role.PREFILL))
    for epoch, name in enumerate(("tried", "d"), 2):
        workers.up(name, epoch, worker_info(name, Role.DECODE, **WILLING))
    for _ in range(EJECT_AFTER):
        workers.failed("tried", now, "broken", is_full=False)
    for _ in range(2):
        assert workers.assign(NEEDS).worker_ids == ("p", "d")
    now += 10 * BACKOFF_SECONDS
    given_to = [workers.assign(NEEDS).worker_ids for _ in range(2)]
    assert given_to == [("d",), ("p", "tried")]


# Through the gateway: what workers are told, and what becomes of it.

BODY = {"model": "tiny", "max_tokens": 4, "return_token_ids": True, "ignore_eos": True}
PROMPT = list(range(60, 100))


@pytest.fixture
def gateway(start_gateway):
    running = start_gateway(
        lambda submit: [100, 101, 102, 103],
        info=WILLING,
        decode_prompts=DecodePromptsConfig(behind_tokens=60, slowness=1.5),
    )
    running.link.up("decode-1", Role.DECODE, **WILLING)
    running.link.pause()
    return running


def asked(gateway, count, **more):
    """Ask one after the other, as workers hear of each."""
    clients = []
    for n in range(count):
        clients.append(gateway.ask(BODY | {"prompt": [*PROMPT, 200 + n]} | more))
        gateway.link.wait_told(lambda n=n: len(gateway.link.sent(Submit)) > n)
    return clients


def given(gateway):
    return [(worker, submit.decode is None) for worker, submit in gateway.link.sent(Submit)]


def prompts(gateway, role):
    return gateway.metric("baton_gateway_prompts_total", worker_role=role)


def test_prompts_behind_a_long_line_go_to_decode_without_a_target(gateway):
    clients = asked(gateway, 5)
    told = given(gateway)
    assert told[:2] == [("prefill-0", False)] * 2
    assert {worker for worker, alone in told[2:4]} == {"decode-0", "decode-1"}
    assert [alone for _, alone in told] == [False, False, True, True, False]
    gateway.link.resume()
    assert [client.choices() for client in clients] == [[[100, 101, 102, 103]]] * 5
    assert (prompts(gateway, "prefill"), prompts(gateway, "decode")) == (3, 2)
    assert [one.line_tokens for one in gateway.service.workers.loads()] == [0, 0, 0]


def test_a_first_token_makes_room_in_the_line(gateway):
    clients = asked(gateway, 3)
    (_, first), (_, second), (helping, third) = gateway.link.sent(Submit)
    assert third.decode is None
    gateway.link.publish("prefill-0", RowSpec(first.handle, 0, [100]))
    gateway.link.publish("prefill-0", RowSpec(second.handle, 0, [100]))
    clients += asked_more(gateway, 3)
    assert given(gateway)[3:] == [("prefill-0", False)] * 2 + [(given(gateway)[5][0], True)]
    gateway.link.publish(helping, RowSpec(third.handle, 0, [100, 101, 102, 103], Finish.LENGTH))
    assert clients[2].choices() == [[100, 101, 102, 103]]
    for client, submit in zip(clients, [s for _, s in gateway.link.sent(Submit)], strict=True):
        if submit is not third:
            gateway.link.publish(
                submit.decode.worker_id if submit.decode else given(gateway)[5][0],
                RowSpec(submit.handle, 0, [100, 101, 102, 103], Finish.LENGTH),
            )
            assert client.choices() == [[100, 101, 102, 103]]


def asked_more(gateway, count):
    before, clients = len(gateway.link.sent(Submit)), []
    for n in range(before, before + count):
        clients.append(gateway.ask(BODY | {"prompt": [*PROMPT, 200 + n]}))
        gateway.link.wait_told(lambda n=n: len(gateway.link.sent(Submit)) > n)
    return clients


def test_a_decode_that_dies_of_computing_is_replaced_and_blamed(gateway):
    clients = asked(gateway, 3)
    worker, submit = gateway.link.sent(Submit)[2]
    assert submit.decode is None
    gateway.link.down(worker)
    gateway.link.wait_told(lambda: any(s.attempt for _, s in gateway.link.sent(Submit)))
    again = [(w, s) for w, s in gateway.link.sent(Submit) if s.handle == submit.handle]
    assert worker not in [w for w, s in again if s.attempt]
    gateway.link.resume()
    assert [client.choices() for client in clients] == [[[100, 101, 102, 103]]] * 3
    assert gateway.metric("baton_gateway_retries_total", how="from_start") >= 1


def test_a_decode_that_refuses_is_avoided_by_the_next_attempt(gateway):
    clients = asked(gateway, 2)
    gateway.link.refusals["decode-0"] = ErrorCode.DECODE_FULL
    clients.append(gateway.ask(BODY | {"prompt": [*PROMPT, 300]}))
    gateway.link.wait_told(lambda: len(gateway.link.sent(Submit)) == 4)
    (refused, one), (taken, other) = gateway.link.sent(Submit)[2:]
    assert (refused, one.decode, one.attempt) == ("decode-0", None, 0)
    assert (taken, other.decode, other.attempt) == ("decode-1", None, 1)
    gateway.link.resume()
    assert [client.choices() for client in clients] == [[[100, 101, 102, 103]]] * 3


def test_a_client_that_leaves_ends_it_at_decode(gateway):
    clients = asked(gateway, 2)
    body = json.dumps(BODY | {"prompt": [*PROMPT, 300]}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 60) as leaves:
        leaves.sendall(head.encode() + body)
        gateway.link.wait_until(
            lambda: sum(isinstance(c, Submit) for _, c in gateway.link.commands) == 3
        )
    worker, submit = gateway.link.sent(Submit)[2]
    assert submit.decode is None
    gateway.link.wait_until(lambda: len(gateway.link.sent(Abort)) > 0)
    assert [(w, a.handle) for w, a in gateway.link.sent(Abort)] == [(worker, submit.handle)]
    gateway.link.resume()
    assert [client.choices() for client in clients] == [[[100, 101, 102, 103]]] * 2


def test_who_computed_it_is_told_with_the_steps(gateway):
    clients = asked(gateway, 3, include_step_details=True)
    gateway.link.resume()
    steps = [client.result().json()["choices"][0]["step_details"] for client in clients]
    assert [{one["computed_by"] for one in of} for of in steps] == [
        {"prefill", "decode"},
        {"prefill", "decode"},
        {"decode"},
    ]


def test_who_computes_the_next_attempt_is_told_with_its_steps(gateway):
    """From decode alone to a pair, of which no decode takes prompts."""
    clients = asked(gateway, 3, include_step_details=True)
    worker, submit = gateway.link.sent(Submit)[2]
    assert submit.decode is None
    (other,) = {"decode-0", "decode-1"} - {worker}
    gateway.link.announce(other, worker_info(other, Role.DECODE))
    gateway.link.down(worker)
    again = partial(attempts_of, gateway, submit.handle)
    gateway.link.wait_told(lambda: len(again()) > 1)
    assert again()[1].decode is not None
    gateway.link.resume()
    (choice,) = clients[2].result().json()["choices"]
    assert [one["computed_by"] for one in choice["step_details"]] == ["prefill", "decode", "decode"]
    assert [client.choices() for client in clients] == [[[100, 101, 102, 103]]] * 3


def attempts_of(gateway, handle):
    return [submit for _, submit in gateway.link.sent(Submit) if submit.handle == handle]


# In a simulated clock.

P_SECONDS, D_SECONDS, RATE, TOKENS = 0.251, 0.464, 2.79, 8192


def first_tokens(rule, seconds=2000.0, seed=4):
    """Return the waits for first tokens of prompts that arrive by chance at 1P+1D, and how many
    decode computed: each computes its prompts one after the other.
    """
    workers = LinkedWorkers("tiny", help_rule=rule)
    facts = {"max_model_len": 1 << 20, "max_running": 10_000}
    workers.up("p", 1, worker_info("p", Role.PREFILL, **facts))
    workers.up("d", 2, worker_info("d", Role.DECODE, **(facts | WILLING)))
    needs, rng = Needs(TOKENS, 16, 0), random.Random(seed)
    now, free, waits, n_helped = 0.0, {"p": 0.0, "d": 0.0}, [], 0
    ends: list[tuple[float, str, tuple[str, ...]]] = []
    while now < seconds:
        now += rng.expovariate(RATE)
        while ends and ends[0][0] <= now:
            _, computing, ids = heapq.heappop(ends)
            workers.prompt_computed(computing, needs)
            for worker_id in ids:
                workers.release(worker_id, needs)
        ids = workers.assign(needs).worker_ids
        computing = ids[0]
        free[computing] = max(free[computing], now) + (P_SECONDS if computing == "p" else D_SECONDS)
        heapq.heappush(ends, (free[computing], computing, ids))
        waits.append(free[computing] - now)
        n_helped += computing == "d"
    return sorted(waits), n_helped


def test_first_tokens_come_sooner_by_simulation_and_decode_computes_a_small_part(capsys):
    alone, none = first_tokens(HelpRule())
    helped, some = first_tokens(HelpRule(TOKENS, 2.0))
    told = {
        name: (statistics.median(waits), waits[int(0.99 * len(waits))])
        for name, waits in (("alone", alone), ("helped", helped))
    }
    with capsys.disabled():
        shown = {name: [round(1e3 * one) for one in of] for name, of in told.items()}
        print(f"\nfirst tokens p50, p99 in ms: {shown}, decode computed {some} of {len(helped)}")
    assert none == 0
    assert 0.05 < some / len(helped) < 0.25
    for without, with_help in zip(told["alone"], told["helped"], strict=True):
        assert with_help < without
    assert told["helped"][1] < 0.6 * told["alone"][1]


@pytest.mark.parametrize(("behind", "slowness"), list(product([1, TOKENS, 3 * TOKENS], [1.0, 4.0])))
def test_no_setting_makes_first_tokens_later_in_the_mean_where_decode_is_as_slow_as_told(
    behind, slowness
):
    """D is 1.85 times as slow: told 1, the rule errs; told 4, it helps late."""
    alone, _ = first_tokens(HelpRule(), seconds=500.0)
    helped, _ = first_tokens(HelpRule(behind, slowness), seconds=500.0)
    if slowness >= D_SECONDS / P_SECONDS:
        assert statistics.mean(helped) <= statistics.mean(alone)
