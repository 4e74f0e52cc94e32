"""What lies in blocks of nobody, or of others, never reaches a sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton_worker.engine.kv.pool import NULL_BLOCK

ENGINES = ("paddle", "device")


def _up_to_block_end(prompt: tuple[int, ...]) -> int:
    return 16 * (len(prompt) // 16 + 3) - len(prompt)


@pytest.mark.slow
def test_the_null_block_stays_zero_and_others_contents_do_not_matter(
    make_bench: Any, make_prompts: Any
) -> None:
    """Requests end exactly with a block, so that their last drafts stand on no block at all."""
    prompts = make_prompts(8, seed=40, longest=60)

    def run(poison: bool) -> list[Any]:
        bench = make_bench(n_draft=5, max_model_len=160)
        pool = bench.engine._parts.pool
        if poison:
            n_blocks = pool.shape.n_blocks + 1
            forms = pool.shape.arrays(n_blocks)
            arrays = [np.full(form.shape, 1e6, form.dtype) for form in forms]
            pool.import_blocks(range(NULL_BLOCK + 1, NULL_BLOCK + 1 + n_blocks), arrays)
        keys = [
            bench.submit(n, p, temperature=0.0, max_tokens=_up_to_block_end(p), logprobs_k=0)
            for n, p in enumerate(prompts)
        ]
        bench.drain()
        nothing = pool.begin_export([NULL_BLOCK], pool.shape.block_size)()
        assert all((array == 0).all() for array in nothing)
        return [(bench.reader[k].tokens, bench.reader[k].logprobs) for k in keys]

    clean, poisoned = run(poison=False), run(poison=True)
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(clean, poisoned, strict=True):
        assert tokens == other_tokens
        np.testing.assert_array_equal(logprobs, other_logprobs)
