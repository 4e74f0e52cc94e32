"""The shape of a model: what `config.json` of a Hugging Face folder says, checked.

Owns the list of model families that Baton runs and refuses everything else by field and value, so
that a wrong model stops at start and never becomes wrong text. Knows no weights and no framework.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

import msgspec

_T = TypeVar("_T")

RopeStyle = Literal["half", "interleaved"]
MtpHidden = Literal["pre_norm", "post_norm"]


@dataclass(frozen=True, slots=True)
class _Family:
    """What a `model_type` means beyond its sizes; defaults are those of the family's HF config.

    Attributes:
        needs: fields without a safe default: HF's own does not follow from the other sizes.
    """

    architecture: str
    rope_style: RopeStyle
    has_qk_norm: bool = False
    ties_embeddings: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    needs: tuple[str, ...] = ()


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "half"),
    "ernie4_5": _Family(
        "Ernie4_5ForCausalLM",
        "interleaved",
        ties_embeddings=True,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM", "half", has_qk_norm=True, needs=("head_dim", "num_key_value_heads")
    ),
}

_LACKS = {
    "deepseek_v2": "MLA attention, mixture of experts",
    "deepseek_v3": "MLA attention, mixture of experts",
    "ernie4_5_moe": "mixture of experts",
    "glm4_moe": "mixture of experts",
    "gpt_oss": "mixture of experts, sliding windows, attention sinks",
    "mixtral": "mixture of experts",
    "qwen2": "attention biases",
    "qwen2_moe": "mixture of experts, attention biases",
    "qwen3_moe": "mixture of experts",
}
"""Well-known families and what Baton lacks for them, for the refusal's text only."""


class ModelShapeError(ValueError):
    """A model folder's configuration is unreadable or unsupported; the message names the field."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases, optional MTP.

    `head_dim` is a size of its own: `n_heads * head_dim` need not be `hidden_size`.

    Attributes:
        n_layers: main decoder layers, MTP layers not counted.
        n_mtp_layers: multi-token-prediction layers (`num_nextn_predict_layers`), 0 for none.
        rope_style: which pairs rotate together: `half` pairs (i, i + head_dim/2), as Llama;
            `interleaved` pairs (2i, 2i + 1), as ERNIE.
        has_qk_norm: each query and key head is RMS-normed before it is rotated (Qwen3).
        mtp_hidden: whether MTP is fed the main model's hidden state from before or after the final
            norm. Published code disagrees, so `baton_mtp_hidden` in config.json decides.
        eos_token_ids: every id that ends a sequence, of config.json and generation_config.json.
        dtype: the checkpoint's own dtype as config.json names it; informative only.
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

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.n_kv_heads * self.head_dim

    @property
    def n_kv_layers(self) -> int:
        """Layers that keep KV: main layers, then MTP layers."""
        return self.n_layers + self.n_mtp_layers


class _RawConfig(msgspec.Struct, frozen=True):
    """The fields of config.json that decide something; others (dropout, versions) are ignored."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    architectures: list[str] | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_nextn_predict_layers: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, object] | None = None
    rope_parameters: dict[str, object] | None = None
    tie_word_embeddings: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    baton_mtp_hidden: MtpHidden = "pre_norm"
    use_bias: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    use_qk_norm: bool | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    partial_rotary_factor: float | None = None
    compression_ratio: float | None = None
    moe_num_experts: int | list[int] | None = None
    num_local_experts: int | None = None
    num_experts: int | None = None
    n_routed_experts: int | None = None
    quantization_config: dict[str, object] | None = None


class _RawGeneration(msgspec.Struct, frozen=True):
    eos_token_id: int | list[int] | None = None


_MUST_BE_OFF = (
    "use_bias",
    "attention_bias",
    "mlp_bias",
    "use_qk_norm",
    "use_sliding_window",
    "moe_num_experts",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "quantization_config",
)
_AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)
_MUST_BE_ONE = ("partial_rotary_factor", "compression_ratio")


def load_shape(model_dir: Path) -> ModelShape:
    """Read `config.json` (and `generation_config.json`, if there) of a Hugging Face folder.

    Raises:
        ModelShapeError: a file is missing or malformed, or a field has a value that Baton cannot
            run; the message names the file, the field and the value.
    """
    path = model_dir / "config.json"
    raw = _decode(path, _RawConfig)
    generation_path = model_dir / "generation_config.json"
    generation = (
        _decode(generation_path, _RawGeneration) if generation_path.exists() else _RawGeneration()
    )
    try:
        _refuse_unsupported(raw)
        _refuse_windows(raw)
        _refuse_gaps(raw)
        _check_sizes(raw)
        shape = _to_shape(raw, generation)
        _check_shape(shape)
    except ModelShapeError as error:
        raise ModelShapeError(f"{path}: {error}") from error
    return shape


def fingerprint(shape: ModelShape, weights_identity: str) -> str:
    """Return 32 hex digits that are equal when two workers may exchange KV, and otherwise differ.

    `weights_identity` comes from the checkpoint (`Weights.identity`). Where a sequence ends and
    which dtype the config names do not change KV, so they do not count.
    """
    fields = dataclasses.asdict(shape)
    for name in ("bos_token_id", "eos_token_ids", "max_position_embeddings", "dtype"):
        del fields[name]
    text = msgspec.json.encode([fields, weights_identity], order="sorted")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _decode(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ModelShapeError(f"{path}: {error.strerror}") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ModelShapeError(f"{path}: {error}") from error


def _refuse_unsupported(raw: _RawConfig) -> None:
    if raw.model_type not in _FAMILIES:
        lacks = _LACKS.get(raw.model_type)
        why = f", for it Baton lacks: {lacks}" if lacks else ""
        _refuse("model_type", raw.model_type, f"one of {sorted(_FAMILIES)}{why}")
    expected = _FAMILIES[raw.model_type].architecture
    if raw.architectures is not None and raw.architectures != [expected]:
        _refuse("architectures", raw.architectures, repr([expected]))
    if raw.hidden_act != "silu":
        _refuse("hidden_act", raw.hidden_act, "'silu'")
    for name in _MUST_BE_OFF:
        if getattr(raw, name):
            _refuse(name, getattr(raw, name), "unset or false")
    for name in _MUST_BE_ONE:
        if getattr(raw, name) not in (None, 1.0):
            _refuse(name, getattr(raw, name), "unset or 1")
    for name in ("rope_scaling", "rope_parameters"):
        _refuse_rope_scaling(name, getattr(raw, name) or {})


def _refuse_windows(raw: _RawConfig) -> None:
    if raw.sliding_window and raw.use_sliding_window is not False:
        _refuse("sliding_window", raw.sliding_window, "unset, or use_sliding_window false")
    if raw.layer_types is not None and set(raw.layer_types) - {"full_attention"}:
        _refuse("layer_types", raw.layer_types, "'full_attention' for every layer")


def _refuse_gaps(raw: _RawConfig) -> None:
    for name in _FAMILIES[raw.model_type].needs:
        if getattr(raw, name) is None:
            _refuse(
                name, None, f"a number, which {raw.model_type} does not derive from other sizes"
            )


def _refuse_rope_scaling(name: str, block: dict[str, object]) -> None:
    kind = block.get("rope_type", block.get("type", "default"))
    if kind not in (None, "none", "default"):
        _refuse(f"{name}.rope_type", kind, "'default'")


def _refuse(field: str, value: object, supported: str) -> NoReturn:
    raise ModelShapeError(f"{field} is {value!r}, supported is {supported}")


def _to_shape(raw: _RawConfig, generation: _RawGeneration) -> ModelShape:
    family = _FAMILIES[raw.model_type]
    return ModelShape(
        model_type=raw.model_type,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        n_layers=raw.num_hidden_layers,
        n_mtp_layers=raw.num_nextn_predict_layers or 0,
        n_heads=raw.num_attention_heads,
        n_kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=raw.head_dim or raw.hidden_size // raw.num_attention_heads,
        intermediate_size=raw.intermediate_size,
        rope_style=family.rope_style,
        rope_theta=_rope_theta(raw),
        rms_norm_eps=family.rms_norm_eps if raw.rms_norm_eps is None else raw.rms_norm_eps,
        tie_word_embeddings=_tied(raw),
        mtp_hidden=raw.baton_mtp_hidden,
        bos_token_id=raw.bos_token_id,
        eos_token_ids=_eos_ids(raw.eos_token_id, generation.eos_token_id),
        max_position_embeddings=raw.max_position_embeddings,
        dtype=raw.dtype or raw.torch_dtype or "float32",
        has_qk_norm=family.has_qk_norm,
    )


def _rope_theta(raw: _RawConfig) -> float:
    theta = (raw.rope_parameters or {}).get("rope_theta", raw.rope_theta)
    if theta is None:
        theta = _FAMILIES[raw.model_type].rope_theta
    if not isinstance(theta, int | float) or theta <= 0:
        _refuse("rope_theta", theta, "a number > 0")
    return float(theta)


def _tied(raw: _RawConfig) -> bool:
    if raw.tie_word_embeddings is None:
        return _FAMILIES[raw.model_type].ties_embeddings
    return raw.tie_word_embeddings


def _eos_ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    ids: list[int] = []
    for source in sources:
        ids += [source] if isinstance(source, int) else source or []
    return tuple(dict.fromkeys(ids))


def _check_sizes(raw: _RawConfig) -> None:
    for name in _AT_LEAST_ONE:
        if getattr(raw, name) is not None and getattr(raw, name) < 1:
            _refuse(name, getattr(raw, name), ">= 1")
    if (raw.num_nextn_predict_layers or 0) < 0:
        _refuse("num_nextn_predict_layers", raw.num_nextn_predict_layers, ">= 0")
    if raw.num_attention_heads % (raw.num_key_value_heads or 1):
        heads = raw.num_attention_heads
        _refuse("num_key_value_heads", raw.num_key_value_heads, f"a divisor of {heads} heads")


def _check_shape(shape: ModelShape) -> None:
    if shape.head_dim < 2 or shape.head_dim % 2:
        _refuse("head_dim", shape.head_dim, "an even number >= 2")
    bos = () if shape.bos_token_id is None else (shape.bos_token_id,)
    for name, tokens in (("bos_token_id", bos), ("eos_token_id", shape.eos_token_ids)):
        for token in tokens:
            if not 0 <= token < shape.vocab_size:
                _refuse(name, token, f"an id in 0..{shape.vocab_size - 1}")
