"""From logits to tokens and their logprobs, as launches.

Owns the order: choose the largest, or process a copy if anybody needs that and draw; verify drafts,
count, score. Raw logits are never written, so that logprobs come from them. Knows no request.
"""

from __future__ import annotations

from baton_worker.engine.backends.device.inputs import Flags, Inputs
from baton_worker.engine.backends.device.penalties import PenaltyCounts
from baton_worker.engine.backends.device.results import Results
from baton_worker.engine.backends.device.seam import (
    Accepted,
    Device,
    DraftRows,
    Kernels,
    Penalised,
    RowMap,
    RowParams,
    Rules,
    ScoreColumns,
    ScorePlan,
    ScoreSource,
    Tensor,
)
from baton_worker.engine.backends.device.shapes import Choice, StepShape
from baton_worker.engine.backends.device.workspace import RowSpace


class Sampler:
    """Launches over a step's `rows`, of which `logits` hold the raw ones.

    Args:
        workspace: the logprob op's.
    """

    def __init__(
        self, device: Device, kernels: Kernels, counts: PenaltyCounts, workspace: Tensor
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._counts = counts
        self._workspace = workspace

    def choose(
        self, shape: StepShape, inputs: Inputs, flags: Flags, accepted: Accepted, rows: RowSpace
    ) -> None:
        """Choose every sequence's tokens and verify its drafts."""
        kernels = self._kernels
        drafts = DraftRows(inputs.draft, inputs.count, inputs.cu_rows)
        if shape.choice is Choice.GREEDY:
            kernels.argmax(rows.logits, rows.target, flags.logits)
            kernels.verify_greedy(rows.target, drafts, accepted)
            return
        state = Penalised(inputs.slot, self._counts.counts, self._counts.seen, inputs.draft)
        logits = rows.logits
        if shape.choice is Choice.PROCESSED:
            logits = self._processed(inputs, flags, state, rows)
        self._draw(inputs, flags, logits, rows)
        kernels.verify_sampled(rows.probs, rows.uniform, drafts, accepted)
        if shape.choice is Choice.PROCESSED:
            kernels.count_tokens(accepted, state)

    def score(
        self, shape: StepShape, inputs: Inputs, accepted: Accepted, out: Results, rows: RowSpace
    ) -> None:
        """Take the logprobs of what was chosen."""
        kernels = self._kernels
        plan = self._plan(rows.scores, out, shape.n_rows)
        source = ScoreSource(inputs.score_temperature, inputs.first_row, inputs.score_top_p)
        kernels.plan_scores(accepted, RowMap(inputs.cu_rows), inputs.k, source, plan)
        logits = rows.both if shape.choice is Choice.PROCESSED else rows.logits
        columns = ScoreColumns(out.logprob, out.rank, out.topk_token, out.topk_logprob)
        kernels.logprobs(logits, plan, columns, self._workspace)
        if shape.choice is not Choice.GREEDY:
            kernels.normalise_top_p(logits, plan, columns)

    def _plan(self, space: ScorePlan, out: Results, n_rows: int) -> ScorePlan:
        """Return the plan of so many rows: as many places as there are offsets for."""
        cut = {
            name: self._device.rows(getattr(space, name), 0, n_rows)
            for name in ("row_index", "token", "k", "inv_temp", "top_p")
        }
        return space._replace(row_offset=out.row_offset, topk_offset=out.topk_offset, **cut)

    def _processed(self, inputs: Inputs, flags: Flags, state: Penalised, rows: RowSpace) -> Tensor:
        rules = Rules(
            inputs.repetition,
            inputs.frequency,
            inputs.presence,
            inputs.bias_starts,
            inputs.bias_ids,
            inputs.bias,
            inputs.mask_starts,
            inputs.masked,
        )
        row_map = RowMap(inputs.cu_rows)
        self._kernels.process(rows.logits, row_map, state, rules, rows.processed, flags.logits)
        return rows.processed

    def _draw(self, inputs: Inputs, flags: Flags, logits: Tensor, rows: RowSpace) -> None:
        params = RowParams(
            inputs.temperature, inputs.top_p, inputs.min_p, inputs.top_k, inputs.cu_rows
        )
        self._kernels.probabilities(logits, params, rows.probs, flags.logits)
        row_map = RowMap(inputs.cu_rows)
        self._kernels.uniforms(inputs.seeds, inputs.positions, row_map, rows.uniform)
