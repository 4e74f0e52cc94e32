"""With overlap a device is given the next decode step before anybody has seen this one's tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton_worker.engine.backends.device.flight import DeviceFlight
from baton_worker.engine.backends.device.inputs import Inputs, fill_ahead
from baton_worker.engine.backends.device.lineup import LaneInputs, Lineup
from baton_worker.engine.backends.device.pace import Pace
from baton_worker.engine.backends.device.program import Program, Programs, fed_next
from baton_worker.engine.backends.device.runner import DeviceRunner
from baton_worker.engine.backends.device.seam import NextStep
from baton_worker.engine.backends.device.shapes import StepShape
from baton_worker.engine.ngram import NgramSizes
from baton_worker.engine.options import DraftSources
from baton_worker.records.columns import Finish
from baton_worker.sampling import LogprobParams

ENGINES = ("device",)
LOOKUP = {"n_draft": 3, "use_mtp": False, "drafts": DraftSources(0, NgramSizes(1, 3))}


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each launch, whether it was behind a step under way."""
    launches: list[bool] = []
    start, start_ahead = DeviceRunner.start, DeviceRunner.start_ahead

    def noted_start(self: Any, *given: Any) -> Any:
        launches.append(False)
        return start(self, *given)

    def noted_ahead(self: Any, *given: Any) -> Any:
        flight = start_ahead(self, *given)
        if flight is not None:
            launches.append(True)
        return flight

    monkeypatch.setattr(DeviceRunner, "start", noted_start)
    monkeypatch.setattr(DeviceRunner, "start_ahead", noted_ahead)
    return launches


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": ((5, 3.0),), "bad_words": ((9,),)},
)


def _served(bench: Any, prompts: Any, **more: Any) -> Any:
    keys = [
        bench.submit(
            n,
            prompt,
            max_tokens=10 + 3 * n,
            seed=n,
            logprobs_k=(-1, 0, 4)[n % 3],
            logprobs=LogprobParams(draft_logprobs=n % 2 == 0, processed=n % 4 == 1),
            **SAMPLINGS[n % 4] | more,
        )
        for n, prompt in enumerate(prompts)
    ]
    bench.drain()
    streams = [bench.reader[key] for key in keys]
    for stream in streams:
        assert all(a <= p for a, p in zip(stream.accepted, stream.proposed, strict=True))
    return [(s.tokens, s.logprobs, s.ranks, s.topk, s.finish) for s in streams]


@pytest.mark.slow
@pytest.mark.parametrize("n_draft", [0, 1, 3, 5])
def test_steady_decoding_waits_for_nobody_and_says_the_same(
    make_bench: Any, make_prompts: Any, ahead: list[bool], n_draft: int
) -> None:
    prompts = make_prompts(8, seed=90)
    wanted = _served(make_bench(n_draft=n_draft), prompts)
    assert not any(ahead)
    ahead.clear()
    bench = make_bench(n_draft=n_draft, overlap=True)
    assert _served(bench, prompts) == wanted
    assert ahead.count(False) == 1, "the prompts"
    assert not ahead[0]
    bench.check_nothing_is_left()


def test_a_launch_that_compiles_or_captures_may_last_as_long_as_a_first_step(
    make_bench: Any, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names its requests, too, and takes nothing from how long the step itself may last."""
    bench = make_bench(n_draft=1, overlap=True, stuck_seconds=10.0, first_step_seconds=120.0)
    key = bench.submit(1, make_prompts(1)[0], temperature=0.0, max_tokens=20)
    seen: list[tuple[str, Any]] = []

    def watched(owner: Any, name: str, what: str) -> None:
        plain = getattr(owner, name)

        def noted(self: Any, *given: Any) -> Any:
            seen.append((what, bench.engine.progress.current))
            return plain(self, *given)

        monkeypatch.setattr(owner, name, noted)

    watched(DeviceRunner, "start", "launch of a step of")
    watched(DeviceRunner, "start_ahead", "launch of a step of")
    watched(DeviceFlight, "landed", "step of")
    bench.drain()
    first: set[str] = set()
    for what, activity in seen[:-1]:  # the last one was launched for who has ended
        assert activity.kind.startswith(what)
        assert activity.keys == (key,)
        assert activity.limit_seconds == (10.0 if activity.kind in first else 120.0)
        first.add(activity.kind)
    assert len(first) == 4, "the prompt and the decoding steps, launched and waited for"


def test_a_launch_that_could_not_go_ahead_takes_no_time_from_the_first_one(
    make_bench: Any, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(n_draft=1, overlap=True, stuck_seconds=10.0, first_step_seconds=120.0)
    prompt = make_prompts(1, seed=97, longest=40)[0]
    bench.submit(1, prompt, temperature=0.0, max_tokens=20, bad_words=((7, 8),))
    limits: dict[str, float] = {}
    start = DeviceRunner.start

    def noted(self: Any, *given: Any) -> Any:
        activity = bench.engine.progress.current
        limits.setdefault(activity.kind, activity.limit_seconds)
        return start(self, *given)

    monkeypatch.setattr(DeviceRunner, "start", noted)
    bench.drain()
    assert set(limits.values()) == {120.0}
    assert len(limits) == 2, "the prompt, and the decoding steps behind an attempt to go ahead"


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [{"n_draft": 0}, {"n_draft": 2}, LOOKUP], ids=str)
def test_what_a_lane_holds_is_what_would_be_written_anew(
    make_bench: Any, make_prompts: Any, monkeypatch: pytest.MonkeyPatch, drafts: dict[str, Any]
) -> None:
    """While requests grow, are preempted and come back, end, and others come."""
    bench = make_bench(overlap=True, n_blocks=26, max_running=7, prefix_caching=True, **drafts)
    runner = bench.engine._parts.runner
    fill, told_by_the_device = LaneInputs.fill, fed_next(NextStep(*NextStep._fields))
    n_written = [0, 0]

    def checked(self: Any, lane: int, program: Program, lineup: Lineup) -> None:
        before = self._written[lane]
        n_written[before is not None and before.lineup is lineup] += 1
        fill(self, lane, program, lineup)
        held = program.inputs[lane]
        anew = Inputs(*(np.full_like(array, 77) for array in held))
        rules = runner._rules(lineup.sampled, program.shape.n_found)
        fill_ahead(anew, lineup.sampled, lineup.at, program.shape, rules)
        ends = {"bias": held.bias_starts[-1], "bias_ids": held.bias_starts[-1]}
        ends["masked"] = held.mask_starts[-1]
        for name in set(Inputs._fields) - told_by_the_device.keys():
            pair = getattr(held, name), getattr(anew, name)
            np.testing.assert_array_equal(*(array[: ends.get(name)] for array in pair), name)

    monkeypatch.setattr(LaneInputs, "fill", checked)
    monkeypatch.setattr(Pace, "are_worth_rows", lambda self, n, gain: gain > 0.0)
    prompts, n_preempted, n_steps = make_prompts(14, seed=94), 0, 0
    keys: list[Any] = []
    while bench.engine.has_work() or len(keys) < len(prompts):
        if n_steps % 9 == 0 and len(keys) < len(prompts):
            for n in range(len(keys), min(len(keys) + 4, len(prompts))):
                wanted = {"max_tokens": 40 + 5 * n, "seed": n, "logprobs_k": (-1, 0, 4)[n % 3]}
                keys.append(bench.submit(n + 1, prompts[n], **wanted, **SAMPLINGS[n % 3]))
        if n_steps == 50:
            bench.engine.abort(keys[5])
        n_preempted += bench.step().stats.preempted
        n_steps += 1
    assert n_preempted
    if drafts is not LOOKUP:
        assert n_written[True] > n_written[False], "mostly it holds nearly all"
    assert min(n_written)
    bench.check_nothing_is_left()


def test_one_graph_serves_plain_steps_and_those_behind_others(
    make_bench: Any, make_prompts: Any
) -> None:
    bench = make_bench(n_draft=2, overlap=True)
    bench.submit(1, make_prompts(1)[0], temperature=0.0, max_tokens=60)
    bench.drain()
    assert bench.engine._parts.runner.launches.captured <= 2, "one more where tables grow wider"


@pytest.mark.slow
def test_a_late_stop_costs_a_row_and_no_other_is_moved(
    make_bench: Any, make_prompts: Any, ahead: list[bool]
) -> None:
    """Whoever ends leaves a hole in the step that was launched meanwhile, and in those behind."""
    prompts = make_prompts(6, seed=91)
    wanted = _served(make_bench(n_draft=2), prompts)
    ahead.clear()
    bench = make_bench(n_draft=2, overlap=True)
    assert _served(bench, prompts) == wanted
    assert [stream[-1] for stream in wanted] == [Finish.LENGTH] * 6
    assert all(ahead[1:])


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"n_draft": 2}, {"bad_words": ((7, 8),)}),
        ({"n_draft": 2}, {"min_tokens": 6, "stop_token_ids": (3,)}),
    ],
    ids=["bad words", "min tokens"],
)
def test_what_hangs_on_the_tokens_waits_for_them(
    make_bench: Any,
    make_prompts: Any,
    ahead: list[bool],
    options: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    prompts = make_prompts(4, seed=92)
    wanted = _served(make_bench(**options), prompts, **sampling)
    bench = make_bench(**options, overlap=True)
    ahead.clear()
    assert _served(bench, prompts, **sampling) == wanted
    assert any(ahead) == ("min_tokens" in sampling), "behind enough tokens it need not wait"


def test_another_number_of_drafts_waits_for_the_step_under_way(
    make_bench: Any, make_prompts: Any, ahead: list[bool]
) -> None:
    prompts = make_prompts(4, seed=93)
    wanted = _served(make_bench(n_draft=0, use_mtp=True, drafts=DraftSources()), prompts)
    bench = make_bench(n_draft=4, overlap=True)
    keys = [
        bench.submit(
            n,
            prompt,
            max_tokens=10 + 3 * n,
            seed=n,
            logprobs_k=(-1, 0, 4)[n % 3],
            logprobs=LogprobParams(processed=n % 4 == 1),
            **SAMPLINGS[n % 4],
        )
        for n, prompt in enumerate(prompts)
    ]
    number = 0
    while bench.engine.has_work():
        bench.engine.set_num_speculative_tokens((4, 4, 4, 1, 1, 1, 0, 0, 5, 5)[number % 10])
        bench.step()
        number += 1
    found = [bench.reader[key] for key in keys]
    assert [(s.tokens, s.logprobs, s.ranks, s.topk, s.finish) for s in found] == wanted
    assert set(ahead) == {False, True}


def test_a_new_request_joins_behind_the_step_under_way(
    make_bench: Any, make_prompts: Any, ahead: list[bool]
) -> None:
    prompts = make_prompts(5, seed=94)
    alone = [_served(make_bench(n_draft=1), [prompt])[0][0] for prompt in prompts]
    bench = make_bench(n_draft=1, overlap=True)
    ahead.clear()
    keys = []
    for number, prompt in enumerate(prompts):
        keys.append(bench.submit(number, prompt, temperature=0.0, max_tokens=10))
        for _ in range(4):
            bench.step()
    bench.drain()
    assert [bench.reader[key].tokens for key in keys] == alone
    assert ahead.count(False) == len(prompts), "each prompt is one step that waits"


def test_who_is_held_back_keeps_what_the_step_under_way_gave_him(
    make_bench: Any, make_prompts: Any
) -> None:
    prompts = make_prompts(3, seed=95)
    alone = [_served(make_bench(n_draft=2), [prompt])[0][0] for prompt in prompts]
    bench = make_bench(n_draft=2, overlap=True)
    keys = [bench.submit(n, p, temperature=0.0, max_tokens=10) for n, p in enumerate(prompts)]
    for number in range(30):
        bench.engine.set_paused(frozenset({1}) if number % 3 == 2 else frozenset())
        if bench.engine.has_work():
            bench.step()
    bench.engine.set_paused(frozenset())
    bench.drain()
    assert [bench.reader[key].tokens for key in keys] == alone
    bench.check_nothing_is_left()


def test_who_is_left_of_many_does_not_pay_for_their_places(
    make_bench: Any, make_prompts: Any, ahead: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int] = []
    of = Programs.of

    def noted(self: Programs, shape: StepShape) -> Program:
        places.append(shape.n_sampled)
        return of(self, shape)

    monkeypatch.setattr(Programs, "of", noted)
    bench = make_bench(overlap=True)
    prompts = make_prompts(32, seed=96, longest=4)
    keys = [
        bench.submit(n, prompt, temperature=0.0, max_tokens=30 if n == 7 else 2 + n % 3)
        for n, prompt in enumerate(prompts)
    ]
    bench.drain()
    assert places[0] == 32
    assert places[-20:] == [1] * 20
    assert ahead.count(False) <= 4, "the prompts, and as often as the places were halved"
    alone = make_bench()
    wanted = alone.submit(7, prompts[7], temperature=0.0, max_tokens=30)
    alone.drain()
    assert bench.reader[keys[7]].tokens == alone.reader[wanted].tokens


def test_a_key_may_come_again_while_its_last_row_is_still_under_way(make_bench: Any) -> None:
    """A request that ended is in the step launched meanwhile; who has its key next is not."""
    bench = make_bench(n_draft=2, overlap=True)
    first = bench.submit(1, (5, 6, 7), temperature=0.0, max_tokens=4)
    bench.submit(2, (5, 6, 7, 8), temperature=0.0, max_tokens=30)
    while bench.reader[first].finish is Finish.NONE:
        bench.step()
    bench.reader.streams.pop(first)
    bench.reader.ended.clear()
    again = bench.submit(1, (5, 6, 7), temperature=0.0, max_tokens=4)
    assert bench.engine.abort(again)
    bench.drain()
    assert bench.reader[again].finish is Finish.ABORT
    bench.check_nothing_is_left()


@pytest.mark.parametrize("sampling", [{"bad_words": ((7, 8),)}, {"min_tokens": 20}])
def test_who_comes_during_a_wait_is_in_the_next_step_where_none_goes_ahead(
    make_bench: Any, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    landings: list[DeviceFlight] = []
    landed = DeviceFlight.landed

    def noted(self: DeviceFlight, *given: Any) -> Any:
        landings.append(self)
        return landed(self, *given)

    monkeypatch.setattr(DeviceFlight, "landed", noted)
    bench = make_bench(n_draft=2, overlap=True)
    bench.submit(1, (5, 6, 7), temperature=0.0, max_tokens=40, **sampling)
    bench.step()
    second: list[Any] = []
    landings.clear()

    def came() -> None:
        if landings and not second:
            second.append(bench.submit(2, (6, 7), temperature=0.0, max_tokens=9))

    bench.reader.read(bench.engine.step(came))
    bench.step()
    assert bench.reader[second[0]].tokens


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_who_fits_by_sharing_blocks_of_who_decodes_is_let_in_at_once(
    make_bench: Any, overlap: bool
) -> None:
    """Steps behind steps name no blocks, so that nobody might ever find those that he needs."""
    bench = make_bench(
        overlap=overlap, block_size=8, n_blocks=16, max_model_len=128, prefill_tokens=128
    )
    prompt = tuple(range(5, 77))
    first = bench.submit(1, prompt, temperature=0.0, max_tokens=30)
    bench.step()
    second = bench.submit(2, prompt, temperature=0.0, max_tokens=9)
    for _ in range(4):
        bench.step()
    assert bench.reader[second].tokens
    assert bench.reader[first].finish is Finish.NONE


@pytest.mark.parametrize("n_draft", [0, 5])
def test_blocks_of_a_step_that_could_not_go_ahead_cost_nobody_a_preemption(
    make_bench: Any, make_prompts: Any, ahead: list[bool], n_draft: int
) -> None:
    """They were taken before the device said so, and stay with whoever needs them next."""
    preempted, n_steps = [], []
    for overlap in (False, True):
        bench = make_bench(
            n_draft=n_draft, overlap=overlap, max_model_len=64, block_size=8, n_blocks=10
        )
        for n, prompt in enumerate(make_prompts(6, seed=94)):
            bench.submit(n, prompt[:9], max_tokens=20, bad_words=((7, 8),), ignore_eos=True)
        stats = []
        while bench.engine.has_work():
            result = bench.engine.step()
            bench.reader.read(result)
            stats.append(result.stats)
            bench.engine.check_integrity()
        preempted.append(sum(s.preempted for s in stats))
        n_steps.append(len(stats))
    assert not any(ahead)
    assert 0 < preempted[1] <= preempted[0]
    assert n_steps[0] == n_steps[1]
