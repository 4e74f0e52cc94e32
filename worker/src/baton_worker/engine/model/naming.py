"""Which checkpoint key holds which weight: the names that several families share.

Owns the names alone. Main layers are named alike by all families so far. MTP layers come in
schemes; two are shared: ERNIE's (`model.mtp_block.{i}`, PaddleFormers and FastDeploy) and
DeepSeek-V3's (`model.layers.{n_layers + i}` with `eh_proj`, `enorm`, `hnorm`, also GLM's). A scheme
of one family stands in that family's file.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class MlpKeys:
    """Keys of one gated MLP of width I."""

    prefix: str

    @property
    def gate_up(self) -> tuple[str, str]:
        """`[I, H]` each."""
        return f"{self.prefix}.gate_proj.weight", f"{self.prefix}.up_proj.weight"

    @property
    def down(self) -> str:
        """`[H, I]`."""
        return f"{self.prefix}.down_proj.weight"


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
    def qkv_bias(self) -> tuple[str, str, str]:
        """`[heads * head_dim]` each: query, key, value; of families that have them."""
        base = f"{self.prefix}.self_attn"
        return f"{base}.q_proj.bias", f"{base}.k_proj.bias", f"{base}.v_proj.bias"

    @property
    def qk_norm(self) -> tuple[str, str]:
        """`[head_dim]` each: query, key; of families that norm them."""
        base = f"{self.prefix}.self_attn"
        return f"{base}.q_norm.weight", f"{base}.k_norm.weight"

    @property
    def query(self) -> str:
        """`[heads * query_size, H]`, of MLA whose queries are not compressed."""
        return f"{self.prefix}.self_attn.q_proj.weight"

    @property
    def query_down(self) -> str:
        """`[q_rank, H]`, of MLA."""
        return f"{self.prefix}.self_attn.q_a_proj.weight"

    @property
    def query_norm(self) -> str:
        """`[q_rank]`, of MLA."""
        return f"{self.prefix}.self_attn.q_a_layernorm.weight"

    @property
    def query_up(self) -> str:
        """`[heads * query_size, q_rank]`, of MLA."""
        return f"{self.prefix}.self_attn.q_b_proj.weight"

    @property
    def kv_down(self) -> str:
        """`[row_size, H]`, of MLA: the compressed row, then the key that all heads share."""
        return f"{self.prefix}.self_attn.kv_a_proj_with_mqa.weight"

    @property
    def kv_norm(self) -> str:
        """`[kv_rank]`, of MLA."""
        return f"{self.prefix}.self_attn.kv_a_layernorm.weight"

    @property
    def kv_up(self) -> str:
        """`[heads * unfolded_size, kv_rank]`, of MLA: of each head its key, then its value."""
        return f"{self.prefix}.self_attn.kv_b_proj.weight"

    @property
    def o(self) -> str:
        """`[H, n_heads * head_dim]`; with MLA `[H, n_heads * value_size]`."""
        return f"{self.prefix}.self_attn.o_proj.weight"

    @property
    def post_norm(self) -> str:
        """`[H]`."""
        return f"{self.prefix}.post_attention_layernorm.weight"

    @property
    def mlp(self) -> MlpKeys:
        """The MLP of layers without a mixture."""
        return MlpKeys(f"{self.prefix}.mlp")

    @property
    def router(self) -> str:
        """`[experts, H]`, of layers with a mixture."""
        return f"{self.prefix}.mlp.gate.weight"

    @property
    def fused_experts(self) -> str:
        """What some tools save in place of a tensor for each expert."""
        return f"{self.prefix}.mlp.experts.gate_up_proj"

    def expert(self, index: int) -> MlpKeys:
        """Return the keys of one expert's MLP."""
        return MlpKeys(f"{self.prefix}.mlp.experts.{index}")

    @property
    def shared(self) -> MlpKeys:
        """The MLP that every token takes beside its experts."""
        return MlpKeys(f"{self.prefix}.mlp.shared_experts")


@dataclass(frozen=True, slots=True)
class MtpKeys:
    """Keys of one MTP layer.

    Attributes:
        proj: `[H, 2H]`; its input is the embedding and the hidden state, in the family's order.
        final_norm: a norm of its own before the head; "" where the scheme shares the main model's.
        needs_final_norm: a checkpoint without it is not whole; else the main model's stands for it.
        copies: (copy, original) of weights the scheme may repeat and that must be equal.
    """

    emb_norm: str
    hidden_norm: str
    proj: str
    layer: LayerKeys
    final_norm: str = ""
    needs_final_norm: bool = False
    copies: tuple[tuple[str, str], ...] = ()


MtpNaming = Callable[[int, int, bool], MtpKeys]
"""Returns the keys of MTP layer `index` of a model with `n_layers` main layers, tied or not."""


def main_layer(index: int) -> LayerKeys:
    """Return the keys of main layer `index`."""
    return LayerKeys(f"model.layers.{index}")


def present_mtp(
    namings: tuple[MtpNaming, ...], index: int, n_layers: int, present: Container[str], tied: bool
) -> MtpKeys:
    """Return the keys of MTP layer `index`, in the scheme whose projection is `present`.

    When none is there, the first scheme's return, and reading them reports the missing one.
    """
    schemes = [naming(index, n_layers, tied) for naming in namings]
    return next((keys for keys in schemes if keys.proj in present), schemes[0])


def is_ignorable(key: str) -> bool:
    """Whether a key holds nothing learned: RoPE tables that old exporters saved."""
    return key.endswith(".rotary_emb.inv_freq")


def ernie_mtp(index: int, n_layers: int, tied: bool) -> MtpKeys:
    """Return ERNIE's keys of an MTP layer."""
    return MtpKeys(
        emb_norm=f"model.mtp_emb_norm.{index}.weight",
        hidden_norm=f"model.mtp_hidden_norm.{index}.weight",
        proj=f"model.mtp_linear_proj.{index}.weight",
        layer=LayerKeys(f"model.mtp_block.{index}"),
    )


def deepseek_mtp(index: int, n_layers: int, tied: bool) -> MtpKeys:
    """Return DeepSeek-V3's keys of an MTP layer, which is numbered behind the main layers."""
    prefix, head = f"model.layers.{n_layers + index}", EMBED if tied else LM_HEAD
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
