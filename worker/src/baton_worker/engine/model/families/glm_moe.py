"""GLM-4.5 and 4.6: half of each head rotates, biases and norms of heads as the config says, experts
chosen by sigmoid and a learned bias behind the first dense layers (arXiv 2508.06471, section 2.1).

The draft layer has DeepSeek-V3's names and a mixture of its own. It is fed the main model's output
behind the final norm, then its own behind its norm, as transformers computes it.
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
from baton_worker.engine.model.naming import deepseek_mtp
from baton_worker.engine.model.refusals import refuse


def _experts(raw: RawExperts, n_layers: int) -> Experts:
    n_dense = 1 if raw.first_k_dense_replace is None else raw.first_k_dense_replace
    if n_dense < 0:
        refuse("first_k_dense_replace", n_dense, ">= 0")
    width = count_of("moe_intermediate_size", raw.moe_intermediate_size)
    shared = 1 if raw.n_shared_experts is None else raw.n_shared_experts
    if shared < 0:
        refuse("n_shared_experts", shared, ">= 0")
    experts = Experts(
        count=count_of("n_routed_experts", agreed(raw, "n_routed_experts", "num_local_experts")),
        chosen=count_of("num_experts_per_tok", raw.num_experts_per_tok),
        intermediate_size=width,
        layers=tuple(range(n_dense, n_layers)),
        shared_size=shared * width,
        scores="sigmoid",
        has_choice_bias=True,
        n_groups=count_of("n_group", raw.n_group, 1),
        n_chosen_groups=count_of("topk_group", raw.topk_group, 1),
        normalises=raw.norm_topk_prob is not False,
        least_sum=1e-20,
        scaling=1.0 if raw.routed_scaling_factor is None else raw.routed_scaling_factor,
        has_mtp=True,
    )
    return check_experts(experts, n_layers, "first_k_dense_replace")


GLM_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    has_qk_norm=None,
    has_qkv_bias=None,
    rotated_part=0.5,
    rms_norm_eps=1e-5,
    needs=("num_key_value_heads", "head_dim"),
    mtp_hidden="post_norm",
    mtp_namings=(deepseek_mtp,),
    experts=_experts,
    expert_fields=dict.fromkeys(
        (
            "n_routed_experts",
            "num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "n_shared_experts",
            "first_k_dense_replace",
            "n_group",
            "topk_group",
            "norm_topk_prob",
            "routed_scaling_factor",
        )
    )
    | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    choice_bias="mlp.gate.e_score_correction_bias",
)
