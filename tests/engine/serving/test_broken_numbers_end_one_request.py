"""NaN or infinity in one request's numbers ends that request by name; the step goes on for others.

The faults are put where a broken weight would put them: into the logits, the draft layer's logits
or the rows that score a prompt of one request, and, with a real model, into one token's embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_testing.numpy_kernels import NumpyKernels
from baton_worker.engine.backends.device import runner as device_runner
from baton_worker.engine.backends.device.drafting import Drafter as DeviceDrafter
from baton_worker.engine.backends.device.sampler import Sampler
from baton_worker.engine.options import DraftSources
from baton_worker.engine.step import prompt_logprobs as prompt_module
from baton_worker.engine.step.drafting import Drafter
from baton_worker.engine.step.runner import Runner
from baton_worker.identity import RequestKey, Role
from baton_worker.link.parts import FrameWriter, StepPart
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.records.layout import Limits
from baton_worker.sampling import LogprobParams

ENGINES = ("paddle", "device")

N = 5
VICTIM = 2
POISON = 9
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9},
    {"temperature": 0.7, "seed": 2, "repetition_penalty": 1.2, "bad_words": ((5,),)},
    {"temperature": 0.0, "min_tokens": 4},
    {"temperature": 1.0, "seed": 4, "min_p": 0.01},
)


class _Broken:
    """A model whose logits are `value` in some rows."""

    def __init__(self, model: Any, rows: list[int], value: float) -> None:
        self._model, self._rows, self._value = model, rows, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden: Any, layer: int | None = None) -> Any:
        logits = self._model.logits(hidden, layer)
        np.from_dlpack(logits)[self._rows] = self._value
        return logits


def _break_logits(monkeypatch: pytest.MonkeyPatch, victim: RequestKey, value: float) -> None:
    real = Runner._raw_logits

    def raw_logits(self: Runner, batch: Any, hidden: Any) -> Any:
        logits = real(self, batch, hidden)
        for first, sequence in zip(batch.first_rows, batch.sampled, strict=True):
            if sequence.request.key == victim and sequence.request.n_output >= 3:
                logits[first, 5] = value
        return logits

    monkeypatch.setattr(Runner, "_raw_logits", raw_logits)
    rows = _rows_on_device(monkeypatch, victim)
    choose = Sampler.choose

    def chosen(self: Any, shape: Any, inputs: Any, flags: Any, accepted: Any, space: Any) -> None:
        self._device.launch(
            lambda logits: logits.__setitem__((rows["sampled"], 5), value), space[1]
        )
        choose(self, shape, inputs, flags, accepted, space)

    monkeypatch.setattr(Sampler, "choose", chosen)


def _rows_on_device(monkeypatch: pytest.MonkeyPatch, victim: RequestKey) -> dict[str, list[int]]:
    """Return where a step's victim is once its output is long enough, kept up to date.

    By `sampled` its first row of logits, by `drafted` its row of a draft's.
    """
    real, rows = device_runner.fill, dict[str, list[int]]()

    def fill(to: Any, batch: Any, *rest: Any) -> None:
        real(to, batch, *rest)
        at = [
            index
            for index, sequence in enumerate(batch.sampled)
            if sequence.request.key == victim and sequence.request.n_output >= 3
        ]
        rows.update(sampled=to.cu_rows[at].tolist(), drafted=at)

    monkeypatch.setattr(device_runner, "fill", fill)
    return rows


def _break_drafts(monkeypatch: pytest.MonkeyPatch, victim: RequestKey, value: float) -> None:
    real = Drafter._by_model

    def by_model(self: Any, output: Any, rows: Any, *rest: Any) -> Any:
        broken = [i for i, r in enumerate(rows) if r.request.key == victim and r.row.position >= 3]
        model, self._model = self._model, _Broken(self._model, broken, value)
        try:
            return real(self, output, rows, *rest)
        finally:
            self._model = model

    monkeypatch.setattr(Drafter, "_by_model", by_model)
    rows = _rows_on_device(monkeypatch, victim)
    argmax, propose, drafting = NumpyKernels.argmax, DeviceDrafter.propose, []

    def largest(self: Any, logits: Any, token: Any, broken: Any) -> None:
        if drafting:
            self._launch(lambda into: into.__setitem__(rows["drafted"], value), logits)
        argmax(self, logits, token, broken)

    def proposed(self: Any, *given: Any) -> None:
        drafting.append(True)
        propose(self, *given)
        drafting.clear()

    monkeypatch.setattr(NumpyKernels, "argmax", largest)
    monkeypatch.setattr(DeviceDrafter, "propose", proposed)


def _break_prompt(monkeypatch: pytest.MonkeyPatch, victim: RequestKey, value: float) -> None:
    real = prompt_module._scored

    def scored(score: Any, rows: Any, request: Any, positions: Any) -> Any:
        def spoilt(*given: Any) -> Any:
            columns = score(*given)
            columns.logprob[-1] = value
            return columns

        return real(spoilt if request.key == victim else score, rows, request, positions)

    monkeypatch.setattr(prompt_module, "_scored", scored)


FAULTS = {"logits": _break_logits, "drafts": _break_drafts, "prompt": _break_prompt}


def _serve(bench: Any, prompts: Any, n: int = N) -> list[Any]:
    """Run the first `n` requests to their ends; every step's columns must make a record."""
    params = LogprobParams(draft_logprobs=True, draft_ids=True, prompt_k=1)
    writer = FrameWriter(Role.MIXED, 1, limits=Limits(vocab_size=bench.engine.shape.vocab_size))
    keys = [
        bench.submit(i, prompts[i], logprobs_k=2, logprobs=params, max_tokens=12, **SAMPLINGS[i])
        for i in range(n)
    ]
    for number, result in enumerate(bench.drain(), 1):
        writer.write([StepPart(result.columns, number)], 1, number, 0)
    return [bench.reader[key] for key in keys]


def _whole(stream: Any) -> Any:
    """Return a stream with its prompt in one piece: a neighbour's end moves chunks' borders."""
    told = [
        entry
        for piece in stream.prompt
        for entry in zip(piece.tokens, piece.logprobs, piece.ranks, strict=True)
    ]
    tops = [
        entry
        for piece in stream.prompt
        for entry in zip(piece.topk_tokens, piece.topk_logprobs, strict=True)
    ]
    return dataclasses.replace(stream, prompt=[told, tops])


@pytest.mark.parametrize("engine", ["real", "sim"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("n_draft", [0, 3])
@pytest.mark.parametrize(
    ("fault", "value"),
    [("logits", np.nan), ("logits", np.inf), ("drafts", np.nan), ("prompt", np.nan)],
)
def test_the_others_get_what_they_get_without_the_broken_one(
    make_bench: Callable[..., Any],
    make_sim_bench: Callable[..., Any],
    make_prompts: Callable[..., Any],
    key: Callable[..., RequestKey],
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    overlap: bool,
    n_draft: int,
    fault: str,
    value: float,
) -> None:
    if fault == "drafts" and not n_draft:
        pytest.skip("no drafts to break")
    make = make_bench if engine == "real" else make_sim_bench
    options = {"n_draft": n_draft, "overlap": overlap, "prefill_tokens": 16}
    prompts = make_prompts(N, seed=4, longest=30)
    clean = _serve(make(**options), prompts)
    FAULTS[fault](monkeypatch, key(VICTIM), value)
    bench = make(**options)
    broken = _serve(bench, prompts)
    for index in range(N):
        if index != VICTIM:
            assert _whole(broken[index]) == _whole(clean[index]), index
    victim, whole = broken[VICTIM], clean[VICTIM]
    assert victim.finish is Finish.ERROR
    assert victim.error is not None
    assert victim.error[0] is ErrorCode.ARITHMETIC
    assert f"position {len(prompts[VICTIM])}" in victim.error[1] or fault != "prompt"
    assert victim.tokens == whole.tokens[: len(victim.tokens)]
    assert len(victim.tokens) < len(whole.tokens)
    assert victim.logprobs == whole.logprobs[: len(victim.tokens)]
    monkeypatch.undo()
    bench.reader.streams.clear()
    bench.reader.ended.clear()
    assert _serve(bench, prompts, n=1)[0].tokens == clean[0].tokens, "it goes on serving"


@pytest.fixture(scope="module")
def poisoned(make_model: Callable[..., Any]) -> Any:
    """A model in which one token's embedding is NaN, and that token is never chosen."""
    model = make_model(3)
    embed, head = model.weights.embed.copy(), model.weights.lm_head.copy()
    embed[POISON], head[:, POISON] = np.nan, 0.0
    weights = dataclasses.replace(model.weights, embed=embed, lm_head=head)
    return dataclasses.replace(model, weights=weights)


@pytest.mark.parametrize("use_mtp", [False, True], ids=["model", "draft layer"])
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("ending", ["itself", "abort"])
def test_nan_left_in_kv_blocks_reaches_no_later_owner(
    make_bench: Callable[..., Any],
    poisoned: Any,
    use_mtp: bool,
    prefix_caching: bool,
    ending: str,
) -> None:
    """Masked positions weigh 1.6e-28, and that times NaN is NaN: stale blocks must be cleared."""
    good = tuple(range(10, 40))
    bad = (*good[:20], POISON, *good[20:])
    options = {
        "model": poisoned,
        "n_draft": 2 if use_mtp else 0,
        "prefix_caching": prefix_caching,
        "prefill_tokens": 16,
        "n_blocks": 6,
        "overlap": ending == "abort",
        "max_model_len": 64,
        "max_running": 2,
    }
    alone = make_bench(**options)
    wanted = alone.submit(1, good, temperature=0.0, max_tokens=20, logprobs_k=1)
    alone.drain()
    bench = make_bench(**options)
    for number in range(2, 6):
        victim = bench.submit(number, bad, temperature=0.0, max_tokens=20, logprobs_k=1)
        bench.step()
        if ending == "abort":  # the chunk with the poison is in flight, the prompt is not whole
            assert bench.engine.abort(victim)
        bench.drain()
        ended = Finish.ABORT if ending == "abort" else Finish.ERROR
        assert bench.reader[victim].finish is ended
    later = bench.submit(1, good, temperature=0.0, max_tokens=20, logprobs_k=1)
    bench.drain()
    found, expected = bench.reader[later], alone.reader[wanted]
    assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)
    assert found.finish is Finish.LENGTH


def test_two_requests_over_one_broken_prefix_both_end_and_leave_nothing(
    make_bench: Callable[..., Any], poisoned: Any
) -> None:
    bench = make_bench(model=poisoned, max_model_len=64, n_blocks=8, prefill_tokens=16)
    bad = (POISON, *range(10, 44))
    keys = [bench.submit(n, bad, temperature=0.0) for n in (1, 2)]
    bench.drain()
    assert {bench.reader[key].error[0] for key in keys} == {ErrorCode.ARITHMETIC}
    assert bench.engine.load().kv_blocks_cached == 0, "nobody may find that KV by its name"
    assert bench.engine.load().kv_blocks_used == 0


@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_a_sequence_may_break_where_a_mask_would_hide_it(
    make_sim_bench: Callable[..., Any],
    key: Callable[..., RequestKey],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """Bad word 5 masks the only NaN: what is chosen is fine, its raw logprob is not."""
    from baton_worker.engine.ngram import NgramSizes

    sources = DraftSources() if method == "mtp" else DraftSources(0, NgramSizes(1, 3))
    _break_logits(monkeypatch, key(0), np.nan)
    for temperature in (0.0, 0.9):
        bench = make_sim_bench(n_draft=2, drafts=sources)
        victim = bench.submit(
            0, (7, 8, 7, 8), temperature=temperature, bad_words=((5,),), logprobs_k=0
        )
        bench.drain()
        assert bench.reader[victim].error is not None
        assert bench.reader[victim].error[0] is ErrorCode.ARITHMETIC
