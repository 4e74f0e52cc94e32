"""What the requests of a step change of their logits, as the device is told of it.

Owns the ragged lists of biases and masked ids, which requests need them, and which distribution
each one's logprobs describe. The rules themselves are `logits_processing`'s and `scoring`'s. Knows
no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.device.shapes import Choice, StepShape
from baton_worker.engine.sampling.logits_processing import is_processed
from baton_worker.engine.sampling.scoring import MIN_TEMPERATURE
from baton_worker.engine.scheduling.batch import FedSequence
from baton_worker.engine.scheduling.requests import RequestState


class ScoreSettings(NamedTuple):
    """Which logits logprobs are of: divided by `temperature`, of the nucleus `top_p` alone."""

    of_processed: bool
    temperature: float
    top_p: float


def score_settings(request: RequestState) -> ScoreSettings | None:
    """Return what a request's logprobs are taken from; None: the raw logits, or it wants none."""
    wanted, sampling = request.params.logprobs, request.params.sampling
    if request.params.logprobs_k < 0 or wanted.is_raw:
        return None
    is_scaled = sampling.temperature != 0.0 and (wanted.processed or wanted.temp_scaled)
    return ScoreSettings(
        of_processed=wanted.processed and is_processed(request),
        temperature=max(sampling.temperature, MIN_TEMPERATURE) if is_scaled else 1.0,
        top_p=sampling.top_p if wanted.top_p_normalized else 1.0,
    )


def choice_of(sampled: Sequence[FedSequence]) -> Choice:
    """Return how much of the sampler these sequences need."""
    if any(is_processed(s.request) for s in sampled):
        return Choice.PROCESSED
    needs_more = any(
        s.request.params.sampling.temperature != 0.0 or score_settings(s.request) is not None
        for s in sampled
    )
    return Choice.SAMPLED if needs_more else Choice.GREEDY


def is_known_ahead(request: RequestState) -> bool:
    """Whether what a request's next rows may not choose does not depend on its next tokens."""
    bias = request.logit_bias
    if bias is not None and bias.words:
        return False
    return request.n_output >= request.params.sampling.min_tokens


class StepRules:
    """Biases and masked ids of a batch's sequences.

    Args:
        sampled: what chooses tokens, before anything was chosen.
        slots: where each penalised request's counts are.
        histories: where each request's tokens are, if lookup is a source.

    Attributes:
        n_entries: room that the longer list needs.
    """

    def __init__(
        self,
        sampled: Sequence[FedSequence],
        slots: Mapping[RequestState, int],
        histories: Mapping[RequestState, int],
    ) -> None:
        self._slots = [slots.get(s.request, -1) for s in sampled]
        self._histories = [histories.get(s.request, -1) for s in sampled]
        self._biases = [s.request.logit_bias for s in sampled]
        self._masks = [_masks(s) if is_processed(s.request) else [] for s in sampled]
        n_biased = sum(len(bias.bias_ids) for bias in self._biases if bias is not None)
        n_masked = sum(len(row) for rows in self._masks for row in rows)
        self.n_entries = max(n_biased, n_masked)

    def fill(self, to: Any, places: npt.NDArray[np.int64], shape: StepShape) -> None:
        """Write to the host's `Inputs`, where `cu_rows` is already.

        Args:
            places: i64[*], of these sequences among the step's, ascending.
        """
        to.slot[:], to.history[:] = -1, -1
        to.slot[places], to.history[places] = self._slots, self._histories
        sizes = np.zeros(len(to.bias_starts) - 1, np.int64)
        at = 0
        for place, bias in zip(places.tolist(), self._biases, strict=True):
            if bias is not None:
                sizes[place] = len(bias.bias_ids)
                stop = at + len(bias.bias_ids)
                to.bias_ids[at:stop], to.bias[at:stop] = bias.bias_ids, bias.bias
                at = stop
        to.bias_starts[0] = 0
        np.cumsum(sizes, out=to.bias_starts[1:])
        self._fill_masks(to, places, shape)

    def _fill_masks(self, to: Any, places: npt.NDArray[np.int64], shape: StepShape) -> None:
        counts = np.zeros(shape.n_rows, np.int64)
        ids: list[int] = []
        for first, rows in zip(to.cu_rows[places].tolist(), self._masks, strict=True):
            for row, masked in enumerate(rows):
                counts[first + row] = len(masked)
                ids += masked
        to.mask_starts[0] = 0
        np.cumsum(counts, out=to.mask_starts[1:])
        to.masked[: len(ids)] = ids


def _masks(sequence: FedSequence) -> list[list[int]]:
    """Return the ids that each row of a sequence may not choose."""
    request, drafts = sequence.request, sequence.drafts
    n_barred = request.params.sampling.min_tokens - request.n_output
    bias = request.logit_bias
    masks = []
    for row in range(len(drafts) + 1):
        masked: list[int] = []
        if bias is not None:
            masked += bias.forbidden(request.output_tail(bias.reach), drafts[:row])
        if row < n_barred:
            masked += request.stop_ids
        masks.append(masked)
    return masks
