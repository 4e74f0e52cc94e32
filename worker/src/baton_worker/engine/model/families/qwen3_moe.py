"""Qwen3, mixtures: Qwen3's decoder, whose tokens each take some of many small experts, the softmax
of all of them renormalised over those (arXiv 2505.09388, section 2). No shared experts, no draft
layer.
"""

from __future__ import annotations

from baton_worker.engine.model.expert_fields import (
    RawExperts,
    agreed,
    check_experts,
    count_of,
)
from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.families.family import Family
from baton_worker.engine.model.refusals import refuse


def _experts(raw: RawExperts, n_layers: int) -> Experts:
    step = count_of("decoder_sparse_step", raw.decoder_sparse_step, 1)
    dense = set(raw.mlp_only_layers or ())
    if not dense <= set(range(n_layers)):
        refuse("mlp_only_layers", raw.mlp_only_layers, f"some of 0..{n_layers - 1}")
    experts = Experts(
        count=count_of("num_experts", agreed(raw, "num_experts", "num_local_experts")),
        chosen=count_of("num_experts_per_tok", raw.num_experts_per_tok),
        intermediate_size=count_of("moe_intermediate_size", raw.moe_intermediate_size),
        layers=tuple(i for i in range(n_layers) if (i + 1) % step == 0 and i not in dense),
        normalises=bool(raw.norm_topk_prob),
    )
    return check_experts(experts, n_layers, "decoder_sparse_step and mlp_only_layers")


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    has_qk_norm=True,
    needs=("head_dim", "num_key_value_heads"),
    experts=_experts,
    expert_fields=dict.fromkeys(
        (
            "num_experts",
            "num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
        )
    )
    | {"scoring_func": "softmax"},
)
