"""The device's `Kernels` over NumPy, float32 as E: what each must compute, written plainly.

A row's bits depend on nothing but the row: each is computed by itself, from rows that lie alike.
Tokens are chosen by the worker's own rules, and scored by `baton_ops` on the CPU, so that a runner
over these kernels can be held against the engine on the CPU. Knows no request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import baton_ops
from baton_testing import numpy_experts
from baton_testing.numpy_device import NumpyDevice, NumpyTensor
from baton_testing.numpy_latent import NumpyLatentKernels
from baton_testing.numpy_lookup import NumpyLookUpKernels
from baton_testing.numpy_ranks import NumpyRankKernels
from baton_testing.numpy_scaled import NumpyScaledKernels, silu_mul
from baton_worker.engine.backends.device.expert_kernels import ExpertLimits, ExpertSum, Router
from baton_worker.engine.backends.device.latent_kernels import LatentKernels
from baton_worker.engine.backends.device.operands import Norm
from baton_worker.engine.backends.device.seam import (
    Accepted,
    DraftRows,
    NextStep,
    Penalised,
    Places,
    Rotation,
    Routes,
    RowMap,
    RowParams,
    Rules,
    ScoreColumns,
    ScorePlan,
    ScoreSource,
    Seeds,
)
from baton_worker.engine.kv.pool import NULL_BLOCK, TRASH_BLOCK
from baton_worker.engine.sampling.logits_processing import truncated
from baton_worker.engine.sampling.noise import uniforms

Array = npt.NDArray[Any]
Product = Callable[[Any, Any, Array], None]
"""Writes x[N, I] @ weight[O, I]^T."""


class NumpyKernels(NumpyScaledKernels, NumpyRankKernels, NumpyLookUpKernels):
    """See `seam.Kernels`; each call goes on the device's stream."""

    expert_limits = ExpertLimits(1 << 20, 1 << 20, 1 << 20)

    def __init__(self, device: NumpyDevice) -> None:
        super().__init__(device)
        self.latent: LatentKernels = NumpyLatentKernels(device.launch)

    def embed(self, table: NumpyTensor, tokens: NumpyTensor, out: NumpyTensor) -> None:
        """See `Kernels.embed`."""
        self._launch(_gather, table, tokens, out)

    def matmul(self, x: NumpyTensor, weight: NumpyTensor, out: NumpyTensor) -> None:
        """See `Kernels.matmul`."""
        self._launch(matmul, x, weight, out)

    def gate_up_silu(self, x: NumpyTensor, weight: NumpyTensor, out: NumpyTensor) -> None:
        """See `Kernels.gate_up_silu`."""
        self._launch(gate_up_silu, x, weight, out)

    def expert_gate_up_silu(
        self,
        x: NumpyTensor,
        starts: NumpyTensor,
        weight: NumpyTensor,
        out: NumpyTensor,
        known: bool,
    ) -> None:
        """See `ExpertKernels.expert_gate_up_silu`."""
        self._launch(numpy_experts.by_expert, x, starts, weight, out, gate_up_silu)

    def expert_matmul(
        self, x: NumpyTensor, starts: NumpyTensor, weight: NumpyTensor, out: NumpyTensor
    ) -> None:
        """See `ExpertKernels.expert_matmul`."""
        self._launch(numpy_experts.by_expert, x, starts, weight, out, matmul)

    def norm_route(
        self, x: Any, residual: Any, norm: Norm, normed: Any, router: Router, out: Routes
    ) -> None:
        """See `ExpertKernels.norm_route`."""
        self._launch(_add_norm, x, residual, *norm, normed)
        self._launch(numpy_experts.route, normed, *router, out, matmul)

    def combine(
        self, made: NumpyTensor, routes: Routes, beside: NumpyTensor | None, out: NumpyTensor
    ) -> None:
        """See `ExpertKernels.combine`."""
        self._launch(numpy_experts.combine, made, routes, beside, out)

    def combine_norm(
        self, sum_: ExpertSum, residual: NumpyTensor, norm: Norm, out: NumpyTensor
    ) -> None:
        """See `ExpertKernels.combine_norm`."""
        self._launch(numpy_experts.combine, *sum_, out)
        self._launch(_add_norm, out, residual, *norm, out)

    def add_norm(
        self,
        x: NumpyTensor | None,
        residual: NumpyTensor,
        weight: NumpyTensor,
        eps: float,
        out: NumpyTensor,
    ) -> None:
        """See `Kernels.add_norm`."""
        self._launch(_add_norm, x, residual, weight, eps, out)

    def rope_store(
        self,
        qkv: NumpyTensor,
        rotation: Rotation,
        places: Places,
        kv: NumpyTensor,
        layer: int,
        query: NumpyTensor,
    ) -> None:
        """See `Kernels.rope_store`."""
        self._launch(_rope_store, qkv, rotation, places, kv, layer, query)

    def attend(
        self,
        query: NumpyTensor,
        kv: NumpyTensor,
        layer: int,
        tables: NumpyTensor,
        contexts: NumpyTensor,
        scale: float,
        out: NumpyTensor,
        scratch: NumpyTensor,
    ) -> None:
        """See `Kernels.attend`."""
        self._launch(_attend, query, kv, layer, tables, contexts, scale, out, scratch)

    def attention_scratch_bytes(
        self, n_heads: int, n_kv_heads: int, head_dim: int, sequences: int, tokens: int, width: int
    ) -> int:
        """See `Kernels.attention_scratch_bytes`."""
        return 16

    def gather(self, x: NumpyTensor, rows: NumpyTensor, out: NumpyTensor) -> None:
        """See `Kernels.gather`."""
        self._launch(_gather, x, rows, out)

    def broken_rows(self, x: NumpyTensor, out: NumpyTensor) -> None:
        """See `Kernels.broken_rows`."""
        self._launch(_broken_rows, x, out)

    def process(
        self,
        logits: NumpyTensor,
        rows: RowMap,
        state: Penalised,
        rules: Rules,
        processed: NumpyTensor,
        broken: NumpyTensor,
    ) -> None:
        """See `Kernels.process`."""
        self._launch(_process, logits, rows, state, rules, processed, broken)

    def argmax(self, logits: NumpyTensor, token: NumpyTensor, broken: NumpyTensor) -> None:
        """See `Kernels.argmax`."""
        self._launch(_argmax, logits, token, broken)

    def probabilities(
        self, logits: NumpyTensor, params: RowParams, probs: NumpyTensor, broken: NumpyTensor
    ) -> None:
        """See `Kernels.probabilities`."""
        self._launch(_probabilities, logits, params, probs, broken)

    def uniforms(
        self, seeds: NumpyTensor, positions: NumpyTensor, rows: RowMap, out: NumpyTensor
    ) -> None:
        """See `Kernels.uniforms`."""
        self._launch(_uniforms, seeds, positions, rows, out)

    def verify_greedy(self, target: NumpyTensor, drafts: DraftRows, out: Accepted) -> None:
        """See `Kernels.verify_greedy`."""
        self._launch(_verify_greedy, target, drafts, out)

    def verify_sampled(
        self, probs: NumpyTensor, uniform: NumpyTensor, drafts: DraftRows, out: Accepted
    ) -> None:
        """See `Kernels.verify_sampled`."""
        self._launch(_verify_sampled, probs, uniform, drafts, out)

    def count_tokens(self, accepted: Accepted, state: Penalised) -> None:
        """See `Kernels.count_tokens`."""
        self._launch(_count_tokens, accepted, state)

    def plan_scores(
        self,
        accepted: Accepted,
        rows: RowMap,
        k: NumpyTensor,
        scale: ScoreSource,
        out: ScorePlan,
    ) -> None:
        """See `Kernels.plan_scores`."""
        self._launch(_plan_scores, accepted, rows, k, scale, out)

    def logprobs(
        self, logits: NumpyTensor, plan: ScorePlan, out: ScoreColumns, work: NumpyTensor
    ) -> None:
        """See `Kernels.logprobs`."""
        self._launch(_logprobs, logits, plan, out)

    def normalise_top_p(self, logits: NumpyTensor, plan: ScorePlan, out: ScoreColumns) -> None:
        """See `Kernels.normalise_top_p`."""
        self._launch(_normalise_top_p, logits, plan, out)

    def logprob_workspace_bytes(self, rows: int, vocab_size: int) -> int:
        """See `Kernels.logprob_workspace_bytes`."""
        return 16

    def scatter_tokens(
        self, accepted: Accepted, count: NumpyTensor, starts: NumpyTensor, tokens: NumpyTensor
    ) -> None:
        """See `Kernels.scatter_tokens`."""
        self._launch(_scatter_tokens, accepted, count, starts, tokens)

    def seed_drafts(self, accepted: Accepted, seeds: Seeds, ahead: int) -> None:
        """See `Kernels.seed_drafts`."""
        self._launch(_seed_drafts, accepted, seeds, ahead)

    def advance(
        self,
        accepted: Accepted,
        starts: NumpyTensor,
        drafts: NumpyTensor,
        fed: NextStep,
        out: NextStep,
    ) -> None:
        """See `Kernels.advance`."""
        self._launch(_advance, accepted, starts, drafts, fed, out)


_ALIGNMENT = 256
_KEPT = threading.local()


def _vector(size: int) -> Array:
    """Return float32 memory of this size that lies as in every call, the thread's last one's."""
    kept = vars(_KEPT)
    name = str(size)
    if name not in kept:
        raw = np.zeros(size * 4 + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        kept[name] = raw[start : start + size * 4].view(np.float32)
    return np.asarray(kept[name])


def _gather(table: Array, rows: Array, out: Array) -> None:
    known = (rows >= 0) & (rows < len(table))
    out[:] = np.where(known[:, None], table[np.where(known, rows, 0)], np.float32(0.0))


def matmul(x: Array, weight: Array, out: Array) -> None:
    """Write out = x @ weight^T, each row by itself."""
    assert x.shape == (len(out), weight.shape[1]), (x.shape, weight.shape, out.shape)
    assert out.shape[1] == len(weight), (weight.shape, out.shape)
    vector = _vector(x.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        for row, values in enumerate(x):
            vector[:] = values
            out[row] = weight @ vector


@np.errstate(invalid="ignore", over="ignore")
def _norm(x: Array, weight: Array, eps: float) -> Array:
    """Return rows [..., D] normed: a row's sum is over memory that lies as if it were alone."""
    wide = x.astype(np.float64, order="C")
    scale = 1.0 / np.sqrt((wide * wide).sum(axis=-1, keepdims=True) / wide.shape[-1] + eps)
    return np.asarray((wide * scale * weight).astype(np.float32))


def _add_norm(x: Array | None, residual: Array, weight: Array, eps: float, out: Array) -> None:
    assert residual.shape == out.shape, (residual.shape, out.shape)
    if x is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            residual += x[: len(residual)]
    out[:] = _norm(residual, weight, eps)


@np.errstate(invalid="ignore", over="ignore")
def _rotated(heads: Array, cos: Array, sin: Array, style: str) -> Array:
    """Return heads [tokens, heads, D], turned by the angles [tokens, D / 2] of their places."""
    half = cos.shape[-1]
    pick = (
        (..., slice(None, half)) if style == "half" else (..., slice(0, None, 2)),
        (..., slice(half, None)) if style == "half" else (..., slice(1, None, 2)),
    )
    cos, sin = cos[:, None], sin[:, None]
    out = np.empty_like(heads)
    out[pick[0]] = heads[pick[0]] * cos - heads[pick[1]] * sin
    out[pick[1]] = heads[pick[1]] * cos + heads[pick[0]] * sin
    return out


def _rope_store(
    qkv: Array, rotation: Rotation, places: Places, kv: Array, layer: int, query: Array
) -> None:
    n_tokens, n_heads, head_dim = query.shape
    n_kv_heads, block_size = kv.shape[3:5]
    n_turned = n_heads + n_kv_heads
    with np.errstate(invalid="ignore", over="ignore"):
        biased = qkv if rotation.bias is None else qkv + rotation.bias
    mine = np.flatnonzero(places.sequence >= 0)
    sequence, position = places.sequence[mine], places.position[mine]
    heads = biased.reshape(n_tokens, -1, head_dim)[mine]
    turned = heads[:, :n_turned]
    if rotation.norms is not None:
        of_query, of_key = rotation.norms[False], rotation.norms[True]
        turned = np.concatenate(
            (
                _norm(turned[:, :n_heads], of_query, rotation.eps),
                _norm(turned[:, n_heads:], of_key, rotation.eps),
            ),
            axis=1,
        )
    turned = _rotated(turned, rotation.cos[position], rotation.sin[position], rotation.style)
    query[mine] = turned[:, :n_heads]
    column, offset = np.divmod(position, block_size)
    width = places.tables.shape[1]
    block = places.tables[sequence, np.minimum(column, width - 1)]
    block = np.where((column >= width) | (block == NULL_BLOCK), TRASH_BLOCK, block)
    # Of tokens that go to one place the last one stays, as if they came after each other.
    kv[block, layer, 0, :, offset] = turned[:, n_heads:]
    kv[block, layer, 1, :, offset] = heads[:, n_turned:]


def _attend(
    query: Array,
    kv: Array,
    layer: int,
    tables: Array,
    contexts: Array,
    scale: float,
    out: Array,
    scratch: Array,
) -> None:
    q_len, rest = divmod(len(query), len(tables))
    assert not rest, (len(query), len(tables))
    n_kv_heads, block_size, head_dim = kv.shape[3:]
    shape = (n_kv_heads, -1, head_dim)
    for sequence, context in enumerate(contexts.tolist()):
        if context <= 0:
            continue
        n_blocks = -(-context // block_size)
        assert q_len <= context, (q_len, context)
        assert n_blocks <= tables.shape[1], (context, tables.shape)
        pages = kv[tables[sequence, :n_blocks], layer].astype(np.float64)
        keys, values = (pages[:, i].swapaxes(0, 1).reshape(shape) for i in (0, 1))
        for j in range(q_len):
            row, last = sequence * q_len + j, context - q_len + j + 1
            heads = query[row].reshape(shape).astype(np.float64)
            done = _attended(heads, keys[:, :last], values[:, :last], scale)
            out[row] = done.reshape(-1, head_dim)


@np.errstate(invalid="ignore", over="ignore")
def _attended(query: Array, keys: Array, values: Array, scale: float) -> Array:
    """Return [kv heads, queries, D] of query [kv heads, queries, D] over keys [kv heads, T, D]."""
    scores = query @ keys.swapaxes(1, 2)
    scores *= scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1)[..., None]
    return np.asarray(weights @ values / total)


def gate_up_silu(x: Any, weight: Any, out: Array, product: Product = matmul) -> None:
    """Write silu(gate) * up of a product that some other kernel may make."""
    gate_up = np.empty((len(out), 2 * out.shape[1]), np.float32)
    product(x, weight, gate_up)
    silu_mul(gate_up, out)


def _broken_rows(x: Array, out: Array) -> None:
    out |= ~np.isfinite(x).all(axis=1)


def _rows_of(cu_rows: Array) -> list[tuple[int, int, int]]:
    """Return (row, its sequence, its place there) of every row that is somebody's."""
    return [
        (row, sequence, row - int(cu_rows[sequence]))
        for sequence in range(len(cu_rows) - 1)
        for row in range(int(cu_rows[sequence]), int(cu_rows[sequence + 1]))
    ]


@np.errstate(invalid="ignore", over="ignore")
def _process(
    logits: Array, rows: RowMap, state: Penalised, rules: Rules, processed: Array, broken: Array
) -> None:
    for row, s, j in _rows_of(rows.cu_rows):
        broken[row] |= not logits[row].max() < np.inf
        values = processed[row]
        values[:] = logits[row]
        mine = slice(int(rules.bias_starts[s]), int(rules.bias_starts[s + 1]))
        values[rules.bias_ids[mine]] += rules.bias[mine]
        if state.slot[s] >= 0:
            _penalise(values, s, j, state, rules)
        values[rules.masked[rules.mask_starts[row] : rules.mask_starts[row + 1]]] = -np.inf


def _penalise(values: Array, s: int, j: int, state: Penalised, rules: Rules) -> None:
    counts, seen = state.counts[state.slot[s]].copy(), state.seen[state.slot[s]] != 0
    assumed = state.draft[s, :j]
    assumed = assumed[(assumed >= 0) & (assumed < len(values))]
    np.add.at(counts, assumed, 1)
    seen[assumed] = True
    factor = rules.repetition[s]
    if factor != 1.0:
        scaled = np.where(values > 0, values / factor, values * factor)
        np.copyto(values, scaled, where=seen)
    values -= rules.frequency[s] * counts.astype(np.float32)
    values -= rules.presence[s] * (counts > 0)


def _argmax(logits: Array, token: Array, broken: Array) -> None:
    token[:] = logits.argmax(axis=1)
    broken |= ~np.isfinite(logits.max(axis=1))


@np.errstate(invalid="ignore", over="ignore")
def _probabilities(logits: Array, params: RowParams, probs: Array, broken: Array) -> None:
    for row, s, _ in _rows_of(params.cu_rows):
        values = logits[row]
        largest = values.max()
        if not np.isfinite(largest):
            broken[row] = 1
            probs[row] = 1.0
        elif params.temperature[s] == 0.0:
            probs[row] = 0.0
            probs[row, values.argmax()] = 1.0
        else:
            weights = np.exp((values - largest) / params.temperature[s])
            weights[weights < params.min_p[s]] = 0.0
            top_k = np.array([params.top_k[s] or len(weights)], np.int64)
            probs[row] = weights
            if top_k[0] < len(weights) or params.top_p[s] < 1.0:
                probs[row] = truncated(weights[None], top_k, params.top_p[s : s + 1])[0]


def _uniforms(seeds: Array, positions: Array, rows: RowMap, out: Array) -> None:
    for row, s, j in _rows_of(rows.cu_rows):
        at = np.array([positions[s] + j], np.uint64)
        out[row] = uniforms(seeds[s : s + 1].view(np.uint64), at)[0]


def _verify_greedy(target: Array, drafts: DraftRows, out: Accepted) -> None:
    _verify(drafts, out, lambda row: int(target[row]))


def _verify_sampled(probs: Array, uniform: Array, drafts: DraftRows, out: Accepted) -> None:
    none, cu_rows = np.zeros((1, 0), np.int32), np.array([0, 1], np.int32)

    def sampled(row: int) -> int:
        weights = probs[row : row + 1]
        if not np.isfinite(weights).all() or weights.sum() <= 0.0:
            return -1
        count = np.zeros(1, np.int32)
        chosen = baton_ops.verify_sampled(weights, uniform[row : row + 1], none, count, cu_rows)
        return int(chosen.token[0, 0])

    _verify(drafts, out, sampled)


def _verify(drafts: DraftRows, out: Accepted, choice: Any) -> None:
    for s, count in enumerate(drafts.count.tolist()):
        out.token[s] = -1
        accepted = 0
        while True:
            out.token[s, accepted] = token = choice(int(drafts.cu_rows[s]) + accepted)
            if accepted == count or token != drafts.draft[s, accepted]:
                break
            accepted += 1
        out.n_accepted[s] = accepted


def _count_tokens(accepted: Accepted, state: Penalised) -> None:
    for s, slot in enumerate(state.slot.tolist()):
        tokens = accepted.token[s, : accepted.n_accepted[s] + 1]
        tokens = tokens[tokens >= 0]
        if slot >= 0:
            np.add.at(state.counts[slot], tokens, 1)
            state.seen[slot, tokens] = 1


def _plan_scores(
    accepted: Accepted, rows: RowMap, k: Array, scale: ScoreSource, out: ScorePlan
) -> None:
    n_rows = n_outputs = n_entries = 0
    for s, count in enumerate((accepted.n_accepted + 1).tolist()):
        for j in range(count):
            out.row_index[n_rows] = rows.cu_rows[s] + j + scale.first_row[s]
            out.token[n_rows] = accepted.token[s, j]
            out.k[n_rows] = k[s]
            out.inv_temp[n_rows] = np.float32(1.0) / scale.temperature[s]
            out.top_p[n_rows] = scale.top_p[s]
            out.row_offset[n_rows], out.topk_offset[n_rows] = n_outputs, n_entries
            n_rows, n_outputs = n_rows + 1, n_outputs + int(k[s] >= 0)
            n_entries += max(int(k[s]), 0)
    out.row_offset[n_rows], out.topk_offset[n_rows] = n_outputs, n_entries
    out.num_rows[0] = n_rows


def _logprobs(logits: Array, plan: ScorePlan, out: ScoreColumns) -> None:
    n, most = int(plan.num_rows[0]), len(plan.token)
    ends = [len(end) for end in (plan.row_offset, plan.topk_offset)]
    assert n <= most, (n, most)
    assert ends == [most + 1] * 2, "what the op asks for"
    token = plan.token[:n]
    baton_ops.logprobs_into(
        logits,
        np.where((token >= 0) & (token < logits.shape[1]), token, 0).astype(np.int32),
        plan.k[:n].copy(),
        out,
        offsets=(plan.row_offset[: n + 1].copy(), plan.topk_offset[: n + 1].copy()),
        row_index=plan.row_index[:n].copy(),
        inv_temp=plan.inv_temp[:n].copy(),
    )


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def _normalise_top_p(logits: Array, plan: ScorePlan, out: ScoreColumns) -> None:
    lowest = np.finfo(np.float32).min
    for row in range(int(plan.num_rows[0])):
        top_p, k = plan.top_p[row], int(plan.k[row])
        if k < 0 or not 0.0 < top_p < 1.0:
            continue
        values = logits[plan.row_index[row]]
        weights = np.exp((values - values.max()) * plan.inv_temp[row])
        whole = np.full(1, len(weights), np.int64)
        kept = truncated(weights[None], whole, np.array([top_p], np.float64))[0]
        mass = np.log(kept.astype(np.float64).sum() / weights.astype(np.float64).sum())
        at, top = int(plan.row_offset[row]), int(plan.topk_offset[row])
        tokens = out.topk_token[top : top + k]
        old, ends = out.topk_logprob[top : top + k], slice(top, top + k)
        out.topk_logprob[ends] = np.where(kept[tokens] > 0, old - mass, lowest)
        is_kept = kept[plan.token[row]] > 0
        out.logprob[at] = out.logprob[at] - mass if is_kept else lowest


def _scatter_tokens(accepted: Accepted, count: Array, starts: Array, tokens: Array) -> None:
    for s, start in enumerate(starts.tolist()):
        if start >= 0:
            n = int(accepted.n_accepted[s]) + 1
            tokens[start : start + n] = accepted.token[s, :n]
            tokens[start + n : start + int(count[s]) + 1] = 0


def _seed_drafts(accepted: Accepted, seeds: Seeds, ahead: int) -> None:
    there = seeds.starts >= 0
    seeds.rows[:] = np.where(there, seeds.starts + accepted.n_accepted, -1)
    seeds.positions[:] = np.where(there, seeds.first + accepted.n_accepted + ahead, -1)
    seeds.contexts[:] = seeds.positions + 1


def _advance(
    accepted: Accepted, starts: Array, drafts: Array, fed: NextStep, out: NextStep
) -> None:
    n_drafts = len(drafts)
    q_len = n_drafts + 1
    for s, start in enumerate(starts.tolist()):
        mine, there = slice(s * q_len, (s + 1) * q_len), start >= 0
        further = int(accepted.n_accepted[s]) + 1
        out.first[s] = fed.first[s] + further if there else 0
        out.draws[s] = fed.draws[s] + further if there else 0
        count = int(np.cumprod(drafts[:, s] >= 0).sum())
        out.count[s] = count if there else 0
        out.contexts[s] = out.first[s] + q_len if there else 0
        out.position[mine] = out.first[s] + np.arange(q_len) if there else 0
        out.draft[s] = -1
        if there:
            out.draft[s, :count] = drafts[:count, s]
        newest, padding = accepted.token[s, further - 1], [0] * (n_drafts - count)
        out.tokens[mine] = [newest, *drafts[:count, s], *padding] if there else 0
