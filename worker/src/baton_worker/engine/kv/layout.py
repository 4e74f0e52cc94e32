"""Which tokens one forward pass feeds, where they stand, and where their KV lives.

Owns the flat-token order that the model, the attention backend and the runner agree on: groups one
after the other, in each group sequence by sequence, in each sequence by position. Pure NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.kv.pool import NULL_BLOCK, TRASH_BLOCK

MIN_ROWS = 8
ROW_MULTIPLE = 4
"""Rows of every matrix product: at least 8, in fours. MKL's float32 product takes other paths for 1
row, for 2..7, and for what is left over from blocks of 4, whose results differ in the last bits. At
these sizes a row's result depends on nothing but the row (measured: AMD EPYC, Intel Xeon), where
columns are padded too (`products.COLUMN_MULTIPLE`). So a
token's logits are the same bits in any batch, chunk or draft count, near-ties fall the same way,
and KV that another request left in the cache is the KV that would be computed."""

MIN_KEYS = 128
"""Keys attended over, padding included, at least. Below, Paddle's softmax sums in another order:
a token's logits would depend on the longest sequence of its batch."""

KEYS_AT_ONCE = 256
"""Keys that one product of weights and values sums over. MKL's splits what has more than some 340
otherwise for each number of them (measured: AMD EPYC), padding included: a token's logits would
depend on the longest sequence of its batch, or on what else its chunk feeds."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenGroup:
    """Sequences that feed equally many tokens.

    Attributes:
        tables: i32[S, W] block tables; entries a sequence does not own are the null block.
        first_position: i64[S] position of each sequence's first fed token.
        q_len: tokens each sequence feeds. What is fed behind a sequence's newest token (drafts, and
            padding to q_len) needs no rollback: its KV is written again before any query sees it.
            Positions without a block write to the trash block.
    """

    tables: npt.NDArray[np.int32]
    first_position: npt.NDArray[np.int64]
    q_len: int

    @property
    def n_sequences(self) -> int:
        """S."""
        return len(self.first_position)

    @property
    def n_tokens(self) -> int:
        """Flat tokens, padding included."""
        return len(self.first_position) * self.q_len

    def positions(self) -> npt.NDArray[np.int64]:
        """Return i64[S, q_len], the position of each fed token."""
        return self.first_position[:, None] + np.arange(self.q_len)


class KvSlots(NamedTuple):
    """Where flat tokens write: block and offset in it, both i64[N]."""

    block: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]


def n_rows(n: int) -> int:
    """Return how many rows to compute for `n` that are wanted."""
    return max(-(-n // ROW_MULTIPLE) * ROW_MULTIPLE, MIN_ROWS)


def pad_rows(values: npt.NDArray[np.int64], fill: int = 0) -> npt.NDArray[np.int64]:
    """Return i64[n_rows(n)]: `values` i64[n], then `fill`."""
    missing = n_rows(len(values)) - len(values)
    return np.concatenate([values, np.full(missing, fill, np.int64)]) if missing else values


def flat_positions(groups: tuple[TokenGroup, ...]) -> npt.NDArray[np.int64]:
    """Return i64[n_rows(N)]: the position of each flat token, 0 for padding."""
    return pad_rows(_join([group.positions().ravel() for group in groups]))


def kv_slots(groups: tuple[TokenGroup, ...], block_size: int) -> KvSlots:
    """Return the KV slot of each flat token, n_rows(N) of them; padding goes to the trash."""
    parts = [_group_slots(group, block_size) for group in groups]
    return KvSlots(
        pad_rows(_join([part.block for part in parts]), TRASH_BLOCK),
        pad_rows(_join([part.offset for part in parts])),
    )


def _group_slots(group: TokenGroup, block_size: int) -> KvSlots:
    positions = group.positions()
    column, offset = np.divmod(positions, block_size)
    block = np.take_along_axis(group.tables, column, axis=1).astype(np.int64)
    block[block == NULL_BLOCK] = TRASH_BLOCK  # all read the null block, so nobody may write to it
    return KvSlots(block.ravel(), offset.ravel())


def _join(parts: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
