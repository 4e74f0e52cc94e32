"""Whatever ends a request, its last entry scores the token that was returned (R37)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from baton_worker.records.columns import Finish

ENGINES = ("paddle", "device")

PROMPT = tuple(range(5, 25))
LENGTH = 18


@pytest.fixture(scope="module")
def free(make_bench: Any) -> list[int]:
    """The greedy continuation with nothing to stop it."""
    bench = make_bench()
    key = bench.submit(1, PROMPT, temperature=0.0, max_tokens=LENGTH)
    bench.drain()
    return list(bench.reader[key].tokens)


def _end_at(tiny: Any, ending: str, last: int, token: int) -> tuple[Any, dict[str, Any], Any]:
    """Return model, engine limits and sampling that end a request at output index `last`."""
    if ending == "eos":
        shape = dataclasses.replace(tiny.shape, eos_token_ids=(token,))
        return dataclasses.replace(tiny, shape=shape), {}, {"ignore_eos": False}
    if ending == "stop":
        return tiny, {}, {"stop_token_ids": (token,)}
    if ending == "max_tokens":
        return tiny, {}, {"max_tokens": last + 1}
    return tiny, {"max_model_len": len(PROMPT) + last + 1}, {}


def _runs(
    tiny: Any, make_bench: Any, ending: str, n_draft: int, ends: dict[int, int]
) -> Iterator[tuple[int, Any, int]]:
    """Yield each end's output index, stream and tokens in its last row.

    What a request may ask for itself ends all of them in one batch; the model and its length end
    one engine each.
    """
    wanted = {"max_tokens": 30, "temperature": 0.0, "logprobs_k": 2}
    own = ending in ("stop", "max_tokens")
    for batch in [ends] if own else [{last: token} for last, token in ends.items()]:
        bench, keys = None, {}
        for last, token in batch.items():
            model, limits, options = _end_at(tiny, ending, last, token)
            bench = bench or make_bench(model, n_draft=n_draft, **limits)
            keys[last] = bench.submit(last, PROMPT, **wanted | options)
        assert bench is not None
        results = bench.drain()
        for last, key in keys.items():
            rows = [r.columns for r in results if key.handle in r.columns.handle]
            (row,) = np.flatnonzero(rows[-1].handle == key.handle)
            yield last, bench.reader[key], int(rows[-1].n_tokens[row])


@pytest.mark.parametrize("n_draft", [0, 1, 5])
@pytest.mark.parametrize("ending", ["eos", "stop", "max_tokens", "model length"])
def test_the_end_is_scored_as_returned(
    tiny: Any, make_bench: Any, free: list[int], ending: str, n_draft: int
) -> None:
    scores = tiny.logprobs([*PROMPT, *free])[len(PROMPT) - 1 : -1]
    ends = {i: free[i] for i in range(1, LENGTH) if free[i] not in free[:i]}
    last_rows = set()
    for last, stream, last_row in _runs(tiny, make_bench, ending, n_draft, ends):
        is_stop = ending in ("eos", "stop")
        assert stream.finish is (Finish.STOP if is_stop else Finish.LENGTH)
        assert stream.tokens == free[: last + 1]
        expected = [scores[i, token] for i, token in enumerate(stream.tokens)]
        assert stream.logprobs == pytest.approx(expected, abs=5e-5)
        # Greedy without penalties: the returned token is also the best, and first among the k.
        assert stream.topk[-1][0] == (stream.tokens[-1], stream.logprobs[-1])
        last_rows.add(last_row)
    assert max(last_rows) > 1 or n_draft == 0, "some request ends behind accepted drafts"
