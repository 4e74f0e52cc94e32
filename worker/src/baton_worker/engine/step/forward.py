"""What a step needs of a model: the seam between the engine's loop and the arithmetic.

Owns the protocol that Paddle's model and the simulated one both keep. Loads no accelerator stack,
so everything above it can be used without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from baton_worker.engine.kv.layout import TokenGroup

Array = Any
"""A model's own tensor type. `logits` gives one that DLPack exports, writable; the rest is opaque
to callers."""


class ForwardModel(Protocol):
    """A model with its KV pool behind it.

    `hidden` arrays hold at least one row for each flat token, padding behind them.
    """

    def plan(self, groups: tuple[TokenGroup, ...]) -> Any:
        """Prepare a forward pass over `groups`; the MTP pass over the same tokens may reuse it."""

    def forward(
        self,
        tokens: npt.NDArray[np.int64],
        plan: Any,
        mark: Callable[[int], None] | None = None,
    ) -> Array:
        """Return the hidden states of tokens i64[N], their KV written.

        Args:
            mark: told how many layers' KV is, at each of `kv.layers.marked_layers`.
        """

    def select_rows(self, hidden: Array, rows: npt.NDArray[np.int64]) -> Array:
        """Return rows i64[R] of `hidden`."""

    def logits(self, hidden: Array, layer: int | None = None) -> Array:
        """Return f32[P, V], P at least the rows of `hidden`.

        Args:
            layer: the MTP layer that `hidden` comes from, here and below; None: the main model.
        """

    def broken_rows(self, hidden: Array, count: int) -> npt.NDArray[np.bool_]:
        """Return bool[count]: which of the first rows hold NaN or infinity, and so does their KV.

        `hidden` is what `forward` or `forward_mtp` returned.
        """

    def mtp_input(self, hidden: Array, layer: int | None = None) -> Array:
        """Return what an MTP layer is fed for `hidden`."""

    def forward_mtp(
        self, tokens: npt.NDArray[np.int64], hidden: Array, plan: Any, layer: int = 0
    ) -> Array:
        """Run an MTP layer over pairs (`mtp_input` at i, token at i + 1 + layer), tokens i64[N]."""
