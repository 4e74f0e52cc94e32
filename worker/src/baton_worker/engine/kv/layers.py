"""Some layers of blocks: which are told while a prompt's last chunk is computed, and what of blocks
is copied.

Owns when of a chunk its blocks are told, and how the blocks and layers of a pull are put together.
A chunk is computed layer by layer, so a block's first layers are final long before its last ones.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FEW_TOKENS = 1024
"""A step of fewer is short: an eighth of the layers of Qwen3-8B takes an H100 2 ms for 512. So is a
chunk, also one of many in a long step: its reader has the words of all to serve.
"""

Spans = npt.NDArray[np.int64]
"""i64[blocks, 2]: of each block the first layer, and the one behind the last."""


class LayerRuns(NamedTuple):
    """Layers `start : stop` of blocks.

    Attributes:
        runs: i64[pieces, 3]: first block there, first block here, how many.
    """

    runs: npt.NDArray[np.int64]
    start: int
    stop: int

    @property
    def n_layers(self) -> int:
        """How many layers."""
        return self.stop - self.start


def marked_layers(n_layers: int, n_tokens: int) -> tuple[int, ...]:
    """Return after how many of a model's layers what is done is told in a step of so many tokens: a
    half, a quarter, an eighth are left; of a short one a half.

    A pull is much quicker than the layers that it follows, so what counts is what the last word
    leaves. But each word takes its reader a millisecond or two, and words of layers that are done
    sooner would only keep it from the offer behind them.
    """
    left = {n_layers // parts for parts in ((2,) if is_short(n_tokens) else (2, 4, 8))}
    return tuple(sorted({n_layers - some for some in left} - {0, n_layers}))


def is_short(n_tokens: int) -> bool:
    """Whether a step, or a chunk, of so many tokens is told of once at the most."""
    return n_tokens < FEW_TOKENS


def runs_of(theirs: Sequence[int], blocks: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return [pieces, 3]: first block there, first block here, how many; neighbours go together."""
    pairs, is_end = np.array([theirs, blocks], np.int64).T, np.ones(len(blocks) + 1, np.bool_)
    is_end[1:-1] = (pairs[1:] - pairs[:-1] != 1).any(axis=1)
    (ends,) = is_end.nonzero()
    return np.concatenate([pairs[ends[:-1]], (ends[1:] - ends[:-1])[:, None]], axis=1)


def each_block(runs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return [blocks, 3]: the same, each block by itself."""
    counts = runs[:, 2]
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    pairs = np.repeat(runs[:, :2], counts, axis=0) + offsets[:, None]
    return np.concatenate([pairs, np.ones((len(pairs), 1), np.int64)], axis=1)


def layer_runs(
    theirs: Sequence[int], blocks: Sequence[int], spans: Spans | None, n_layers: int
) -> list[LayerRuns]:
    """Return what is copied of blocks of so many layers, those of the same layers together.

    Args:
        spans: None for all layers.
    """
    if spans is None:
        return [LayerRuns(runs_of(theirs, blocks), 0, n_layers)]
    pairs, found = np.array([theirs, blocks], np.int64), []
    for start, stop in np.unique(spans, axis=0).tolist():
        own = pairs[:, (spans == (start, stop)).all(axis=1)]
        found.append(LayerRuns(runs_of(own[0].tolist(), own[1].tolist()), start, stop))
    return found


def spans_of(done: Sequence[int], wanted: Sequence[int], n_layers: int) -> Spans | None:
    """Return the layers from those that are here of each block up to those that are wanted; None
    where that is all of each.
    """
    spans = np.array([done, wanted], np.int64).T
    is_all = not spans[:, 0].any() and bool((spans[:, 1] == n_layers).all())
    return None if is_all else spans


def count_layers(n_blocks: int, spans: Spans | None, n_layers: int) -> int:
    """Return how many layers a pull has, those of all its blocks together."""
    return n_blocks * n_layers if spans is None else int((spans[:, 1] - spans[:, 0]).sum())
