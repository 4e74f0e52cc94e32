"""A step that the device was given: what it will have done to the requests once it has landed.

Owns the way from results to requests, by the same rules as the host's runner. A step that was
launched behind one under way learns only at its landing what it fed: requests that ended meanwhile
are not touched, whatever the device computed for them. Knows no kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.device.lineup import Lineup
from baton_worker.engine.backends.device.pace import Pace
from baton_worker.engine.backends.device.program import Launch, Program
from baton_worker.engine.backends.device.results import Results, Told, stride
from baton_worker.engine.backends.device.scores import DeviceScores, draft_scores
from baton_worker.engine.backends.device.seam import Event
from baton_worker.engine.backends.device.shapes import StepShape
from baton_worker.engine.lookup import Lookup
from baton_worker.engine.output.outcome import KeptRow, freeze
from baton_worker.engine.output.snapshot import NO_SNAPSHOT, PromptRow, StepSnapshot
from baton_worker.engine.sampling.sampler import Chosen
from baton_worker.engine.scheduling.batch import Batch, FedSequence
from baton_worker.engine.scheduling.plans import PrefillChunk
from baton_worker.engine.scheduling.requests import RequestState
from baton_worker.engine.step.failures import Failures
from baton_worker.engine.step.keeping import advance, emitted_of, keep_all
from baton_worker.messages import NO_DRAFT_SCORES, DraftScores
from baton_worker.records.columns import Finish

Int64Array = npt.NDArray[np.int64]


class ScoredPrompts(NamedTuple):
    """Prompt tokens that were scored with a step, and whose scores are no numbers."""

    rows: tuple[PromptRow, ...]
    failures: Failures


class Carried(NamedTuple):
    """Whom a step carries, as its launch knew.

    Attributes:
        order: whose each of the step's places is; None: nobody's.
        sampled: the sequences that choose tokens, by place.
        at: i64[*], the place of each among the step's B sequences, ascending.
        chunks: of prompts.
        prompts: their tokens that were scored.
        is_ahead: the drafts of those that decode say how many, not which.
    """

    order: tuple[RequestState | None, ...]
    sampled: tuple[FedSequence, ...]
    at: Int64Array
    chunks: tuple[PrefillChunk, ...] = ()
    prompts: ScoredPrompts | None = None
    is_ahead: bool = False


class Laid(NamedTuple):
    """What counts of a step.

    Attributes:
        batch: its sequences and chunks, without their tokens.
        at: i64[*], the places of the sequences among the device's B.
        chunks_at: the first flat token of each chunk.
    """

    batch: Batch
    at: Int64Array
    chunks_at: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceFlight:
    """See `step.in_flight.Flight`.

    Attributes:
        program, lane: what it runs as, and where its numbers travel.
        launch: how it was launched.
        came: when its results are on the host.
        carried: whom.
        lineup: of a step that only decodes and was launched behind one under way.
        n_draft: K. use_mtp: whether the MTP layer ran.
        pace: is told what it took.
        behind: the end of the step before, if that carried one of those that decode here: so the
            device had no reason to rest.
    """

    program: Program
    lane: int
    launch: Launch
    came: Event
    carried: Carried
    n_draft: int
    use_mtp: bool
    pace: Pace
    lineup: Lineup | None = None
    behind: Event | None = None

    def layers(self) -> Iterator[int]:
        """See `Flight.layers`."""
        for mark in self.launch.marks:
            mark.came.wait()
            yield mark.n_layers

    def landed(self, is_live: Callable[[RequestState], bool]) -> StepSnapshot:
        """See `Flight.landed`."""
        self.came.wait()
        self.program.count_time(self.launch, self.came)
        told, shape = self.program.told(self.lane), self.program.shape
        self.program.check_ranks(told)
        laid = self._laid(is_live)
        if not laid.batch.sampled and not laid.batch.chunks:
            return NO_SNAPSHOT
        failures = Failures()
        _note(failures, laid, told.flags.hidden, shape, "hidden states")
        chosen = _chosen(laid, told, shape)
        for index in np.flatnonzero(chosen.broken).tolist():
            failures.add(laid.batch.sampled[index].request, "logits")
        prompts = self.carried.prompts
        if prompts is not None:
            failures.merge(prompts.failures)
        kept = keep_all(laid.batch, chosen)
        self._note_pace(kept)
        advance(laid.batch, kept)
        if self.use_mtp:
            _note(failures, laid, told.flags.mtp, shape, "draft layer's hidden states")
        self._draft(kept, laid, told, failures)
        rows = tuple(freeze(row) for row in kept)
        return StepSnapshot(
            rows=rows,
            emitted=emitted_of(laid.batch, chosen.token, rows),
            scoring=DeviceScores.of(told.results, laid.at),
            prompts=() if prompts is None else prompts.rows,
            failures=failures.reasons,
        )

    def _laid(self, is_live: Callable[[RequestState], bool]) -> Laid:
        """Leave out who has ended since the launch, as only a step before this one lets them."""
        carried, shape = self.carried, self.program.shape
        sampled, at = carried.sampled, carried.at
        is_there = [is_live(s.request) for s in sampled]
        if not all(is_there):
            sampled = tuple(itertools.compress(sampled, is_there))
            at = at[np.array(is_there, np.bool_)]
        if carried.is_ahead and shape.q_len > 1:
            sampled = tuple([_with_drafts(s, shape.q_len - 1) for s in sampled])
        starts = itertools.accumulate(shape.chunks, initial=shape.n_decoded)
        chunks = [
            (chunk, start)
            for chunk, start in zip(carried.chunks, starts, strict=False)
            if is_live(chunk.request)
        ]
        n_decode, nothing = sum([s.verified for s in sampled]), np.empty(0, np.int64)
        batch = Batch(nothing, (), n_decode, tuple([c for c, _ in chunks]), sampled, nothing)
        return Laid(batch, at, tuple([start for _, start in chunks]))

    def _note_pace(self, kept: tuple[KeptRow, ...]) -> None:
        """Note what it took, if it was launched before the one before had come."""
        shape = self.program.shape
        if self.behind is None or self.launch.is_first or not kept or not self.carried.is_ahead:
            return
        seconds = self.came.seconds_since(self.behind)
        tokens_each = sum([row.row.n_tokens for row in kept]) / len(kept)
        self.pace.note(shape.n_sampled, shape.feeds_found, seconds, tokens_each)

    def _draft(self, kept: tuple[KeptRow, ...], laid: Laid, told: Told, failures: Failures) -> None:
        """Set the requests that go on up with their drafts."""
        shape = self.program.shape
        n_model = shape.n_drafts
        if not self.n_draft:
            return
        made = told.results.drafts.reshape(shape.n_made, stride(shape))[:, laid.at].T.tolist()
        scores = [NO_DRAFT_SCORES] * len(kept)
        if n_model and shape.draft_top >= 0:
            scores = self._draft_scores(kept, laid, told.results)
        broken = told.flags.drafts[laid.at].tolist()
        for index, (request, _, row) in enumerate(kept):
            if row.finish is not Finish.NONE:
                continue
            if n_model and broken[index]:
                failures.add(request, "draft logits")
            drafts = tuple(itertools.takewhile(_is_draft, made[index]))
            request.drafts, request.draft_scores = drafts, scores[index]
            if shape.n_found:
                request.lookup = request.lookup or Lookup()
                request.lookup.note(request.tokens, n_model, drafts[n_model:])

    def _draft_scores(
        self, kept: tuple[KeptRow, ...], laid: Laid, results: Results
    ) -> list[DraftScores]:
        shape, inputs = self.program.shape, self.program.inputs[self.lane]
        places = zip(
            inputs.draft_offsets[laid.at].tolist(),
            inputs.draft_topk_offsets[laid.at].tolist(),
            [row.request.draft_k for row in kept],
            strict=True,
        )
        return [
            draft_scores(results, at, top, k, shape.n_drafts, stride(shape))
            for at, top, k in places
        ]


def _is_draft(token: int) -> bool:
    return token >= 0


def _with_drafts(sequence: FedSequence, most: int) -> FedSequence:
    """Return a sequence with the drafts that a step which went ahead has fed."""
    if not sequence.verified:
        return sequence
    return sequence._replace(drafts=sequence.request.usable_drafts()[:most])


def _note(
    failures: Failures, laid: Laid, flags: npt.NDArray[np.uint8], shape: StepShape, what: str
) -> None:
    """Note whose flat tokens are flagged."""
    if not flags.any():
        return
    batch, n = laid.batch, laid.batch.n_decode
    if n:
        rows = flags[: shape.n_decoded].reshape(shape.sequences, -1)[laid.at[:n]]
        broken = np.array([row.any() for row in rows])
        for index in np.flatnonzero(broken).tolist():
            failures.add(batch.sampled[index].request, what)
    for chunk, start in zip(batch.chunks, laid.chunks_at, strict=True):
        if flags[start : start + chunk.n_tokens].any():
            failures.add(chunk.request, what)


def _chosen(laid: Laid, told: Told, shape: StepShape) -> Chosen:
    """Return what was chosen for the sequences that count.

    No more drafts are accepted than were up for it: the device may have been given some behind a
    request's last position.
    """
    sampled, at, results = laid.batch.sampled, laid.at, told.results
    count = np.array([len(s.drafts) for s in sampled], np.int64)
    broken = np.zeros(len(sampled), np.bool_)
    if told.flags.logits.any():
        first = np.where(at < shape.sequences, at * shape.rows_each, shape.n_decoded_rows + at)
        first[at >= shape.sequences] -= shape.sequences
        ends = zip(first.tolist(), (first + count + 1).tolist(), strict=True)
        broken = np.array([told.flags.logits[a:b].any() for a, b in ends], np.bool_)
    n_accepted = np.minimum(results.n_accepted[at], count).astype(np.int32)
    return Chosen(n_accepted, results.token[at], broken)
