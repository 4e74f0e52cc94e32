"""Logprobs of prompt tokens from hidden states that lie on the device.

Owns the launches: some rows at a time through the head, so that memory stays bounded however long
a chunk is. Which rows those are is `step.prompt_logprobs`' business.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import baton_ops
from baton_worker.engine.backends.device.decoder import Decoder
from baton_worker.engine.backends.device.layout import Field, Layout
from baton_worker.engine.backends.device.seam import (
    Device,
    Kernels,
    ScoreColumns,
    ScorePlan,
    Tensor,
)
from baton_worker.engine.backends.device.workspace import Workspace


class _Columns(NamedTuple):
    logprob: Any
    rank: Any
    topk_token: Any
    topk_logprob: Any


class PromptScorer:
    """Scores rows of a step's prompts.

    Args:
        most_top: alternatives of a token at most.

    Attributes:
        at_once: rows that one call takes.
    """

    def __init__(
        self, device: Device, kernels: Kernels, decoder: Decoder, space: Workspace, most_top: int
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._decoder = decoder
        self._space = space
        self.at_once = n = space.sizes.prompt_rows
        self._plan = Layout(_plan_fields(n))
        self._columns = Layout(
            {
                "logprob": Field("float32", (n,)),
                "rank": Field("int32", (n,)),
                "topk_token": Field("int32", (n * most_top,)),
                "topk_logprob": Field("float32", (n * most_top,)),
            }
        )
        self._up, self._down = (device.host(x.stop) for x in (self._plan, self._columns))
        self._told = device.empty((self._plan.stop,), "uint8")
        self._tells = device.empty((self._columns.stop,), "uint8")

    def score(
        self, final: Tensor, rows: range, tokens: list[int], k: int
    ) -> baton_ops.LogprobColumns:
        """Return the raw logprobs of `tokens` by `rows` of `final` E[N, H], the normed states."""
        n = len(tokens)
        self._fill(tokens, k)
        plan = ScorePlan(**self._plan.on_device(self._device, self._told))
        out = ScoreColumns(**self._columns.on_device(self._device, self._tells))
        self._device.upload(self._up, self._told)
        logits = self.logits(final, rows)
        self._kernels.logprobs(logits, plan, out, self._space.logprobs)
        self._device.download(self._tells, self._down).wait()
        found = _Columns(**self._columns.on_host(np.array(self._down)))
        return baton_ops.LogprobColumns(
            found.logprob[:n],
            found.rank[:n],
            found.topk_token[: n * k],
            found.topk_logprob[: n * k],
        )

    def logits(self, final: Tensor, rows: range) -> Tensor:
        """Return f32[R, V] of these rows: all that is done of it on other ranks."""
        logits = self._space.prompt_logits(len(rows))
        self._decoder.logits(self._device.rows(final, rows.start, rows.stop), logits)
        self._decoder.end_unit()
        return logits

    def _fill(self, tokens: list[int], k: int) -> None:
        n, rows = len(tokens), np.arange(self.at_once + 1)
        to = ScorePlan(**self._plan.on_host(self._up))
        to.row_index[:] = np.minimum(rows[:-1], n - 1)
        to.token[:], to.k[:], to.inv_temp[:], to.top_p[:] = 0, k, 1.0, 1.0
        to.token[:n] = tokens
        to.row_offset[:], to.topk_offset[:] = rows, rows * k
        to.num_rows[:] = n


def _plan_fields(count: int) -> dict[str, Field]:
    words, numbers = Field("int32", (count,)), Field("float32", (count,))
    ends = Field("int32", (count + 1,))
    return {
        "row_index": words,
        "token": words,
        "k": words,
        "inv_temp": numbers,
        "row_offset": ends,
        "topk_offset": ends,
        "num_rows": Field("int32", (1,)),
        "top_p": numbers,
    }
