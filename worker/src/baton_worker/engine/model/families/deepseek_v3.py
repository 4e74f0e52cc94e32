"""DeepSeek-V3 and R1: attention over compressed rows, experts chosen by sigmoid and a learned bias
in groups behind the first dense layers (arXiv 2412.19437, sections 2.1 and 2.2).

The draft layer is numbered behind the main ones, has a mixture of its own, and repeats embedding
and head. It is fed the main model's output behind the final norm, then its own behind its norm.
"""

from __future__ import annotations

from functools import partial

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

GROUPED_FIELDS = dict.fromkeys(
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
) | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""What `grouped_experts` reads."""

GROUPED_BIAS = "mlp.gate.e_score_correction_bias"


def grouped_experts(
    raw: RawExperts,
    n_layers: int,
    n_dense: int,
    n_groups: int = 1,
    n_chosen_groups: int = 1,
    scaling: float = 1.0,
) -> Experts:
    """Return DeepSeek-V3's mixture, which others have too.

    Args:
        n_dense: the first layers that have none, where `first_k_dense_replace` does not say.
        n_groups, n_chosen_groups, scaling: where the config does not say.

    Raises:
        ModelShapeError: a value that no mixture has.
    """
    n_dense = n_dense if raw.first_k_dense_replace is None else raw.first_k_dense_replace
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
        n_groups=count_of("n_group", raw.n_group, n_groups),
        n_chosen_groups=count_of("topk_group", raw.topk_group, n_chosen_groups),
        normalises=raw.norm_topk_prob is not False,
        least_sum=1e-20,
        scaling=scaling if raw.routed_scaling_factor is None else raw.routed_scaling_factor,
        has_mtp=True,
    )
    return check_experts(experts, n_layers, "first_k_dense_replace")


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    rope_style="interleaved",
    has_mla=True,
    mtp_hidden="post_norm",
    mtp_namings=(deepseek_mtp,),
    experts=partial(grouped_experts, n_dense=3, n_groups=8, n_chosen_groups=4, scaling=2.5),
    expert_fields=GROUPED_FIELDS | {"moe_layer_freq": 1},
    choice_bias=GROUPED_BIAS,
)
