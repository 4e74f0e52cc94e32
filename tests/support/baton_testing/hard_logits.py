"""Rows of logits of named kinds, each a temptation to get ties, ranges or special values wrong."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton_testing import draws

KINDS = (
    "bulk",
    "flat",
    "peaked",
    "tied",
    "masked",
    "ascending",
    "constant",
    "offset",
    "signed_zeros",
    "not_a_number",
)


def rows(kind: str, count: int, vocab: int) -> npt.NDArray[np.float32]:
    """Return f32[count, vocab] of a kind, drawn anew each time that a test asks."""
    rng = draws.new_rng()
    x = rng.standard_normal((count, vocab)).astype(np.float32)
    if kind == "bulk":
        return x * 2 + 16 * rng.random((count, vocab), np.float32) ** 400
    if kind == "flat":
        return x * np.float32(0.01)
    if kind == "peaked":
        x[np.arange(count), rng.integers(vocab, size=count)] = 60
    elif kind == "tied":
        x = np.round(x * 2)
    elif kind == "masked":
        x[rng.random((count, vocab)) > 10 / vocab] = -np.inf
        x[::5] = -np.inf
    elif kind == "ascending":
        x.sort(axis=1)
    elif kind == "constant":
        x[:] = -1.5
    elif kind == "offset":
        x = x * 8 + np.where(np.arange(count) % 2 == 0, 1e4, -1e4)[:, None].astype(np.float32)
    elif kind == "signed_zeros":
        x = -np.abs(x)
        x[:, ::3] = -0.0
        x[:, 1::7] = 0.0
    elif kind == "not_a_number":
        x[0::4, 0] = np.nan
        x[1::4, vocab // 3] = -np.nan
        x[2::4, vocab // 4] = np.inf
        x[:, vocab // 2] = -np.inf
    return x
