"""What a kernel does that looks drafts up: see `engine.ngram`, of which it is the device's form.

Owns the protocol. Knows no step and no request.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from baton_worker.engine.backends.device.operands import Accepted, Tensor
from baton_worker.engine.ngram import NgramSizes


class Histories(NamedTuple):
    """The tokens of sequences, and where a step's S are among them.

    Attributes:
        starts, first: i32[S], as `Inputs` has them.
        slot: i32[S], each one's place; -1: it has none.
        tokens: i32[slots, L], by position.
    """

    starts: Tensor
    first: Tensor
    slot: Tensor
    tokens: Tensor


class LookUpKernels(Protocol):
    """Drafts without a model."""

    def look_up(
        self,
        accepted: Accepted,
        histories: Histories,
        drafts: Tensor,
        n_before: int,
        sizes: NgramSizes,
    ) -> None:
        """Add a step's tokens to the histories; write what `NgramIndex.propose` would propose.

        `drafts` is i32[K, *], one draft of all sequences after the other, of which others have made
        the first `n_before`. -1 where nothing is found, where a sequence is not there or has no
        place, and where its history has no room for its newest token.
        """
