"""ERNIE-4.5, mixtures: the dense model's decoder, and behind its first layers experts that a token
chooses by softmax and a learned bias, beside some that all tokens share (the ERNIE 4.5 technical
report, section 2). Its draft layer is dense.
"""

from __future__ import annotations

from dataclasses import replace

from baton_worker.engine.model.expert_fields import (
    RawExperts,
    agreed,
    check_experts,
    count_of,
)
from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.families.ernie import ERNIE
from baton_worker.engine.model.refusals import refuse


def _experts(raw: RawExperts, n_layers: int) -> Experts:
    first = _index("moe_layer_start_index", raw.moe_layer_start_index, 1)
    last = _index("moe_layer_end_index", raw.moe_layer_end_index, -1)
    if not -1 <= last < n_layers:
        refuse("moe_layer_end_index", last, f"-1 or in 0..{n_layers - 1}")
    step = count_of("moe_layer_interval", raw.moe_layer_interval, 1)
    end = n_layers if last == -1 else last + 1
    width = count_of("moe_intermediate_size", raw.moe_intermediate_size)
    shared = 2 if raw.moe_num_shared_experts is None else raw.moe_num_shared_experts
    if shared < 0:
        refuse("moe_num_shared_experts", shared, ">= 0")
    experts = Experts(
        count=count_of("moe_num_experts", agreed(raw, "moe_num_experts", "num_experts")),
        chosen=count_of("moe_k", agreed(raw, "moe_k", "num_experts_per_tok")),
        intermediate_size=width,
        layers=tuple(i for i in range(max(first, 0), end) if (i + 1) % step == 0),
        shared_size=shared * width,
        has_choice_bias=True,
        least_sum=1e-12 if raw.moe_norm_min is None else raw.moe_norm_min,
    )
    where = "moe_layer_start_index, moe_layer_end_index and moe_layer_interval"
    chosen_by = "num_experts_per_tok" if raw.moe_k is None else "moe_k"
    return check_experts(experts, n_layers, where, chosen_by)


def _index(name: str, value: int | list[int] | None, default: int) -> int:
    found = default if value is None else value
    if not isinstance(found, int):
        refuse(name, found, "one number, of a model of text alone")
    return found


ERNIE_MOE = replace(
    ERNIE,
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    needs=("num_key_value_heads",),
    experts=_experts,
    expert_fields=dict.fromkeys(
        (
            "moe_num_experts",
            "num_experts",
            "moe_k",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "moe_num_shared_experts",
            "moe_norm_min",
            "moe_layer_start_index",
            "moe_layer_end_index",
            "moe_layer_interval",
        )
    )
    | {"norm_topk_prob": True, "moe_gate_act": "softmax"},
    choice_bias="mlp.moe_statics.e_score_correction_bias",
)
