"""One request's life inside the engine: its tokens, its blocks, its finish.

Owns the per-request state that outlives a step and the rule that ends a request. Knows neither
queues nor the model; the scheduler moves a request between phases, the runner feeds it tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.api import Handoff, KvInPool
from baton_worker.engine.kv.leases import Lease
from baton_worker.engine.kv.pool import NULL_BLOCK
from baton_worker.engine.kv.sharing import Pull, is_over
from baton_worker.engine.lookup import Lookup
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.ngram import NgramIndex
from baton_worker.engine.options import EngineOptions
from baton_worker.engine.scheduling.logit_bias import LogitBias, logit_bias_of
from baton_worker.engine.scheduling.waiting_queue import Arrival
from baton_worker.identity import RequestKey
from baton_worker.messages import HANDOFF_LAYERS, NO_DRAFT_SCORES, DraftScores, Submit
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.sampling import RequestParams


class Phase(enum.Enum):
    """Where a request is: queued, stepping, or prefilled and offered for handoff."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    HELD = enum.auto()


class Penalties:
    """Which tokens came before, dense over the vocabulary and updated token by token.

    Attributes:
        seen: bool[V], in the prompt or the output.
        counts: i32[V], occurrences in the output.
    """

    __slots__ = ("counts", "seen")

    def __init__(self, vocab_size: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.seen = np.zeros(vocab_size, np.bool_)
        self.seen[list(prompt)] = True
        self.counts = np.zeros(vocab_size, np.int32)
        self.add(output)

    def add(self, tokens: Sequence[int]) -> None:
        """Count emitted tokens."""
        for token in tokens:
            self.seen[token] = True
            self.counts[token] += 1


@dataclass(slots=True, eq=False)
class AheadBlocks:
    """Blocks of a request that were pulled before its offer came, or are being pulled still.

    Attributes:
        names: by which the allocator may have them, in the order of positions.
        layers: how many of each were pulled, the first ones; of those, too, that the request has
            taken.
        n_coming: pulls that are under way.
    """

    names: list[bytes] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    n_coming: int = 0

    def put(self, start: int, names: Sequence[bytes], layers: Sequence[int]) -> None:
        """Note what stands at `start` and behind."""
        self.names[start : start + len(names)] = names
        self.layers[start : start + len(layers)] = layers

    def cut(self, count: int) -> list[bytes]:
        """Drop all behind the first `count`; return their names."""
        gone = self.names[count:]
        del self.names[count:], self.layers[count:]
        return gone


@dataclass(slots=True, eq=False)
class RequestState:
    """A request that the engine holds.

    Attributes:
        params: what was asked.
        tokens: prompt, then output.
        stop_ids: tokens that end it.
        table: i32[W] block table; entries past `n_blocks` are the null block.
        n_given: tokens of output that an earlier attempt gave and this one goes on behind.
        n_computed: positions whose KV is valid in every layer.
        n_reused: prompt tokens whose KV was at hand when it was first admitted.
        drafts: proposals for the positions after `tokens`.
        draft_scores: logprobs of the first of them, when the request wants them told.
        n_prompt_told: prompt positions whose logprobs were told; the first has none.
        has_foreign_kv: whether its KV came with a handoff.
        block_names: contents of its full blocks, see `prefix_cache`; `n_named` were offered.
        ngrams: where lookup finds its drafts, if it is a source on the host; `lookup`: how often
            they were right, if that is asked.
        turn: its place among its gateway's requests; see `waiting_queue` for this, `arrival`, its
            place among all, `n_overtaken`, later ones admitted before it, and `is_promoted`.
        ahead: blocks of it that were pulled before its offer.
        kv_stays: whether decode pulls its KV, so that none is exported; `tells_layers`: whether it
            does so while the last chunk is computed, layers behind layers.
        incoming: a handoff whose KV is not yet in the pool; `n_imported_blocks` of it are.
        pull: what writes to its blocks beside the steps; `lease`: under which decode reads them.
        n_open: newest tokens that a step feeds again, see `EngineOptions.n_open_tokens`.
        submitted_at, admitted_at: engine clock, seconds; `admitted_at` of the first admission.
    """

    key: RequestKey
    params: RequestParams
    n_prompt: int
    tokens: list[int]
    stop_ids: frozenset[int]
    max_total_tokens: int
    table: npt.NDArray[np.int32]
    submitted_at: float
    penalties: Penalties | None = None
    logit_bias: LogitBias | None = None
    hand_over: bool = False
    turn: int = 0
    arrival: Arrival = (0, 0)
    n_overtaken: int = 0
    is_promoted: bool = False
    incoming: Handoff | None = None
    n_imported_blocks: int = 0
    ahead: AheadBlocks = field(default_factory=AheadBlocks)
    kv_stays: bool = False
    tells_layers: bool = False
    n_told_blocks: int = 0
    pull: Pull | None = None
    lease: Lease | None = None
    phase: Phase = Phase.WAITING
    admitted_at: float | None = None
    n_blocks: int = 0
    n_given: int = 0
    n_computed: int = 0
    n_reused: int = 0
    drafts: tuple[int, ...] = ()
    draft_scores: DraftScores = NO_DRAFT_SCORES
    n_prompt_told: int = 1
    has_foreign_kv: bool = False
    block_names: list[bytes] = field(default_factory=list)
    n_named: int = 0
    ngrams: NgramIndex | None = None
    lookup: Lookup | None = None
    n_open: int = 1

    @property
    def n_output(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def priority(self) -> int:
        """Lower is served first."""
        return self.params.priority

    @property
    def may_reuse_kv(self) -> bool:
        """Whether cached blocks may stand for its first tokens; not when every row of the prompt is
        wanted.
        """
        return self.params.logprobs.prompt_k < 0

    @property
    def draft_k(self) -> int:
        """Alternatives per draft to score drafts with; -1: do not score them."""
        return self.params.logprobs_k if self.params.logprobs.draft_logprobs else -1

    @property
    def is_decoding(self) -> bool:
        """Whether only the open tokens lack KV, so that drafts can be verified behind them."""
        n_tokens = len(self.tokens)
        return self.n_computed == max(n_tokens - self.n_open, 0) and n_tokens > self.n_prompt

    @property
    def is_pulled(self) -> bool:
        """Whether its KV is to be read out of another pool, and is not known to be here."""
        return self.incoming is not None and isinstance(self.incoming.kv, KvInPool)

    @property
    def is_coming(self) -> bool:
        """Whether some of what was pulled before its offer is still under way."""
        return self.ahead.n_coming > 0

    @property
    def is_on_its_way(self) -> bool:
        """Whether its KV is being pulled, so that no step can be about it yet."""
        return self.pull is not None and not is_over(self.pull)

    @property
    def blocks(self) -> list[int]:
        """The blocks it owns, in position order."""
        blocks: list[int] = self.table[: self.n_blocks].tolist()
        return blocks

    def end_lease(self) -> None:
        """See to it that nobody takes what is in its blocks for its KV any more."""
        if self.lease is not None:
            self.lease.end()
            self.lease, self.n_told_blocks = None, 0

    def output_tail(self, count: int) -> tuple[int, ...]:
        """Return the last `count` tokens of the output, or all of fewer."""
        return tuple(self.tokens[max(len(self.tokens) - count, self.n_prompt) :])

    def usable_drafts(self) -> tuple[int, ...]:
        """Return the drafts that could be emitted if all were accepted.

        None behind fewer tokens than draft layers: there some layers have no row to begin at.
        """
        if len(self.tokens) < self.n_open:
            return ()
        most = self.max_total_tokens - len(self.tokens) - 1
        return self.drafts if len(self.drafts) <= most else self.drafts[: max(most, 0)]

    def settle(self, n_valid: int) -> None:
        """Note that the main model's KV is valid up to position `n_valid`, and each draft layer's
        as far as the tokens are known that it takes.
        """
        self.n_computed = self.settled(n_valid)

    def settled(self, n_valid: int) -> int:
        """Return what `settle` would make of `n_computed`."""
        return max(min(n_valid, len(self.tokens) - self.n_open), 0)

    def accept(self, tokens: Sequence[int]) -> Accepted:
        """Append what the step emitted, up to the token that ends the request.

        A stop token wins over the length when both end it at the same token.
        """
        known, finish, kept = self.tokens, Finish.NONE, 0
        for token in tokens:
            known.append(token)
            kept += 1
            if token in self.stop_ids:
                finish = Finish.STOP
                break
            if len(known) >= self.max_total_tokens:
                finish = Finish.LENGTH
                break
        if self.penalties is not None:
            self.penalties.add(tokens[:kept])
        return Accepted(kept, finish)


class Accepted(NamedTuple):
    """How many of a step's tokens a request kept, and whether they ended it."""

    n_kept: int
    finish: Finish


@dataclass(frozen=True, slots=True)
class Terminal:
    """A request that ended outside a forward pass: aborted or failed."""

    key: RequestKey
    position: int
    finish: Finish
    code: ErrorCode | None = None
    message: str = ""


class Ending(NamedTuple):
    """How a request that a launched step carries shall end once that has landed."""

    finish: Finish
    code: ErrorCode | None
    message: str


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What new requests are checked against, and what their state is sized by.

    Attributes:
        n_open_tokens: see `EngineOptions`.
    """

    vocab_size: int
    max_model_len: int
    max_top_k: int
    table_width: int
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    n_open_tokens: int = 1

    @classmethod
    def of(cls, shape: ModelShape, options: EngineOptions) -> RequestLimits:
        """Return those of an engine."""
        return cls(
            vocab_size=shape.vocab_size,
            max_model_len=options.max_model_len,
            max_top_k=options.max_top_k,
            table_width=options.table_width,
            eos_token_ids=frozenset(shape.eos_token_ids),
            n_open_tokens=options.n_open_tokens,
        )


def new_state(
    request: Submit, limits: RequestLimits, now: float, kv_stays: bool = False
) -> RequestState:
    """Return the state of a freshly submitted prompt, or of one that goes on after an output."""
    state = _state(request.key, request, request.output_token_ids, limits, now)
    state.hand_over = request.decode is not None
    state.kv_stays = kv_stays
    state.tells_layers = (
        kv_stays and request.decode is not None and HANDOFF_LAYERS in request.decode.features
    )
    state.turn = request.turn
    state.n_given = len(request.output_token_ids)
    if request.output_token_ids:
        state.n_prompt_told = state.n_prompt
    return state


def imported_state(handoff: Handoff, limits: RequestLimits, now: float) -> RequestState:
    """Return the state of a handoff: its first token emitted elsewhere, its KV still to import."""
    source = handoff.state
    output = (*source.output_token_ids, source.first_token)
    state = _state(source.key, source, output, limits, now)
    state.incoming = handoff
    state.drafts = source.drafts
    state.draft_scores = source.draft_scores
    state.n_reused = source.n_reused
    state.has_foreign_kv = True
    state.n_prompt_told = state.n_prompt
    return state


def _state(
    key: RequestKey,
    params: RequestParams,
    output: tuple[int, ...],
    limits: RequestLimits,
    now: float,
) -> RequestState:
    sampling, prompt = params.sampling, params.prompt_token_ids
    eos = frozenset[int]() if sampling.ignore_eos else limits.eos_token_ids
    penalties = Penalties(limits.vocab_size, prompt, output) if sampling.has_penalties else None
    return RequestState(
        key=key,
        params=params,
        n_prompt=len(prompt),
        tokens=[*prompt, *output],
        stop_ids=eos | frozenset(sampling.stop_token_ids),
        max_total_tokens=min(len(prompt) + sampling.max_tokens, limits.max_model_len),
        table=np.full(limits.table_width, NULL_BLOCK, np.int32),
        submitted_at=now,
        penalties=penalties,
        logit_bias=logit_bias_of(sampling),
        n_open=limits.n_open_tokens,
    )
