"""Checkpoints with several draft layers: layer i makes draft i, whatever else happens meanwhile.

The oracle is DeepSeek-V3's definition over whole sequences, in float64. Drafts depend on the tokens
alone: not on which drafts were rejected before, on chunks, on what others left in the prefix cache,
or on who computed the KV.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_testing import numpy_reference as reference
from baton_testing.engine_bench import LoadedModel
from baton_worker.engine.model.weights import MtpWeights
from baton_worker.engine.options import MAX_DRAFTS
from baton_worker.sampling import LogprobParams

ENGINES = ("paddle", "device")

TOLERANCE = 5e-5
SCORES = LogprobParams(draft_logprobs=True)
KS = (1, 2, 3, 5)
HEADS = {
    "interleaved": {"rope_style": "interleaved", "mtp_hidden": "pre_norm"},
    "half": {"rope_style": "half", "mtp_hidden": "post_norm", "mtp_order": "hidden_embedding"},
}


def changed(mtp: MtpWeights, seed: int) -> MtpWeights:
    """Return a layer that drafts much alike, and not the same."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(1.0, 0.01, mtp.proj.shape).astype(np.float32)
    return dataclasses.replace(mtp, proj=np.asarray(mtp.proj) * noise)


@pytest.fixture(scope="module", params=[2, 3])
def trained(tiny: LoadedModel, request: pytest.FixtureRequest) -> Drafting:
    """The trained model with layers like its own, so that drafts are accepted, and rejected."""
    mtp = tuple(changed(tiny.weights.mtp[0], seed) for seed in range(request.param))
    shape = dataclasses.replace(tiny.shape, n_mtp_layers=request.param)
    return Drafting(shape, dataclasses.replace(tiny.weights, mtp=mtp), least=max(KS))


@pytest.fixture(scope="module")
def prompts(make_prompts: Any) -> list[tuple[int, ...]]:
    """Prompts of 1, 2 and 3 tokens among them: fewer than there are layers."""
    longer = make_prompts(6, seed=61, longest=40)
    return [*longer, longer[0][:1], longer[1][:2], longer[2][:3]]


@dataclasses.dataclass(frozen=True)
class Drafting(LoadedModel):
    """A model whose drafts the oracle makes once: requests say the same in every test.

    Attributes:
        least: so many it makes, though fewer are asked for: other tests ask for them.
        made: by the tokens before.
    """

    least: int = 0
    made: dict[tuple[int, ...], list[reference.Draft]] = dataclasses.field(default_factory=dict)

    def drafts(self, known: tuple[int, ...], count: int) -> list[reference.Draft]:
        """Return so many drafts of the oracle's behind these tokens."""
        if len(self.made.get(known, ())) < count:
            most = max(count, self.least)
            self.made[known] = reference.drafts(self.weights, self.shape, known, most)
        return self.made[known][:count]


def check(model: Drafting, prompt: Any, stream: Any) -> int:
    """Compare what a stream told of its drafts with the oracle; return how many there were."""
    n_drafts = 0
    for row in filter(None, stream.shown):
        expected = model.drafts((*prompt, *stream.tokens[: row.first]), len(row.tokens))
        assert row.tokens == [draft.token for draft in expected]
        scores = [draft.logprobs[draft.token] for draft in expected]
        np.testing.assert_allclose(row.logprobs, scores, rtol=0, atol=TOLERANCE)
        n_drafts += len(row.tokens)
    return n_drafts


def submit_all(bench: Any, prompts: Any, **options: Any) -> list[Any]:
    sampled = {"logprobs_k": 0, "logprobs": SCORES, "max_tokens": 16} | options
    return [
        bench.submit(n, prompt, temperature=0.7 * (n % 2), seed=n, **sampled)
        for n, prompt in enumerate(prompts)
    ]


def check_all(model: Drafting, bench: Any, keys: Any, prompts: Any) -> list[Any]:
    """Check drafts, and tokens and their logprobs; return the streams."""
    streams = [bench.reader[key] for key in keys]
    for prompt, stream in zip(prompts, streams, strict=True):
        expected = model.logprobs([*prompt, *stream.tokens])[len(prompt) - 1 : -1]
        chosen = expected[np.arange(len(stream.tokens)), stream.tokens]
        np.testing.assert_allclose(stream.logprobs, chosen, rtol=0, atol=TOLERANCE)
        assert check(model, prompt, stream) == sum(stream.proposed)
    return streams


@pytest.mark.slow
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("prefill_tokens", [512, 7], ids=["whole", "chunks"])
def test_drafts_are_the_references_behind_accepted_and_rejected_ones(
    trained: Drafting, make_bench: Any, prompts: Any, k: int, prefill_tokens: int
) -> None:
    bench = make_bench(trained, n_draft=k, prefill_tokens=prefill_tokens)
    keys = submit_all(bench, prompts)
    bench.drain()
    streams = check_all(trained, bench, keys, prompts)
    accepted, proposed = (
        sum(sum(getattr(stream, name)) for stream in streams) for name in ("accepted", "proposed")
    )
    assert 0 < accepted < proposed, "the cell must see drafts of both ends"


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("n_layers", [2, 3, 5])
def test_random_layers_draft_in_turn(
    make_model: Callable[..., LoadedModel],
    make_bench: Any,
    make_prompts: Any,
    heads: str,
    n_layers: int,
    k: int,
) -> None:
    made = make_model(n_mtp_layers=n_layers, **HEADS[heads])
    model = Drafting(made.shape, made.weights)
    prompts = [prompt[: 2 + 3 * n] for n, prompt in enumerate(make_prompts(4, vocab_size=64))]
    bench = make_bench(model, n_draft=k, block_size=8, prefill_tokens=11)
    keys = submit_all(bench, prompts, max_tokens=9)
    bench.drain()
    check_all(model, bench, keys, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("k", KS)
def test_decode_goes_on_with_prefills_drafts_and_kv(
    trained: Drafting, make_bench: Any, prompts: Any, hand_over: Any, k: int
) -> None:
    prefill = make_bench(trained, n_draft=k, prefill_tokens=9)
    decode = make_bench(trained, n_draft=k, reader=prefill.reader)
    keys = submit_all(prefill, prompts, hand_over=True)
    hand_over(prefill, decode, prefill.handoffs())
    decode.drain()
    streams = check_all(trained, decode, keys, prompts)
    for prompt, stream in zip(prompts, streams, strict=True):
        first = next(row for row in stream.shown if row is not None)
        at = max(trained.shape.n_mtp_layers - len(prompt), 1)  # before, layers have no row to begin
        assert (first.first, len(first.tokens)) == (at, k)


@pytest.mark.slow
def test_a_cached_prefix_holds_no_other_requests_continuation(
    trained: Drafting, make_bench: Any
) -> None:
    """Requests that part right behind a block share what does not depend on what follows it."""
    n_layers = trained.shape.n_mtp_layers
    common = list(range(40, 72))
    bench = make_bench(trained, n_draft=MAX_DRAFTS, block_size=16)
    for number, n_same in enumerate((32, 32 + n_layers - 1, 32 + n_layers)):
        prompts = [[*common, *[90] * (n_same - 32), tail, 101, 102, 103] for tail in (80, 81)]
        for index, prompt in enumerate(prompts):
            key = bench.submit(
                10 * number + index, prompt, max_tokens=8, logprobs_k=0, logprobs=SCORES,
                cache_salt=bytes([number]),
            )  # fmt: skip
            bench.drain()
            check_all(trained, bench, [key], [prompt])
            known = [32 if n_same == 32 + n_layers else 16] if index else []
            assert bench.reader[key].reused == known


@pytest.mark.slow
def test_k_may_change_under_way(trained: Drafting, make_bench: Any, prompts: Any) -> None:
    bench = make_bench(trained, n_draft=2, prefill_tokens=9)
    keys = submit_all(bench, prompts, max_tokens=24)
    for k in (2, 0, 5, 1, 0, 3) * 40:
        bench.engine.set_num_speculative_tokens(k)
        if bench.engine.has_work():
            bench.step()
    assert not bench.engine.has_work()
    check_all(trained, bench, keys, prompts)


@pytest.mark.slow
def test_what_was_preempted_drafts_as_before(
    trained: Drafting, make_bench: Any, prompts: Any
) -> None:
    options = {"n_draft": 3, "block_size": 8, "prefill_tokens": 9, "max_model_len": 80}
    bench = make_bench(trained, n_blocks=14, **options)
    keys = submit_all(bench, prompts)
    results = bench.drain()
    assert sum(result.stats.preempted for result in results) > 0
    check_all(trained, bench, keys, prompts)


@pytest.mark.slow
def test_a_budget_that_leaves_less_than_the_open_tokens_is_waited_out(
    trained: Drafting, make_bench: Any, prompts: Any
) -> None:
    """As few prompt tokens a step as there are layers: every prompt ends all the same."""
    bench = make_bench(trained, n_draft=2, prefill_tokens=trained.shape.n_mtp_layers)
    keys = submit_all(bench, prompts, max_tokens=6)
    bench.drain()
    check_all(trained, bench, keys, prompts)


@pytest.mark.slow
def test_a_step_behind_a_step_changes_nothing(
    trained: Drafting, make_bench: Any, prompts: Any
) -> None:
    bench = make_bench(trained, n_draft=3, prefill_tokens=9, overlap=True)
    keys = submit_all(bench, prompts)
    bench.drain()
    check_all(trained, bench, keys, prompts)
