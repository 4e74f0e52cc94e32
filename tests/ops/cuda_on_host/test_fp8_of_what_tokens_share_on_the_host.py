"""What all tokens share, behind their experts' rows, on the host: it has the bits of a product of
its own, by every tile that takes it, and experts have theirs.
"""

from __future__ import annotations

import numpy as np
import pytest

from baton_testing.host_scaled import WAYS, HostScaled, HostTurned
from baton_testing.host_scaled_rows import aligned, rows_of, wide


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("processors", [1, 5])
@pytest.mark.parametrize("is_gated", [True, False], ids=["first", "second"])
def test_what_all_share_of_some_tokens_has_its_bits_behind_their_experts_rows(
    both: tuple[HostScaled, HostTurned], way: int, processors: int, is_gated: bool
) -> None:
    """Of the first product it has all rows of x, of the second those behind the pairs'."""
    rng = np.random.default_rng([way, processors])
    starts = np.concatenate([[0], np.cumsum([3, 0, 19, 0, 12])]).astype(np.int32)
    tokens, pairs, columns, outputs = 17, int(starts[-1]), 400, 72
    parts = 2 if is_gated else 1
    x = rows_of(rng, tokens if is_gated else pairs + tokens, columns, 128)
    row = rng.integers(0, tokens, pairs).astype(np.int32) if is_gated else None
    weight = rows_of(rng, parts * outputs * (len(starts) - 1), columns, 128)
    shared = rows_of(rng, parts * outputs, columns, 128)
    turned = both[1]
    turned.set(seed=way)
    out, wanted = (wide(pairs + tokens, outputs, np.uint16) for _ in range(2))
    own, others = wanted[:pairs, :outputs], wanted[pairs:, :outputs]
    first = 0 if is_gated else pairs
    behind = x._replace(values=aligned(x.values[first:]), scales=aligned(x.scales[first:]))
    turned.define(x, weight, 128, own, is_gated, row, starts)
    turned.define(behind, shared, 128, others, is_gated)
    turned.matmul(
        way,
        x,
        weight,
        128,
        out[:, :outputs],
        is_gated,
        row,
        starts,
        processors=processors,
        beside=shared,
        beside_rows=tokens,
    )
    np.testing.assert_array_equal(out, wanted)
