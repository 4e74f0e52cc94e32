"""Whether a worker takes whole prompts beside its role, and in which chunks: pure.

A decode worker that does is told by `engine.decode_prompt_chunk_tokens`, which every role may be
given: prefill and mixed workers keep to `engine.prefill_chunk_tokens`.
"""

from __future__ import annotations

import msgspec

from baton_worker.config import ProcessConfig
from baton_worker.identity import Role
from baton_worker.messages import DECODE_PROMPTS


def with_chunks_of(config: ProcessConfig, role: Role) -> ProcessConfig:
    """Return the configuration in which `engine.prefill_chunk_tokens` is this role's, and
    `engine.decode_prompt_chunk_tokens` the same where it is from there, else 0: so the engine, on
    every rank, tells the field that a person wrote (`options.chunk_field`).

    Of a decode worker that takes prompts no step is larger, also those that compute a preempted
    request anew: how long its streams may wait is one number.
    """
    chunk = config.engine.decode_prompt_chunk_tokens
    if takes_prompts(config, role):
        engine = msgspec.structs.replace(config.engine, prefill_chunk_tokens=chunk)
    else:
        engine = msgspec.structs.replace(config.engine, decode_prompt_chunk_tokens=0)
    return msgspec.structs.replace(config, engine=engine)


def features_of(config: ProcessConfig, role: Role) -> tuple[str, ...]:
    """Return what HELLO says of that."""
    return (DECODE_PROMPTS,) if takes_prompts(config, role) else ()


def takes_prompts(config: ProcessConfig, role: Role) -> bool:
    """Whether it is a decode worker that computes prompts too."""
    return role is Role.DECODE and config.engine.decode_prompt_chunk_tokens > 0
