"""Quantised models: which matrices are FP8, and what of them has a scale of its own.

Owns the facts that engines and loaders compute by; which config says so is `quantisation_fields`'
business. Knows no weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

E4M3 = "F8_E4M3"
"""The name of the dtype in safetensors."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """The matrices of decoder layers are e4m3 numbers with float32 scales, and so is what they
    multiply; embeddings, head, norms, biases and routers are not.

    Attributes:
        group: how many elements along the shared dimension have a scale of their own, in a weight
            and in each token's activations; 0 for all of them.
        rows: how many of a weight's outputs share its scales.
        scale: the last word of a scale tensor's key, behind the module's name.
        kept: patterns of names of modules that are stored as any other model's, see `patterns`.
    """

    group: int
    rows: int
    scale: str
    kept: tuple[str, ...] = ()

    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """Return what the name of a module that is kept begins with a match of."""
        return tuple(re.compile(pattern) for pattern in self.kept)

    def scale_key(self, key: str) -> str:
        """Return the key of the scales of the weight of this key."""
        return f"{module_of(key)}.{self.scale}"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a weight `[out, in]`."""
        outputs, inputs = shape
        return -(-outputs // self.rows), -(-inputs // self.group) if self.group else 1

    def group_of(self, width: int) -> int:
        """Return how many of `width` elements have a scale of their own."""
        return self.group or width

    def has_blocks(self, outputs: int) -> bool:
        """Whether so many outputs are whole blocks of those that share their scales."""
        return self.rows > 1 and outputs % self.rows == 0


def is_kept(key: str, patterns: tuple[re.Pattern[str], ...]) -> bool:
    """Whether the weight of this key is one of those that `Fp8.patterns` names."""
    return any(pattern.match(module_of(key)) for pattern in patterns)


def module_of(key: str) -> str:
    """Return the name of the module that the weight of this key is of."""
    return key.removesuffix(".weight")
