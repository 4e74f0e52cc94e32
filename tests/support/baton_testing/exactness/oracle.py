"""How far a subject's logprobs are from float64's, over the texts that it said itself.

Owns the comparison. The oracle is `numpy_reference`, which
shares nothing with an engine but the weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from baton_testing.engine_bench import Bench, LoadedModel, Reader
from baton_testing.exactness.asks import submit
from baton_testing.exactness.rounding import nearest
from baton_testing.exactness.subjects import Subject
from baton_worker.sampling import LogprobParams


class Errors(NamedTuple):
    """Of raw logprobs of sampled tokens: their number, the largest error, and the mean."""

    tokens: int
    largest: float
    mean: float


def errors(subject: Subject, model: LoadedModel, **options: Any) -> Errors:
    """Serve the subject's requests and compare each token's raw logprob with the oracle's."""
    raw = {"logprobs_k": 0, "logprobs": LogprobParams()}
    asks = [dataclasses.replace(ask, **raw) for ask in subject.asks()]
    found: list[float] = []
    with subject.engine(**options) as engine:
        bench = Bench(engine, Reader())
        keys = [submit(bench, number, ask) for number, ask in enumerate(asks, start=1)]
        while engine.has_work():
            bench.reader.read(engine.step())
    for ask, key in zip(asks, keys, strict=True):
        stream = bench.reader[key]
        exact = model.logprobs([*ask.prompt, *stream.tokens])[len(ask.prompt) - 1 : -1]
        wanted = exact[np.arange(len(stream.tokens)), stream.tokens]
        found += np.abs(np.array(stream.logprobs) - wanted).tolist()
    return Errors(len(found), max(found), float(np.mean(found)))


def rounded(value: Any) -> Any:
    """Return weights as bfloat16 has them: to the nearest, ties to even."""
    if isinstance(value, np.ndarray):
        return nearest(value)
    if isinstance(value, tuple):
        return tuple(map(rounded, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: rounded(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    return value
