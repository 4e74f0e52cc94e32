"""Whether a worker takes whole prompts beside its role, and in which chunks: pure.

A decode worker that does is told by `engine.decode_prompt_chunk_tokens`, which every role may be
given: prefill and mixed workers keep to `engine.prefill_chunk_tokens`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from baton_worker.config import ConfigError, ProcessConfig
from baton_worker.identity import Role
from baton_worker.messages import DECODE_PROMPTS

_OTHERS_FIELD = "engine.prefill_chunk_tokens"
_DECODES_FIELD = "engine.decode_prompt_chunk_tokens"


def with_chunks_of(config: ProcessConfig, role: Role) -> ProcessConfig:
    """Return the configuration in which `engine.prefill_chunk_tokens` is this role's.

    Of a decode worker that takes prompts no step is larger, also those that compute a preempted
    request anew: how long its streams may wait is one number.
    """
    if not takes_prompts(config, role):
        return config
    chunk = config.engine.decode_prompt_chunk_tokens
    engine = msgspec.structs.replace(config.engine, prefill_chunk_tokens=chunk)
    return msgspec.structs.replace(config, engine=engine)


@contextlib.contextmanager
def naming_chunks(config: ProcessConfig, role: Role) -> Iterator[None]:
    """Have what is said of a chunk that is too large name the field that it was read from.

    Args:
        config: as it came, or of `with_chunks_of`.

    Raises:
        ConfigError: the engine's, which knows one field only.
    """
    try:
        yield
    except ConfigError as error:
        if not takes_prompts(config, role):
            raise
        raise ConfigError(str(error).replace(_OTHERS_FIELD, _DECODES_FIELD)) from error


def features_of(config: ProcessConfig, role: Role) -> tuple[str, ...]:
    """Return what HELLO says of that."""
    return (DECODE_PROMPTS,) if takes_prompts(config, role) else ()


def takes_prompts(config: ProcessConfig, role: Role) -> bool:
    """Whether it is a decode worker that computes prompts too."""
    return role is Role.DECODE and config.engine.decode_prompt_chunk_tokens > 0
