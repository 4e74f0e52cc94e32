"""How KV lies in a handoff: the arrays of so many blocks, their dtype, and what may be in them.

Two forms. Layered: two float32 arrays a layer, K and V, `[blocks, kv_heads, block_size, head_dim]`,
MTP layers last. By block: one array `[blocks, layers, 2, kv_heads, block_size, head_dim]` of the
model's dtype, as a device keeps it, so that a block is one copy. Either may be compressed (MLA):
one row a token that all heads share is in place of its keys and values, so there is one part where
there are two. Pools of two forms exchange nothing, and refuse each other by the form's name. Knows
no pool and no wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

KvDtype = Literal["float32", "bfloat16"]
KvKind = Literal["float32", "bfloat16", "float32-compressed", "bfloat16-compressed"]
"""A dtype, and whether rows are compressed: one word of what workers say to each other."""

KV_MAGNITUDE = 1e15
"""Largest |value| taken in a handoff. A masked position keeps a weight of 1.6e-28 on the CPU, so
larger values (or NaN) left in a block could disturb that block's next owner."""

BY_BLOCK = "-by-block"
"""What the name of a form by block ends in, behind the dtype."""

COMPRESSED = "-compressed"
"""What stands behind the dtype in the name of a compressed form."""

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
        is_compressed: a token's row is there once, in place of its key and its value.
    """

    n_layers: int
    kv_heads: int
    block_size: int
    head_dim: int
    n_blocks: int
    dtype: KvDtype = "float32"
    is_by_block: bool = False
    is_compressed: bool = False

    @property
    def kind(self) -> KvKind:
        """Its dtype, and whether it is compressed."""
        if self.dtype == "float32":
            return "float32-compressed" if self.is_compressed else "float32"
        return "bfloat16-compressed" if self.is_compressed else "bfloat16"

    @property
    def form(self) -> str:
        """The name of its form."""
        return self.kind + BY_BLOCK if self.is_by_block else self.kind

    @property
    def n_parts(self) -> int:
        """How many arrays or rows each layer has: keys and values, or one in their place."""
        return 1 if self.is_compressed else 2

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all parts of every layer."""
        values = self.kv_heads * self.block_size * self.head_dim
        itemsize = np.dtype(_STORED_AS[self.dtype]).itemsize
        return self.n_parts * self.n_layers * values * itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a block."""
        return self.block_bytes // self.n_layers

    def part(self, ranks: int) -> KvShape:
        """Return the shape of each rank's pool where so many share the heads, or have one each."""
        return replace(self, kv_heads=max(self.kv_heads // ranks, 1))

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
            return (ArrayForm((n_blocks, self.n_layers, self.n_parts, *block), dtype),)
        return (ArrayForm((n_blocks, *block), dtype),) * (self.n_parts * self.n_layers)

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
