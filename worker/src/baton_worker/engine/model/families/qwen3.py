"""Qwen3, dense: no biases, each query and key head RMS-normed before it is rotated, and a head
size that does not follow from the others (arXiv 2505.09388, section 2).
"""

from __future__ import annotations

from baton_worker.engine.model.families.family import Family

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    has_qk_norm=True,
    needs=("head_dim", "num_key_value_heads"),
)
