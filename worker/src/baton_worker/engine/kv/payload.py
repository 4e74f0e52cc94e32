"""How KV lies in a handoff: the arrays of so many blocks, their dtype, and what may be in them.

Two forms. Layered: two float32 arrays a layer, K and V, `[blocks, kv_heads, block_size, head_dim]`,
MTP layers last. By block: one array `[blocks, layers, 2, kv_heads, block_size, head_dim]` of the
model's dtype, as a device keeps it, so that a block is one copy. Pools of two forms exchange
nothing, and refuse each other by the form's name. Knows no pool and no wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

KvDtype = Literal["float32", "bfloat16"]

KV_MAGNITUDE = 1e15
"""Largest |value| taken in a handoff. A masked position keeps a weight of 1.6e-28 on the CPU, so
larger values (or NaN) left in a block could disturb that block's next owner."""

BY_BLOCK = "-by-block"
"""What the name of a form by block ends in, behind the dtype."""

_STORED_AS: dict[KvDtype, type[np.generic]] = {"float32": np.float32, "bfloat16": np.uint16}
_SIGNLESS = np.uint16(0x7FFF)
_LARGEST_BFLOAT16 = int(np.float32(KV_MAGNITUDE).view(np.uint32)) >> 16
"""Bits of bfloat16 without their sign are in the order of its magnitudes, infinity and NaN last."""


class ArrayForm(NamedTuple):
    """One array of a handoff; bfloat16 is kept as uint16."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class KvShape:
    """What two pools must share to exchange blocks, plus how many blocks this one has.

    Attributes:
        dtype: of keys and values.
        is_by_block: which of the two forms; layered KV is float32.
    """

    n_layers: int
    kv_heads: int
    block_size: int
    head_dim: int
    n_blocks: int
    dtype: KvDtype = "float32"
    is_by_block: bool = False

    @property
    def form(self) -> str:
        """The name of its form."""
        return self.dtype + BY_BLOCK if self.is_by_block else self.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, K and V of every layer."""
        values = self.kv_heads * self.block_size * self.head_dim
        return 2 * self.n_layers * values * np.dtype(_STORED_AS[self.dtype]).itemsize

    def blocks_for(self, n_positions: int) -> int:
        """Return how many blocks hold so many positions."""
        return -(-n_positions // self.block_size)

    def bytes_of(self, n_positions: int) -> int:
        """Return the bytes of the blocks, K and V of every layer, that hold so many positions."""
        return self.blocks_for(n_positions) * self.block_bytes

    def arrays(self, n_blocks: int) -> tuple[ArrayForm, ...]:
        """Return the arrays that hold so many blocks."""
        block = (self.kv_heads, self.block_size, self.head_dim)
        dtype = np.dtype(_STORED_AS[self.dtype])
        if self.is_by_block:
            return (ArrayForm((n_blocks, self.n_layers, 2, *block), dtype),)
        return (ArrayForm((n_blocks, *block), dtype),) * (2 * self.n_layers)

    def zeros(self, n_blocks: int) -> tuple[npt.NDArray[Any], ...]:
        """Return the arrays of so many blocks that hold nothing."""
        return tuple(np.zeros(form.shape, form.dtype) for form in self.arrays(n_blocks))


def is_tame(arrays: Sequence[npt.NDArray[Any]]) -> bool:
    """Whether all values are finite and no larger than KV_MAGNITUDE."""
    return all(map(_is_tame, arrays))


def _is_tame(array: npt.NDArray[Any]) -> bool:
    if array.dtype == np.uint16:
        return bool((array & _SIGNLESS).max() <= _LARGEST_BFLOAT16)
    return bool(array.max() <= KV_MAGNITUDE and array.min() >= -KV_MAGNITUDE)
