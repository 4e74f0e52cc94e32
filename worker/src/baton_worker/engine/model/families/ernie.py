"""ERNIE-4.5, dense: Llama whose neighbouring elements rotate together (the ERNIE 4.5 technical
report, section 2; its draft layer is that of DeepSeek-V3 under names of its own).
"""

from __future__ import annotations

from baton_worker.engine.model.families.family import Family

ERNIE = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    rope_style="interleaved",
    ties_embeddings=True,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
)
