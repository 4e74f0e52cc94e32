"""Steps on a device: a plan in, a flight out.

Owns what a step is laid out as, and when one may be launched behind another whose results nobody
has seen: rows stay in their places then, and who is gone leaves his empty. Knows neither queues nor
records.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

import baton_ops
from baton_worker.engine.backends.device.flight import Carried, DeviceFlight, ScoredPrompts
from baton_worker.engine.backends.device.following import EngineFollowers
from baton_worker.engine.backends.device.inputs import fill, fill_ahead
from baton_worker.engine.backends.device.lineup import LaneInputs, Lineup, places
from baton_worker.engine.backends.device.pace import Pace
from baton_worker.engine.backends.device.program import (
    N_LANES,
    Launch,
    Launches,
    Program,
)
from baton_worker.engine.backends.device.rules import StepRules, choice_of, is_known_ahead
from baton_worker.engine.backends.device.seam import Event
from baton_worker.engine.backends.device.shapes import (
    Choice,
    StepShape,
    rules_bucket,
    sequence_bucket,
    width_bucket,
)
from baton_worker.engine.backends.device.slots import Slots
from baton_worker.engine.backends.device.steps import Steps
from baton_worker.engine.options import EngineOptions
from baton_worker.engine.output.snapshot import StepSnapshot
from baton_worker.engine.scheduling.batch import Batch, FedSequence, assemble
from baton_worker.engine.scheduling.plans import PrefillChunk, StepPlan
from baton_worker.engine.scheduling.requests import RequestState
from baton_worker.engine.step.failures import Failures
from baton_worker.engine.step.in_flight import Mark
from baton_worker.engine.step.prompt_logprobs import score_prompts

_FEW_PLACES = 8
"""Among so few it is not worth a wait to leave out who is gone."""


class DeviceRunner:
    """See `step.in_flight.StepRunner`.

    Args:
        options: `use_mtp` only if the weights have an MTP layer.
        followers: the other ranks' devices, which repeat what this one's are told.
    """

    def __init__(
        self, steps: Steps, options: EngineOptions, followers: EngineFollowers | None = None
    ) -> None:
        self._options = options
        self._steps = steps
        self._followers = followers
        # Not by methods of its own: a closed engine's memory would wait for the collector.
        self._counted = Slots(options.max_running, partial(_fill_counts, steps, followers))
        self._remembered = Slots(options.max_running, partial(_fill_history, steps, followers))
        self._programs = steps.programs
        self._lane = 0
        self._ahead = LaneInputs()
        self._pace = Pace()
        self._newest: DeviceFlight | None = None

    @property
    def launches(self) -> Launches:
        """How its steps got onto the device."""
        return self._programs.launches

    def run(self, plan: StepPlan, n_draft: int, mark: Mark = lambda n_layers: None) -> StepSnapshot:
        """See `StepRunner.run`; it has landed before anybody could be told of layers."""
        return self.start(plan, n_draft).landed(lambda request: True)

    def start(self, plan: StepPlan, n_draft: int) -> DeviceFlight:
        """See `AheadRunner.start`: lay out, upload, launch, score prompt tokens, download."""
        batch = assemble(plan.decode, plan.prefill)
        assert len(batch.tokens) <= plan.most_tokens, "the plan's bound holds (R29)"
        requests = tuple(s.request for s in batch.sampled)
        rules = self._rules(batch.sampled, self._n_by_lookup(n_draft))
        program, lane = self._programs.of(self._shape(batch, rules, n_draft)), self._next_lane()
        self._ahead.forget()
        fill(program.inputs[lane], batch, program.shape, rules)
        launch = self._launch(program, lane, is_marked=bool(plan.told_by_layers))
        at, prompts = np.arange(len(batch.sampled)), self._score_prompts(batch)
        carried = Carried(requests, batch.sampled, at, batch.chunks, prompts)
        return self._flight(program, lane, launch, carried, n_draft)

    def start_ahead(
        self, behind: DeviceFlight, plan: StepPlan, n_draft: int
    ) -> DeviceFlight | None:
        """See `AheadRunner.start_ahead`.

        What a prompt feeds is known; but its logprobs are taken while its step is waited for. Of
        who decodes the device knows the newest token and its drafts; and what it may not choose,
        when that does not hang on the tokens themselves. Lookup's drafts are fed where that is
        worth their rows. Where half of many places or more are empty, a step that waits
        lays the others out anew: else the last request of a burst would be computed among all
        places that the burst had.
        """
        if any(map(_is_scored, plan.prefill)):
            return None
        if not plan.decode:
            return self.start(plan, n_draft)
        before = behind.program.shape
        if self._options.n_open_tokens > 1:  # what is fed before the newest token, no kernel tells
            return None
        made = self._n_by_model(n_draft), self._n_by_lookup(n_draft)
        if (before.n_drafts, before.n_found) != made:
            return None
        is_known = behind.lineup is not None and behind.lineup.decode == plan.decode
        if not (is_known or all(map(is_known_ahead, plan.decode))):
            return None
        if self._is_mostly_empty(before.n_sampled, len(plan.decode)):
            return None
        if plan.prefill:
            return self._start_mixed(behind, plan, n_draft)
        shape, lineup = self._shape_ahead(behind, plan.decode), behind.lineup
        if lineup is None or lineup.decode != plan.decode or lineup.q_len != shape.q_len:
            lineup = self._lineup(behind, plan, shape.q_len)
            shape = self._chosen_shape(shape, lineup.sampled, lineup.rules)
        n_fed = len(plan.decode) * shape.q_len
        assert n_fed <= plan.most_tokens, "the plan's bound holds (R29)"
        program, lane = self._programs.of(shape), self._next_lane()
        self._ahead.fill(lane, program, lineup)
        launch = self._launch(program, lane, is_ahead=True)
        carried = Carried(lineup.order, lineup.sampled, lineup.at, is_ahead=True)
        return self._flight(program, lane, launch, carried, n_draft, lineup)

    def _start_mixed(
        self, behind: DeviceFlight, plan: StepPlan, n_draft: int
    ) -> DeviceFlight | None:
        """Launch chunks beside who decodes in places that the device knows; None: too many places.

        Whose prompt ends in it stands behind all those places, empty ones too.
        """
        shape, chunks = self._shape_ahead(behind, plan.decode), assemble((), plan.prefill)
        n_places = shape.sequences + len(chunks.sampled)
        if n_places > self._options.max_running:
            return None
        order, decoding, at = _placed(plan.decode, behind, shape.q_len)
        ending = [s._replace(start=s.start + shape.n_decoded) for s in chunks.sampled]
        order += (None,) * (shape.sequences - len(order)) + tuple(s.request for s in ending)
        sampled, at = (*decoding, *ending), np.append(at, np.arange(shape.sequences, n_places))
        rules = self._rules(sampled, shape.n_found)
        shape = self._chosen_shape(self._with_chunks(shape, chunks), sampled, rules)
        n_fed = len(plan.decode) * shape.q_len + len(chunks.tokens)
        assert n_fed <= plan.most_tokens, "the plan's bound holds (R29)"
        program, lane = self._programs.of(shape), self._next_lane()
        self._ahead.forget()
        fill_ahead(program.inputs[lane], sampled, at, shape, rules, chunks)
        is_marked = bool(plan.told_by_layers)
        launch = self._launch(program, lane, is_ahead=True, is_marked=is_marked)
        carried = Carried(order, sampled, at, plan.prefill, is_ahead=True)
        return self._flight(program, lane, launch, carried, n_draft)

    def _with_chunks(self, shape: StepShape, chunks: Batch) -> StepShape:
        """Return the shape of a step that decodes, with chunks behind its sequences."""
        options, n_complete = self._options, len(chunks.sampled)
        last = max([int(g.first_position.max()) + g.q_len for g in chunks.groups]) + shape.n_drafts
        width = width_bucket(-(-last // options.block_size), options.table_width)
        if n_complete:
            n_sampled = sequence_bucket(shape.sequences + n_complete, options.max_running)
            n_complete = n_sampled - shape.sequences
        return shape._replace(
            chunks=tuple(chunk.n_tokens for chunk in chunks.chunks),
            n_complete=n_complete,
            width=max(shape.width, width),
        )

    def _launch(
        self, program: Program, lane: int, is_ahead: bool = False, is_marked: bool = False
    ) -> Launch:
        """Launch a step on all ranks: on the others first, whose kernels this one's wait for."""
        if self._followers is not None:
            self._followers.step(program.shape, lane, is_ahead, program.told_inputs(lane))
        return program.start(lane, is_ahead, is_marked)

    def _lineup(self, behind: DeviceFlight, plan: StepPlan, q_len: int) -> Lineup:
        order, sampled, at = _placed(plan.decode, behind, q_len)
        rules = self._rules(sampled, behind.program.shape.n_found)
        return Lineup(plan.decode, order, sampled, at, q_len, rules)

    def _rules(self, sampled: Sequence[FedSequence], n_found: int) -> StepRules:
        requests = [s.request for s in sampled]
        counted = self._counted.assign([r for r in requests if r.penalties is not None])
        # A step that looks nothing up adds nothing to histories: those behind it are filled anew.
        return StepRules(sampled, counted, self._remembered.assign(requests if n_found else ()))

    def _flight(
        self,
        program: Program,
        lane: int,
        launch: Launch,
        carried: Carried,
        n_draft: int,
        lineup: Lineup | None = None,
    ) -> DeviceFlight:
        came = program.finish(lane)
        flight = DeviceFlight(
            program=program,
            lane=lane,
            launch=launch,
            came=came,
            carried=carried,
            n_draft=n_draft,
            use_mtp=self._options.use_mtp,
            pace=self._pace,
            lineup=lineup,
            behind=self._end_of_newest(carried),
        )
        if self._options.drafts.ngram is not None:
            self._newest = flight
        return flight

    def _end_of_newest(self, carried: Carried) -> Event | None:
        """Return when the step before ends, if somebody whom it carries decodes in this one."""
        newest = self._newest
        if newest is None:
            return None
        there = {s.request for s in newest.carried.sampled}
        goes_on = any(s.verified and s.request in there for s in carried.sampled)
        return newest.came if goes_on else None

    def _feeds_found(self, before: StepShape, decode: Sequence[RequestState]) -> bool:
        """Whether what lookup found behind the last step that landed makes what it finds behind the
        one under way worth its rows.
        """
        if not before.n_found:
            return False
        gain = sum([r.lookup.gain_tokens() for r in decode if r.lookup is not None])
        return self._pace.are_worth_rows(before.n_sampled, gain / len(decode))

    def _n_by_model(self, n_draft: int) -> int:
        """Return how many of `n_draft` drafts the MTP layer makes here."""
        options = self._options
        return options.drafts.model_steps(n_draft) if options.use_mtp else 0

    def _n_by_lookup(self, n_draft: int) -> int:
        """Return how many of them lookup may make."""
        return n_draft - self._n_by_model(n_draft) if self._options.drafts.ngram else 0

    def _is_mostly_empty(self, n_places: int, count: int) -> bool:
        """Whether `count` sequences are worth one step that waits, and so has fewer places."""
        fewer = sequence_bucket(count, self._options.max_running)
        return n_places > _FEW_PLACES and 2 * fewer <= n_places

    def _next_lane(self) -> int:
        self._lane = (self._lane + 1) % N_LANES
        return self._lane

    def _shape_ahead(self, behind: DeviceFlight, decode: Sequence[RequestState]) -> StepShape:
        """Return the shape of a step behind another one, as wide as its places may reach."""
        before, options = behind.program.shape, self._options
        q_len = 1 + (before.n_made if self._feeds_found(before, decode) else before.n_drafts)
        known = [r for r in behind.carried.order if r is not None]
        computed, told = max([r.n_computed for r in known]), max([len(r.tokens) for r in known])
        last = max(computed + before.q_len, told) + q_len + before.n_drafts
        return before._replace(
            sequences=before.n_sampled,
            q_len=q_len,
            chunks=(),
            n_complete=0,
            width=width_bucket(-(-last // options.block_size), options.table_width),
        )

    def _shape(self, batch: Batch, rules: StepRules, n_draft: int) -> StepShape:
        options = self._options
        n_drafts = self._n_by_model(n_draft)
        last = max(int(g.first_position.max()) + g.q_len for g in batch.groups) + n_drafts
        n_complete = len(batch.sampled) - batch.n_decode
        assert [s.request for s in batch.sampled[batch.n_decode :]] == [
            chunk.request for chunk in batch.chunks[:n_complete]
        ], "only the last chunk of a step may leave its prompt incomplete"
        sequences, n_sampled = batch.n_decode, len(batch.sampled)
        q_len = batch.groups[0].q_len if sequences else 0
        n_fed = max((len(s.drafts) for s in batch.sampled[:sequences]), default=0)
        if n_sampled:  # as many as the decode step behind this one has
            n_sampled = sequence_bucket(n_sampled, options.max_running)
        if batch.chunks:
            n_complete = n_sampled - sequences
        else:
            sequences = n_sampled
        shape = StepShape(
            sequences=sequences,
            q_len=q_len,
            chunks=tuple(chunk.n_tokens for chunk in batch.chunks),
            n_complete=n_complete,
            width=width_bucket(-(-last // options.block_size), options.table_width),
            choice=Choice.GREEDY,
            most_top=-1,
            n_drafts=n_drafts,
            draft_top=-1,
            n_rules=0,
            n_mtp=options.n_mtp,
            n_known=max(q_len - n_fed, 1),
            n_found=self._n_by_lookup(n_draft),
        )
        return self._chosen_shape(shape, batch.sampled, rules)

    def _chosen_shape(
        self, shape: StepShape, sampled: Sequence[FedSequence], rules: StepRules
    ) -> StepShape:
        """Return a shape with what its sequences ask of the sampler and of logprobs."""
        most, choice = self._options.max_top_k, choice_of(sampled)
        wanted = [s.request.params.logprobs_k for s in sampled]
        told = [s.request.draft_k for s in sampled] if shape.n_drafts else []
        return shape._replace(
            choice=choice,
            most_top=_most_top(wanted, most),
            draft_top=_most_top(told, most),
            n_rules=rules_bucket(rules.n_entries if choice is Choice.PROCESSED else 0),
        )

    def _score_prompts(self, batch: Batch) -> ScoredPrompts | None:
        failures = Failures()
        if not any(map(_is_scored, batch.chunks)):
            return None
        score = partial(self._score, len(batch.tokens))
        at_once = self._steps.prompts.at_once
        return ScoredPrompts(score_prompts(score, batch, at_once, failures), failures)

    def _score(
        self, n_tokens: int, rows: range, tokens: list[int], k: int
    ) -> baton_ops.LogprobColumns:
        if self._followers is not None:
            self._followers.score(n_tokens, rows)
        final = self._steps.space.tokens(n_tokens).final
        return self._steps.prompts.score(final, rows, tokens, k)


def _fill_counts(
    steps: Steps, followers: EngineFollowers | None, slot: int, request: RequestState
) -> None:
    """Fill a request's place on all ranks."""
    assert request.penalties is not None, "who has none has no place"
    counted, seen = request.penalties.counts, request.penalties.seen.view(np.uint8)
    if followers is not None:
        followers.penalise(slot, counted, seen)
    steps.counts.fill(slot, counted, seen)


def _fill_history(
    steps: Steps, followers: EngineFollowers | None, slot: int, request: RequestState
) -> None:
    """Fill a request's place on all ranks."""
    assert steps.histories is not None, "asked with lookup alone"
    if followers is not None:
        followers.remember(slot, request.tokens)
    steps.histories.fill(slot, request.tokens)


def _is_scored(chunk: PrefillChunk) -> bool:
    return chunk.request.params.logprobs.prompt_k >= 0


def _placed(
    decode: Sequence[RequestState], behind: DeviceFlight, q_len: int
) -> tuple[tuple[RequestState | None, ...], tuple[FedSequence, ...], npt.NDArray[np.int64]]:
    """Return who decodes behind a flight: whose each of its places is, the sequences, and i64[*]
    their places. Their drafts say how many, not which.
    """
    order, unknown = places(decode, behind.carried.order), (-1,) * (q_len - 1)
    sampled = tuple(
        FedSequence(request, place * q_len, unknown, True)
        for place, request in enumerate(order)
        if request is not None
    )
    at = np.array([place for place, r in enumerate(order) if r is not None], np.int64)
    return order, sampled, at


def _most_top(wanted: list[int], most: int) -> int:
    """Return the room for alternatives: none told, the token's own alone, or the most allowed."""
    highest = max(wanted, default=-1)
    return highest if highest < 1 else most
