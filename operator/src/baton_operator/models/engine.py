"""The engine's part of a PDDeployment's spec, and what its fields forbid each other."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from baton_operator.models.fields import Model, about

TORCH_ON_GPUS: Final = "engine.framework torch is for device gpu"
BFLOAT16_ON_GPUS: Final = "engine.dtype bfloat16 is for device gpu: a cpu computes in float32"
LEAST_CHUNK: Final = 16
CHUNK_OR_NONE: Final = f"engine.decodePromptChunkTokens is 0, or {LEAST_CHUNK} at least"

ENGINE_RULES: Final = (
    ("self.device == 'gpu' || self.framework != 'torch'", TORCH_ON_GPUS),
    ("self.device == 'gpu' || self.dtype != 'bfloat16'", BFLOAT16_ON_GPUS),
    (
        f"self.decodePromptChunkTokens == 0 || self.decodePromptChunkTokens >= {LEAST_CHUNK}",
        CHUNK_OR_NONE,
    ),
)
"""CEL, and what is said where it does not hold."""


class EngineSpec(Model, frozen=True):
    """Limits of the engine, the same in both roles."""

    device: Annotated[
        Literal["cpu", "gpu", "sim"],
        about(
            "Where the model computes; sim makes up text without weights, to test a fleet. "
            "GPUs themselves are asked for in the role's template."
        ),
    ] = "cpu"
    framework: Annotated[
        Literal["auto", "paddle", "torch"],
        about("What gives memory and graphs of a GPU; auto is PyTorch where the image has it."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        about("Dtype of weights and KV on a GPU; auto is the checkpoint's own."),
    ] = "auto"
    gpu_memory_percent: Annotated[
        int,
        about("Share of a GPU's memory that weights, KV and working memory may take together.",
              ge=5, le=98),
    ] = 90  # fmt: skip
    block_size: Annotated[Literal[8, 16, 32, 64], about("Tokens per KV block.")] = 16
    kv_blocks: Annotated[
        int,
        about("KV blocks per worker; 0 makes room for maxRunning full sequences, on a GPU for what "
              "its memory holds.", ge=0, le=1 << 30),
    ] = 0  # fmt: skip
    max_running: Annotated[
        int, about("Requests stepped together on one worker.", ge=1, le=65536)
    ] = 32
    max_waiting: Annotated[
        int, about("Requests queued on one worker beyond those.", ge=1, le=1 << 20)
    ] = 1024
    max_model_len: Annotated[
        int, about("Most tokens of one sequence; 0 is the model's own limit.", ge=0, le=1 << 30)
    ] = 0
    prefill_chunk_tokens: Annotated[
        int, about("Prompt tokens computed per step.", ge=1, le=1 << 20)
    ] = 512
    prefix_caching: Annotated[
        bool,
        about("Share KV between requests that begin alike; the time to the first token then tells "
              "clients whether others sent their prompt."),
    ] = True  # fmt: skip
    decode_prompt_chunk_tokens: Annotated[
        int,
        about("Decode workers compute prompts too while prefill's line is long, so many tokens a "
              "step, by which gaps between their streams' tokens grow. 0: they do not.",
              ge=0, le=1 << 20),
    ] = 0  # fmt: skip
