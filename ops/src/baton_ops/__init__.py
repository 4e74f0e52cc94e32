"""Native ops of speculative decoding: acceptance, and logprobs with rank and top-k.

They take NumPy, Paddle or PyTorch tensors by DLPack, without copies, and import no framework.
"""

from baton_ops.logprob import (
    LogprobColumns,
    LogprobOptions,
    Offsets,
    RankMode,
    logprobs,
    logprobs_into,
    offsets,
    workspace_bytes,
)
from baton_ops.settings import isa, set_isa, set_threads, threads
from baton_ops.verification import Verification, verify_greedy, verify_sampled

__all__ = [
    "LogprobColumns",
    "LogprobOptions",
    "Offsets",
    "RankMode",
    "Verification",
    "isa",
    "logprobs",
    "logprobs_into",
    "offsets",
    "set_isa",
    "set_threads",
    "threads",
    "verify_greedy",
    "verify_sampled",
    "workspace_bytes",
]
