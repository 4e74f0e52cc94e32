"""Which checkpoint key holds which weight, in the naming schemes that Baton reads.

Owns the names alone. Main layers are named alike by Llama, Qwen3 and ERNIE-4.5. MTP layers come in
two schemes: ERNIE's (`model.mtp_block.{i}`, PaddleFormers and FastDeploy) and DeepSeek-V3's
(`model.layers.{n_layers + i}` with `eh_proj`, `enorm`, `hnorm`, also GLM's).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerKeys:
    """Keys of one decoder layer; matrices are stored `[out, in]`."""

    prefix: str

    @property
    def input_norm(self) -> str:
        """`[H]`."""
        return f"{self.prefix}.input_layernorm.weight"

    @property
    def qkv(self) -> tuple[str, str, str]:
        """`[heads * head_dim, H]` each: query, key, value."""
        base = f"{self.prefix}.self_attn"
        return f"{base}.q_proj.weight", f"{base}.k_proj.weight", f"{base}.v_proj.weight"

    @property
    def qk_norm(self) -> tuple[str, str]:
        """`[head_dim]` each: query, key; of families that norm them."""
        base = f"{self.prefix}.self_attn"
        return f"{base}.q_norm.weight", f"{base}.k_norm.weight"

    @property
    def o(self) -> str:
        """`[H, n_heads * head_dim]`."""
        return f"{self.prefix}.self_attn.o_proj.weight"

    @property
    def post_norm(self) -> str:
        """`[H]`."""
        return f"{self.prefix}.post_attention_layernorm.weight"

    @property
    def gate_up(self) -> tuple[str, str]:
        """`[I, H]` each."""
        return f"{self.prefix}.mlp.gate_proj.weight", f"{self.prefix}.mlp.up_proj.weight"

    @property
    def down(self) -> str:
        """`[H, I]`."""
        return f"{self.prefix}.mlp.down_proj.weight"


@dataclass(frozen=True, slots=True)
class MtpKeys:
    """Keys of one MTP layer.

    Attributes:
        proj: `[H, 2H]`; its input is the embedding, then the hidden state.
        final_norm: a norm of its own before the head; "" where the scheme shares the main model's.
        copies: (copy, original) of weights the scheme may repeat and that must be equal.
    """

    emb_norm: str
    hidden_norm: str
    proj: str
    layer: LayerKeys
    final_norm: str = ""
    copies: tuple[tuple[str, str], ...] = ()


def main_layer(index: int) -> LayerKeys:
    """Return the keys of main layer `index`."""
    return LayerKeys(f"model.layers.{index}")


def mtp_layer(index: int, n_layers: int, present: Container[str], tied: bool) -> MtpKeys:
    """Return the keys of MTP layer `index`, in the scheme whose projection is `present`.

    When neither is there, ERNIE's keys return, and reading them reports the missing one.
    """
    deepseek = _deepseek_mtp(f"model.layers.{n_layers + index}", EMBED if tied else LM_HEAD)
    return deepseek if deepseek.proj in present else _ernie_mtp(index)


def is_ignorable(key: str) -> bool:
    """Whether a key holds nothing learned: RoPE tables that old exporters saved."""
    return key.endswith(".rotary_emb.inv_freq")


def _ernie_mtp(index: int) -> MtpKeys:
    return MtpKeys(
        emb_norm=f"model.mtp_emb_norm.{index}.weight",
        hidden_norm=f"model.mtp_hidden_norm.{index}.weight",
        proj=f"model.mtp_linear_proj.{index}.weight",
        layer=LayerKeys(f"model.mtp_block.{index}"),
    )


def _deepseek_mtp(prefix: str, head: str) -> MtpKeys:
    return MtpKeys(
        emb_norm=f"{prefix}.enorm.weight",
        hidden_norm=f"{prefix}.hnorm.weight",
        proj=f"{prefix}.eh_proj.weight",
        layer=LayerKeys(prefix),
        final_norm=f"{prefix}.shared_head.norm.weight",
        copies=(
            (f"{prefix}.embed_tokens.weight", EMBED),
            (f"{prefix}.shared_head.head.weight", head),
        ),
    )
