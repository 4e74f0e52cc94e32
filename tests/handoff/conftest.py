"""Fixtures for the KV channel: handoffs with recognisable content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_worker.engine.api import Handoff
from baton_worker.messages import HandoffState
from baton_worker.sampling import SamplingParams


@pytest.fixture
def make_handoff() -> Callable[..., Handoff]:
    def make(handle: int = 1 << 40, attempt: int = 0, n_cached: int = 20, **over: Any) -> Handoff:
        fields: dict[str, Any] = {
            "handle": handle,
            "attempt": attempt,
            "model_fingerprint": "f",
            "dtype": "float32",
            "n_layers": 3,
            "kv_heads": 2,
            "block_size": 8,
            "head_dim": 4,
            "n_cached": n_cached,
            "prompt_token_ids": tuple(range(n_cached)),
            "sampling": SamplingParams(seed=7),
            "logprobs_k": 2,
            "first_token": 5,
            "width": 3,
            "first_logprob": -0.5,
            "first_rank": 1,
            "topk_tokens": (5, 6),
            "topk_logprobs": (-0.5, -1.5),
            "drafts": (9,),
        }
        state = HandoffState(**(fields | over))
        rng = np.random.default_rng(handle & 0xFFFF)
        shape = (-(-n_cached // 8), 2, 8, 4)
        return Handoff(state, tuple(rng.standard_normal(shape, np.float32) for _ in range(6)))

    return make
