"""Prefill hands a request over and decode continues it exactly, whatever the draft counts (R23)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from baton_worker.engine.api import EngineRefusedError, Handoff
from baton_worker.engine.ngram import NgramSizes
from baton_worker.engine.options import DraftSources
from baton_worker.engine.scheduling.requests import RequestLimits, imported_state
from baton_worker.messages import DecodeTarget, DraftScores, Submit
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.sampling import LogprobParams, RequestParams, SamplingParams

ENGINES = ("paddle", "device")

OPTIONS: dict[str, Any] = {"max_tokens": 18, "logprobs_k": 3, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def mixed(make_bench: Any, make_prompts: Any) -> Any:
    prompts = make_prompts(12, seed=8, longest=70)
    bench = make_bench(n_draft=1)
    keys = [
        bench.submit(n, p, temperature=0.8 * (n % 2), seed=n, **OPTIONS)
        for n, p in enumerate(prompts)
    ]
    bench.drain()
    return prompts, {key: bench.reader[key] for key in keys}


@pytest.mark.slow
@pytest.mark.parametrize(("k_prefill", "k_decode"), [(0, 2), (1, 1), (1, 5), (5, 1), (3, 0)])
def test_prefill_and_decode_give_what_one_engine_gives(
    make_bench: Any, mixed: Any, hand_over: Any, k_prefill: int, k_decode: int
) -> None:
    prompts, expected = mixed
    prefill = make_bench(n_draft=k_prefill, use_mtp=True, prefill_tokens=50)
    decode = make_bench(n_draft=k_decode, use_mtp=True, reader=prefill.reader)
    for n, p in enumerate(prompts):
        prefill.submit(n, p, temperature=0.8 * (n % 2), seed=n, hand_over=True, **OPTIONS)
    hand_over(prefill, decode, prefill.handoffs())
    assert prefill.engine.load().kv_blocks_used == 0
    results = decode.drain()
    assert [key for r in results for key in r.imported] == list(expected)
    for key, stream in expected.items():
        got = decode.reader[key]
        assert got.echoed
        assert (got.tokens, got.ranks, got.finish) == (stream.tokens, stream.ranks, stream.finish)
        assert got.logprobs == pytest.approx(stream.logprobs, abs=5e-5)


def test_without_mtp_on_either_side(make_bench: Any, mixed: Any, hand_over: Any) -> None:
    prompts, expected = mixed
    prefill = make_bench()
    decode = make_bench(reader=prefill.reader)
    for n, p in enumerate(prompts):
        prefill.submit(n, p, temperature=0.8 * (n % 2), seed=n, hand_over=True, **OPTIONS)
    hand_over(prefill, decode, prefill.handoffs())
    decode.drain()
    assert all(decode.reader[key].tokens == stream.tokens for key, stream in expected.items())


def test_all_that_was_asked_goes_over(make_bench: Any, key: Any) -> None:
    """Whatever fields there are; decode's state holds them as they came."""
    asked = RequestParams(
        prompt_token_ids=tuple(range(5, 40)),
        sampling=SamplingParams(max_tokens=18, seed=3, logit_bias=((7, -2.0),), bad_words=((8,),)),
        logprobs_k=3,
        logprobs=LogprobParams(processed=True, draft_logprobs=True),
        priority=-4,
        output_token_ids=(11, 12),
        cache_salt=b"salt",
        traceparent="00-1-2-03",
    ).fields()
    default = RequestParams(sampling=SamplingParams()).fields()
    left_out = [name for name, value in asked.items() if value == default[name]]
    assert left_out == [], "give each a value in `asked` above, not its default"
    prefill = make_bench(n_draft=1)
    prefill.engine.submit(Submit(*key(1), decode=DecodeTarget("decode-0", ""), **asked))
    prefill.reader[key(1)].tokens.extend(asked["output_token_ids"])
    (handoff,) = prefill.handoffs()
    assert handoff.state.fields() == asked
    limits = RequestLimits(vocab_size=512, max_model_len=128, max_top_k=20, table_width=8)
    assert imported_state(handoff, limits, 0.0).params.fields() == asked


@pytest.fixture(scope="module")
def repeating(make_bench: Any, mixed: Any) -> Any:
    """Prompts that quote an earlier answer and then ask again, and what one engine says."""
    prompts = [p + tuple(s.tokens) + p for p, s in zip(mixed[0], mixed[1].values(), strict=True)]
    bench = make_bench()
    keys = [bench.submit(n, p, temperature=0.0, **OPTIONS) for n, p in enumerate(prompts)]
    bench.drain()
    return prompts, {key: bench.reader[key] for key in keys}


@pytest.mark.slow
@pytest.mark.parametrize("model_steps", [0, 1, 2])
def test_drafts_by_prompt_lookup_are_handed_over_and_continue(
    make_bench: Any, repeating: Any, hand_over: Any, model_steps: int
) -> None:
    """R21: `ngram` (no MTP layer) and `mtp_ngram` in the roles prefill and decode."""
    prompts, expected = repeating
    options = {
        "n_draft": 4,
        "use_mtp": model_steps > 0,
        "drafts": DraftSources(model_steps, NgramSizes(1, 3)),
    }
    prefill = make_bench(prefill_tokens=50, **options)
    decode = make_bench(reader=prefill.reader, **options)
    for n, p in enumerate(prompts):
        prefill.submit(n, p, temperature=0.0, hand_over=True, **OPTIONS)
    handoffs = prefill.handoffs()
    assert {len(h.state.drafts) for h in handoffs} == {model_steps, 4}
    hand_over(prefill, decode, handoffs)
    results = decode.drain()
    assert sum(int(r.stats.accepted_by_position.sum()) for r in results) > 0
    for key, stream in expected.items():
        got = decode.reader[key]
        assert (got.tokens, got.ranks, got.finish) == (stream.tokens, stream.ranks, stream.finish)
        assert got.logprobs == pytest.approx(stream.logprobs, abs=5e-5)


def test_the_offer_carries_first_token_columns_and_every_draft(make_bench: Any) -> None:
    bench = make_bench(n_draft=4)
    key = bench.submit(1, range(5, 30), temperature=0.0, max_tokens=9, logprobs_k=2, hand_over=True)
    (handoff,) = bench.handoffs()
    state, stream = handoff.state, bench.reader[key]
    assert stream.tokens == [state.first_token]
    assert stream.logprobs == [state.first_logprob]
    assert stream.ranks == [state.first_rank]
    assert stream.topk == [list(zip(state.topk_tokens, state.topk_logprobs, strict=True))]
    assert stream.drafts == state.drafts
    assert len(state.drafts) == 4
    assert stream.finish is Finish.NONE
    forms = bench.engine._parts.pool.shape.arrays(2)
    assert [(a.shape, a.dtype) for a in handoff.kv] == list(forms)
    assert all((a[-1, ..., 25 - 16 :, :] == 0).all() for a in handoff.kv)


def test_columns_of_several_offers_do_not_mix(make_bench: Any, make_prompts: Any) -> None:
    bench = make_bench(n_draft=1)
    bench.submit(90, range(5, 9), temperature=0.0, max_tokens=30, logprobs_k=5)
    bench.step()
    widths = {
        bench.submit(n, p, temperature=0.0, max_tokens=5, logprobs_k=k, hand_over=True): k
        for n, (p, k) in enumerate(zip(make_prompts(5), (-1, 4, 0, 20, 1), strict=True))
    }
    for handoff in bench.step().handoffs:
        state = handoff.state
        key = next(k for k in widths if k.handle == state.handle)
        stream = bench.reader[key]
        assert state.width == widths[key] + 1
        assert len(state.topk_tokens) == max(widths[key], 0)
        assert stream.topk == (
            [list(zip(state.topk_tokens, state.topk_logprobs, strict=True))]
            if state.topk_tokens
            else []
        )


def test_kv_travels_bitwise(make_bench: Any) -> None:
    """What decode imported is what it would export again, bit for bit."""
    prefill, decode = (make_bench(n_draft=1) for _ in range(2))
    prefill.submit(1, range(5, 46), temperature=0.0, max_tokens=9, hand_over=True)
    (handoff,) = prefill.handoffs()
    decode.submit(7, range(100, 130), temperature=0.0, max_tokens=3)
    decode.step()
    decode.engine.admit_handoff(handoff)
    decode.step()
    pool, scheduler = decode.engine._parts.pool, decode.engine._parts.scheduler
    (request,) = [r for r in scheduler.requests() if r.key.handle == handoff.state.handle]
    again = pool.begin_export(request.blocks, handoff.state.n_cached)()
    for sent, kept in zip(handoff.kv, again, strict=True):
        assert sent.tobytes() == kept.tobytes()


@pytest.mark.parametrize("ending", ["eos", "length", "stop"])
def test_a_first_token_that_ends_the_request_is_not_handed_over(
    tiny: Any, make_bench: Any, ending: str
) -> None:
    prompt = tuple(range(5, 30))
    first = int(tiny.logprobs(prompt)[-1].argmax())
    options: dict[str, dict[str, Any]] = {
        "eos": {"ignore_eos": False, "max_tokens": 9},
        "length": {"max_tokens": 1},
        "stop": {"stop_token_ids": (first,), "max_tokens": 9},
    }
    model = tiny
    if ending == "eos":
        model = dataclasses.replace(
            tiny, shape=dataclasses.replace(tiny.shape, eos_token_ids=(first,))
        )
    bench = make_bench(model, n_draft=2)
    key = bench.submit(1, prompt, temperature=0.0, hand_over=True, **options[ending])
    assert bench.handoffs() == []
    assert bench.reader[key].finish is (Finish.LENGTH if ending == "length" else Finish.STOP)
    assert bench.reader[key].tokens == [first]
    assert bench.reader[key].drafts == ()
    assert bench.engine.load().kv_blocks_used == 0


def test_blocks_stay_held_until_release(make_bench: Any) -> None:
    bench = make_bench(n_draft=1)
    key = bench.submit(1, range(5, 40), temperature=0.0, max_tokens=9, hand_over=True)
    bench.drain()
    assert bench.engine.load().kv_blocks_used > 0
    assert bench.engine.load().held_handoffs == 1
    bench.engine.release_handoff(key)
    bench.engine.release_handoff(key)
    assert bench.engine.load().kv_blocks_used == 0
    assert not bench.engine.has_work()


Change = Callable[[Handoff], Handoff]


def _state(**fields: Any) -> Change:
    return lambda h: dataclasses.replace(h, state=msgspec.structs.replace(h.state, **fields))


def _scores(n: int = 2, **fields: Any) -> Change:
    """Logprobs of `n` drafts with two alternatives each."""
    values: dict[str, Any] = {
        "logprobs": (-1.0,) * n,
        "ranks": (1,) * n,
        "topk_tokens": (3, 4) * n,
        "topk_logprobs": (-1.0, -2.0) * n,
    }
    return _state(draft_scores=DraftScores(**(values | fields)))


def _sampling(**fields: Any) -> Change:
    return lambda h: _state(sampling=msgspec.structs.replace(h.state.sampling, **fields))(h)


def _stopping_at_first(handoff: Handoff) -> Handoff:
    return _sampling(stop_token_ids=(handoff.state.first_token,))(handoff)


def _kv(change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Change:
    return lambda h: dataclasses.replace(h, kv=(*h.kv[:-1], change(h.kv[-1].copy())))


def _with_value(value: float) -> Change:
    def poison(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        array[0, 0, 0, 0] = value
        return array

    return _kv(poison)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (_state(model_fingerprint="other"), ErrorCode.INCOMPATIBLE, "model_fingerprint"),
        (_state(dtype="bfloat16"), ErrorCode.INCOMPATIBLE, "dtype"),
        (_state(n_layers=2), ErrorCode.INCOMPATIBLE, "n_layers"),
        (_state(block_size=8), ErrorCode.INCOMPATIBLE, "block_size"),
        (_state(n_cached=24), ErrorCode.INCOMPATIBLE, "n_cached"),
        (lambda h: dataclasses.replace(h, kv=h.kv[:-1]), ErrorCode.INCOMPATIBLE, r"\d KV arrays"),
        (_kv(lambda a: a[:1]), ErrorCode.INCOMPATIBLE, r"KV array \d"),
        (_kv(lambda a: a.astype(np.float16)), ErrorCode.INCOMPATIBLE, "float16"),
        (_state(first_token=512), ErrorCode.INVALID_REQUEST, "first_token holds 512"),
        (_state(drafts=(1, -4)), ErrorCode.INVALID_REQUEST, "drafts holds -4"),
        (_state(n_reused=-1), ErrorCode.INVALID_REQUEST, "n_reused is -1"),
        (_state(n_reused=1 << 40), ErrorCode.INVALID_REQUEST, "n_reused is 1099511627776"),
        (_state(drafts=(1,) * 6), ErrorCode.INVALID_REQUEST, "drafts has 6"),
        (_sampling(max_tokens=1), ErrorCode.INVALID_REQUEST, "max_tokens is 1"),
        (_stopping_at_first, ErrorCode.INVALID_REQUEST, "ends the request"),
        (_state(width=1), ErrorCode.INVALID_REQUEST, "width is 1"),
        (_state(topk_tokens=(1,)), ErrorCode.INVALID_REQUEST, "topk_tokens"),
        (_scores(), ErrorCode.INVALID_REQUEST, "2 logprobs and 2 ranks"),
        (_scores(n=1, ranks=()), ErrorCode.INVALID_REQUEST, "1 logprobs and 0 ranks"),
        (_scores(n=1, ranks=(0,)), ErrorCode.INVALID_REQUEST, "rank 0"),
        (_scores(n=1, logprobs=(float("nan"),)), ErrorCode.INVALID_REQUEST, "the logprob nan"),
        (_scores(n=1, topk_tokens=(512, 3)), ErrorCode.INVALID_REQUEST, "draft_scores holds 512"),
        (_scores(n=1, topk_tokens=(5,)), ErrorCode.INVALID_REQUEST, "1 alternatives"),
    ],
)
def test_a_bad_handoff_is_refused_and_harms_no_other(
    make_bench: Any, change: Change, code: ErrorCode, message: str
) -> None:
    prefill, decode = (make_bench(n_draft=1) for _ in range(2))
    prefill.submit(1, range(5, 30), temperature=0.0, max_tokens=9, logprobs_k=2, hand_over=True)
    (handoff,) = prefill.handoffs()
    other = decode.submit(2, range(40, 60), temperature=0.0, max_tokens=5)
    decode.step()
    with pytest.raises(EngineRefusedError, match=message) as refusal:
        decode.engine.admit_handoff(change(handoff))
    assert refusal.value.code is code
    decode.drain()
    assert decode.reader[other].finish is Finish.LENGTH
    assert decode.engine.load().kv_blocks_used == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e30, -1e30])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_kv_that_is_unfit_ends_its_request_at_the_import_and_harms_no_other(
    make_bench: Any, value: float, overlap: bool
) -> None:
    prefill = make_bench(n_draft=1)
    decode = make_bench(n_draft=1, overlap=overlap, reader=prefill.reader)
    prefill.submit(1, range(5, 30), temperature=0.0, max_tokens=9, logprobs_k=2, hand_over=True)
    (handoff,) = prefill.handoffs()
    other = decode.submit(2, range(40, 60), temperature=0.0, max_tokens=5)
    decode.step()
    decode.engine.admit_handoff(_with_value(value)(handoff))
    results = decode.drain()
    (failure,) = [failure for result in results for failure in result.failed]
    assert failure.code is ErrorCode.INCOMPATIBLE
    assert "NaN or a value beyond 1e+15" in failure.message
    stream = decode.reader[failure.key]
    assert stream.finish is Finish.ERROR
    assert stream.tokens == [handoff.state.first_token], "what prefill said, and no more"
    assert stream.error == (failure.code, failure.message)
    assert not [key for result in results for key in result.imported]
    assert decode.reader[other].finish is Finish.LENGTH
    assert decode.engine.load().kv_blocks_used == 0


@pytest.mark.parametrize("drafts", [(), (3,), (3, 9, 27), (3, 9, 27, 81, 243)])
def test_wrong_drafts_change_nothing_but_acceptance(
    make_bench: Any, drafts: tuple[int, ...]
) -> None:
    prompt, options = tuple(range(5, 30)), {"temperature": 0.0, "max_tokens": 12}
    alone, prefill, decode = (make_bench(n_draft=1) for _ in range(3))
    key = alone.submit(1, prompt, **options)
    alone.drain()
    prefill.submit(1, prompt, hand_over=True, **options)
    (handoff,) = prefill.handoffs()
    decode.engine.admit_handoff(_state(drafts=drafts)(handoff))
    decode.drain()
    assert decode.reader[key].tokens == alone.reader[key].tokens
    assert decode.reader[key].proposed[0] == len(drafts)


def test_a_duplicate_handoff_is_refused(make_bench: Any) -> None:
    prefill, decode = (make_bench(n_draft=1) for _ in range(2))
    prefill.submit(1, range(5, 30), temperature=0.0, max_tokens=9, hand_over=True)
    (handoff,) = prefill.handoffs()
    decode.engine.admit_handoff(handoff)
    with pytest.raises(EngineRefusedError, match="already held"):
        decode.engine.admit_handoff(handoff)
