"""Every way to serve a request gives the float64 reference's tokens and logprobs.

The matrix: drafting method and K, one process or a pair, overlap, chunked prefill, in turn with
each number of logprobs; and a sample of it over two tensor-parallel ranks. The expected output
shares with the engine only the weights and the formula of the noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.build import build_engine
from baton_worker.engine.ngram import NgramSizes
from baton_worker.engine.options import NO_DRAFTS, DraftSources
from baton_worker.engine.sampling.noise import uniforms
from baton_worker.records.columns import Finish

ENGINES = ("paddle", "device")

pytestmark = pytest.mark.slow

TOKENS = 20
TOLERANCE = 5e-5
WHOLE_PROMPT, CHUNK = 512, 13
KS = (-1, 0, 5, 20)
"""How many logprobs of others: none at all, the token's own, some, as many as may be."""

LOOKUP = NgramSizes(1, 3)
METHODS: dict[str, dict[str, Any]] = {
    "none": {"n_draft": 0, "use_mtp": False, "drafts": NO_DRAFTS},
    "ngram-3": {"n_draft": 3, "use_mtp": False, "drafts": DraftSources(0, LOOKUP)},
    "mtp-1": {"n_draft": 1, "use_mtp": True, "drafts": DraftSources()},
    "mtp-3": {"n_draft": 3, "use_mtp": True, "drafts": DraftSources()},
    "mtp-5": {"n_draft": 5, "use_mtp": True, "drafts": DraftSources()},
    "mtp_ngram-5": {"n_draft": 5, "use_mtp": True, "drafts": DraftSources(2, LOOKUP)},
}


@dataclass(frozen=True)
class Case:
    """A prompt, how its tokens are chosen, and what must come of it.

    Attributes:
        logprobs: f64[TOKENS, V], the reference's for each output position.
    """

    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    tokens: list[int]
    logprobs: npt.NDArray[np.float64]


def _sampled(logprobs: npt.NDArray[np.float64], temperature: float, uniform: float) -> int:
    """Return the first token at which the cumulative probability, in id order, passes `uniform`."""
    scaled = np.exp((logprobs - logprobs.max()) / temperature)
    cumulative = np.cumsum(scaled)
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def _expected(model: Any, prompt: tuple[int, ...], sampling: dict[str, Any]) -> Case:
    tokens: list[int] = []
    rows = []
    for position in range(TOKENS):
        logprobs = model.logprobs([*prompt, *tokens])[-1]
        rows.append(logprobs)
        if sampling["temperature"] == 0.0:
            tokens.append(int(logprobs.argmax()))
        else:
            seed, at = np.array([sampling["seed"]], np.uint64), np.array([position], np.uint64)
            tokens.append(_sampled(logprobs, sampling["temperature"], float(uniforms(seed, at)[0])))
    return Case(prompt, sampling, tokens, np.array(rows))


@pytest.fixture(scope="module")
def cases(tiny: Any, make_prompts: Any) -> list[Case]:
    """Greedy and seeded requests; every other prompt repeats itself, as text for lookup does."""
    made = []
    for number, prompt in enumerate(make_prompts(8, seed=21, longest=40)):
        sampling = {"temperature": 0.8 * (number // 2 % 2), "seed": 77 + number}
        made.append(_expected(tiny, prompt * (1 + number % 2), sampling))
    return made


def _mixed(make_bench: Any, hand_over: Any, cases: list[Case], k: int, options: Any) -> Any:
    bench = make_bench(**options)
    keys = _submit(bench, cases, k, hand_over=False)
    return bench, keys, bench.drain()


def _pair(make_bench: Any, hand_over: Any, cases: list[Case], k: int, options: Any) -> Any:
    prefill = make_bench(**options)
    decode = make_bench(reader=prefill.reader, **options)
    keys = _submit(prefill, cases, k, hand_over=True)
    handoffs = prefill.handoffs()
    assert len(handoffs) == len(cases)
    hand_over(prefill, decode, handoffs)
    results = decode.drain()
    assert all(decode.reader[key].echoed for key in keys)
    return decode, keys, results


def _submit(bench: Any, cases: list[Case], k: int, *, hand_over: bool) -> list[Any]:
    return [
        bench.submit(
            n, case.prompt, max_tokens=TOKENS, logprobs_k=k, hand_over=hand_over, **case.sampling
        )
        for n, case in enumerate(cases)
    ]


def _check(stream: Any, case: Case, k: int) -> None:
    assert stream.tokens == case.tokens
    assert stream.finish is Finish.LENGTH
    if k < 0:
        assert (stream.logprobs, stream.ranks, stream.topk) == ([], [], [])
        return
    chosen = case.logprobs[np.arange(TOKENS), case.tokens]
    np.testing.assert_allclose(stream.logprobs, chosen, rtol=0, atol=TOLERANCE)
    assert stream.ranks == (case.logprobs >= chosen[:, None]).sum(axis=1).tolist()
    if not k:
        assert stream.topk == []
        return
    best = np.argsort(-case.logprobs, axis=1, kind="stable")[:, :k]
    assert [[token for token, _ in row] for row in stream.topk] == best.tolist()
    values = [[value for _, value in row] for row in stream.topk]
    wanted = np.take_along_axis(case.logprobs, best, axis=1)
    np.testing.assert_allclose(values, wanted, rtol=0, atol=TOLERANCE)


VALUES: tuple[tuple[Any, ...], ...] = (
    ENGINES,
    tuple(METHODS.values()),
    (_mixed, _pair),
    (False, True),
    (WHOLE_PROMPT, CHUNK),
)


def in_turn(*cell: Any) -> int:
    """Return a cell's number of logprobs, by its values' places among theirs: so each number meets
    each two values of other parameters.
    """
    places = [known.index(value) for known, value in zip(VALUES, cell, strict=True)]
    return KS[sum(places) % len(KS)]


def test_each_number_of_logprobs_meets_each_two_other_values() -> None:
    pairs = {
        (in_turn(*cell), first, second)
        for cell in itertools.product(*VALUES)
        for first, second in itertools.combinations(enumerate(map(str, cell)), 2)
    }
    sizes = itertools.combinations([len(values) for values in VALUES], 2)
    assert len(pairs) == len(KS) * sum(one * other for one, other in sizes)


@pytest.mark.parametrize("prefill_tokens", [WHOLE_PROMPT, CHUNK], ids=["whole", "chunked"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
@pytest.mark.parametrize("serve", [_mixed, _pair], ids=["mixed", "pair"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_the_output_is_the_references(
    make_bench: Any,
    hand_over: Any,
    cases: list[Case],
    method: dict[str, Any],
    serve: Any,
    overlap: bool,
    prefill_tokens: int,
    request: pytest.FixtureRequest,
) -> None:
    engine = request.node.callspec.params["make_bench"]
    k = in_turn(engine, method, serve, overlap, prefill_tokens)
    options = {**method, "overlap": overlap, "prefill_tokens": prefill_tokens}
    bench, keys, results = serve(make_bench, hand_over, cases, k, options)
    for key, case in zip(keys, cases, strict=True):
        _check(bench.reader[key], case, k)
    accepted = sum(int(result.stats.accepted_by_position.sum()) for result in results)
    assert (accepted > 0) == (method["n_draft"] > 0), "the cell must do what it is named for"


SPECULATIVE = {
    "none": SpeculativeConfig("none", 0),
    "ngram-3": SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3),
    "mtp-1": SpeculativeConfig("mtp", 1),
    "mtp-3": SpeculativeConfig("mtp", 3),
    "mtp-5": SpeculativeConfig("mtp", 5),
    "mtp_ngram-5": SpeculativeConfig(
        "mtp_ngram", 5, num_model_steps=2, prompt_lookup_min=1, prompt_lookup_max=3
    ),
}


@pytest.fixture
def two_ranks(bench_of: Any, tiny_model_dir: Path) -> Iterator[Callable[..., Any]]:
    """`two_ranks(reader=None, **options)`: a bench over two processes, options as `EngineConfig`'s.

    `speculative` is the drafting method.
    """
    with ExitStack() as stack:

        def make(speculative: SpeculativeConfig, reader: Any = None, **engine: Any) -> Any:
            sizes = EngineConfig(max_model_len=256, tensor_parallel_size=2, **engine)
            model = ModelConfig(str(tiny_model_dir))
            config = ProcessConfig(model=model, speculative=speculative, engine=sizes)
            return bench_of(stack.enter_context(closing(build_engine(config))), reader)

        yield make


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("method", "serve", "overlap", "prefill_tokens", "k"),
    [
        ("none", _mixed, True, CHUNK, 5),
        ("ngram-3", _pair, False, WHOLE_PROMPT, 20),
        ("mtp-1", _mixed, False, CHUNK, 0),
        ("mtp-3", _pair, True, CHUNK, 5),
        ("mtp-5", _mixed, True, WHOLE_PROMPT, 20),
        ("mtp_ngram-5", _pair, True, CHUNK, -1),
    ],
)
def test_two_ranks_give_the_references_output(
    two_ranks: Any,
    hand_over: Any,
    cases: list[Case],
    method: str,
    serve: Any,
    overlap: bool,
    prefill_tokens: int,
    k: int,
) -> None:
    options = {
        "speculative": SPECULATIVE[method],
        "overlap": overlap,
        "prefill_chunk_tokens": prefill_tokens,
    }
    bench, keys, results = serve(two_ranks, hand_over, cases, k, options)
    for key, case in zip(keys, cases, strict=True):
        _check(bench.reader[key], case, k)
    accepted = sum(int(result.stats.accepted_by_position.sum()) for result in results)
    assert (accepted > 0) == (method != "none")
