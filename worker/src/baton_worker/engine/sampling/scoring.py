"""The logits that logprobs are taken from: the model's own, or a copy for requests that ask.

Owns what `LogprobParams` means in numbers. A step in which nobody asks copies nothing, so that raw
logprobs come from untouched logits (R34) and cost what they did. Must run before the step's tokens
are appended, because a row's processing depends on the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.sampling.logits_processing import Logits, process, truncated
from baton_worker.engine.scheduling.batch import FedSequence
from baton_worker.engine.scheduling.requests import RequestState

MIN_TEMPERATURE = 1e-5
"""Below this the logprob op would not scale at all; a lower one counts as this."""


class Scoring(NamedTuple):
    """What logprobs are computed from.

    Attributes:
        logits: f32[R, V], rows as in the raw logits; nobody writes to it, though it is not marked
            read-only, since DLPack cannot share such arrays.
        inv_temp: f32[B], what each sequence's logits are multiplied by; None: all by 1.
    """

    logits: Logits
    inv_temp: npt.NDArray[np.float32] | None = None

    def select(self, kept: Sequence[int]) -> Scoring:
        """Return the scoring of these sequences only, over the same logits."""
        if self.inv_temp is None:
            return self
        return Scoring(self.logits, self.inv_temp[np.array(kept, np.int64)])


@np.errstate(over="ignore", invalid="ignore")  # `choose` finds what is broken
def scoring_of(model_logits: Logits, raw: Logits, sequences: Sequence[FedSequence]) -> Scoring:
    """Return what to score B sequences' tokens with.

    Args:
        model_logits: the model's memory, at least R rows.
        raw: a read-only view of its R rows, `1 + len(drafts)` rows per sequence, in order.
        sequences: what is chosen from, before anything was chosen.
    """
    if not any(_wants_other(s.request) for s in sequences):
        return Scoring(model_logits)
    logits, start = raw.copy(), 0
    inverse = np.ones(len(sequences), np.float32)
    for index, sequence in enumerate(sequences):
        stop = start + len(sequence.drafts) + 1
        if _wants_other(sequence.request):
            temperature = _temperature(sequence.request)
            inverse[index] = 1.0 / temperature
            _transform(logits[start:stop], sequence, temperature)
        start = stop
    return Scoring(logits, inverse)


def _wants_other(request: RequestState) -> bool:
    return request.params.logprobs_k >= 0 and not request.params.logprobs.is_raw


def _temperature(request: RequestState) -> float:
    temperature = request.params.sampling.temperature
    if temperature == 0.0 or not (
        request.params.logprobs.processed or request.params.logprobs.temp_scaled
    ):
        return 1.0
    return max(temperature, MIN_TEMPERATURE)


def _transform(rows: Logits, sequence: FedSequence, temperature: float) -> None:
    """Change one sequence's rows as its parameters say, but for the temperature."""
    request = sequence.request
    if request.params.logprobs.processed:
        process(rows, [sequence])
    if request.params.logprobs.top_p_normalized and request.params.sampling.top_p < 1.0:
        _keep_nucleus(rows, temperature, request.params.sampling.top_p)


def _keep_nucleus(rows: Logits, temperature: float, top_p: float) -> None:
    """Mask what the sampler would leave out by top_p alone.

    The weights are computed as the sampler does, so a token it took is never masked here.
    """
    weights = np.exp((rows - rows.max(axis=1, keepdims=True)) / np.float32(temperature))
    n_rows, vocab_size = rows.shape
    kept = truncated(weights, np.full(n_rows, vocab_size), np.full(n_rows, top_p))
    rows[kept == 0.0] = -np.inf
