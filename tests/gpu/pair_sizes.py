"""How much is asked in each part of the benchmarks of several GPUs, by model.

Pure. Owns the sizes; all that stands on one card at a time fits one of 80 GB.
"""

from __future__ import annotations

from typing import NamedTuple

from bench_gateway import BLOCK_SIZE, Load

FIRST_TOKENS = 8
"""Out of a single request: enough to see the steps behind the first."""
AT_ONCE = 32
"""Requests that are compared at the same time."""


class Sizes(NamedTuple):
    """See the module.

    Attributes:
        ttft: prompts' tokens, each so many times (`repeats`).
        streams, context, tokens: the steady streams, and what each has in and may have out.
        skip: tokens that each has before anything counts.
        arriving, arriving_tokens: in and out of a prompt that arrives beside them.
        lead, window, grace: seconds before the first may arrive, in which they arrive, and after.
        load: of the prefill capacity that was measured with so many prompts (`prompts`).
        wide: the streams that logprobs are told of, each of so many tokens in and out.
        rounds: of them.
        exact: requests that are compared, in slices of so many (`exact_slice`), each of which is
            asked at every K before the next; `exact_longest`, `exact_tokens`: in and out.
    """

    ttft: tuple[int, ...]
    repeats: int
    streams: int
    context: int
    tokens: int
    skip: int
    arriving: int
    arriving_tokens: int
    lead: float
    window: float
    grace: float
    load: float
    prompts: int
    wide: Load
    rounds: int
    exact: int
    exact_slice: int
    exact_longest: int
    exact_tokens: int

    @property
    def longest(self) -> int:
        """Of any request, in tokens."""
        return max(
            max(self.ttft) + FIRST_TOKENS,
            self.context + self.tokens,
            self.arriving + self.arriving_tokens,
            self.wide.prompt + self.wide.tokens,
            self.exact_longest + self.exact_tokens,
        )

    def blocks(self, share: float = 1.0, wide: bool = False) -> int:
        """Return room for the streams, four prompts that arrive, any one request, and the wide."""
        of_streams = self.streams * ((self.context + self.tokens) // BLOCK_SIZE + 2)
        of_prompts = 4 * ((self.arriving + self.arriving_tokens) // BLOCK_SIZE + 2)
        of_longest = -(-(self.longest + 128) // BLOCK_SIZE) + 2
        of_wide = self.wide.kv_blocks if wide else 0
        return max(round(of_streams * share) + of_prompts, of_longest, of_wide)

    @property
    def idle_blocks(self) -> int:
        """Return room for three single requests of the longest kind."""
        return 3 * ((max(*self.ttft, self.arriving) + 128) // BLOCK_SIZE + 2)

    @property
    def exact_blocks(self) -> int:
        """Return room for all that are compared at the same time, and for a single request."""
        of_each = (self.exact_longest + self.exact_tokens) // BLOCK_SIZE + 3
        return max(AT_ONCE * of_each, self.idle_blocks)


SIZES = {
    "qwen3-8b": Sizes(
        ttft=(512, 8192), repeats=20,
        streams=64, context=1024, tokens=2816, skip=8, arriving=8192, arriving_tokens=16,
        lead=3.0, window=20.0, grace=2.0, load=0.7, prompts=12,
        wide=Load(256, 128, 480, 32, 192), rounds=3,
        exact=1000, exact_slice=250, exact_longest=1024, exact_tokens=32,
    ),
    "tiny": Sizes(
        ttft=(32, 256), repeats=3,
        streams=4, context=32, tokens=900, skip=2, arriving=256, arriving_tokens=4,
        lead=1.0, window=1.5, grace=0.5, load=0.2, prompts=4,
        wide=Load(8, 16, 900, 50, 600), rounds=2,
        exact=24, exact_slice=12, exact_longest=96, exact_tokens=12,
    ),
}  # fmt: skip
