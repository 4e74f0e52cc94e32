"""What a step tells: everything the host needs of it in one download.

Owns the fields and their views. Knows no request.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from baton_worker.engine.backends.device.inputs import Flags
from baton_worker.engine.backends.device.layout import Field
from baton_worker.engine.backends.device.shapes import StepShape


class Results(NamedTuple):
    """The fields, of the device or of the host.

    Attributes:
        n_accepted: i32[B]. token: i32[B, K + 1].
        row_offset, topk_offset: i32[R + 1], where each emitted token's logprobs lie.
        logprob: f32[R]. rank: i32[R]. topk_token: i32[R * k]. topk_logprob: f32[R * k].
        drafts: i32[(MTP's drafts + lookup's) * `stride`], one draft of all sequences after the
            other; -1: lookup found none.
        draft_logprob, draft_rank: alike, of MTP's. draft_topk_token, draft_topk_logprob: k times as
            wide.
    """

    n_accepted: Any
    token: Any
    row_offset: Any
    topk_offset: Any
    logprob: Any
    rank: Any
    topk_token: Any
    topk_logprob: Any
    drafts: Any
    draft_logprob: Any
    draft_rank: Any
    draft_topk_token: Any
    draft_topk_logprob: Any


class Told(NamedTuple):
    """A step's results on the host, in memory of their own."""

    flags: Flags
    results: Results


def stride(shape: StepShape) -> int:
    """Return how far one draft's numbers lie behind the one before's."""
    return -(-shape.n_sampled // 4) * 4


def result_fields(shape: StepShape) -> dict[str, Field]:
    """Return the fields of `Results` for a step of this shape."""
    b, r, top = shape.n_sampled, shape.n_rows, max(shape.most_top, 0)
    n_scored = r if shape.most_top >= 0 else 0
    n_drafts = shape.n_drafts * stride(shape)
    n_told, draft_top = (n_drafts if shape.draft_top >= 0 else 0), max(shape.draft_top, 0)
    return {
        "n_accepted": Field("int32", (b,)),
        "token": Field("int32", (b, shape.n_fed + 1)),
        "row_offset": Field("int32", (n_scored + 1,)),
        "topk_offset": Field("int32", (n_scored + 1,)),
        "logprob": Field("float32", (n_scored,)),
        "rank": Field("int32", (n_scored,)),
        "topk_token": Field("int32", (n_scored * top,)),
        "topk_logprob": Field("float32", (n_scored * top,)),
        "drafts": Field("int32", (shape.n_made * stride(shape),)),
        "draft_logprob": Field("float32", (n_told,)),
        "draft_rank": Field("int32", (n_told,)),
        "draft_topk_token": Field("int32", (n_told * draft_top,)),
        "draft_topk_logprob": Field("float32", (n_told * draft_top,)),
    }
