"""Drafting with the MTP layers, as launches: all of a step's drafts without a look by the host.

Owns which rows run when; see `step.mtp` for why. Sequences that end in this step are drafted for
too: the host, which alone knows, drops those drafts. Knows no request.
"""

from __future__ import annotations

from baton_worker.engine.backends.device.decoder import Decoder, Fed, Group
from baton_worker.engine.backends.device.inputs import Flags, Inputs, ahead_stride
from baton_worker.engine.backends.device.results import Results, stride
from baton_worker.engine.backends.device.seam import (
    Accepted,
    Device,
    Kernels,
    Places,
    ScoreColumns,
    ScorePlan,
    Seeds,
    Tensor,
)
from baton_worker.engine.backends.device.shapes import StepShape
from baton_worker.engine.backends.device.workspace import SequenceSpace, Workspace


class Drafter:
    """Launches over a decoder's MTP layers."""

    def __init__(
        self, device: Device, kernels: Kernels, decoder: Decoder, space: Workspace
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._decoder = decoder
        self._space = space

    def propose(
        self,
        shape: StepShape,
        fed: Fed,
        inputs: Inputs,
        flags: Flags,
        accepted: Accepted,
        out: Results,
    ) -> None:
        """Bring the layers' KV level with the model's for the step's tokens; write each sequence's
        drafts.
        """
        space = self._space.tokens(shape.n_tokens)
        n_drafts = shape.n_drafts if shape.n_sampled else 0
        hidden = self._decoder.mtp_input(space.residual, space.final)
        # What is normed replaces a layer's own scratch: the final norm is the last to read it. What
        # the next layer is fed stands elsewhere, for each layer begins in that scratch.
        normed = space.normed if space.chained is None else space.chained
        for layer in range(shape.n_mtp):
            tokens = self._following(shape, inputs, accepted, out, layer)
            self._decoder.run_mtp(fed._replace(tokens=tokens), hidden, normed, space, layer)
            self._kernels.broken_rows(space.residual, flags.mtp)
            hidden = self._decoder.mtp_input(space.residual, normed)
            if layer < n_drafts:
                self._from_rows(shape, inputs, accepted, space.residual, normed)
                self._choose(shape, inputs, flags, out, layer)
        if n_drafts > shape.n_mtp:
            self._further(shape, inputs, flags, accepted, out)

    def _following(
        self, shape: StepShape, inputs: Inputs, accepted: Accepted, out: Results, layer: int
    ) -> Tensor:
        """Return i32[N], what a layer takes: the step's tokens where the host did not know, and the
        drafts of the layers before behind them.
        """
        at = layer * ahead_stride(shape.n_tokens)
        tokens = self._device.rows(inputs.following, at, at + shape.n_tokens)
        if not shape.n_sampled:
            return tokens
        starts = self._back(inputs, shape, layer)
        self._kernels.scatter_tokens(accepted, inputs.count, starts, tokens)
        for number in range(min(layer, shape.n_drafts)):
            starts = self._back(inputs, shape, layer - 1 - number)
            self._put(shape, inputs, accepted, starts, self._draft(out, shape, number), tokens)
        return tokens

    def _put(
        self,
        shape: StepShape,
        inputs: Inputs,
        accepted: Accepted,
        starts: Tensor,
        draft: Tensor,
        tokens: Tensor,
    ) -> None:
        """Write a draft of each sequence to `tokens`, as far behind `starts` as tokens were
        accepted.
        """
        chain = self._space.chain(shape.n_sampled)
        written = Seeds(starts, inputs.first, chain.rows, chain.positions, chain.contexts)
        self._kernels.seed_drafts(accepted, written, 0)
        self._device.copy(draft, chain.draft)
        one = Accepted(chain.none, chain.column)
        self._kernels.scatter_tokens(one, chain.none, chain.rows, tokens)

    def _back(self, inputs: Inputs, shape: StepShape, count: int) -> Tensor:
        if not count:
            return inputs.starts
        at = (count - 1) * ahead_stride(shape.n_sampled)
        return self._device.rows(inputs.back, at, at + shape.n_sampled)

    def _further(
        self, shape: StepShape, inputs: Inputs, flags: Flags, accepted: Accepted, out: Results
    ) -> None:
        """Write the drafts that the last layer makes of its own output."""
        count, n_layers = shape.n_sampled, shape.n_mtp
        space, seeds = self._space.tokens(count), self._space.sequences(count)
        hidden = self._decoder.mtp_input(seeds.hidden, seeds.normed)
        for number in range(n_layers, shape.n_drafts):
            tokens, ahead = self._draft(out, shape, number - 1), number - n_layers + 1
            fed = self._fed(inputs, accepted, tokens, ahead)
            self._decoder.run_mtp(fed, hidden, seeds.normed, space, n_layers - 1)
            hidden = self._decoder.mtp_input(space.residual, seeds.normed)
            self._choose(shape, inputs, flags, out, number)

    def _choose(
        self, shape: StepShape, inputs: Inputs, flags: Flags, out: Results, number: int
    ) -> None:
        """Write a draft of each sequence, the best that its row predicts."""
        count = shape.n_sampled
        logits = self._space.rows(count).logits
        self._decoder.logits(self._space.sequences(count).normed, logits)
        self._kernels.argmax(logits, self._draft(out, shape, number), flags.drafts)
        if shape.draft_top >= 0:
            self._score(shape, inputs, out, logits, number)

    def _from_rows(
        self, shape: StepShape, inputs: Inputs, accepted: Accepted, residual: Tensor, normed: Tensor
    ) -> None:
        """Gather the rows that predict a draft: normed, and as they are."""
        seeds = self._space.sequences(shape.n_sampled)
        self._kernels.seed_drafts(accepted, self._seeds(inputs, seeds), 0)
        self._kernels.gather(normed, seeds.rows, seeds.normed)
        self._kernels.gather(residual, seeds.rows, seeds.hidden)

    def _fed(self, inputs: Inputs, accepted: Accepted, tokens: Tensor, ahead: int) -> Fed:
        count = int(tokens.shape[0])
        seeds = self._space.sequences(count)
        self._kernels.seed_drafts(accepted, self._seeds(inputs, seeds), ahead)
        tables = self._device.rows(inputs.tables, 0, count)
        places = Places(inputs.drafting, seeds.positions, tables)
        return Fed(tokens, places, (Group(0, count, tables, seeds.contexts),))

    def _seeds(self, inputs: Inputs, seeds: SequenceSpace) -> Seeds:
        return Seeds(inputs.starts, inputs.first, seeds.rows, seeds.positions, seeds.contexts)

    def _draft(self, out: Results, shape: StepShape, number: int) -> Tensor:
        return self._part(out.drafts, shape, number)

    def _part(self, tensor: Tensor, shape: StepShape, number: int, width: int = 1) -> Tensor:
        at = number * stride(shape) * width
        return self._device.rows(tensor, at, at + shape.n_sampled * width)

    def _score(
        self, shape: StepShape, inputs: Inputs, out: Results, logits: Tensor, number: int
    ) -> None:
        """Take the logprobs of a draft, one row of each sequence."""
        plan = ScorePlan(
            row_index=inputs.draft_rows,
            token=self._draft(out, shape, number),
            k=inputs.draft_k,
            inv_temp=inputs.ones,
            row_offset=inputs.draft_offsets,
            topk_offset=inputs.draft_topk_offsets,
            num_rows=inputs.draft_count,
            top_p=inputs.ones,
        )
        columns = ScoreColumns(
            self._part(out.draft_logprob, shape, number),
            self._part(out.draft_rank, shape, number),
            self._part(out.draft_topk_token, shape, number, max(shape.draft_top, 0)),
            self._part(out.draft_topk_logprob, shape, number, max(shape.draft_top, 0)),
        )
        self._kernels.logprobs(logits, plan, columns, self._space.logprobs)
