"""Whatever fails in whatever order, a request that is tried again stands somewhere or has ended."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from baton_testing.retry_books import Books
from baton_worker.gateway.serving.failures import MAX_HARMS, TREATMENTS, Loss
from baton_worker.gateway.serving.helping import NO_HELP, HelpRule
from baton_worker.messages import DECODE_PROMPTS, FEATURES, Reserve, Submit

WAITING, ENDED = "baton_gateway_waiting_retries", "baton_gateway_requests_total"


class Retries(RuleBasedStateMachine):
    """Whatever fails in whatever order, a request stands at linked workers, waits, or has ended."""

    facts: ClassVar[dict[str, object]] = {"max_running": 2, "max_waiting": 0}
    help_rule = NO_HELP
    first_ones: tuple[str, ...] = ()
    names = st.sampled_from(["p0", "p1", "d0", "d1", "m0", "m1"])
    places = st.integers(0, 20)

    @initialize(max_retries=st.integers(0, 3), max_wait=st.sampled_from([0.0, 30.0]))
    def begin(self, max_retries, max_wait):
        self.max_retries = max_retries
        self.gateway = Books(self.help_rule, max_retries=max_retries, max_wait_seconds=max_wait)
        self.generations = []
        self.gateway.up(*self.first_ones, **self.facts)
        self.ask_first()

    def ask_first(self):
        """Nothing yet."""

    @rule(name=names)
    def up(self, name):
        self.bring_up(name)

    def bring_up(self, name):
        if name not in self.gateway.wire.there and self.gateway.workers.epoch(name) is None:
            self.gateway.up(name, **self.facts)

    @rule(name=names, cause=st.sampled_from([Loss.DIED, Loss.LEFT]))
    def down(self, name, cause):
        if self.gateway.workers.epoch(name) is not None:
            self.gateway.down(name, cause)

    @rule(name=names)
    def the_link_loses(self, name):
        self.gateway.wire.there.discard(name)

    @rule(n=st.integers(1, 3), token=st.integers(1, 7))
    def ask(self, n, token):
        self.ask_one(n, token)

    def ask_one(self, n, token):
        generation = self.gateway.ask(n, (token,))
        if generation is not None:
            self.generations.append(generation)

    @rule(at=places, cause=st.sampled_from(list(TREATMENTS)), is_last=st.booleans())
    def fail(self, at, cause, is_last):
        begun = [live for live in self.gateway.requests.live() if live.holders]
        if begun:
            live = begun[at % len(begun)]
            self.gateway.fail(live, cause, live.holders[-1 if is_last else 0])

    @rule(at=places)
    def go_well(self, at):
        begun = [live for live in self.gateway.requests.live() if live.holders]
        if begun:
            live = begun[at % len(begun)]
            self.gateway.tell(live, 3)
            self.gateway.retrier.worked(live, live.holders[0], is_whole=False)

    @rule(at=places, is_well=st.booleans())
    def end(self, at, is_well):
        open_ones = [one for one in self.generations if one.live]
        if open_ones:
            one = open_ones[at % len(open_ones)]
            live = next(iter(one.live.values()))
            if is_well and live.holders:
                self.gateway.requests.finish(live, live.holders[0])
            else:
                self.gateway.leave(one)

    @rule(seconds=st.floats(0, 40))
    def pass_time(self, seconds):
        self.gateway.now += seconds
        self.gateway.retrier.expire(self.gateway.now)

    @rule()
    def serve(self):
        while not self.gateway.retrier.serve():
            pass

    @invariant()
    def every_request_is_somewhere_and_the_accounts_agree(self):
        requests, waiting, expected = self.gateway.requests.live(), 0, {}
        for live in requests:
            assert live.key.attempt <= self.max_retries
            assert len(live.generation.harmed) < MAX_HARMS
            waiting += not live.holders
            assert live.sources == live.holders
            for worker_id in live.sources:
                expected[worker_id] = expected.get(worker_id, 0) + 1
        assert self.gateway.taken() == expected
        assert len(self.gateway.retrier) >= waiting
        told = [(submit.handle, submit.attempt) for _, submit in self.gateway.wire.of(Submit)]
        assert len(told) == len(set(told)), "no attempt is begun twice"

    def teardown(self):
        gateway = self.gateway
        for load in gateway.workers.loads():
            gateway.down(load.info.worker_id)
        gateway.now += 1000
        assert gateway.metric(WAITING) == len(gateway.retrier)
        gateway.retrier.expire(gateway.now)
        assert gateway.metric(WAITING) == len(gateway.retrier) == 0
        assert gateway.requests.is_empty
        samples = [sample for metric in gateway.registry.collect() for sample in metric.samples]
        ended = sum(sample.value for sample in samples if sample.name == ENDED)
        assert ended == len(self.generations), "each ends once"
        for _, reserve in gateway.wire.of(Reserve):
            assert reserve.deadline_seconds == 60.0


def test_whatever_fails_each_request_goes_on_waits_or_has_ended_once():
    run_state_machine_as_test(Retries, settings=settings(max_examples=40, stateful_step_count=30))


class Helped(Retries):
    """The same where decode computes prompts alone; lines are of those whose first token is due."""

    facts: ClassVar[dict[str, object]] = {
        "max_running": 4,
        "max_waiting": 2,
        "features": (*FEATURES, DECODE_PROMPTS),
    }
    help_rule = HelpRule(behind_tokens=1, slowness=1.0)
    first_ones = ("p0", "d0", "d1")

    def ask_first(self):
        """As many as it takes for decode to be given one, whatever is drawn then."""
        for _ in range(3):
            self.ask_one(1, 1)
        loads = {load.info.worker_id: load for load in self.gateway.workers.loads()}
        assert loads["d0"].line_tokens + loads["d1"].line_tokens > 0

    @rule(name=st.sampled_from(first_ones))
    def up(self, name):
        self.bring_up(name)

    @rule(at=Retries.places)
    def tell_first(self, at):
        due = [live for live in self.gateway.requests.live() if live.computing]
        if due:
            live = due[at % len(due)]
            self.gateway.tell(live, 3)
            self.gateway.requests.prompt_computed(live)

    @invariant()
    def lines_agree(self):
        lines, prompts = Counter(), Counter()
        for live in self.gateway.requests.live():
            assert bool(live.holders) or not live.computing, "who waits stands in no line"
            lines[live.computing] += live.needs.prompt_tokens
            prompts.update(dict.fromkeys(live.sources, live.needs.prompt_tokens))
        for load in self.gateway.workers.loads():
            name = load.info.worker_id
            assert (load.line_tokens, load.prompt_tokens) == (lines[name], prompts[name])


def test_whatever_fails_lines_are_what_has_no_first_token_yet():
    run_state_machine_as_test(Helped, settings=settings(max_examples=40, stateful_step_count=40))
