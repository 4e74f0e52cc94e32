"""The fields of config.json that tell of multi-head latent attention.

Owns the fields and the refusal of values that no such attention has. Knows no formula.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from baton_worker.engine.model.expert_fields import RawExperts
from baton_worker.engine.model.mla import Mla
from baton_worker.engine.model.refusals import ModelShapeError, refuse

_ALL = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
    "rope_interleave",
)
MOST_ROW = 4080
"""Values of a token's row at most, on every engine: what the plain CUDA kernel of attention has
room for. Its block holds two queries of a row's width and eight warps' results of 2 * (256 + 2)
values, as float32 in 48 KiB: (2 * 4080 + 8 * 516) * 4 bytes. A handoff may say 4096."""


class RawMla(RawExperts, frozen=True, kw_only=True):
    """A family without such attention refuses what is told here. (Structs have one base only.)

    Attributes:
        q_lora_rank: null where queries are not compressed, which absence does not say.
        qk_head_dim: the sum of the two others, where a config tells it.
    """

    q_lora_rank: int | msgspec.UnsetType | None = msgspec.UNSET
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    qk_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_interleave: bool | None = None


def refuse_mla(raw: RawMla) -> None:
    """Refuse a config that tells of what its family has not.

    Raises:
        ModelShapeError: it does; the message names the field and its value.
    """
    for name in _ALL:
        value = getattr(raw, name)
        if value is not msgspec.UNSET and value:
            refuse(name, value, "unset or false")


def read_mla(raw: RawMla, n_heads: int, kv_heads: int | None, head_dim: int | None) -> Mla:
    """Return the sizes, scores as they are without a stretched context.

    Args:
        n_heads, kv_heads, head_dim: what the config says of heads; the last two may be unset.

    Raises:
        ModelShapeError: a size is absent, or does not go with another.
    """
    sizes = Mla(
        q_rank=_q_rank(raw),
        kv_rank=_size("kv_lora_rank", raw.kv_lora_rank),
        nope_size=_size("qk_nope_head_dim", raw.qk_nope_head_dim),
        rope_size=_size("qk_rope_head_dim", raw.qk_rope_head_dim),
        value_size=_size("v_head_dim", raw.v_head_dim),
        score_scale=1.0,
    )
    if sizes.rope_size % 2:
        refuse("qk_rope_head_dim", sizes.rope_size, "an even number")
    if sizes.row_size > MOST_ROW:
        if sizes.rope_size >= MOST_ROW:
            refuse("qk_rope_head_dim", sizes.rope_size, f"< {MOST_ROW}")
        refuse("kv_lora_rank", sizes.kv_rank, f"<= {MOST_ROW - sizes.rope_size}")
    if sizes.row_size % 2:
        refuse("kv_lora_rank", sizes.kv_rank, "an even number")
    _refuse_others("qk_head_dim", raw.qk_head_dim, sizes.query_size)
    _refuse_others("num_key_value_heads", kv_heads, n_heads)
    _refuse_others("head_dim", head_dim, sizes.rope_size)
    return replace(sizes, score_scale=float(sizes.query_size**-0.5))


def _size(name: str, value: int | None) -> int:
    if value is None or value < 1:
        refuse(name, value, "a number >= 1")
    return value


def _q_rank(raw: RawMla) -> int:
    """Return the width of compressed queries, 0 where they are not."""
    supported = "a number >= 1, or null for queries that are not compressed"
    rank = raw.q_lora_rank
    if isinstance(rank, msgspec.UnsetType):
        raise ModelShapeError(f"q_lora_rank is absent, supported is {supported}")
    if rank is not None and rank < 1:
        refuse("q_lora_rank", rank, supported)
    return rank or 0


def _refuse_others(name: str, told: int | None, wanted: int) -> None:
    """Refuse what follows from other sizes and is told otherwise."""
    if told not in (None, wanted):
        refuse(name, told, f"unset or {wanted}")
