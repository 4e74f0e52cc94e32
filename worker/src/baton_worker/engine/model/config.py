"""`config.json` of a Hugging Face folder: the fields that decide something, and what is refused.

Owns the fields and refuses every one that Baton cannot run, by name and value, so that a wrong
model stops at start and never becomes wrong text. Knows no weights and no formula.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from baton_worker.engine.model.expert_fields import refuse_others
from baton_worker.engine.model.families.family import Family, MtpHidden
from baton_worker.engine.model.families.registry import FAMILIES, LACKS
from baton_worker.engine.model.mla_fields import RawMla, refuse_mla
from baton_worker.engine.model.refusals import ModelShapeError, refuse
from baton_worker.engine.model.rope import MAX_POSITIONS

_T = TypeVar("_T")


class RawConfig(RawMla, frozen=True, kw_only=True):
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
    baton_mtp_hidden: MtpHidden | None = None
    use_bias: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    qkv_bias: bool | None = None
    use_qk_norm: bool | None = None
    use_rmsnorm: bool | None = None
    use_mrope: bool | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    partial_rotary_factor: float | None = None
    compression_ratio: float | None = None
    quantization_config: dict[str, object] | None = None
    compression_config: dict[str, object] | None = None
    dual_chunk_attention_config: dict[str, object] | None = None
    swiglu_limit: float | None = None
    logits_soft_cap: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None


class RawGeneration(msgspec.Struct, frozen=True):
    """The fields of generation_config.json that an engine needs."""

    eos_token_id: int | list[int] | None = None


class _ModelType(msgspec.Struct, frozen=True):
    model_type: str


_MUST_BE_OFF = (
    "use_bias",
    "mlp_bias",
    "use_mrope",
    "use_sliding_window",
    "compression_config",
    "dual_chunk_attention_config",
    "swiglu_limit",
    "logits_soft_cap",
    "attn_logit_softcapping",
    "final_logit_softcapping",
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
_COUNTS_OF_EXPERTS = ("moe_num_experts", "num_local_experts", "num_experts", "n_routed_experts")
_MOST_LAYERS = 10_000
"""Far beyond any model; what is listed by layer stays small."""
_MUST_BE_ONE = ("compression_ratio",)


def read_config(path: Path) -> RawConfig:
    """Return the fields of a `config.json`.

    The family is looked at first: another one's fields may be of other types.

    Raises:
        ModelShapeError: the file is missing or malformed, or the family is none that Baton runs.
    """
    text = _read(path)
    _refuse_unknown_family(_decode(text, _ModelType).model_type)
    return _decode(text, RawConfig)


def read_generation(path: Path) -> RawGeneration:
    """Return the fields of a `generation_config.json`, which need not be there.

    Raises:
        ModelShapeError: it is malformed.
    """
    return _decode(_read(path), RawGeneration) if path.exists() else RawGeneration()


def check(raw: RawConfig) -> Family:
    """Refuse what Baton cannot run, and return the family.

    Raises:
        ModelShapeError: a field has such a value; the message names both.
    """
    family = FAMILIES[raw.model_type]
    _refuse_unsupported(raw, family)
    _refuse_biases(raw, family)
    _refuse_windows(raw)
    _refuse_gaps(raw, family)
    _check_sizes(raw)
    return family


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelShapeError(f"{error.strerror}") from error


def _decode(text: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelShapeError(str(error)) from error


def _refuse_unknown_family(model_type: str) -> None:
    if model_type not in FAMILIES:
        lacks = LACKS.get(model_type)
        why = f", for it Baton lacks: {lacks}" if lacks else ""
        refuse("model_type", model_type, f"one of {sorted(FAMILIES)}{why}")


def _refuse_unsupported(raw: RawConfig, family: Family) -> None:
    if raw.architectures is not None and raw.architectures != [family.architecture]:
        refuse("architectures", raw.architectures, repr([family.architecture]))
    if raw.hidden_act != "silu":
        refuse("hidden_act", raw.hidden_act, "'silu'")
    if family.experts is not None:
        refuse_others(raw, family.expert_fields)
    if not family.has_mla:
        refuse_mla(raw)
    for name in _MUST_BE_OFF if family.experts else _MUST_BE_OFF + _COUNTS_OF_EXPERTS:
        if getattr(raw, name):
            refuse(name, getattr(raw, name), "unset or false")
    if raw.use_rmsnorm is False:
        refuse("use_rmsnorm", False, "unset or true")
    for name in _MUST_BE_ONE:
        if getattr(raw, name) not in (None, 1.0):
            refuse(name, getattr(raw, name), "unset or 1")


def _refuse_biases(raw: RawConfig, family: Family) -> None:
    """`attention_bias` says what its family means by it: for most also a bias of the output's."""
    if family.has_qkv_bias and raw.attention_bias is False:
        refuse("attention_bias", False, f"unset or true for {family.model_type}")
    if family.has_qkv_bias is False and raw.attention_bias:
        refuse("attention_bias", True, "unset or false")
    if raw.qkv_bias is not None and raw.qkv_bias != told(family.has_qkv_bias, raw.attention_bias):
        refuse("qkv_bias", raw.qkv_bias, f"unset or {not raw.qkv_bias} for {family.model_type}")
    has_norms = family.has_qk_norm
    if has_norms is not None and raw.use_qk_norm is not None and raw.use_qk_norm != has_norms:
        refuse("use_qk_norm", raw.use_qk_norm, f"unset or {has_norms} for {family.model_type}")


def told(of_family: bool | None, of_config: bool | None) -> bool:
    """Return what a family says, or where it leaves that to config.json, what that does."""
    return bool(of_config) if of_family is None else of_family


def _refuse_windows(raw: RawConfig) -> None:
    if raw.sliding_window and raw.use_sliding_window is not False:
        refuse("sliding_window", raw.sliding_window, "unset, or use_sliding_window false")
    if raw.layer_types is not None and set(raw.layer_types) - {"full_attention"}:
        refuse("layer_types", raw.layer_types, "'full_attention' for every layer")


def _refuse_gaps(raw: RawConfig, family: Family) -> None:
    for name in family.needs:
        if getattr(raw, name) is None:
            refuse(name, None, f"a number, which {raw.model_type} does not derive from other sizes")


def _check_sizes(raw: RawConfig) -> None:
    for name in _AT_LEAST_ONE:
        if getattr(raw, name) is not None and getattr(raw, name) < 1:
            refuse(name, getattr(raw, name), ">= 1")
    if raw.num_hidden_layers > _MOST_LAYERS:
        refuse("num_hidden_layers", raw.num_hidden_layers, f"<= {_MOST_LAYERS}")
    if raw.max_position_embeddings > MAX_POSITIONS:
        refuse("max_position_embeddings", raw.max_position_embeddings, f"<= {MAX_POSITIONS}")
    if raw.rms_norm_eps is not None and not 0.0 <= raw.rms_norm_eps < 1.0:
        refuse("rms_norm_eps", raw.rms_norm_eps, "a number in 0..1")
    if (raw.num_nextn_predict_layers or 0) < 0:
        refuse("num_nextn_predict_layers", raw.num_nextn_predict_layers, ">= 0")
    if raw.num_attention_heads % (raw.num_key_value_heads or 1):
        heads = raw.num_attention_heads
        refuse("num_key_value_heads", raw.num_key_value_heads, f"a divisor of {heads} heads")
