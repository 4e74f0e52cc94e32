"""GLM-4.5 and 4.6: half of each head rotates, biases and norms of heads as the config says, experts
chosen by sigmoid and a learned bias behind the first dense layers (arXiv 2508.06471, section 2.1).

The draft layer has DeepSeek-V3's names and a mixture of its own. It is fed the main model's output
behind the final norm, then its own behind its norm, as transformers computes it.
"""

from __future__ import annotations

from functools import partial

from baton_worker.engine.model.families.deepseek_v3 import (
    GROUPED_BIAS,
    GROUPED_FIELDS,
    grouped_experts,
)
from baton_worker.engine.model.families.family import Family
from baton_worker.engine.model.naming import deepseek_mtp

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
    experts=partial(grouped_experts, n_dense=1),
    expert_fields=GROUPED_FIELDS,
    choice_bias=GROUPED_BIAS,
)
