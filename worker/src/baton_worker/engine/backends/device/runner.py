"""One step on a device: a plan in, emitted tokens with logprobs and new drafts out.

Owns the order of a step on the host's side: lay the batch out, launch, and, when the results are
here, do to the requests what they say, by the same rules as the host's runner. Knows neither queues
nor records.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from baton_worker.engine.backends.device.decoder import Decoder
from baton_worker.engine.backends.device.drafting import Drafter
from baton_worker.engine.backends.device.inputs import fill
from baton_worker.engine.backends.device.penalties import PenaltySlots
from baton_worker.engine.backends.device.program import Launches, Machine, Programs
from baton_worker.engine.backends.device.prompts import PromptScorer
from baton_worker.engine.backends.device.results import Told, stride
from baton_worker.engine.backends.device.rules import StepRules, choice_of
from baton_worker.engine.backends.device.sampler import Sampler
from baton_worker.engine.backends.device.scores import DeviceScores, draft_scores
from baton_worker.engine.backends.device.seam import Device, Kernels, Tensor
from baton_worker.engine.backends.device.shapes import (
    Choice,
    StepShape,
    rules_bucket,
    sequence_bucket,
    width_bucket,
)
from baton_worker.engine.backends.device.weights import DeviceWeights
from baton_worker.engine.backends.device.workspace import Sizes, Workspace
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.options import MAX_DRAFTS, EngineOptions
from baton_worker.engine.output.outcome import KeptRow, freeze
from baton_worker.engine.output.snapshot import PromptRow, StepSnapshot
from baton_worker.engine.sampling.sampler import Chosen
from baton_worker.engine.scheduling.batch import Batch, assemble
from baton_worker.engine.scheduling.requests import RequestState
from baton_worker.engine.scheduling.scheduler import StepPlan
from baton_worker.engine.step.drafting import look_up
from baton_worker.engine.step.failures import Failures
from baton_worker.engine.step.keeping import advance, emitted_of, keep_all
from baton_worker.engine.step.prompt_logprobs import score_prompts
from baton_worker.messages import NO_DRAFT_SCORES
from baton_worker.records.columns import Finish

_PROMPT_ROWS = 256
_RULES = 4096


class DeviceModel(NamedTuple):
    """A model on a device. `kv`: E[blocks, layers, 2, Hkv, block_size, D], see `kv.pool`."""

    device: Device
    kernels: Kernels
    spec: ModelShape
    weights: DeviceWeights
    kv: Tensor


class DeviceRunner:
    """See `step.in_flight.StepRunner`.

    Args:
        options: `use_mtp` only if the weights have an MTP layer.

    Raises:
        DeviceError: the device has too little memory for the largest step.
    """

    def __init__(self, model: DeviceModel, options: EngineOptions) -> None:
        self._options = options
        spec, (device, kernels) = model.spec, model[:2]
        space = Workspace(device, kernels, spec, model.weights.dtype, sizes_of(options))
        decoder = Decoder(
            device, kernels, spec, model.weights, model.kv, space.attention, space.sizes.positions
        )
        self._slots = PenaltySlots(device, options.max_running, spec.vocab_size)
        self._space = space
        self._prompts = PromptScorer(device, kernels, decoder, space, options.max_top_k)
        machine = Machine(
            device=device,
            kernels=kernels,
            decoder=decoder,
            sampler=Sampler(device, kernels, self._slots, space.logprobs),
            drafter=Drafter(device, kernels, decoder, space) if options.use_mtp else None,
            space=space,
        )
        self._programs = Programs(machine, _largest(options))

    @property
    def launches(self) -> Launches:
        """How its steps got onto the device."""
        return self._programs.launches

    def run(self, plan: StepPlan, n_draft: int) -> StepSnapshot:
        """Advance every sequence of `plan` and propose `n_draft` drafts for those that go on.

        1. Lay out, upload, launch. 2. Score prompt tokens. 3. Download. 4. Keep tokens up to a
        finish. 5. Drafts. 6. Freeze what was emitted. A sequence whose numbers are not finite is
        named in the snapshot; its neighbours do not notice.
        """
        batch = assemble(plan.decode, plan.prefill)
        assert len(batch.tokens) <= plan.most_tokens, "the plan's bound holds (R29)"
        rules = StepRules(batch.sampled, self._slots.assign([s.request for s in batch.sampled]))
        program = self._programs.of(self._shape(batch, rules, n_draft))
        fill(program.inputs, batch, program.shape, rules)
        program.start()
        failures = Failures()
        prompts = self._score_prompts(batch, failures)
        program.finish().wait()
        return self._keep(batch, program.told(), program.shape, (prompts, failures), n_draft)

    def _shape(self, batch: Batch, rules: StepRules, n_draft: int) -> StepShape:
        options, sampled = self._options, [s.request for s in batch.sampled]
        n_drafts = options.drafts.model_steps(n_draft) if options.use_mtp else 0
        last = max(int(g.first_position.max()) + g.q_len for g in batch.groups) + n_drafts
        n_complete = len(sampled) - batch.n_decode
        assert [s.request for s in batch.sampled[batch.n_decode :]] == [
            chunk.request for chunk in batch.chunks[:n_complete]
        ], "only the last chunk of a step may leave its prompt incomplete"
        sequences = batch.n_decode
        if sequences and not batch.chunks:
            sequences = sequence_bucket(sequences, options.max_running)
        choice = choice_of(batch.sampled)
        return StepShape(
            sequences=sequences,
            q_len=batch.groups[0].q_len if batch.n_decode else 0,
            chunks=tuple(chunk.n_tokens for chunk in batch.chunks),
            n_complete=n_complete,
            width=width_bucket(-(-last // options.block_size), options.table_width),
            choice=choice,
            most_top=_most_top([r.params.logprobs_k for r in sampled], options.max_top_k),
            n_drafts=n_drafts,
            draft_top=_most_top([r.draft_k for r in sampled], options.max_top_k)
            if n_drafts
            else -1,
            n_rules=rules_bucket(rules.n_entries if choice is Choice.PROCESSED else 0),
        )

    def _score_prompts(self, batch: Batch, failures: Failures) -> tuple[PromptRow, ...]:
        if not any(chunk.request.params.logprobs.prompt_k >= 0 for chunk in batch.chunks):
            return ()
        final = self._space.tokens(len(batch.tokens)).final
        score = partial(self._prompts.score, final)
        return score_prompts(score, batch, self._prompts.at_once, failures)

    def _keep(
        self,
        batch: Batch,
        told: Told,
        shape: StepShape,
        of_prompts: tuple[tuple[PromptRow, ...], Failures],
        n_draft: int,
    ) -> StepSnapshot:
        """Do to the requests what the device told of them."""
        failures, n_tokens = Failures(), len(batch.tokens)
        failures.of_rows(batch, told.flags.hidden[:n_tokens] != 0, "hidden states")
        chosen = _chosen(batch, told, shape)
        for index in np.flatnonzero(chosen.broken).tolist():
            failures.add(batch.sampled[index].request, "logits")
        prompts, prompt_failures = of_prompts
        failures.merge(prompt_failures)
        kept = keep_all(batch, chosen)
        advance(batch, kept)
        if self._options.use_mtp:
            broken = told.flags.mtp[:n_tokens] != 0
            failures.of_rows(batch, broken, "draft layer's hidden states")
        self._draft(kept, told, shape, n_draft, failures)
        rows = tuple(freeze(row) for row in kept)
        scores = DeviceScores.of(told.results, len(batch.sampled))
        emitted = emitted_of(batch, chosen.token, rows)
        return StepSnapshot(rows, emitted, scores, prompts, failures.reasons)

    def _draft(
        self,
        kept: tuple[KeptRow, ...],
        told: Told,
        shape: StepShape,
        n_draft: int,
        failures: Failures,
    ) -> None:
        """Set the requests that go on up with their drafts."""
        if not n_draft:
            return
        n_model, far = shape.n_drafts, stride(shape)
        made = told.results.drafts.reshape(n_model, far)[:, : len(kept)].T.tolist()
        scores = [NO_DRAFT_SCORES] * len(kept)
        if n_model and shape.draft_top >= 0:
            wanted = [row.request.draft_k for row in kept]
            scores = draft_scores(told.results, wanted, n_model, far)
        for index, (request, _, row) in enumerate(kept):
            if row.finish is not Finish.NONE:
                continue
            if n_model and told.flags.drafts[index]:
                failures.add(request, "draft logits")
            self._set(request, tuple(made[index]), n_draft - n_model)
            request.draft_scores = scores[index]

    def _set(self, request: RequestState, drafts: tuple[int, ...], n_more: int) -> None:
        request.drafts = drafts + look_up(self._options.drafts, request, drafts, n_more)


def sizes_of(options: EngineOptions) -> Sizes:
    """Return the sizes of the largest step that these options allow."""
    rows = options.max_running * (MAX_DRAFTS + 1)
    return Sizes(
        tokens=rows + options.prefill_tokens,
        sequences=options.max_running,
        rows=rows,
        positions=options.table_width * options.block_size,
        prompt_rows=_PROMPT_ROWS,
    )


def _largest(options: EngineOptions) -> StepShape:
    return StepShape(
        sequences=options.max_running,
        q_len=MAX_DRAFTS + 1,
        chunks=(options.prefill_tokens,),
        n_complete=1,
        width=options.table_width,
        choice=Choice.PROCESSED,
        most_top=options.max_top_k,
        n_drafts=MAX_DRAFTS,
        draft_top=options.max_top_k,
        n_rules=_RULES,
    )


def _most_top(wanted: list[int], most: int) -> int:
    """Return the room for alternatives: none told, the token's own alone, or the most allowed."""
    highest = max(wanted, default=-1)
    return highest if highest < 1 else most


def _chosen(batch: Batch, told: Told, shape: StepShape) -> Chosen:
    """Return what was chosen for the sequences that are there."""
    n, results = len(batch.sampled), told.results
    n_rows = np.array([len(s.drafts) + 1 for s in batch.sampled], np.int64)
    first = np.arange(n) * shape.q_len
    first[batch.n_decode :] = shape.n_decoded + np.arange(n - batch.n_decode)
    broken = np.zeros(n, np.bool_)
    if told.flags.logits.any():
        ends = zip(first.tolist(), (first + n_rows).tolist(), strict=True)
        broken = np.array([told.flags.logits[a:b].any() for a, b in ends], np.bool_)
    return Chosen(results.n_accepted[:n], results.token[:n], broken)
