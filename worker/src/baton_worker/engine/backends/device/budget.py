"""What a device's memory is for, in numbers: weights, a step's working memory, others, KV.

Pure arithmetic and the words for people. Knows no device; names the fields of the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_worker.engine.backends.device.pool_sharing import RESERVED_BLOCKS

MOST_BLOCKS = 1 << 20
"""Blocks of tiny models: more of them would serve nobody, and the host keeps lists of them."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Of one rank's device, in bytes.

    Attributes:
        total: what the device has.
        share: of that, what all on it may take together.
        others: what was taken before the model came: other processes, the driver's own.
        weights: the model's, or this rank's part of it.
        working: what a step as large as any takes; None: not known yet.
        block_bytes, block_size: of a block of KV, here; in tokens.
        max_model_len: tokens of the longest request, which must fit alone.
        chunk_field: of the configuration, that which says how large a step is.
    """

    total: int
    share: float
    others: int
    weights: int
    working: int | None
    block_bytes: int
    block_size: int
    max_model_len: int
    chunk_field: str

    @property
    def kv(self) -> int:
        """Bytes that are left for KV, 0 or more."""
        taken = self.others + self.weights + (self.working or 0)
        return max(int(self.share * self.total) - taken, 0)

    @property
    def n_blocks(self) -> int:
        """Blocks of KV that requests may share."""
        return min(max(self.kv // self.block_bytes - RESERVED_BLOCKS, 0), MOST_BLOCKS)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits at once."""
        return self.n_blocks * self.block_size

    @property
    def is_enough(self) -> bool:
        """Whether the longest request fits."""
        return self.kv_tokens >= self.max_model_len

    @property
    def longest_blocks(self) -> int:
        """Blocks that the longest request takes."""
        return -(-self.max_model_len // self.block_size)

    def told(self) -> str:
        """Return all of it in words."""
        working = "" if self.working is None else f", {told(self.working)} a step's working memory"
        return (
            f"engine.gpu_memory_utilization {self.share:g} of {told(self.total)} is "
            f"{told(int(self.share * self.total))}, of which {told(self.weights)} are weights"
            f"{working} and {told(self.others)} were in use before: {told(self.kv)} are left for "
            f"KV, which is {self.kv_tokens} tokens of {told(self.block_bytes // self.block_size)}"
        )

    def refusal(self) -> str:
        """Return why the longest request does not fit, and what to do."""
        needed = (self.longest_blocks + RESERVED_BLOCKS) * self.block_bytes
        lower = f"lower it to {self.kv_tokens} at most, or" if self.kv_tokens > 1 else "lower it,"
        return (
            f"{self.told()}; one request of engine.max_model_len {self.max_model_len} needs "
            f"{told(needed)}: {lower} engine.max_running or {self.chunk_field}, or raise "
            "the share or engine.tensor_parallel_size"
        )

    def facts(self) -> dict[str, object]:
        """Return what a line of the log tells."""
        return {
            "total_bytes": self.total,
            "gpu_memory_utilization": self.share,
            "other_bytes": self.others,
            "weight_bytes": self.weights,
            "working_bytes": self.working or 0,
            "kv_bytes": self.kv,
            "kv_blocks": self.n_blocks,
            "kv_tokens": self.kv_tokens,
            "max_model_len": self.max_model_len,
            "longest_requests": self.kv_tokens // self.max_model_len,
        }


def told(n_bytes: int) -> str:
    """Return a number of bytes for people."""
    for unit, size, digits in (("GiB", 1 << 30, 1), ("MiB", 1 << 20, 2)):
        if n_bytes >= size:
            return f"{n_bytes / size:.{digits}f} {unit}"
    return f"{n_bytes / 1024:.1f} KiB" if n_bytes >= 1024 else f"{n_bytes} bytes"
