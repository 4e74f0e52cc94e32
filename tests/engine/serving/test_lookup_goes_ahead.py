"""Steps go ahead with lookup's drafts or without them; either way they say the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from baton_worker.engine.backends.device.flight import DeviceFlight
from baton_worker.engine.backends.device.pace import Pace
from baton_worker.engine.backends.device.runner import DeviceRunner
from baton_worker.engine.ngram import NgramIndex, NgramSizes
from baton_worker.engine.options import DraftSources
from baton_worker.records.columns import Finish
from baton_worker.sampling import LogprobParams

ENGINES = ("device",)
LOOKUP = DraftSources(0, NgramSizes(1, 3))
SOURCES = {
    "lookup": {"n_draft": 3, "use_mtp": False, "drafts": LOOKUP},
    "a layer's, then lookup's": {
        "n_draft": 3,
        "use_mtp": True,
        "drafts": DraftSources(1, NgramSizes(1, 3)),
    },
    "two of a layer": {"n_draft": 5, "use_mtp": True, "drafts": DraftSources(2, NgramSizes(1, 3))},
}
Found = list[tuple[tuple[int, ...], tuple[int, ...]]]
Served = tuple[list[Any], list[int], list[int]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step launched, whether it went ahead."""
    noted: list[bool] = []

    def watched(name: str, is_ahead: bool) -> None:
        plain = getattr(DeviceRunner, name)

        def launch(self: Any, *given: Any) -> Any:
            flight = plain(self, *given)
            if flight is not None:
                noted.append(is_ahead)
            return flight

        monkeypatch.setattr(DeviceRunner, name, launch)

    watched("start", False)
    watched("start_ahead", True)
    return noted


@pytest.fixture
def decide(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """Have others decide whether lookup's drafts are worth rows, where there is any to gain."""

    def decided(worth: Callable[[], bool]) -> None:
        def decision(self: Pace, sequences: int, gain: float) -> bool:
            return gain > 0.0 and worth()

        monkeypatch.setattr(Pace, "are_worth_rows", decision)

    return decided


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    """Of each landing and request, what was found, and what the host's index finds in its text."""
    noted: Found = []
    draft = DeviceFlight._draft

    def watched(self: DeviceFlight, kept: Any, *given: Any) -> None:
        draft(self, kept, *given)
        shape = self.program.shape
        for request, _, row in kept if shape.n_found else ():
            if row.finish is Finish.NONE:
                made, drafts = request.drafts[: shape.n_drafts], request.drafts
                index = NgramIndex(NgramSizes(1, 3))
                wanted = index.propose(request.tokens, made, shape.n_found)
                noted.append((drafts[len(made) :], wanted))

    monkeypatch.setattr(DeviceFlight, "_draft", watched)
    return noted


def _served(bench: Any, prompts: Sequence[Any], each_step: Any = None, **more: Any) -> Served:
    """Return what streams said, and their proposed and accepted drafts."""
    keys = [
        bench.submit(
            n,
            prompt,
            max_tokens=12 + 5 * (n % 4),
            seed=n,
            temperature=(0.0, 0.0, 0.8)[n % 3],
            logprobs_k=(-1, 0, 4)[n % 3],
            logprobs=LogprobParams(draft_ids=n % 2 == 0, draft_logprobs=n % 2 == 0),
            **more,
        )
        for n, prompt in enumerate(prompts)
    ]
    while bench.engine.has_work():
        if each_step is not None:
            each_step(bench.engine)
        bench.step()
    streams = [bench.reader[key] for key in keys]
    for stream in streams:
        assert all(a <= p for a, p in zip(stream.accepted, stream.proposed, strict=True))
    said = [(s.tokens, s.logprobs, s.ranks, s.topk, s.finish) for s in streams]
    bench.check_nothing_is_left()
    return said, [sum(s.proposed) for s in streams], [sum(s.accepted) for s in streams]


def test_where_nothing_is_found_every_step_goes_ahead(
    make_bench: Any, make_prompts: Any, launches: list[bool]
) -> None:
    prompts = make_prompts(4, seed=31)
    wanted, *_ = _served(make_bench(), prompts)
    launches.clear()
    never = DraftSources(0, NgramSizes(100, 100))
    bench = make_bench(n_draft=3, use_mtp=False, drafts=never, overlap=True)
    said, proposed, _ = _served(bench, prompts)
    assert said == wanted
    assert not any(proposed)
    assert launches.count(False) == 1, "the prompts"


@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
def test_where_rows_are_not_worth_it_steps_verify_the_layers_drafts_alone(
    make_bench: Any, make_prompts: Any, launches: list[bool], decide: Any, sources: dict[str, Any]
) -> None:
    prompts = make_prompts(4, seed=32)
    wanted, by_layer, _ = _served(
        make_bench(
            n_draft=sources["drafts"].max_model_steps, use_mtp=sources["use_mtp"], overlap=True
        ),
        prompts,
    )
    decide(lambda: False)
    launches.clear()
    said, proposed, _ = _served(make_bench(overlap=True, **sources), prompts)
    assert said == wanted
    assert proposed == by_layer
    assert launches.count(False) == 1, "the prompts"


@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
def test_what_is_found_is_verified_by_steps_that_go_ahead(
    make_bench: Any,
    make_prompts: Any,
    launches: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    sources: dict[str, Any],
) -> None:
    """As many drafts as without steps ahead, where the host looks a step's tokens up first."""
    prompts = [tuple([7, 8, 9, 10] * 6), *make_prompts(3, seed=36)]
    wanted = _served(make_bench(**sources), prompts)
    monkeypatch.setattr(Pace, "are_worth_rows", lambda self, n, gain: True)
    launches.clear()
    assert _served(make_bench(overlap=True, **sources), prompts) == wanted
    assert launches.count(False) == 1, "the prompts"


@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
def test_what_steps_took_is_noted_of_those_that_went_ahead(
    make_bench: Any, make_prompts: Any, monkeypatch: pytest.MonkeyPatch, sources: dict[str, Any]
) -> None:
    """Of each with nothing made for it, behind the one before that carried one of its streams."""
    noted: list[Any] = []
    wanted: list[Any] = []
    flights: list[Any] = []
    landed, made = DeviceFlight.landed, DeviceRunner._flight
    monkeypatch.setattr(Pace, "note", lambda self, *given: noted.append(given))
    turn = itertools.count()
    monkeypatch.setattr(
        Pace, "are_worth_rows", lambda self, n, gain: gain > 0.0 and next(turn) % 4 < 3
    )

    def noted_flight(self: Any, *given: Any, **named: Any) -> Any:
        flights.append(made(self, *given, **named))
        return flights[-1]

    def noted_landing(self: Any, is_live: Any) -> Any:
        snapshot, shape = landed(self, is_live), self.program.shape
        before = flights[flights.index(self) - 1] if flights.index(self) else None
        was_there = {s.request for s in before.carried.sampled} if before else set()
        goes_on = any(s.verified and s.request in was_there for s in self.carried.sampled)
        is_told = self.carried.is_ahead and not shape.chunks and not self.launch.is_first
        if goes_on and is_told and snapshot.rows:
            each = sum(row.n_tokens for row in snapshot.rows) / len(snapshot.rows)
            seconds = self.came.seconds_since(before.came)
            wanted.append((shape.n_sampled, shape.q_len > shape.n_drafts + 1, seconds, each))
        return snapshot

    monkeypatch.setattr(DeviceRunner, "_flight", noted_flight)
    monkeypatch.setattr(DeviceFlight, "landed", noted_landing)
    bench = make_bench(overlap=True, prefill_tokens=32, **sources)
    for number, prompt in enumerate([(7, 8, 9, 10) * 6, *make_prompts(3, seed=33)]):
        bench.submit(number, prompt, max_tokens=30 + 30 * number, ignore_eos=True)
    bench.drain()
    assert noted == wanted
    assert {feeds_found for _, feeds_found, *_ in noted} == {False, True}


def test_a_step_of_others_than_the_one_before_has_rested(make_bench: Any) -> None:
    """As of a handoff that comes to an engine at rest, with drafts of lookup."""
    bench = make_bench(overlap=True, **SOURCES["lookup"])
    runner = bench.engine._parts.runner
    for number in range(2):
        bench.submit(number, (7, 8, 9, 10) * 6, max_tokens=6, ignore_eos=True)
    bench.step()
    newest = runner._newest
    own, others = newest.carried.sampled[:1], newest.carried.sampled[1:]
    runner._newest = SimpleNamespace(carried=newest.carried._replace(sampled=others), came="then")
    assert runner._end_of_newest(newest.carried._replace(sampled=own)) is None
    assert runner._end_of_newest(newest.carried) == "then"
    runner._newest = newest
    bench.drain()


def test_without_lookup_nothing_is_noted(
    make_bench: Any, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Any] = []
    monkeypatch.setattr(Pace, "note", lambda self, *given: noted.append(given))
    _served(make_bench(n_draft=2, overlap=True), make_prompts(3, seed=34))
    assert not noted


def test_of_steps_that_did_not_go_ahead_nothing_is_noted(
    make_bench: Any, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device rested before each of them, for as long as the host took."""
    noted: list[Any] = []
    monkeypatch.setattr(Pace, "note", lambda self, *given: noted.append(given))
    bench = make_bench(**SOURCES["lookup"])
    _served(bench, make_prompts(3, seed=38))
    assert bench.engine._parts.runner.launches.captured, "who was first is not noted either"
    assert not noted


@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
def test_what_rows_may_bring_is_the_mean_of_all(
    make_bench: Any, make_prompts: Any, monkeypatch: pytest.MonkeyPatch, sources: dict[str, Any]
) -> None:
    asked: list[float] = []
    wanted: list[float] = []
    feeds = DeviceRunner._feeds_found

    def noted(self: Any, before: Any, decode: Any) -> bool:
        gains = [r.lookup.gain_tokens() for r in decode if r.lookup]
        wanted.append(sum(gains) / len(decode))
        return feeds(self, before, decode)

    def decision(self: Pace, sequences: int, gain: float) -> bool:
        asked.append(gain)
        return gain > 0.05

    monkeypatch.setattr(DeviceRunner, "_feeds_found", noted)
    monkeypatch.setattr(Pace, "are_worth_rows", decision)
    _served(make_bench(overlap=True, **sources), [(7, 8, 9, 10) * 6, *make_prompts(3, seed=35)])
    assert asked == pytest.approx(wanted)
    assert max(asked) > 0.05 > min(asked)


def test_a_step_ahead_of_accepted_drafts_has_tables_for_all_of_them(
    make_bench: Any, decide: Any
) -> None:
    """Tables are 8 blocks wide, or 16: what is accepted may be what needs the ninth."""
    options = {"max_running": 1, "max_model_len": 256}
    turn = itertools.count()
    for length in range(110, 122, 2):
        prompt = ((7, 8, 9, 10) * 40)[:length]
        wanted, *_ = _served(make_bench(**options), [prompt] * 4)
        decide(lambda: bool(next(turn) % 2))
        said, *_ = _served(make_bench(overlap=True, **SOURCES["lookup"], **options), [prompt] * 4)
        assert said == wanted, length


@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
def test_tokens_of_steps_that_look_nothing_up_are_found_later(
    make_bench: Any, make_prompts: Any, found: Found, sources: dict[str, Any]
) -> None:
    """K is 0 for a while, or all of it the layer's: no kernel adds what is emitted meanwhile."""
    bench = make_bench(overlap=True, **sources)
    for number, prompt in enumerate([(7, 8, 9, 10) * 6, *make_prompts(3, seed=37)]):
        bench.submit(number, prompt, max_tokens=150, ignore_eos=True)
    most = sources["n_draft"]
    for count in (most, 0, most, sources["drafts"].max_model_steps, most):
        bench.engine.set_num_speculative_tokens(count)
        for _ in range(5):
            bench.step()
    bench.drain()
    assert [drafts for drafts, _ in found] == [wanted for _, wanted in found]
    assert any(drafts for drafts, _ in found)


def _lives(make_bench: Any, make_prompts: Any, decide: Any, sources: Any, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [
        prompt * rng.choice((1, 1, 3)) for prompt in make_prompts(6, seed=100 + seed, longest=18)
    ]
    limits = {"max_running": rng.choice((2, 4, 32)), "prefill_tokens": rng.choice((16, 512))}
    wanted, *_ = _served(make_bench(**limits), prompts)
    decide(lambda: rng.random() < 0.5)
    changes = rng.random() < 0.3

    def change(engine: Any) -> None:
        if changes and rng.random() < 0.2:
            engine.set_num_speculative_tokens(rng.randrange(6))

    bench = make_bench(overlap=True, **sources, **limits)
    said, *_ = _served(bench, prompts, change)
    assert said == wanted


@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
def test_any_turns_of_both_say_the_same(
    make_bench: Any, make_prompts: Any, decide: Any, found: Found, sources: dict[str, Any]
) -> None:
    _lives(make_bench, make_prompts, decide, sources, seed=0)
    assert [drafts for drafts, _ in found] == [wanted for _, wanted in found]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 7))
@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
def test_many_turns_of_both_say_the_same(
    make_bench: Any,
    make_prompts: Any,
    decide: Any,
    found: Found,
    sources: dict[str, Any],
    seed: int,
) -> None:
    _lives(make_bench, make_prompts, decide, sources, seed)
    assert [drafts for drafts, _ in found] == [wanted for _, wanted in found]
