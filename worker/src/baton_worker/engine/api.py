"""The engine's contract with the roles around it: what goes in, what one step brings out.

All calls happen on the engine's own thread. The engine never touches a socket and never waits; the
role decides when to step and moves results to the link and to the KV transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton_worker.identity import RequestKey
from baton_worker.messages import HandoffState, Submit
from baton_worker.records.columns import ErrorCode, StepColumns


class EngineRefusedError(Exception):
    """The engine will not take this request; `code` says why and whether another may."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class RankDiedError(RuntimeError):
    """A tensor-parallel rank of this worker is gone or does not come; the message says which one,
    and how it ended.
    """


class DeviceError(RuntimeError):
    """What is installed cannot serve the configured device. Not worth a retry."""


class LeaseName(NamedTuple):
    """What blocks were lent under, see `kv.leases.Leases`: where that is told, and its number."""

    slot: int
    serial: int


@dataclass(frozen=True, slots=True, eq=False)
class KvInPool:
    """KV of a handoff that lies in the pool of its prefill worker until decode has pulled it.

    Attributes:
        blocks: where, in the order of the positions.
        lease: tells for how long they are.
        pool: whose, a `kv.sharing.PeerPool`; None at the prefill worker itself.
    """

    blocks: tuple[int, ...]
    lease: LeaseName
    pool: Any = None


class BegunBlocks(NamedTuple):
    """The last `n_blocks` of those that are told hold their first `n_layers` layers, and no more
    yet.
    """

    n_blocks: int
    n_layers: int


ALL_WHOLE = BegunBlocks(0, 0)
"""Nothing is begun: every block is whole."""


class KvFilled(NamedTuple):
    """All that a prompt which is still computed has filled of its blocks: decode may pull it.

    `begun`: which of them are not filled in all layers.
    """

    key: RequestKey
    kv: KvInPool
    begun: BegunBlocks = ALL_WHOLE


TellFilled = Callable[[KvFilled], object]


@dataclass(frozen=True, slots=True, eq=False)
class Handoff:
    """A prefilled request: state plus KV, as arrays (see HandoffState) or in prefill's pool.

    Outgoing KV is a copy or stays valid until `Engine.release_handoff`; incoming arrays may be
    read-only views of received frames.
    """

    state: HandoffState
    kv: tuple[npt.NDArray[Any], ...] | KvInPool

    @property
    def sent_bytes(self) -> int:
        """Bytes of KV that travel with it."""
        return 0 if isinstance(self.kv, KvInPool) else sum(array.nbytes for array in self.kv)


@dataclass(frozen=True, slots=True, eq=False)
class StepStats:
    """What one step did, for the metrics. Times are seconds of this step's wall clock.

    Attributes:
        proposed_by_position, accepted_by_position: i64[K]; decode verification only.
        accept_lengths: tokens that verification yielded, one entry per decode row (1..K+1).
        logprob_rows_by_k: (k, tokens with k alternatives), each k once, without the k of no token.
        prompt_rows_by_k: the same of prompt tokens.
        logprob_op_seconds: for output tokens alone.
        first_tokens: (key, queue_seconds, prefill_seconds) for each prompt finished in this step,
            and each that goes on behind an earlier attempt's tokens.
        prefix_query_tokens, prefix_hit_tokens: tokens of requests admitted in this step that were
            looked up in the prefix cache, and those whose KV it held.
    """

    prefill_tokens: int
    decode_rows: int
    emitted_tokens: int
    preempted: int
    proposed_by_position: npt.NDArray[np.int64]
    accepted_by_position: npt.NDArray[np.int64]
    accept_lengths: tuple[int, ...]
    logprob_rows_by_k: tuple[tuple[int, int], ...]
    logprob_op_seconds: float
    step_seconds: float
    first_tokens: tuple[tuple[RequestKey, float, float], ...] = ()
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_rows_by_k: tuple[tuple[int, int], ...] = ()

    @property
    def logprob_rows(self) -> int:
        """Tokens that carried logprobs."""
        return sum(rows for _, rows in self.logprob_rows_by_k)

    @property
    def logprob_columns(self) -> int:
        """Entries of those tokens: the sampled token's and its alternatives'."""
        return sum(rows * (1 + k) for k, rows in self.logprob_rows_by_k)


class FailedRequest(NamedTuple):
    """A request that the engine itself ended with an error row."""

    key: RequestKey
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The immutable outcome of one step.

    Attributes:
        columns: rows to publish, finished and aborted requests' terminal rows among them.
        handoffs: prompts that finished prefill here and wait to be sent; their blocks stay held.
        imported: handoffs whose KV now sits in the pool: acknowledge these.
        failed: requests that ended because the step could not go on with them; their rows are
            among the columns.
        filled: of prompts that are still computed and whose KV stays, what there is to pull.
    """

    columns: StepColumns
    handoffs: tuple[Handoff, ...]
    imported: tuple[RequestKey, ...]
    stats: StepStats
    failed: tuple[FailedRequest, ...] = ()
    filled: tuple[KvFilled, ...] = ()


class LaunchKind(StrEnum):
    """How a step gets onto a device: replayed as a graph, or kernel by kernel - one that only
    decodes, and one with prompts.
    """

    GRAPH = "graph"
    DECODE = "decode"
    MIXED = "mixed"


class Launched(NamedTuple):
    """Steps launched so far, and the device's time from the first kernel of each to its results,
    of those that have landed.
    """

    steps: int = 0
    seconds: float = 0.0


class DeviceLoad(NamedTuple):
    """What an engine's device holds and has done.

    Attributes:
        memory_used, memory_total, memory_peak: bytes; used by all on the device, peak by this
            process's tensors.
        graphs_captured: graphs of decoding steps made so far.
        graphs_kept: of how many sequences those at hand are, and how many are of so many.
        launched: by `LaunchKind`.
    """

    memory_used: int
    memory_total: int
    memory_peak: int
    graphs_captured: int
    graphs_kept: Mapping[int, int]
    launched: Mapping[LaunchKind, Launched]


WHY_LEFT_AHEAD = ("blocks", "lease", "times", "room", "unfit", "lost", "coming")
"""Why nothing of use is pulled before its offer: blocks that are not the request's or none of the
pool's; lent no more; pulled too often; those who run need the room; values that no pool may hold;
what was read has not come; others took some of its blocks, or what came for them was lost, while
something comes for those behind.
"""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot for gauges and admission.

    Attributes:
        num_speculative_tokens: K as it is set now.
        kv_blocks_cached: blocks nobody holds whose KV the prefix cache may still give out.
        kv_pulled_ahead_blocks, kv_pulled_behind_blocks: read out of other pools so far: what had
            come before the offer, and all else. Some layers of a block count as that part of it.
        kv_left_ahead: words of filled blocks that nothing of use was pulled for so far, by why:
            `WHY_LEFT_AHEAD`.
        device: None for an engine on the host.
    """

    running: int
    waiting: int
    held_handoffs: int
    kv_blocks_used: int
    kv_blocks_total: int
    num_speculative_tokens: int = 0
    kv_blocks_cached: int = 0
    kv_pulled_ahead_blocks: float = 0.0
    kv_pulled_behind_blocks: float = 0.0
    kv_left_ahead: Mapping[str, int] = field(default_factory=dict)
    device: DeviceLoad | None = None


class Engine(Protocol):
    """What a role needs of an engine."""

    def submit(self, request: Submit, kv_stays: bool = False) -> None:
        """Queue a prompt; with `decode` set it is offered for handoff after its first token.

        Args:
            kv_stays: decode will pull its KV out of this engine's shared pool.

        Raises:
            EngineRefusedError: queue full, prompt too long, or a duplicate key.
        """

    def admit_handoff(self, handoff: Handoff) -> None:
        """Queue a prefilled request; its key appears in a later step's `imported`.

        Raises:
            EngineRefusedError: INCOMPATIBLE for another model or layout, QUEUE_FULL, duplicate.
        """

    def pull_ahead(self, filled: KvFilled, n_tokens: int) -> None:
        """Pull what there is of a prompt of so many tokens, if there is room for it.

        Its offer may name the same blocks under the same lease, or other ones, or never come.
        """

    def drop_ahead(self, key: RequestKey) -> None:
        """No offer will come: forget what was pulled for it. Idempotent."""

    def handoff_bytes(self, n_tokens: int) -> int:
        """Return the bytes of KV that a handoff of `n_tokens` positions carries."""

    def release_handoff(self, key: RequestKey) -> None:
        """Free the blocks of an offered handoff (acknowledged, or given up). Idempotent."""

    def abort(self, key: RequestKey) -> bool:
        """End a request; its terminal row comes with the next step. False if it is not held.

        No row of it follows but that one: what a step in flight yields for it is discarded.
        """

    def fail(self, key: RequestKey, code: ErrorCode, message: str) -> bool:
        """End a request with an error row in the next step. False if it is not held."""

    def set_paused(self, incarnations: frozenset[int]) -> None:
        """Hold back every request of these gateway processes; they keep their place and blocks.

        Aborting or failing a paused request still works. `has_work` does not count paused ones.
        """

    @property
    def num_speculative_tokens(self) -> int:
        """K, drafts proposed per sequence and step. May be read from any thread."""

    @property
    def max_speculative_tokens(self) -> int:
        """Largest K that may be set; 0 for an engine without a drafting method."""

    def set_num_speculative_tokens(self, count: int) -> None:
        """Change K from the next step on; outputs do not depend on it.

        Raises:
            ValueError: not in 0..5, or drafts asked of an engine that makes none.
        """

    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    def step(
        self,
        before_next: Callable[[], object] = lambda: None,
        tell_filled: TellFilled = lambda filled: None,
    ) -> StepResult:
        """Advance every runnable request once and return a step's result.

        An engine may return with the next step already in flight; `has_work` then holds.
        `before_next` is called before it launches that one, perhaps twice, and may call any method
        but `step`: what came while a step ran need not wait for another, unless that was launched
        while the step ran. `tell_filled` is told of prompts' last chunks, layer by layer, while the
        step runs; it calls nothing of the engine.
        """

    def load(self) -> EngineLoad:
        """Return current occupancy."""
