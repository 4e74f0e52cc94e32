"""Qwen2 and Qwen2.5, dense: Llama with biases on query, key and value (arXiv 2407.10671, section
2.2.1; 2412.15115, section 2). The small ones tie the head to the embeddings; none has a draft
layer.
"""

from __future__ import annotations

from baton_worker.engine.model.families.family import Family

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    has_qkv_bias=True,
    needs=("num_key_value_heads",),
)
