"""What a step is told: every number of it in one upload.

Owns the fields and what they hold of a batch, absent sequences included. Flags, which kernels only
ever set, go up as zeros with it and come back with the results. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import baton_ops
from baton_worker.engine.backends.device.layout import Field
from baton_worker.engine.backends.device.rank_kernels import MOST_RANKS
from baton_worker.engine.backends.device.rules import StepRules, score_settings
from baton_worker.engine.backends.device.shapes import StepShape
from baton_worker.engine.sampling.noise import as_seed
from baton_worker.engine.scheduling.batch import Batch, FedSequence, next_tokens

Int64Array = npt.NDArray[np.int64]


class Inputs(NamedTuple):
    """The fields, of the device or of the host.

    T sequences have a table, the first B of them choose tokens from R rows; N flat tokens. Absent
    sequences have no context, no drafts, no logprobs, no slots and no start.

    Attributes:
        tokens, sequence, position: i32[N].
        following: i32[`ahead_stride(N)` * MTP layers, at least one]; for each layer i32[N], the
            token that it takes: the one behind, for later layers further behind; 0 where the step
            chooses it.
        back: i32[`ahead_stride(B)` * layers behind the first, at least one]: the flat token one
            before `starts`, two before it and so on, -1 where the sequence has none.
        tables: i32[T, W]. contexts: i32[T]. rows: i32[R], flat tokens.
        cu_rows: i32[B + 1]. draft: i32[B, K]. count, k, starts, first: i32[B]; `starts`: the first
            flat token that chooses, `first`: its position. drafting: i32[B], the sequence, or -1.
        temperature, min_p: f32[B]. top_p: f64[B]. top_k: i32[B]. seeds, positions: i64[B].
        slot, history: i32[B]. repetition, frequency, presence: f32[B]. bias_starts: i32[B + 1].
        bias_ids: i32[*]. bias: f32[*]. mask_starts: i32[R + 1]. masked: i32[*].
        score_temperature, score_top_p: f32[B]. first_row: i32[B].
        draft_k, draft_rows: i32[B]. draft_offsets, draft_topk_offsets: i32[B + 1].
        draft_count: i32[1]. ones: f32[B].
    """

    tokens: Any
    sequence: Any
    position: Any
    following: Any
    back: Any
    tables: Any
    contexts: Any
    rows: Any
    cu_rows: Any
    draft: Any
    count: Any
    k: Any
    starts: Any
    first: Any
    drafting: Any
    temperature: Any
    min_p: Any
    top_p: Any
    top_k: Any
    seeds: Any
    positions: Any
    slot: Any
    history: Any
    repetition: Any
    frequency: Any
    presence: Any
    bias_starts: Any
    bias_ids: Any
    bias: Any
    mask_starts: Any
    masked: Any
    score_temperature: Any
    score_top_p: Any
    first_row: Any
    draft_k: Any
    draft_rows: Any
    draft_offsets: Any
    draft_topk_offsets: Any
    draft_count: Any
    ones: Any


class Flags(NamedTuple):
    """What was not finite: hidden, mtp u8[N] of flat tokens, logits u8[R], drafts u8[B]; and whose
    sums did not come to pass: ranks i32[`MOST_RANKS`], see `Collective.refuse`.
    """

    hidden: Any
    mtp: Any
    logits: Any
    drafts: Any
    ranks: Any


def input_fields(shape: StepShape) -> dict[str, Field]:
    """Return the fields of `Inputs` for a step of this shape."""
    n, b, r, t = shape.n_tokens, shape.n_sampled, shape.n_rows, shape.n_tables
    flat, each, ends = (Field("int32", (size,)) for size in (n, b, b + 1))
    number, rules = Field("float32", (b,)), Field("int32", (shape.n_rules,))
    wide = Field("int64", (b,))
    special = {
        "tokens": flat,
        "sequence": flat,
        "position": flat,
        "following": Field("int32", (layered(n, shape.n_mtp),)),
        "back": Field("int32", (layered(b, shape.n_mtp - 1),)),
        "tables": Field("int32", (t, shape.width)),
        "contexts": Field("int32", (t,)),
        "rows": Field("int32", (r,)),
        "cu_rows": ends,
        "draft": Field("int32", (b, shape.n_fed)),
        "top_p": Field("float64", (b,)),
        "seeds": wide,
        "positions": wide,
        "bias_starts": ends,
        "bias_ids": rules,
        "bias": Field("float32", (shape.n_rules,)),
        "mask_starts": Field("int32", (r + 1,)),
        "masked": rules,
        "draft_offsets": ends,
        "draft_topk_offsets": ends,
        "draft_count": Field("int32", (1,)),
    }
    numbers = ("temperature", "min_p", "repetition", "frequency", "presence")
    special |= dict.fromkeys((*numbers, "score_temperature", "score_top_p", "ones"), number)
    return {name: special.get(name, each) for name in Inputs._fields}


def ahead_stride(count: int) -> int:
    """Return how far one layer's numbers lie behind the one before's: at a multiple of 16 bytes."""
    return -(-count // 4) * 4


def layered(count: int, n_mtp: int) -> int:
    """Return the room for so many numbers of each of these layers."""
    return ahead_stride(count) * max(n_mtp, 1)


def flag_fields(shape: StepShape) -> dict[str, Field]:
    """Return the fields of `Flags` for a step of this shape."""
    flat = Field("uint8", (shape.n_tokens,))
    return {
        "hidden": flat,
        "mtp": flat,
        "logits": Field("uint8", (shape.n_rows,)),
        "drafts": Field("uint8", (shape.n_sampled,)),
        "ranks": Field("int32", (MOST_RANKS,)),
    }


def fill(to: Inputs, batch: Batch, shape: StepShape, rules: StepRules) -> None:
    """Write a batch to the host's fields, all of them.

    Args:
        rules: of the same batch.
    """
    to.tokens[:], to.sequence[:], to.position[:], to.following[:] = 0, -1, 0, 0
    to.tables[:], to.contexts[:] = 0, 0
    _fill_batch(to, batch, shape)
    _fill_rest(to, batch.sampled, np.arange(len(batch.sampled)), shape, rules)
    _fill_back(to, batch, shape)


def fill_ahead(
    to: Inputs,
    sampled: Sequence[FedSequence],
    at: Int64Array,
    shape: StepShape,
    rules: StepRules,
    chunks: Batch | None = None,
) -> None:
    """Write what is known of a step whose tokens and places only the device will know.

    Such a step feeds a sequence one known token: it has one MTP layer at most.

    Args:
        sampled: the sequences that are there; the drafts of those that decode say how many, not
            which.
        at: i64[*], the place of each among the step's B sequences.
        rules: of the same sequences.
        chunks: of prompts, which are known: all that stands behind the sequences that decode.
    """
    to.tokens[:], to.position[:], to.following[:] = 0, 0, 0
    to.tables[:], to.contexts[:], to.back[:] = 0, 0, -1
    decoding, sequence = at[at < shape.sequences], np.full(shape.sequences, -1)
    sequence[decoding] = decoding
    to.sequence[: shape.n_decoded] = np.repeat(sequence, shape.q_len)
    if chunks is not None:
        _fill_batch(to, chunks, shape, shape.n_decoded, shape.sequences)
    width = shape.width
    for index, one in zip(at.tolist(), sampled, strict=True):
        to.tables[index] = one.request.table[:width]
    _fill_rest(to, sampled, at, shape, rules)


def _fill_rest(
    to: Inputs, sampled: Sequence[FedSequence], at: Int64Array, shape: StepShape, rules: StepRules
) -> None:
    _fill_sampled(to, sampled, at, shape)
    _fill_sampling(to, [s.request.params.sampling for s in sampled], at)
    _fill_draws(to, sampled, at)
    rules.fill(to, at, shape)
    _fill_scores(to, sampled, at, shape)


def _fill_batch(to: Inputs, batch: Batch, shape: StepShape, start: int = 0, table: int = 0) -> None:
    """Flat tokens from `start` on, of sequences from `table` on; those of absent sequences lie
    behind.
    """
    to.tokens[start : start + len(batch.tokens)] = batch.tokens
    _fill_following(to.following, batch, shape, start)
    for group in batch.groups:
        stop, last = start + group.n_tokens, table + group.n_sequences
        to.sequence[start:stop] = np.repeat(np.arange(table, last), group.q_len)
        to.position[start:stop] = group.positions().ravel()
        width = min(shape.width, group.tables.shape[1])
        to.tables[table:last, :width] = group.tables[:, :width]
        to.contexts[table:last] = group.first_position + group.q_len
        start, table = stop, last


def _fill_following(to: npt.NDArray[np.int32], batch: Batch, shape: StepShape, start: int) -> None:
    nothing = np.empty((len(batch.sampled), 0), np.int32)
    known = next_tokens(batch, nothing, max(shape.n_mtp, 1))
    stride, count = ahead_stride(shape.n_tokens), known.shape[1]
    to.reshape(-1, stride)[:, start : start + count] = known


def _fill_back(to: Inputs, batch: Batch, shape: StepShape) -> None:
    to.back[:] = -1
    sampled = batch.sampled
    if not sampled:
        return
    rows = to.back.reshape(-1, ahead_stride(shape.n_sampled))
    starts, count = to.starts[: len(sampled)], np.arange(1, 1 + len(rows))[:, None]
    before = to.first[: len(sampled)] - np.array(_first_fed(batch), np.int64)
    rows[:, : len(sampled)] = np.where(count <= before, starts - count, -1)


def _first_fed(batch: Batch) -> list[int]:
    """Return the first position that is fed of each sequence that chooses tokens."""
    decode = [s.request.n_computed for s in batch.sampled[: batch.n_decode]]
    return decode + [chunk.start for chunk in batch.chunks if chunk.is_last]


def _fill_sampled(
    to: Inputs, sampled: Sequence[FedSequence], at: Int64Array, shape: StepShape
) -> None:
    """Rows and drafts of the sequences that choose tokens."""
    starts = np.array([s.start for s in sampled], np.int64)
    last, decoded = starts[at >= shape.sequences], at[at < shape.sequences]
    to.rows[:] = -1
    rows = to.rows[: shape.n_decoded_rows].reshape(shape.sequences, shape.rows_each)
    rows[decoded] = starts[: len(decoded), None] + np.arange(shape.rows_each)
    to.rows[shape.n_decoded_rows : shape.n_decoded_rows + len(last)] = last
    each = np.full(shape.n_sampled, 1)
    each[: shape.sequences] = shape.rows_each
    to.cu_rows[0] = 0
    np.cumsum(each, out=to.cu_rows[1:])
    to.draft[:], to.count[:], to.starts[:], to.first[:], to.drafting[:] = -1, 0, -1, 0, -1
    to.count[at] = [len(s.drafts) for s in sampled]
    for index, sequence in zip(at.tolist(), sampled, strict=True):
        if sequence.drafts:
            to.draft[index, : len(sequence.drafts)] = sequence.drafts
    to.starts[at], to.first[at], to.drafting[at] = starts, to.position[starts], at


def _fill_sampling(to: Inputs, params: Sequence[Any], at: Int64Array) -> None:
    to.temperature[:], to.min_p[:], to.top_p[:], to.top_k[:] = 0.0, 0.0, 1.0, 0
    to.repetition[:], to.frequency[:], to.presence[:] = 1.0, 0.0, 0.0
    to.temperature[at] = [p.temperature for p in params]
    to.min_p[at] = [p.min_p for p in params]
    to.top_p[at] = [p.top_p for p in params]
    to.top_k[at] = [p.top_k for p in params]
    to.repetition[at] = [p.repetition_penalty for p in params]
    to.frequency[at] = [p.frequency_penalty for p in params]
    to.presence[at] = [p.presence_penalty for p in params]


def _fill_draws(to: Inputs, sampled: Sequence[FedSequence], at: Int64Array) -> None:
    to.seeds[:], to.positions[:] = 0, 0
    seeds = np.array([as_seed(s.request.params.sampling.seed) for s in sampled], np.uint64)
    to.seeds[at] = seeds.view(np.int64)
    to.positions[at] = [s.request.n_output for s in sampled]


def _fill_scores(
    to: Inputs, sampled: Sequence[FedSequence], at: Int64Array, shape: StepShape
) -> None:
    to.k[:], to.score_temperature[:], to.score_top_p[:], to.first_row[:] = -1, 1.0, 1.0, 0
    to.k[at] = [s.request.params.logprobs_k for s in sampled]
    for index, sequence in zip(at.tolist(), sampled, strict=True):
        if (settings := score_settings(sequence.request)) is not None:
            to.score_temperature[index] = settings.temperature
            to.score_top_p[index] = settings.top_p
            to.first_row[index] = shape.n_rows if settings.of_processed else 0
    to.draft_k[:], to.ones[:] = -1, 1.0
    to.draft_k[at] = [s.request.draft_k for s in sampled]
    to.draft_rows[:], to.draft_count[:] = np.arange(shape.n_sampled), shape.n_sampled
    places = baton_ops.offsets(to.draft_k)
    to.draft_offsets[:], to.draft_topk_offsets[:] = places.row, places.topk
