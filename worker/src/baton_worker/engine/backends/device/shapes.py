"""Which steps are alike: the sizes that decide what is launched and where its memory lies.

Owns the buckets. Steps that only decode are rounded up to few shapes, so that each of them can be
one graph; what is rounded up is marked absent in the inputs. Knows no request and no tensor.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

_FEWEST_BLOCKS = 8
_FEWEST_RULES = 256


class Choice(enum.IntEnum):
    """How much of the sampler a step needs; more is never wrong, only slower.

    GREEDY: the largest raw logit. SAMPLED: from the raw logits. PROCESSED: from a processed copy.
    """

    GREEDY = 0
    SAMPLED = 1
    PROCESSED = 2


class StepShape(NamedTuple):
    """The sizes of a step.

    Attributes:
        sequences: that decode, absent ones included; q_len: tokens that each feeds, of which
            `n_known` at most come before the first draft.
        chunks: tokens of each prefill chunk.
        n_complete: chunks at whose end a token is chosen, absent ones included; they come first.
        width: blocks in a table.
        most_top: alternatives of a logprob at most; -1: no logprobs.
        n_drafts: that the MTP layer makes.
        draft_top: alternatives of a draft's logprob at most; -1: none are told.
        n_rules: room for biases, and for masked ids.
        n_mtp: MTP layers that follow.
        n_found: drafts that lookup makes behind the MTP layer's.
    """

    sequences: int
    q_len: int
    chunks: tuple[int, ...]
    n_complete: int
    width: int
    choice: Choice
    most_top: int
    n_drafts: int
    draft_top: int
    n_rules: int
    n_mtp: int = 0
    n_known: int = 1
    n_found: int = 0

    @property
    def rows_each(self) -> int:
        """Rows of logits of each sequence that decodes: its newest token's and its drafts'."""
        return max(self.q_len - self.n_known + 1, 0)

    @property
    def n_decoded_rows(self) -> int:
        """Rows of logits of the sequences that decode."""
        return self.sequences * self.rows_each

    @property
    def n_decoded(self) -> int:
        """Flat tokens of the sequences that decode."""
        return self.sequences * self.q_len

    @property
    def n_tokens(self) -> int:
        """N, all flat tokens."""
        return self.n_decoded + sum(self.chunks)

    @property
    def n_tables(self) -> int:
        """Sequences with a table: those that decode, then one for each chunk; at least B."""
        return self.sequences + max(len(self.chunks), self.n_complete)

    @property
    def n_sampled(self) -> int:
        """B, sequences that choose tokens: the first of those with a table."""
        return self.sequences + self.n_complete

    @property
    def n_rows(self) -> int:
        """R, rows of logits."""
        return self.n_decoded_rows + self.n_complete

    @property
    def n_fed(self) -> int:
        """K, columns for drafts: one at least, so that no tensor is empty."""
        return max(self.rows_each - 1, 1)

    @property
    def n_made(self) -> int:
        """Drafts that the step makes for the next one."""
        return self.n_drafts + self.n_found

    @property
    def feeds_found(self) -> bool:
        """Whether it verifies more drafts than the MTP layer's."""
        return self.n_found > 0 and self.q_len > self.n_drafts + self.n_known

    @property
    def are_rows_all(self) -> bool:
        """Whether every flat token has a row of logits."""
        return not self.chunks and self.n_known == 1

    @property
    def is_repeated(self) -> bool:
        """Whether steps like this come again and again."""
        return not self.chunks


def sequence_bucket(count: int, most: int) -> int:
    """Return how many sequences a decoding step of `count` is rounded up to, at most `most`."""
    if count <= 8:
        rounded = 1 << max(count - 1, 0).bit_length()
    else:
        step = 8 if count <= 64 else 16 if count <= 256 else 32
        rounded = -(-count // step) * step
    return max(min(rounded, most), count)


def width_bucket(n_blocks: int, most: int) -> int:
    """Return how many blocks wide tables are that need `n_blocks`, at most `most`."""
    return min(max(_power(n_blocks), _FEWEST_BLOCKS), most)


def rules_bucket(count: int) -> int:
    """Return the room for `count` biases or masked ids."""
    return max(_power(count), _FEWEST_RULES)


def _power(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
