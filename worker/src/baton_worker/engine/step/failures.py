"""Numbers that are none, in one sequence of a step: found, named, and kept from everybody else.

Owns what counts as broken (NaN or infinite where a finite number must be) and whose it is. A weight
or a prompt may do that to one request; rows of a step do not mix, so the others go on and only that
one ends. Knows no model: it is told which rows are broken.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from baton_worker.engine.scheduling.batch import Batch
from baton_worker.engine.scheduling.requests import RequestState
from baton_worker.identity import RequestKey

Broken = npt.NDArray[np.bool_]


class Failures:
    """The requests of one step that cannot go on, each with what was found first."""

    def __init__(self) -> None:
        self.reasons: dict[RequestKey, str] = {}

    def add(self, request: RequestState, what: str) -> None:
        """Note that `what` of a request is not finite."""
        position = len(request.tokens)
        reason = f"the {what} of this request are not finite numbers at position {position}"
        self.reasons.setdefault(request.key, reason)

    def merge(self, later: Failures) -> None:
        """Take over what was found elsewhere, of requests that nothing was found of here."""
        self.reasons = later.reasons | self.reasons

    def of_rows(self, batch: Batch, broken: Broken, what: str) -> None:
        """Note whose flat tokens are `broken` bool[N]."""
        if broken.any():
            for request, start, stop in _owners(batch):
                if broken[start:stop].any():
                    self.add(request, what)


def _owners(batch: Batch) -> Iterator[tuple[RequestState, int, int]]:
    """Yield each sequence with its flat tokens, from the first to behind the last."""
    start = 0
    for sequence in batch.sampled[: batch.n_decode]:  # chunks that choose tokens stand behind
        stop = start + batch.groups[0].q_len
        yield sequence.request, start, stop
        start = stop
    for chunk in batch.chunks:
        yield chunk.request, start, start + chunk.n_tokens
        start += chunk.n_tokens
