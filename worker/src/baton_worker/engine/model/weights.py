"""A model's weights as the engine wants them: fused, `[in, out]`, float32, framework-free.

Where a model is quantised, its matrices are e4m3 numbers, as float32, with their scales.

Owns the dataclasses and the step from a checkpoint's tensors to them. Which key holds what is
`naming`'s business, how bytes are read is `checkpoint`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton_worker.engine.load_progress import LoadProgress
from baton_worker.engine.model import naming
from baton_worker.engine.model.checkpoint import (
    CheckpointError,
    StoredTensor,
    identity,
    open_checkpoint,
)
from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.matrices import (
    SCALED,
    Float32Array,
    Matrix,
    ScaledMatrix,
    joined,
    multiplied_out,
)
from baton_worker.engine.model.mla import Mla
from baton_worker.engine.model.reading import CheckedReader
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.model.shards import WHOLE, Shard, cut_sizes, split_groups

_ALL = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """One gated MLP of width I: `(silu(x @ gate) * (x @ up)) @ down`.

    Attributes:
        gate_up: `[H, 2 * I]`: gate, then up.
        down: `[I, H]`.
    """

    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The mixture of one layer, see `experts.Experts`.

    Attributes:
        router: `[H, experts]`, whole on every shard.
        choice_bias: `[experts]`, None for families without.
        experts: each one's MLP.
    """

    router: Float32Array
    choice_bias: Float32Array | None
    experts: tuple[MlpWeights, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """What MLA makes of compressed rows, see `mla.Mla`; heads are this shard's.

    Attributes:
        q_norm: `[q_rank]`, q_up: `[q_rank, n_heads * query_size]`: of compressed queries; None for
            models whose queries are not.
        kv_norm: `[kv_rank]`.
        kv_up: `[n_heads, unfolded_size, kv_rank]`: each head's matrix, its key's rows first; never
            quantised, but multiplied out.
    """

    q_norm: Float32Array | None
    q_up: Matrix | None
    kv_norm: Float32Array
    kv_up: Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer; all arrays float32 and C-contiguous. Sizes are this shard's.

    Attributes:
        input_norm: `[H]`, before attention.
        qkv: `[H, (n_heads + 2 * n_kv_heads) * head_dim]`: all query heads, then keys, then values.
            With MLA `[H, sum of ModelShape.projected_sizes]`: compressed queries, whole on every
            shard, or query heads, then the compressed row and the key that all heads share.
        o: `[n_heads * head_dim, H]`; with MLA `[n_heads * value_size, H]`.
        post_norm: `[H]`, before the MLP.
        mlp: what every token takes: of a mixture the shared experts; None where it has none.
        qk_norm: `[head_dim]` each, of query and key heads; None for families without.
        qkv_bias: `[(n_heads + 2 * n_kv_heads) * head_dim]`, as `qkv`'s columns; None for families
            without.
        mixture: of the tokens' own experts; None for layers without.
        latent: of MLA; None for families without.
    """

    input_norm: Float32Array
    qkv: Matrix
    o: Matrix
    post_norm: Float32Array
    mlp: MlpWeights | None
    qk_norm: tuple[Float32Array, Float32Array] | None = None
    qkv_bias: Float32Array | None = None
    mixture: ExpertWeights | None = None
    latent: LatentWeights | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MtpWeights:
    """One MTP layer: `layer(concat[rms(emb(t+1), emb_norm), rms(h, hidden_norm)] @ proj)`.

    The two are joined in the order of `ModelShape.mtp_order`. The draft logits are
    `rms(output, final_norm) @ Weights.lm_head`.

    Attributes:
        emb_norm, hidden_norm: `[H]`.
        proj: `[2 * H, H]`; rows `:H` take what comes first in `ModelShape.mtp_order`.
        layer: the decoder layer.
        final_norm: `[H]`; the main model's unless the checkpoint has one of its own.
    """

    emb_norm: Float32Array
    hidden_norm: Float32Array
    proj: Matrix
    layer: LayerWeights
    final_norm: Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A whole model, or one shard of it.

    Attributes:
        embed: `[V, H]`.
        final_norm: `[H]`.
        lm_head: `[H, V]`, contiguous of its own also when tied to `embed`; `[H, 0]` on shards
            other than 0, which compute no logits.
        identity: hash of the checkpoint's tensors, equal on every shard; see `shape.fingerprint`.
    """

    embed: Float32Array
    layers: tuple[LayerWeights, ...]
    mtp: tuple[MtpWeights, ...]
    final_norm: Float32Array
    lm_head: Float32Array
    identity: str


def load_weights(
    model_dir: Path,
    model_shape: ModelShape,
    shard: Shard = WHOLE,
    n_mtp: int | None = None,
    progress: LoadProgress | None = None,
) -> Weights:
    """Read the checkpoint in `model_dir` into fused float32 arrays; only the shard's part is read.

    Args:
        n_mtp: how many of the model's MTP layers are wanted, None for all; the others are only
            checked.
        progress: is told of each tensor, as a whole, when it is begun with.

    Raises:
        CheckpointError: unreadable files, or a key that is missing, unknown, of another shape than
            `model_shape` says, or a copy that differs from its original; the message names it.
        ValueError: the model_shape's heads or intermediate width do not divide by `shard.size`, or
            its shards would cut groups that share a scale.
    """
    for name, size in cut_sizes(model_shape).items():
        if size % shard.size:
            raise ValueError(f"{name} {size} does not divide by {shard.size} shards")
    shared = split_groups(model_shape, shard.size)
    if shared:
        raise ValueError(shared)
    checkpoint = open_checkpoint(model_dir)
    progress = progress or LoadProgress()
    progress.begin(sum(stored.raw.nbytes for stored in checkpoint.values()))
    checked = CheckedReader(checkpoint, model_shape, progress.add)
    reader = _Reader(checked, model_shape, shard)
    wanted = model_shape.n_mtp_layers if n_mtp is None else min(n_mtp, model_shape.n_mtp_layers)
    embed = reader.matrix(naming.EMBED, (model_shape.vocab_size, model_shape.hidden_size))
    final_norm = reader.norm(naming.FINAL_NORM)
    weights = Weights(
        embed=embed,
        layers=tuple(reader.layer(naming.main_layer(i), i) for i in range(model_shape.n_layers)),
        mtp=tuple(reader.mtp(i, final_norm) for i in range(wanted)),
        final_norm=final_norm,
        lm_head=reader.head(embed),
        identity=identity(checkpoint),
    )
    unwanted = _Reader(checked, model_shape, shard, is_wanted=False)
    for index in range(wanted, model_shape.n_mtp_layers):
        unwanted.mtp(index, final_norm)
    checked.refuse_unread()
    progress.finish()
    return weights


class _Reader:
    """Reads weights of one shard, or no more of each than that it is there."""

    def __init__(
        self,
        checked: CheckedReader,
        model_shape: ModelShape,
        shard: Shard,
        is_wanted: bool = True,
    ) -> None:
        self._checked = checked
        self._is_wanted = is_wanted
        self._model_shape = model_shape
        self._shard = shard

    def _stored(self, key: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._checked.stored(key, shape)
        return stored if self._is_wanted else stored.part(slice(0, 0))

    def layer(self, keys: naming.LayerKeys, index: int) -> LayerWeights:
        model_shape = self._model_shape
        experts, width = model_shape.experts_of(index), model_shape.mlp_size(index)
        widths = model_shape.projected_sizes
        return LayerWeights(
            input_norm=self.norm(keys.input_norm),
            qkv=self._latent_columns(keys, widths)
            if model_shape.mla
            else self._fused_columns(keys.qkv, widths),
            o=self._row_split(keys.o, model_shape.o_size),
            post_norm=self.norm(keys.post_norm),
            mlp=self._mlp(keys.shared if experts else keys.mlp, width) if width else None,
            qk_norm=self._qk_norm(keys) if model_shape.has_qk_norm else None,
            qkv_bias=self._joined(keys.qkv_bias, widths) if model_shape.has_qkv_bias else None,
            mixture=self._mixture(keys, experts) if experts else None,
            latent=self._latent(keys, model_shape.mla) if model_shape.mla else None,
        )

    def _latent_columns(self, keys: naming.LayerKeys, widths: tuple[int, ...]) -> Matrix:
        mla, hidden = self._model_shape.mla, self._model_shape.hidden_size
        assert mla is not None, "of a model that has it"
        query, (q_width, row_width) = keys.query_down if mla.q_rank else keys.query, widths
        own = slice(None) if mla.q_rank else self._shard.part(q_width)
        parts = [
            self._matrix(query, (q_width, hidden), rows=own),
            self._matrix(keys.kv_down, (row_width, hidden)),
        ]
        return _of_one_kind((query, keys.kv_down), parts)

    def _latent(self, keys: naming.LayerKeys, mla: Mla) -> LatentWeights:
        n_heads = self._model_shape.n_heads
        q_norm = q_up = None
        if mla.q_rank:
            width = n_heads * mla.query_size
            q_norm = self._stored(keys.query_norm, (mla.q_rank,)).float32()
            shape = (width, mla.q_rank)
            q_up = self._matrix(keys.query_up, shape, rows=self._shard.part(width))
        width = n_heads * mla.unfolded_size
        shape = (width, mla.kv_rank)
        # Multiplied with from both sides, which scales of groups along one do not go with.
        kv_up = multiplied_out(self._matrix(keys.kv_up, shape, rows=self._shard.part(width))).T
        self._stored(keys.kv_up, shape).require_finite(kv_up, made=SCALED)
        return LatentWeights(
            q_norm=q_norm,
            q_up=q_up,
            kv_norm=self._stored(keys.kv_norm, (mla.kv_rank,)).float32(),
            kv_up=np.ascontiguousarray(kv_up).reshape(-1, mla.unfolded_size, mla.kv_rank),
        )

    def _mlp(self, keys: naming.MlpKeys, width: int) -> MlpWeights:
        return MlpWeights(
            gate_up=self._fused_columns(keys.gate_up, (width, width)),
            down=self._row_split(keys.down, width),
        )

    def _mixture(self, keys: naming.LayerKeys, experts: Experts) -> ExpertWeights:
        self._checked.refuse_fused(keys)
        bias = self._checked.choice_bias(keys, experts)
        return ExpertWeights(
            router=self._transposed(keys.router, (experts.count, self._model_shape.hidden_size)),
            choice_bias=None if bias is None else bias.float32(),
            experts=tuple(
                self._mlp(keys.expert(i), experts.intermediate_size) for i in range(experts.count)
            ),
        )

    def mtp(self, index: int, shared_norm: Float32Array) -> MtpWeights:
        model_shape = self._model_shape
        keys = self._checked.mtp_keys(index)
        has_own_norm = self._checked.has_own_norm(keys)
        return MtpWeights(
            emb_norm=self.norm(keys.emb_norm),
            hidden_norm=self.norm(keys.hidden_norm),
            proj=self._matrix(
                keys.proj, (model_shape.hidden_size, 2 * model_shape.hidden_size), as_stored=True
            ),
            layer=self.layer(keys.layer, model_shape.n_layers + index),
            final_norm=self.norm(keys.final_norm) if has_own_norm else shared_norm,
        )

    def head(self, embed: Float32Array) -> Float32Array:
        if self._shard.rank:
            self._checked.skip(naming.LM_HEAD)
            return np.empty((self._model_shape.hidden_size, 0), np.float32)
        if not self._model_shape.tie_word_embeddings:
            return self._transposed(naming.LM_HEAD, embed.shape)
        self._checked.check_copy(naming.LM_HEAD, naming.EMBED)
        return np.ascontiguousarray(embed.T)

    def norm(self, key: str) -> Float32Array:
        return self._stored(key, (self._model_shape.hidden_size,)).float32()

    def _qk_norm(self, keys: naming.LayerKeys) -> tuple[Float32Array, Float32Array]:
        query, key = keys.qk_norm
        shape = (self._model_shape.head_dim,)
        return self._stored(query, shape).float32(), self._stored(key, shape).float32()

    def matrix(self, key: str, shape: tuple[int, ...]) -> Float32Array:
        return self._stored(key, shape).float32()

    def _fused_columns(self, keys: tuple[str, ...], widths: tuple[int, ...]) -> Matrix:
        hidden = self._model_shape.hidden_size
        parts = [
            self._matrix(key, (width, hidden), rows=self._shard.part(width))
            for key, width in zip(keys, widths, strict=True)
        ]
        return _of_one_kind(keys, parts)

    def _joined(self, keys: tuple[str, ...], widths: tuple[int, ...]) -> Float32Array:
        parts = [
            self._stored(key, (width,)).float32(rows=self._shard.part(width))
            for key, width in zip(keys, widths, strict=True)
        ]
        return np.concatenate(parts)

    def _row_split(self, key: str, width: int) -> Matrix:
        shape = (self._model_shape.hidden_size, width)
        return self._matrix(key, shape, columns=self._shard.part(width))

    def _matrix(
        self,
        key: str,
        shape: tuple[int, int],
        rows: slice = _ALL,
        columns: slice = _ALL,
        as_stored: bool = False,
    ) -> Matrix:
        """Return these rows and columns of a matrix stored `[out, in]`, as `[in, out]`."""
        scales = self._checked.scales(key, shape, as_stored)
        if scales is None:
            return np.ascontiguousarray(self._stored(key, shape).float32(rows, columns).T)
        stored = self._checked.stored(key, shape)
        rows = rows if self._is_wanted else slice(0, 0)
        quantisation = self._model_shape.quantisation
        assert quantisation is not None, "what has scales is quantised"
        group = quantisation.group_of(shape[1])
        first, last, _ = columns.indices(shape[1])
        of_groups = scales.float32(columns=slice(first // group, -(-last // group)))
        of_outputs = np.repeat(of_groups, quantisation.rows, axis=0)[: shape[0]][rows]
        return ScaledMatrix(
            values=np.ascontiguousarray(stored.e4m3(rows, columns).T),
            scales=np.ascontiguousarray(of_outputs.T),
            group=group,
        )

    def _transposed(self, key: str, shape: tuple[int, ...]) -> Float32Array:
        return np.ascontiguousarray(self.matrix(key, shape).T)


def _of_one_kind(keys: tuple[str, ...], parts: list[Matrix]) -> Matrix:
    if len({type(part) for part in parts}) > 1:
        told = ", ".join(keys)
        raise CheckpointError(f"{told}: quantised in part, supported is all of them or none")
    return joined(parts)
