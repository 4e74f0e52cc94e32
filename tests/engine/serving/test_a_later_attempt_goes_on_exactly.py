"""A request that begins behind an earlier attempt's tokens gives the rest of the same output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton_worker.engine.api import EngineRefusedError
from baton_worker.records.columns import Finish
from baton_worker.sampling import LogprobParams

ENGINES = ("paddle", "device")

PROMPT = tuple(range(20, 47))
N_OUTPUT = 20

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.1, "top_p": 0.9, "seed": 11},
    "penalised": {
        "temperature": 0.9, "seed": 4, "presence_penalty": 0.8, "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
    },
    "held back": {"temperature": 0.8, "seed": 2, "min_tokens": 9, "stop_token_ids": (30, 31)},
}  # fmt: skip


@pytest.fixture
def whole(make_bench: Callable[..., Any]) -> Callable[..., Any]:
    """The undisturbed stream of a way of sampling."""

    def run(**sampling: Any) -> Any:
        bench = make_bench()
        key = bench.submit(1, PROMPT, max_tokens=N_OUTPUT, logprobs_k=3, **sampling)
        bench.drain()
        return bench.reader[key]

    return run


def resumed(bench: Any, stream: Any, given: int, **options: Any) -> Any:
    """Submit what goes on behind the first tokens of a stream, as if a reader had those."""
    key = bench.submit(
        given, PROMPT, max_tokens=N_OUTPUT, logprobs_k=3,
        output_token_ids=tuple(stream.tokens[:given]), **options,
    )  # fmt: skip
    bench.reader[key].tokens += stream.tokens[:given]
    return key


def goes_on(found: Any, stream: Any, given: int) -> None:
    assert found.tokens == stream.tokens
    assert found.logprobs == pytest.approx(stream.logprobs[given:], abs=5e-5)
    assert found.ranks == stream.ranks[given:]
    assert [[t for t, _ in top] for top in found.topk] == [
        [t for t, _ in top] for top in stream.topk[given:]
    ]
    assert found.finish is stream.finish


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"n_draft": 0}, id="plain"),
        pytest.param({"n_draft": 3, "prefill_tokens": 11}, id="chunked", marks=pytest.mark.slow),
        pytest.param({"n_draft": 3, "overlap": True}, id="overlap"),
    ],
)
def test_every_cut_goes_on_to_the_same_end(
    make_bench: Callable[..., Any], whole: Callable[..., Any], sampling: Any, options: Any
) -> None:
    stream = whole(**sampling)
    bench = make_bench(**options)
    keys = {
        given: resumed(bench, stream, given, **sampling) for given in range(1, len(stream.tokens))
    }
    bench.drain()
    for given, key in keys.items():
        goes_on(bench.reader[key], stream, given)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
def test_a_later_attempt_is_handed_over_like_any_other(
    make_bench: Callable[..., Any],
    whole: Callable[..., Any],
    hand_over: Callable[..., None],
    sampling: Any,
) -> None:
    stream = whole(**sampling)
    prefill = make_bench(n_draft=2, prefill_tokens=11)
    decode = make_bench(n_draft=2, reader=prefill.reader, overlap=True)
    cuts = range(1, len(stream.tokens) - 1)
    keys = {given: resumed(prefill, stream, given, hand_over=True, **sampling) for given in cuts}
    handoffs = prefill.handoffs()
    assert sorted(len(h.state.output_token_ids) for h in handoffs) == list(cuts)
    hand_over(prefill, decode, handoffs)
    decode.drain()
    for given, key in keys.items():
        goes_on(decode.reader[key], stream, given)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((5, 6), {"max_tokens": 2}, "2 tokens have used it up"),
        ((5, 1), {"ignore_eos": False}, "which ends the request"),
        ((5, 900), {}, "output_token_ids holds 900"),
    ],
)
def test_an_output_that_leaves_nothing_is_refused(
    make_bench: Callable[..., Any], given: Any, options: Any, message: str
) -> None:
    bench = make_bench()
    with pytest.raises(EngineRefusedError, match=message):
        bench.submit(1, PROMPT, output_token_ids=given, **{"max_tokens": 9} | options)
    assert not bench.engine.has_work()


def test_a_length_counts_what_earlier_attempts_gave(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    key = bench.submit(1, PROMPT, temperature=0.0, max_tokens=5, output_token_ids=(40, 41, 42))
    bench.reader[key].tokens += [40, 41, 42]
    bench.drain()
    assert len(bench.reader[key].tokens) == 5
    assert bench.reader[key].finish is Finish.LENGTH


def test_a_prompt_is_not_told_again_behind_an_output(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    told = {}
    for given in ((), (40, 41, 42)):
        bench.submit(
            len(given), PROMPT, temperature=0.0, max_tokens=5, output_token_ids=given,
            logprobs=LogprobParams(prompt_k=0),
        )  # fmt: skip
        rows = []
        while bench.engine.has_work():
            rows += bench.engine.step().columns.prompt_tokens.rows()
        told[given] = [token for row in rows if row is not None for token in row.tokens]
    assert told == {(): list(PROMPT[1:]), (40, 41, 42): []}
