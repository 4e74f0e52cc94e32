"""Llama, and whoever copies it: RMSNorm, rotary halves, grouped-query attention, SwiGLU, no biases
(arXiv 2302.13971, 2407.21783).
"""

from __future__ import annotations

from baton_worker.engine.model.families.family import Family

LLAMA = Family(model_type="llama", architecture="LlamaForCausalLM")
