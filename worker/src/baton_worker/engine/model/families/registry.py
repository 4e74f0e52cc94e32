"""The families that Baton runs, by `model_type`, and what it lacks for some that it does not."""

from __future__ import annotations

from baton_worker.engine.model.families.deepseek_v3 import DEEPSEEK_V3
from baton_worker.engine.model.families.ernie import ERNIE
from baton_worker.engine.model.families.ernie_moe import ERNIE_MOE
from baton_worker.engine.model.families.family import Family
from baton_worker.engine.model.families.glm_moe import GLM_MOE
from baton_worker.engine.model.families.llama import LLAMA
from baton_worker.engine.model.families.mimo import MIMO
from baton_worker.engine.model.families.qwen2 import QWEN2
from baton_worker.engine.model.families.qwen3 import QWEN3
from baton_worker.engine.model.families.qwen3_moe import QWEN3_MOE

_ALL = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, ERNIE, ERNIE_MOE, MIMO, GLM_MOE, DEEPSEEK_V3)
FAMILIES = {family.model_type: family for family in _ALL}

LACKS = {
    "deepseek_v2": "its choice of experts",
    "gpt_oss": "sliding windows, attention sinks",
    "mimo_v2_flash": "sliding windows, attention sinks",
    "mixtral": "its names of experts",
    "qwen2_moe": "a gate of the shared expert",
}
"""Well-known families and what Baton lacks for them, for the refusal's text only."""


def family_of(model_type: str) -> Family:
    """Return the family of a `model_type` that Baton runs."""
    return FAMILIES[model_type]
