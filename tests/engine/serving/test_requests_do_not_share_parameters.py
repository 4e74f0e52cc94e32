"""Per-row sampling parameters follow the number of rows of each request (R38)."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_worker.engine.sampling.sampler import choose
from baton_worker.engine.scheduling.batch import FedSequence
from baton_worker.engine.scheduling.requests import RequestLimits, RequestState, new_state
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

VOCAB = 400
LIMITS = RequestLimits(VOCAB, 64, 4, 8, frozenset({1}))

params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0]),
        "top_p": st.sampled_from([0.3, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 10, 100]),
        "seed": st.integers(0, 2**64 - 1),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "min_tokens": st.sampled_from([0, 4]),
    }
)


def new_request(number: int, options: dict[str, Any]) -> RequestState:
    request = Submit(number, 0, prompt_token_ids=(2, 3), sampling=SamplingParams(**options))
    state = new_state(request, LIMITS, 0.0)
    state.accept([4, 4, 5])
    return state


@settings(max_examples=100, deadline=None)
@given(
    batch=st.lists(st.tuples(params, st.integers(0, 5)), min_size=2, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_batch_gives_each_request_what_it_gets_alone(
    batch: list[tuple[dict[str, Any], int]], seed: int
) -> None:
    """Drafts are the tokens that each request would choose, so that all its rows are reached."""
    rng = np.random.default_rng(seed)
    fed, alone, raws, row = [], [], [], 0
    for number, (options, n_drafts) in enumerate(batch):
        state = new_request(number + 1, options)
        raw = rng.normal(size=(n_drafts + 1, VOCAB)).astype(np.float32)
        drafts: tuple[int, ...] = ()
        for _ in range(n_drafts):
            chosen = choose(raw[: len(drafts) + 1], [FedSequence(state, 0, drafts, True)])
            drafts = (*drafts, int(chosen.token[0, len(drafts)]))
        single = choose(raw, [FedSequence(state, 0, drafts, True)])
        assert single.n_accepted[0] == n_drafts
        alone.append(single.token[0, : n_drafts + 1].tolist())
        fed.append(FedSequence(state, row, drafts, True))
        raws.append(raw)
        row += n_drafts + 1
    together = choose(np.concatenate(raws), fed)
    for index, tokens in enumerate(alone):
        assert together.n_accepted[index] == len(tokens) - 1
        assert together.token[index, : len(tokens)].tolist() == tokens
