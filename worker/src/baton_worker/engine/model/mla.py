"""Multi-head latent attention: its sizes, and what of a token it keeps.

A token's keys and values are made of one compressed row, which is all that is kept: that row,
normed, and a rotated key that all heads share. Folded into the query, the key's half of the matrix
that would unfold the row makes every head attend to the row itself (DeepSeek-V2, arXiv 2405.04434,
section 2.1.2). Knows no config.json and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mla:
    """The sizes of one head, and of the rows that heads are made of.

    Attributes:
        q_rank: the width that queries are compressed to; 0: they are not.
        kv_rank: the width that keys and values are compressed to.
        nope_size: what of a query and key head does not rotate; it stands first.
        rope_size: what does; of the key, all heads share it.
        value_size: of a value head.
        score_scale: what products of queries and keys are multiplied with.
        norm_eps: of the norms of compressed rows, which published code does not take from
            `rms_norm_eps`.
    """

    q_rank: int
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int
    score_scale: float
    norm_eps: float = 1e-6

    @property
    def query_size(self) -> int:
        """Width of a query head before it is folded."""
        return self.nope_size + self.rope_size

    @property
    def row_size(self) -> int:
        """Width of what is kept of a token: the compressed row, then the rotated key."""
        return self.kv_rank + self.rope_size

    @property
    def unfolded_size(self) -> int:
        """Width of what a head's matrix makes of the compressed row: its key, then its value."""
        return self.nope_size + self.value_size

    def input_sizes(self, n_heads: int) -> tuple[int, int]:
        """Return what a layer's input is projected to: queries, compressed or not, and the row."""
        return self.q_rank or n_heads * self.query_size, self.row_size
