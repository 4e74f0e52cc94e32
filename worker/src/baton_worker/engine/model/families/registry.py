"""The families that Baton runs, by `model_type`, and what it lacks for some that it does not."""

from __future__ import annotations

from baton_worker.engine.model.families.ernie import ERNIE
from baton_worker.engine.model.families.family import Family
from baton_worker.engine.model.families.llama import LLAMA
from baton_worker.engine.model.families.mimo import MIMO
from baton_worker.engine.model.families.qwen2 import QWEN2
from baton_worker.engine.model.families.qwen3 import QWEN3

FAMILIES = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3, ERNIE, MIMO)}

LACKS = {
    "deepseek_v2": "MLA attention, mixture of experts",
    "deepseek_v3": "MLA attention, mixture of experts",
    "ernie4_5_moe": "mixture of experts",
    "glm4_moe": "mixture of experts, partial rotation",
    "gpt_oss": "mixture of experts, sliding windows, attention sinks",
    "mimo_v2_flash": "mixture of experts, sliding windows, attention sinks",
    "mixtral": "mixture of experts",
    "qwen2_moe": "mixture of experts",
    "qwen3_moe": "mixture of experts",
}
"""Well-known families and what Baton lacks for them, for the refusal's text only."""


def family_of(model_type: str) -> Family:
    """Return the family of a `model_type` that Baton runs."""
    return FAMILIES[model_type]
