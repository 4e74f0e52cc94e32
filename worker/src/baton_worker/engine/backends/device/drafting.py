"""Drafting with the MTP layer, as launches: all of a step's drafts without a look by the host.

Owns which rows run when; see `step.mtp` for why. Sequences that end in this step are drafted for
too: the host, which alone knows, drops those drafts. Knows no request.
"""

from __future__ import annotations

from baton_worker.engine.backends.device.decoder import Decoder, Fed, Group
from baton_worker.engine.backends.device.inputs import Flags, Inputs
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
from baton_worker.engine.backends.device.workspace import SequenceSpace, TokenSpace, Workspace


class Drafter:
    """Launches over a decoder's MTP layer."""

    def __init__(
        self, device: Device, kernels: Kernels, decoder: Decoder, space: Workspace
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._decoder = decoder
        self._space = space

    def follow(
        self, shape: StepShape, fed: Fed, inputs: Inputs, flags: Flags, accepted: Accepted
    ) -> None:
        """Bring the layer's KV level with the model's for the step's tokens."""
        space = self._space.tokens(shape.n_tokens)
        if shape.n_sampled:
            self._kernels.scatter_tokens(accepted, inputs.count, inputs.starts, inputs.following)
        hidden = self._decoder.mtp_input(space.residual, space.final)
        # What is normed replaces a layer's own scratch: the final norm is the last to read it.
        following = fed._replace(tokens=inputs.following)
        self._decoder.run_mtp(following, hidden, space.normed, space)
        self._kernels.broken_rows(space.residual, flags.mtp)

    def propose(
        self, shape: StepShape, inputs: Inputs, flags: Flags, accepted: Accepted, out: Results
    ) -> None:
        """Write each sequence's drafts, the first from where `follow` left off."""
        count = shape.n_sampled
        space, seeds = self._space.tokens(count), self._space.sequences(count)
        rows = self._space.rows(count)
        hidden = self._first(shape, inputs, accepted, seeds)
        for number in range(shape.n_drafts):
            if number:
                fed = self._fed(inputs, accepted, self._draft(out, shape, number - 1), number)
                self._decoder.run_mtp(fed, hidden, seeds.normed, space)
                hidden = self._decoder.mtp_input(space.residual, seeds.normed)
            self._decoder.logits(seeds.normed, rows.logits)
            self._kernels.argmax(rows.logits, self._draft(out, shape, number), flags.drafts)
            if shape.draft_top >= 0:
                self._score(shape, inputs, out, rows.logits, number)

    def _first(
        self, shape: StepShape, inputs: Inputs, accepted: Accepted, seeds: SequenceSpace
    ) -> Tensor:
        """Gather the rows that predict the first draft: normed, and as the layer is fed them."""
        whole: TokenSpace = self._space.tokens(shape.n_tokens)
        self._kernels.seed_drafts(accepted, self._seeds(inputs, seeds), 0)
        self._kernels.gather(whole.normed, seeds.rows, seeds.normed)
        self._kernels.gather(whole.residual, seeds.rows, seeds.hidden)
        return self._decoder.mtp_input(seeds.hidden, seeds.normed)

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
