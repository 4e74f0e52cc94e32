"""The shape of a model: what `config.json` of a Hugging Face folder says, resolved.

Owns the sizes and facts that engines compute by, and the fingerprint of those that KV depends on.
What a family means is `families`' business, what is refused `config`'s. Knows no weights and no
framework.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton_worker.engine.model.config import (
    RawConfig,
    RawGeneration,
    check,
    read_config,
    read_generation,
    told,
)
from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.families.family import Family, MtpHidden, MtpOrder, RopeStyle
from baton_worker.engine.model.mla import Mla
from baton_worker.engine.model.mla_fields import read_mla
from baton_worker.engine.model.quantisation import Fp8
from baton_worker.engine.model.quantisation_fields import read_quantisation
from baton_worker.engine.model.refusals import ModelShapeError, refuse
from baton_worker.engine.model.rope import RopeScaling, YarnScaling, stretches
from baton_worker.engine.model.rope_fields import (
    read_rotated_part,
    read_scaling,
    read_score_factor,
    read_theta,
)

__all__ = [
    "ModelShape",
    "ModelShapeError",
    "MtpHidden",
    "MtpOrder",
    "RopeStyle",
    "fingerprint",
    "load_shape",
]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU or a mixture of them, optional MTP.

    `head_dim` is a size of its own: `n_heads * head_dim` need not be `hidden_size`.

    Attributes:
        n_layers: main decoder layers, MTP layers not counted.
        n_mtp_layers: multi-token-prediction layers (`num_nextn_predict_layers`), 0 for none.
        rope_style: which pairs rotate together: `half` pairs (i, i + head_dim/2), as Llama;
            `interleaved` pairs (2i, 2i + 1), as ERNIE.
        has_qk_norm: each query and key head is RMS-normed before it is rotated (Qwen3).
        mtp_hidden: whether MTP is fed the main model's hidden state from before or after the final
            norm. The family says; `baton_mtp_hidden` in config.json decides where published code
            of a family disagrees.
        eos_token_ids: every id that ends a sequence, of config.json and generation_config.json.
        max_position_embeddings: longest context; what YaRN makes of it counts.
        dtype: the checkpoint's own dtype as config.json names it; informative only.
        has_qkv_bias: query, key and value projections have biases (Qwen2, MiMo).
        mtp_order: what the MTP projection's input is, the first half first.
        rotated_size: how many elements of each head rotate, the first ones; 0 for all.
        rope_scaling: how rotation is stretched to longer contexts, None for not at all.
        experts: the mixture that some layers have in place of their MLP, None for dense models.
        mla: attention is over compressed rows, None for not. Then `n_kv_heads` and `head_dim` are
            those of what is kept and attended to: one head, the row that all query heads share.
        quantisation: how the matrices of decoder layers are quantised, None for not at all.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_mtp_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_style: RopeStyle
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    mtp_hidden: MtpHidden
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int
    dtype: str
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    mtp_order: MtpOrder = "embedding_hidden"
    rope_scaling: RopeScaling | None = None
    rotated_size: int = 0
    experts: Experts | None = None
    mla: Mla | None = None
    quantisation: Fp8 | None = None

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.n_heads * self.head_dim

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        """Widths of what a layer's input is projected to: queries, keys, values; with MLA queries,
        compressed or not, and the compressed row.
        """
        if self.mla is not None:
            return self.mla.input_sizes(self.n_heads)
        return self.q_size, self.kv_size, self.kv_size

    @property
    def stretches(self) -> tuple[slice, ...]:
        """Stretches of a head in the order in which a device has them, see `rope.stretches`:
        neighbours that rotate together stay where they are.
        """
        is_partial = self.rope_style == "half" and self.rotated_size
        return stretches(self.head_dim, self.rotated_size if is_partial else 0)

    @property
    def o_size(self) -> int:
        """Width of what attention gives to the output's projection."""
        return self.q_size if self.mla is None else self.n_heads * self.mla.value_size

    @property
    def rope_head_size(self) -> int:
        """Width of that of a head for which angles are tabulated."""
        return self.head_dim if self.mla is None else self.mla.rope_size

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.n_kv_heads * self.head_dim

    def kv_block(self, block_size: int) -> tuple[int, int, int, int, int]:
        """Return `[layers, parts, heads, block_size, size]` of a block of the main layers: keys and
        values, or one compressed row in their place.
        """
        n_parts = 2 if self.mla is None else 1
        return self.n_layers, n_parts, self.n_kv_heads, block_size, self.head_dim

    @property
    def n_kv_layers(self) -> int:
        """Layers that keep KV: main layers, then MTP layers."""
        return self.n_layers + self.n_mtp_layers

    def experts_of(self, index: int) -> Experts | None:
        """Return the mixture of layer `index`, MTP layers behind the main ones; None: an MLP."""
        experts = self.experts
        if experts is None:
            return None
        has_them = experts.has_mtp if index >= self.n_layers else index in experts.layers
        return experts if has_them else None

    def mlp_size(self, index: int) -> int:
        """Return the width of what every token takes in layer `index`, 0 for nothing."""
        experts = self.experts_of(index)
        return self.intermediate_size if experts is None else experts.shared_size


_NOT_KV = ("bos_token_id", "eos_token_ids", "max_position_embeddings", "dtype")
_LATER = {
    "has_qkv_bias": False,
    "mtp_order": "embedding_hidden",
    "rope_scaling": None,
    "rotated_size": 0,
    "experts": None,
    "mla": None,
    "quantisation": None,
}
"""Fields that came after the first release, and what models without them have: left out there, so
that workers of both versions name such a model alike."""


def load_shape(model_dir: Path) -> ModelShape:
    """Read `config.json` (and `generation_config.json`, if there) of a Hugging Face folder.

    Raises:
        ModelShapeError: a file is missing or malformed, or a field has a value that Baton cannot
            run; the message names the file, the field and the value.
    """
    path = model_dir / "generation_config.json"
    try:
        generation = read_generation(path)
        path = model_dir / "config.json"
        raw = read_config(path)
        shape = _to_shape(raw, check(raw), generation)
        _check_shape(shape)
        _check_ids("eos_token_id", _eos_ids(raw.eos_token_id), shape.vocab_size)
        path = model_dir / "generation_config.json"
        _check_ids("eos_token_id", _eos_ids(generation.eos_token_id), shape.vocab_size)
    except ModelShapeError as error:
        raise ModelShapeError(f"{path}: {error}") from error
    return shape


def fingerprint(shape: ModelShape, weights_identity: str) -> str:
    """Return 32 hex digits that are equal when two workers may exchange KV, and otherwise differ.

    `weights_identity` comes from the checkpoint (`Weights.identity`). Where a sequence ends and
    which dtype the config names do not change KV, so they do not count.
    """
    fields = dataclasses.asdict(shape)
    for name in _NOT_KV:
        del fields[name]
    for name, absent in _LATER.items():
        if fields[name] == absent:
            del fields[name]
    text = msgspec.json.encode([fields, weights_identity], order="sorted")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _to_shape(raw: RawConfig, family: Family, generation: RawGeneration) -> ModelShape:
    scaling = read_scaling(raw.rope_scaling, raw.rope_parameters)
    mla = _mla(raw) if family.has_mla else None
    head_dim = raw.head_dim or raw.hidden_size // raw.num_attention_heads
    if mla is not None:
        head_dim = mla.row_size
    part = read_rotated_part(
        raw.partial_rotary_factor, raw.rope_scaling, raw.rope_parameters, family.rotated_part
    )
    return ModelShape(
        model_type=raw.model_type,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        n_layers=raw.num_hidden_layers,
        n_mtp_layers=raw.num_nextn_predict_layers or 0,
        n_heads=raw.num_attention_heads,
        n_kv_heads=1 if mla else raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=raw.intermediate_size,
        rope_style=_rope_style(raw, family),
        rope_theta=read_theta(
            raw.rope_theta, raw.rope_scaling, raw.rope_parameters, family.rope_theta
        ),
        rms_norm_eps=family.rms_norm_eps if raw.rms_norm_eps is None else raw.rms_norm_eps,
        tie_word_embeddings=_tied(raw, family),
        mtp_hidden=raw.baton_mtp_hidden or family.mtp_hidden,
        bos_token_id=raw.bos_token_id,
        eos_token_ids=_eos_ids(raw.eos_token_id, generation.eos_token_id),
        max_position_embeddings=_longest(raw.max_position_embeddings, scaling),
        dtype=raw.dtype or raw.torch_dtype or "float32",
        has_qk_norm=told(family.has_qk_norm, raw.use_qk_norm),
        has_qkv_bias=told(family.has_qkv_bias, raw.attention_bias),
        mtp_order=family.mtp_order,
        rope_scaling=scaling,
        rotated_size=_rotated_size(part, head_dim),
        experts=family.experts(raw, raw.num_hidden_layers) if family.experts else None,
        mla=mla,
        quantisation=read_quantisation(raw.quantization_config),
    )


def _mla(raw: RawConfig) -> Mla:
    sizes = read_mla(raw, raw.num_attention_heads, raw.num_key_value_heads, raw.head_dim)
    grown = read_score_factor(raw.rope_scaling, raw.rope_parameters)
    return dataclasses.replace(sizes, score_scale=sizes.score_scale * grown)


def _rope_style(raw: RawConfig, family: Family) -> RopeStyle:
    """Return the family's, unless a family with MLA is told otherwise."""
    return "half" if family.has_mla and raw.rope_interleave is False else family.rope_style


def _rotated_size(part: float, head_dim: int) -> int:
    """Return how many elements of a head rotate, 0 for all."""
    if part == 1.0:
        return 0
    size = int(part * head_dim)
    if not 0.0 < part <= 1.0 or size < 2 or size % 2 or (head_dim - size) % 2:
        refuse("partial_rotary_factor", part, f"a part of {head_dim} that is even and not 0")
    return size


def _longest(told: int, scaling: RopeScaling | None) -> int:
    """Return the longest context: configs with YaRN may still tell the one before."""
    if isinstance(scaling, YarnScaling):
        return max(told, int(scaling.original_positions * scaling.factor))
    return told


def _tied(raw: RawConfig, family: Family) -> bool:
    return family.ties_embeddings if raw.tie_word_embeddings is None else raw.tie_word_embeddings


def _eos_ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    ids: list[int] = []
    for source in sources:
        ids += [source] if isinstance(source, int) else source or []
    return tuple(dict.fromkeys(ids))


def _check_shape(shape: ModelShape) -> None:
    if shape.head_dim < 2 or shape.head_dim % 2:
        refuse("head_dim", shape.head_dim, "an even number >= 2")
    bos = () if shape.bos_token_id is None else (shape.bos_token_id,)
    _check_ids("bos_token_id", bos, shape.vocab_size)


def _check_ids(name: str, tokens: tuple[int, ...], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            refuse(name, token, f"an id in 0..{vocab_size - 1}")
