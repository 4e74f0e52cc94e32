"""One forward step: a plan in, emitted tokens with logprobs and new drafts out.

Owns the order inside a step: feed, choose, keep, draft. It changes request state only by
what was fed, emitted and proposed, and returns a snapshot that later steps do not touch, so that
logprobs and rows may be made of it while the next step runs. Knows neither queues nor records.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from baton_worker.engine.options import DraftSources
from baton_worker.engine.output.outcome import freeze
from baton_worker.engine.output.snapshot import StepSnapshot
from baton_worker.engine.sampling.logprobs import HostScores
from baton_worker.engine.sampling.sampler import choose
from baton_worker.engine.sampling.scoring import scoring_of
from baton_worker.engine.scheduling.batch import Batch, assemble, next_tokens
from baton_worker.engine.scheduling.plans import StepPlan
from baton_worker.engine.step.drafting import Drafter, FedLayers
from baton_worker.engine.step.failures import Failures
from baton_worker.engine.step.forward import Array, ForwardModel
from baton_worker.engine.step.in_flight import Mark
from baton_worker.engine.step.keeping import advance, emitted_of, keep_all
from baton_worker.engine.step.prompt_logprobs import rows_at_once, score_prompts, score_rows
from baton_worker.records.columns import Finish


class Runner:
    """Executes step plans over one model.

    Args:
        n_mtp: MTP layers whose KV is kept current, also while no drafts are asked for.
        drafts: where drafts come from; by default all from the MTP layers.
    """

    def __init__(self, model: ForwardModel, n_mtp: int, drafts: DraftSources | None = None) -> None:
        self._model = model
        self._drafter = Drafter(model, drafts or DraftSources())
        self._n_mtp = n_mtp

    def run(self, plan: StepPlan, n_draft: int, mark: Mark = lambda n_layers: None) -> StepSnapshot:
        """Advance every sequence of `plan` and propose `n_draft` drafts for those that go on.

        1. Forward. 2. Choose tokens from the sampled rows' raw logits; set apart what logprobs are
        taken from; score prompt tokens. 3. Keep them up to a finish. 4. MTP over all fed tokens,
        and drafts. 5. Freeze what was emitted. Sequences whose numbers are not finite go through
        all that like the others, which they do not touch, and are named in the snapshot.
        """
        batch = assemble(plan.decode, plan.prefill)
        assert len(batch.tokens) <= plan.most_tokens, "the plan's bound holds (R29)"
        forward_plan = self._model.plan(batch.groups)
        hidden = self._model.forward(
            batch.tokens, forward_plan, mark if plan.told_by_layers else None
        )
        failures, n_tokens = Failures(), len(batch.tokens)
        failures.of_rows(batch, self._model.broken_rows(hidden, n_tokens), "hidden states")
        logits = self._raw_logits(batch, hidden)
        raw = _read_only(logits[: len(batch.sampled_rows)])
        scoring = scoring_of(logits, raw, batch.sampled)
        chosen = choose(raw, batch.sampled)
        for index in np.flatnonzero(chosen.broken).tolist():
            failures.add(batch.sampled[index].request, "logits")
        score = partial(score_rows, self._model, hidden)
        prompts = score_prompts(score, batch, rows_at_once(raw.shape[1]), failures)
        kept = keep_all(batch, chosen)
        # Prompt rows and MTP's tokens are found from where chunks began, so `advance` comes last.
        fed = None
        if self._n_mtp:
            following = next_tokens(batch, chosen.token, self._n_mtp)
            fed = FedLayers(batch, hidden, following, forward_plan)
        advance(batch, kept)
        going_on = [row for row in kept if row.row.finish is Finish.NONE]
        self._drafter.propose(fed, going_on, n_draft, failures)
        rows = tuple(freeze(row) for row in kept)
        emitted = emitted_of(batch, chosen.token, rows)
        return StepSnapshot(rows, emitted, HostScores(scoring), prompts, failures.reasons)

    def _raw_logits(self, batch: Batch, hidden: Array) -> npt.NDArray[np.float32]:
        """Return the sampled rows' logits f32[R, V], and padding behind them: the model's memory.

        A view made once: the model's own tensor would have to be taken apart by each op again.
        """
        if len(batch.sampled_rows) != len(batch.tokens):
            hidden = self._model.select_rows(hidden, batch.sampled_rows)
        return np.asarray(np.from_dlpack(self._model.logits(hidden)), np.float32)


def _read_only(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return a view for sampling: a write would change the logprobs, so it raises."""
    raw = logits.view()
    raw.flags.writeable = False
    return raw
