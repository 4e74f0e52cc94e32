"""ERNIE-4.5, mixtures: the dense model's decoder, and behind its first layers experts that a token
chooses by softmax and a learned bias, beside some that all tokens share (the ERNIE 4.5 technical
report, section 2). Its draft layer is dense.
"""

from __future__ import annotations

from dataclasses import replace

from baton_worker.engine.model.expert_fields import RawExperts, check_experts, count_of
from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.families.ernie import ERNIE
from baton_worker.engine.model.refusals import refuse


def _experts(raw: RawExperts, n_layers: int) -> Experts:
    first, last = raw.moe_layer_start_index, raw.moe_layer_end_index
    first, last = 1 if first is None else first, -1 if last is None else last
    if not isinstance(first, int) or not isinstance(last, int):
        refuse("moe_layer_start_index", first, "one number, of a model of text alone")
    if last >= n_layers:
        refuse("moe_layer_end_index", last, f"-1 or in 0..{n_layers - 1}")
    step = count_of("moe_layer_interval", raw.moe_layer_interval, 1)
    end = n_layers if last == -1 else last + 1
    width = count_of("moe_intermediate_size", raw.moe_intermediate_size)
    shared = 2 if raw.moe_num_shared_experts is None else raw.moe_num_shared_experts
    if shared < 0:
        refuse("moe_num_shared_experts", shared, ">= 0")
    experts = Experts(
        count=count_of("moe_num_experts", raw.moe_num_experts),
        chosen=count_of("moe_k", raw.moe_k),
        intermediate_size=width,
        layers=tuple(i for i in range(max(first, 0), end) if (i + 1) % step == 0),
        shared_size=shared * width,
        has_choice_bias=True,
        least_sum=1e-12 if raw.moe_norm_min is None else raw.moe_norm_min,
    )
    return check_experts(experts, n_layers)


ERNIE_MOE = replace(
    ERNIE,
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    needs=("num_key_value_heads",),
    experts=_experts,
    choice_bias="mlp.moe_statics.e_score_correction_bias",
)
