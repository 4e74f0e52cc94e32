"""The configuration of what decode workers do for prefill: when they are given prompts."""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton_worker.config_types import Section

LEAST_CHUNK_TOKENS = 16


def check_chunk(tokens: int) -> None:
    """Refuse a chunk of which a prompt would take a step for hardly any of it.

    Raises:
        ValueError: `engine.decode_prompt_chunk_tokens` is neither 0 nor large enough.
    """
    if 0 < tokens < LEAST_CHUNK_TOKENS:
        raise ValueError(
            f"decode_prompt_chunk_tokens is {tokens}: give {LEAST_CHUNK_TOKENS} at least, or 0 for "
            "a decode worker that takes no prompts"
        )


class DecodePromptsConfig(Section, frozen=True):
    """When a decode worker that takes prompts (`engine.decode_prompt_chunk_tokens`) is given one.

    `behind_tokens`: when every prefill worker that could has more prompt tokens before it than
    that, and the prompt's first token would come sooner from decode; 0: never. Counted are prompts
    of this gateway whose first token has not come: others' are not seen. `slowness`: how many times
    as long as prefill decode takes for a token, in small chunks beside its streams.
    """

    behind_tokens: Annotated[int, msgspec.Meta(ge=0)] = 8192
    slowness: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 2.0
