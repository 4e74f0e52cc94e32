"""An engine in a test: requests in, its rows merged by a strict reader, and a model's oracle.

Knows `StepEngine` and the records' columns, no framework: each area brings its own engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton_testing import numpy_reference as reference
from baton_worker.engine.api import Handoff, StepResult, TellFilled
from baton_worker.engine.engine import StepEngine
from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.mla import Mla
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.model.weights import (
    ExpertWeights,
    LatentWeights,
    LayerWeights,
    MlpWeights,
    MtpWeights,
    Weights,
)
from baton_worker.identity import RequestKey, make_handle
from baton_worker.messages import DecodeTarget, Submit
from baton_worker.records.columns import (
    FINISH_MASK,
    FLAG_ECHO,
    FLAG_FIRST_TOKEN,
    FLAG_HAS_DRAFT,
    ErrorCode,
    Finish,
)
from baton_worker.records.scored import ScoredRow
from baton_worker.sampling import SamplingParams


@dataclass(frozen=True)
class LoadedModel:
    """A model's shape and weights, and its float64 oracle."""

    shape: ModelShape
    weights: Weights

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return f64[T, V]: row i scores the token after `tokens[i]`."""
        return reference.log_softmax(reference.forward(self.weights, self.shape, tokens).logits)


@dataclass
class Stream:
    """What one request's rows said so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    topk: list[list[tuple[int, float]]] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    shown: list[ScoredRow | None] = field(default_factory=list)
    prompt: list[ScoredRow] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    error: tuple[ErrorCode, str] | None = None
    echoed: bool = False


class Reader:
    """Merges rows by request and fails on what a gateway could not merge.

    A row must continue its stream without gap or overlap, except an echo, which must repeat
    position 0 exactly; nothing may follow a finish; columns must be used up exactly.
    """

    def __init__(self) -> None:
        self.streams: dict[RequestKey, Stream] = {}
        self.ended: set[RequestKey] = set()

    def __getitem__(self, key: RequestKey) -> Stream:
        return self.streams.setdefault(key, Stream())

    def read(self, result: StepResult) -> None:
        columns = result.columns
        token = logprob = topk = draft = 0
        errors = {error.row: error for error in columns.errors}
        shown = list(columns.verified_drafts.rows()) or [None] * columns.n_rows
        prompts = list(columns.prompt_tokens.rows()) or [None] * columns.n_rows
        seen = set()
        for row in range(columns.n_rows):
            key = RequestKey(int(columns.handle[row]), int(columns.attempt[row]))
            if (told := prompts[row]) is not None:
                assert key not in seen, "prompt tokens come before the step's output"
                assert not columns.n_tokens[row]
                assert not self[key].tokens
                assert told.first == 1 + sum(len(piece.tokens) for piece in self[key].prompt)
                self[key].prompt.append(told)
                continue
            assert key not in seen, "one row per request and step"
            seen.add(key)
            n, width = int(columns.n_tokens[row]), int(columns.width[row])
            n_scored, n_topk = (n if width else 0), n * max(width - 1, 0)
            part = Stream(
                tokens=columns.token[token : token + n].tolist(),
                logprobs=columns.logprob[logprob : logprob + n_scored].tolist(),
                ranks=columns.rank[logprob : logprob + n_scored].tolist(),
                topk=_grouped(columns, topk, n_topk, width - 1),
            )
            token, logprob, topk = token + n, logprob + n_scored, topk + n_topk
            flags = int(columns.flags[row])
            n_drafts = int(columns.draft_count[row]) if len(columns.draft_count) else 0
            assert bool(flags & FLAG_HAS_DRAFT) == (n_drafts > 0)
            part.drafts = tuple(columns.draft[draft : draft + n_drafts].tolist())
            draft += n_drafts
            if len(columns.n_proposed):
                part.proposed = [int(columns.n_proposed[row])]
                part.accepted = [int(columns.n_accepted[row])]
                part.shown = [shown[row]]
            if len(columns.n_reused) and columns.n_reused[row]:
                assert flags & FLAG_FIRST_TOKEN, "told with a first token and nowhere else"
                self[key].reused.append(int(columns.n_reused[row]))
            self._merge(key, int(columns.position[row]), flags, part)
            if row in errors:
                self[key].error = (errors[row].code, errors[row].message)
        assert token == len(columns.token)
        assert logprob == len(columns.logprob) == len(columns.rank)
        assert topk == len(columns.topk_token) == len(columns.topk_logprob)
        assert draft == len(columns.draft)

    def _merge(self, key: RequestKey, position: int, flags: int, part: Stream) -> None:
        stream = self[key]
        assert key not in self.ended, f"a row after the end of {key}"
        if flags & FLAG_ECHO:
            assert position == max(len(stream.tokens) - 1, 0)
            assert not stream.echoed
            stream.echoed = True
            if stream.tokens:
                assert part.tokens == stream.tokens[-1:]
                assert part.logprobs == stream.logprobs[-1:]
                assert part.ranks == stream.ranks[-1:]
                assert part.topk == stream.topk[-1:]
                return
        assert position == len(stream.tokens), f"gap or overlap at {position}"
        assert bool(flags & FLAG_FIRST_TOKEN) == (position == 0 and bool(part.tokens))
        for name in ("tokens", "logprobs", "ranks", "topk", "proposed", "accepted", "shown"):
            getattr(stream, name).extend(getattr(part, name))
        stream.drafts = part.drafts
        stream.finish = Finish(flags & FINISH_MASK)
        if stream.finish is not Finish.NONE:
            self.ended.add(key)


def _grouped(columns: Any, start: int, count: int, k: int) -> list[list[tuple[int, float]]]:
    ids = columns.topk_token[start : start + count].tolist()
    values = columns.topk_logprob[start : start + count].tolist()
    pairs = list(zip(ids, values, strict=True))
    return [pairs[i : i + k] for i in range(0, count, k)] if k > 0 else []


class Clock:
    """A clock that moves a millisecond each time it is read."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Bench:
    """An engine and the reader of its rows."""

    engine: StepEngine
    reader: Reader

    def submit(
        self,
        number: int,
        prompt: Sequence[int],
        *,
        hand_over: bool = False,
        kv_stays: bool = False,
        features: tuple[str, ...] = (),
        **options: Any,
    ) -> RequestKey:
        """Submit a prompt; keywords go to Submit or else to SamplingParams.

        Args:
            features: of the decode worker that it is handed over to.
        """
        of_request = set(Submit.__struct_fields__)
        fields = {name: options.pop(name) for name in [*options] if name in of_request}
        options.setdefault("ignore_eos", True)
        request = Submit(
            *key(number),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**options),
            decode=DecodeTarget("decode-0", "", features=features) if hand_over else None,
            **fields,
        )
        self.engine.submit(request, kv_stays)
        return request.key

    def step(self, tell_filled: TellFilled = lambda filled: None) -> StepResult:
        result = self.engine.step(tell_filled=tell_filled)
        self.reader.read(result)
        self.engine.check_integrity()
        return result

    def drain(self) -> list[StepResult]:
        """Step until there is nothing left to do."""
        results = []
        while self.engine.has_work():
            results.append(self.step())
            assert len(results) < 10_000
        return results

    def known(self) -> list[RequestKey]:
        """Requests that the engine knows: they wait, run, or are held for decode."""
        return list(self.engine._requests)

    def check_nothing_is_left(self) -> None:
        """Of requests that have all ended."""
        engine, load = self.engine, self.engine.load()
        held = (load.running, load.waiting, load.held_handoffs, load.kv_blocks_used)
        assert held == (0, 0, 0, 0)
        assert not self.known()
        assert not engine._requests.has_terminals
        assert not engine._requests.endings
        assert engine._in_flight is None
        assert not list(engine._parts.scheduler.requests())

    def handoffs(self) -> list[Handoff]:
        return [handoff for result in self.drain() for handoff in result.handoffs]


def key(number: int, incarnation: int = 1) -> RequestKey:
    return RequestKey(make_handle(incarnation, number), 0)


def random_weights(shape: ModelShape, rng: np.random.Generator) -> Weights:
    def matrix(rows: int, columns: int) -> Any:
        return rng.normal(0.0, 1.5 * rows**-0.5, (rows, columns)).astype(np.float32)

    def norm(size: int = shape.hidden_size) -> Any:
        return rng.normal(1.0, 0.1, size).astype(np.float32)

    def bias(size: int) -> Any:
        return rng.normal(0.0, 1.0, size).astype(np.float32)

    def mlp(width: int) -> MlpWeights:
        return MlpWeights(matrix(shape.hidden_size, 2 * width), matrix(width, shape.hidden_size))

    def mixture(experts: Experts) -> ExpertWeights:
        return ExpertWeights(
            router=matrix(shape.hidden_size, experts.count),
            choice_bias=bias(experts.count) / 8 if experts.has_choice_bias else None,
            experts=tuple(mlp(experts.intermediate_size) for _ in range(experts.count)),
        )

    def layer(index: int) -> LayerWeights:
        width, experts = sum(shape.projected_sizes), shape.experts_of(index)
        return LayerWeights(
            input_norm=norm(),
            qkv=matrix(shape.hidden_size, width),
            o=matrix(shape.o_size, shape.hidden_size),
            post_norm=norm(),
            mlp=mlp(shape.mlp_size(index)) if shape.mlp_size(index) else None,
            qk_norm=(norm(shape.head_dim), norm(shape.head_dim)) if shape.has_qk_norm else None,
            qkv_bias=bias(width) if shape.has_qkv_bias else None,
            mixture=mixture(experts) if experts else None,
            latent=_latent(shape.n_heads, shape.mla, matrix, norm) if shape.mla else None,
        )

    final_norm = norm()
    mtp = tuple(
        MtpWeights(
            norm(),
            norm(),
            matrix(2 * shape.hidden_size, shape.hidden_size),
            layer(shape.n_layers + index),
            norm(),
        )
        for index in range(shape.n_mtp_layers)
    )
    return Weights(
        embed=rng.normal(0.0, 1.0, (shape.vocab_size, shape.hidden_size)).astype(np.float32),
        layers=tuple(map(layer, range(shape.n_layers))),
        mtp=mtp,
        final_norm=final_norm,
        lm_head=matrix(shape.hidden_size, shape.vocab_size),
        identity="random",
    )


def _latent(
    n_heads: int, mla: Mla, matrix: Callable[[int, int], Any], norm: Callable[[int], Any]
) -> LatentWeights:
    width = mla.unfolded_size
    return LatentWeights(
        q_norm=norm(mla.q_rank) if mla.q_rank else None,
        q_up=matrix(mla.q_rank, n_heads * mla.query_size) if mla.q_rank else None,
        kv_norm=norm(mla.kv_rank),
        kv_up=matrix(mla.kv_rank, n_heads * width).T.reshape(n_heads, width, -1).copy(),
    )
