"""What the device's runner needs: memory and graphs from a framework, arithmetic from kernels.

Owns the two protocols. `Device` is what a framework (PyTorch, Paddle, NumPy in the tests) gives;
`Kernels` is what `baton_ops` computes on its tensors. All of it works on one stream, in order.
Every kernel writes to memory that it is given, allocates nothing and waits for nothing, so that
any sequence of calls can be captured as a graph and replayed. Knows no model and no request.

Shapes are named: N flat tokens, S sequences, R sampled rows, H hidden size, V vocabulary, D head
dimension, K drafts at most, W blocks in a table. E is the model's dtype (bfloat16 or float32).
Sizes are those of the step's bucket: rows that are not there are marked as each kernel says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.device.expert_kernels import ExpertKernels, Routes
from baton_worker.engine.backends.device.latent_kernels import LatentKernels
from baton_worker.engine.backends.device.lookup_kernels import LookUpKernels
from baton_worker.engine.backends.device.operands import (
    Accepted,
    DraftRows,
    NextStep,
    Penalised,
    Places,
    RopeStyle,
    Rotation,
    RowMap,
    RowParams,
    Rules,
    ScoreColumns,
    ScorePlan,
    ScoreSource,
    Seeds,
    Tensor,
)
from baton_worker.engine.backends.device.pieces import Rows
from baton_worker.engine.backends.device.rank_kernels import RankKernels
from baton_worker.engine.backends.device.scaled_kernels import ScaledKernels

__all__ = [
    "Accepted",
    "DType",
    "Device",
    "DraftRows",
    "Event",
    "Graph",
    "Host",
    "Kernels",
    "Mapped",
    "MemoryUse",
    "NextStep",
    "Penalised",
    "Places",
    "RopeStyle",
    "Rotation",
    "Routes",
    "RowMap",
    "RowParams",
    "Rows",
    "Rules",
    "ScoreColumns",
    "ScorePlan",
    "ScoreSource",
    "Seeds",
    "Shared",
    "Tensor",
]

DType = Literal["bfloat16", "float32", "float64", "int32", "int64", "uint8"]

Host = npt.NDArray[np.uint8]
"""Page-locked memory of the host, seen as bytes."""


class MemoryUse(NamedTuple):
    """Bytes of the device: free and total as the driver tells, and this process's peak so far."""

    free: int
    total: int
    peak: int


class Event(Protocol):
    """A point in the device's stream, or the end of a pull."""

    def wait(self) -> None:
        """Return once the device has come to it."""

    def has_come(self) -> bool:
        """Whether `wait` would return at once."""

    def seconds_since(self, earlier: Event) -> float:
        """Return the device's time from an earlier event to this one, which was waited for; it
        waits for nothing itself.
        """


class Shared(NamedTuple):
    """Memory that other processes may map.

    Attributes:
        tensor: uint8, of as many bytes as were asked for.
        descriptor: stands for the memory, for `Device.map` in another process. A file descriptor:
            the owner closes it.
        n_bytes: what there is to map.
    """

    tensor: Tensor
    descriptor: int
    n_bytes: int


class Mapped(Protocol):
    """Another process's memory, which outlives that process. Whoever lets go of it last unmaps it;
    a pull from it has come by then.
    """

    n_bytes: int


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch it again, over the addresses that it was captured with."""


class Device(Protocol):
    """A framework's memory, stream and graphs.

    A thread that launches kernels calls one of these methods first: each makes the stream the
    thread's own. While one thread captures, the calls of others wait. Every method raises
    `engine.api.DeviceError` when the device refuses, naming what was asked of it.
    """

    index: int | None  # which of those that this process sees; None: the host's memory
    name: str

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Return new memory; never during a capture."""

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Return new memory of zeros; never during a capture."""

    def view(self, buffer: Tensor, at: int, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Return a typed view of uint8[*] `buffer` from byte `at` (a multiple of 16) on."""

    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Return rows `start : stop` of a tensor, sharing its memory."""

    def columns(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Return columns `start : stop` of a matrix, sharing its memory: its rows are strided."""

    def copy(self, source: Tensor, to: Tensor) -> None:
        """Copy memory of the device, in stream order; may be captured."""

    def host(self, n_bytes: int) -> Host:
        """Return page-locked memory."""

    def upload(self, source: npt.NDArray[Any], to: Tensor) -> None:
        """Copy bytes to a tensor of as many, in stream order.

        `source` is contiguous, of any dtype as wide (uint16 for bfloat16), and may not change
        before an event recorded behind this has come. Never during a capture.
        """

    def download(self, source: Tensor, to: npt.NDArray[Any]) -> Event:
        """Begin to copy to the host; `to` is valid once the event has come. Never during a capture.

        `to` is contiguous and of as many bytes; only page-locked memory is copied to while the
        caller goes on.
        """

    def shared(self, n_bytes: int) -> Shared:
        """Return new memory of zeros that other processes may map; never during a capture."""

    def map(self, descriptor: int, n_bytes: int) -> Mapped:
        """Return the memory that a descriptor from `shared` stands for, of another process and
        another device too; the descriptor may be closed then. Never during a capture.
        """

    def address(self, memory: Tensor | Mapped) -> int:
        """Return where contiguous memory begins for kernels of this device, in this process."""

    def pull(
        self,
        source: Mapped,
        to: Tensor | Mapped,
        pieces: npt.NDArray[np.int64],
        rows: Rows | None = None,
    ) -> Event:
        """Begin to copy pieces of other memory, and return their end.

        They are read and written behind all that was launched up to now and beside all that is
        launched later, in any order. Never during a capture.

        Args:
            to: contiguous; memory of another device is written as well as one's own.
            pieces: [pieces, 3]: the byte of `source`, the byte of `to`, how many bytes.
            rows: of what a piece's third number counts rows instead.
        """

    def record(self) -> Event:
        """Return the point behind all that was launched up to now."""

    def follow(self, event: Event) -> None:
        """Let all that is launched later stand behind an event of another device too."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` launches. It has run before at least once, outside of a capture.

        Meanwhile no garbage is collected: a graph that is freed in a capture breaks it.

        Raises:
            DeviceError: the work does something that a graph cannot hold.
        """

    def memory(self) -> MemoryUse:
        """Return what is used."""

    def synchronise(self) -> None:
        """Wait for all work; raises `DeviceError` when some of it failed."""


class Kernels(RankKernels, ExpertKernels, ScaledKernels, LookUpKernels, Protocol):
    """The arithmetic of a step. The order of every sum is fixed by a weight's or head's shape
    alone: a row's bits do not depend on the other rows, on how many there are, or on padding.
    """

    latent: LatentKernels  # of multi-head latent attention

    # -- the decoder -------------------------------------------------------------------------

    def embed(self, table: Tensor, tokens: Tensor, out: Tensor) -> None:
        """out E[N, H] = rows i32[N] of E[V, H]; a token outside 0..V-1 gives zeros."""

    def matmul(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """out E or f32[N, O] = x E[N, I] @ weight E[O, I]^T, summed in fp32 along I.

        `x`'s rows may be strided.
        """

    def gate_up_silu(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """out E[N, I] = silu(gate) * up, [gate, up] = x E[N, H] @ weight E[2 I, H]^T; these two are
        summed and rounded to E as by `matmul`, the rest is in fp32, rounded once.
        """

    def add_norm(
        self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """residual += x (rounded to E; x None: nothing); out = rms_norm(residual) * weight.

        All E[N, H], `weight` E[H]. The norm is of the rounded residual, in fp32, rounded once.
        `out`'s rows may be strided.
        """

    def rope_store(
        self, qkv: Tensor, rotation: Rotation, places: Places, kv: Tensor, layer: int, query: Tensor
    ) -> None:
        """Add the bias to the heads of qkv E[N, (Hq + 2 Hkv) * D], norm and rotate them, each if
        asked for; queries go to `query` E[N, Hq, D], keys and values into the pool
        E[blocks, layers, 2, Hkv, block_size, D].

        All of it is float32, rounded once. A token without a block of its own (null, or beyond the
        table) writes to the trash block; padding writes nothing. Bias, norms, angles and places are
        read early: between what writes them and the call before this one there is one that is no
        `matmul`, `attend`, `add_norm`, `rope_store`, `expert_matmul`, `norm_route`, `combine`,
        `combine_norm` or call of ranks.
        """

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        layer: int,
        tables: Tensor,
        contexts: Tensor,
        scale: float,
        out: Tensor,
        scratch: Tensor,
    ) -> None:
        """Causal attention of each sequence's last N / S tokens over its paged context.

        Args:
            query: E[N, Hq, D], sequence by sequence, equally many tokens each.
            tables: i32[S, W]; they, contexts and keys of earlier steps are read as early as places.
            contexts: i32[S], positions up to and with the sequence's last query; 0 or less: not
                there, its output is left alone.
            out: E[N, Hq, D].
            scratch: uint8[`attention_scratch_bytes`], zeros at first, left fit for the next call.
        """

    def attention_scratch_bytes(
        self, n_heads: int, n_kv_heads: int, head_dim: int, sequences: int, tokens: int, width: int
    ) -> int:
        """Return what `attend` needs for up to so many sequences, flat tokens and table width
        (in positions).
        """

    def gather(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        """out E[R, H] = rows i32[R] of x E[N, H]; a row outside 0..N-1 gives zeros."""

    def broken_rows(self, x: Tensor, out: Tensor) -> None:
        """out u8[N] |= 1 where x E[N, H] or f32[N, H] holds NaN or infinity."""

    # -- choosing tokens ---------------------------------------------------------------------

    def process(
        self,
        logits: Tensor,
        rows: RowMap,
        state: Penalised,
        rules: Rules,
        processed: Tensor,
        broken: Tensor,
    ) -> None:
        """processed f32[R, V]: f32[R, V] after logit bias, penalties and masks, in that order.

        Row j of a sequence is processed as if drafts 1..j had been emitted. Rows behind the last
        sequence's are left alone. broken u8[R] |= 1 where any logit is NaN or infinitely large,
        which a mask may hide from `probabilities`.
        """

    def argmax(self, logits: Tensor, token: Tensor, broken: Tensor) -> None:
        """token i32[R]: the lowest id of the largest logit; broken u8[R] |= 1 where that is NaN or
        infinite (any NaN in the row breaks it).
        """

    def probabilities(
        self, logits: Tensor, params: RowParams, probs: Tensor, broken: Tensor
    ) -> None:
        """probs f32[R, V]: temperature, min_p, top_k, top_p of f32[R, V], in that order, not
        normalised; see `sampler._probabilities`. Temperature 0: one at the argmax, zeros else.
        broken u8[R] |= 1 where the largest logit is NaN or infinite; such a row gets any
        distribution. Rows behind the last sequence's are left alone.
        """

    def uniforms(self, seeds: Tensor, positions: Tensor, rows: RowMap, out: Tensor) -> None:
        """out f64[R]: `noise.uniforms` of seeds i64[S] (as unsigned) at positions i64[S] + j.

        Rows behind the last sequence's are left alone.
        """

    def verify_greedy(self, target: Tensor, drafts: DraftRows, out: Accepted) -> None:
        """`baton_ops.cuda.verify_greedy_into`."""

    def verify_sampled(
        self, probs: Tensor, uniform: Tensor, drafts: DraftRows, out: Accepted
    ) -> None:
        """`baton_ops.cuda.verify_sampled_into`."""

    def count_tokens(self, accepted: Accepted, state: Penalised) -> None:
        """Count each sequence's tokens (those >= 0 up to n_accepted + 1) as seen and emitted."""

    # -- logprobs ----------------------------------------------------------------------------

    def plan_scores(
        self, accepted: Accepted, rows: RowMap, k: Tensor, scale: ScoreSource, out: ScorePlan
    ) -> None:
        """`baton_ops.cuda.plan_into`: which rows of the logits give which token's logprobs."""

    def logprobs(self, logits: Tensor, plan: ScorePlan, out: ScoreColumns, work: Tensor) -> None:
        """`baton_ops.logprobs_into` over the plan's rows; `work` is its zeroed workspace."""

    def normalise_top_p(self, logits: Tensor, plan: ScorePlan, out: ScoreColumns) -> None:
        """`baton_ops.cuda.normalise_top_p_into`, of the plan's own top_p."""

    def logprob_workspace_bytes(self, rows: int, vocab_size: int) -> int:
        """Return the bytes of `logprobs`' workspace."""

    # -- from step to step -------------------------------------------------------------------

    def scatter_tokens(
        self, accepted: Accepted, count: Tensor, starts: Tensor, tokens: Tensor
    ) -> None:
        """tokens i32[N][starts i32[S] + j] = token[s, j] for j <= n_accepted, 0 for the rejected
        drafts behind them, up to j = count i32[S] (of `DraftRows`); a start of -1 writes nothing.
        """

    def seed_drafts(self, accepted: Accepted, seeds: Seeds, ahead: int) -> None:
        """rows[s] = starts[s] + n_accepted[s]: the flat token whose MTP output predicts draft 1;
        positions[s] = first[s] + n_accepted[s] + ahead: where the token stands that is fed `ahead`
        behind it; contexts[s] = positions[s] + 1. Without a start (-1): -1, -1 and 0.
        """

    def advance(
        self, accepted: Accepted, starts: Tensor, drafts: Tensor, fed: NextStep, out: NextStep
    ) -> None:
        """Write what the step behind this one feeds: the newest tokens and their drafts.

        Each sequence stands n_accepted + 1 positions further. `drafts` is i32[K, *], one draft of
        all sequences after the other, -1 from where one has none; `starts` i32[S] is -1 for who is
        not there: its tokens and positions are 0. `fed` (`first`, `draws` are read) may be `out`.
        """
