"""Choices of one prompt that a worker is given at once each compute all of it, so that a line
counts it for each; those behind its computation find it. The cache is asked at admission.
"""

from __future__ import annotations

import pytest

from baton_worker.identity import make_handle
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

PROMPT, BLOCK, CHOICES = tuple(range(20, 220)), 16, 4
WHOLE = (len(PROMPT) - 1) // BLOCK * BLOCK
"""Tokens of full blocks whose next token is known with the prompt."""


def choice(i: int) -> Submit:
    sampling = SamplingParams(temperature=0.9, max_tokens=4, ignore_eos=True, seed=i)
    return Submit(
        make_handle(77, i), 0, prompt_token_ids=PROMPT, sampling=sampling, logprobs_k=0, decode=None
    )


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("chunk", [BLOCK, 2048])
def test_choices_that_come_together_each_compute_their_prompt(make_worker, chunk, overlap):
    worker = make_worker("m", k=0, prefill_chunk_tokens=chunk, overlap=overlap)
    for i in range(CHOICES):
        worker.command(choice(i))
    worker.run()
    assert found(worker) == [0] * CHOICES


def test_choices_that_come_behind_it_find_it(make_worker):
    worker = make_worker("m", k=0)
    for i in range(CHOICES):
        worker.command(choice(i))
        worker.run()
    assert found(worker) == [0] + [WHOLE] * (CHOICES - 1)


def found(worker) -> list[int]:
    """Return of each choice how many tokens of its prompt it had not to compute."""
    return [worker.rows(make_handle(77, i))[0].n_reused for i in range(CHOICES)]
