"""MiMo-7B: Qwen2's decoder with draft layers of its own (arXiv 2505.07608, section 2.2).

A draft layer is fed the main model's output behind its final norm, norms that and the embedding of
the token behind, and projects them in this order: hidden state, embedding. Its output has a norm of
its own, and the main model's head.
"""

from __future__ import annotations

from baton_worker.engine.model.families.family import Family
from baton_worker.engine.model.naming import LayerKeys, MtpKeys


def mimo_mtp(index: int, n_layers: int, tied: bool) -> MtpKeys:
    """Return the keys of draft layer `index`, which are numbered apart from the main layers."""
    prefix = f"model.mtp_layers.{index}"
    return MtpKeys(
        emb_norm=f"{prefix}.token_layernorm.weight",
        hidden_norm=f"{prefix}.hidden_layernorm.weight",
        proj=f"{prefix}.input_proj.weight",
        layer=LayerKeys(prefix),
        final_norm=f"{prefix}.final_layernorm.weight",
        needs_final_norm=True,
    )


MIMO = Family(
    model_type="mimo",
    architecture="MiMoForCausalLM",
    has_qkv_bias=True,
    needs=("num_key_value_heads",),
    mtp_hidden="post_norm",
    mtp_order="hidden_embedding",
    mtp_namings=(mimo_mtp,),
)
