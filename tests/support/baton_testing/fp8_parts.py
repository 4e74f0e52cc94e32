"""Which outputs of a device's matrices lie together as a checkpoint has them.

Scales of blocks stay so where all such parts of a matrix are of whole blocks: what makes weights
without a checkpoint asks here.
"""

from __future__ import annotations

import math

from baton_worker.engine.model.shape import ModelShape


def input_part(shape: ModelShape) -> int:
    """Return what the rows of all parts of a layer's input matrix are multiples of."""
    lengths = [part.stop - part.start for part in shape.stretches]
    of_heads = lengths if shape.mla is None and len(lengths) > 1 else []
    return math.gcd(*shape.projected_sizes, *of_heads)
