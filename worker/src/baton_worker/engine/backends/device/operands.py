"""The tensors that kernels are given together, by name.

Owns shapes and meanings; the shapes' letters are `seam`'s. Knows no kernel.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Tensor = Any
"""A framework's own tensor: contiguous, on the device, exported by DLPack."""

RopeStyle = Literal["half", "interleaved"]


class Places(NamedTuple):
    """Where N flat tokens stand: sequence i32[N] (-1: padding), position i32[N]; tables i32[S, W]
    of blocks.
    """

    sequence: Tensor
    position: Tensor
    tables: Tensor


class Norm(NamedTuple):
    """An RMS norm: weight E[H], epsilon."""

    weight: Tensor
    eps: float


class Rotation(NamedTuple):
    """What happens to a head before it is used.

    norms: weights E[D] of queries' and of keys' RMS norm, None for none; eps: theirs. cos, sin:
    f32[positions, D / 2]. style: which elements rotate together, see `ModelShape.rope_style`. bias
    E[(Hq + 2 Hkv) * D]: what is added to the projection first, None for nothing.
    """

    norms: tuple[Tensor, Tensor] | None
    eps: float
    cos: Tensor
    sin: Tensor
    style: RopeStyle
    bias: Tensor | None = None


class RowMap(NamedTuple):
    """Whose R sampled rows are whose: sequence s owns rows cu_rows[s] : cu_rows[s + 1]."""

    cu_rows: Tensor


class DraftRows(NamedTuple):
    """draft i32[S, K], valid in [s, : count[s]]; count i32[S]; cu_rows i32[S + 1].

    A sequence may own more than count + 1 rows: those behind are padding.
    """

    draft: Tensor
    count: Tensor
    cu_rows: Tensor


class Accepted(NamedTuple):
    """n_accepted i32[S]; token i32[S, K + 1], -1 after the end."""

    n_accepted: Tensor
    token: Tensor


class RowParams(NamedTuple):
    """Of each sequence: temperature, min_p f32[S], top_p f64[S], top_k i32[S] (0: all). cu_rows as
    in `RowMap`.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    cu_rows: Tensor


class Penalised(NamedTuple):
    """What each sequence's penalties count.

    slot i32[S]: the sequence's place in `counts` i32[slots, V] (times in the output, hence 0 where
    not seen) and `seen` u8[slots, V] (in prompt or output); -1: no penalties. draft i32[S, K]: what
    its rows assume; an id outside 0..V-1 is none.
    """

    slot: Tensor
    counts: Tensor
    seen: Tensor
    draft: Tensor


class Rules(NamedTuple):
    """What changes logits.

    repetition, frequency, presence f32[S]. Biases of sequence s: bias_ids i32 (distinct) and bias
    f32 at bias_starts i32[S + 1][s : s + 2]. Ids that row r may not choose: masked i32 at
    mask_starts i32[R + 1][r : r + 2].
    """

    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    bias_starts: Tensor
    bias_ids: Tensor
    bias: Tensor
    mask_starts: Tensor
    masked: Tensor


class ScoreSource(NamedTuple):
    """temperature f32[S] (1: raw); first_row i32[S]: what is added to a sequence's rows, so that
    they are found in processed logits that lie behind the raw ones; top_p f32[S] (1: whole).
    """

    temperature: Tensor
    first_row: Tensor
    top_p: Tensor


class ScorePlan(NamedTuple):
    """`baton_ops.cuda.StepPlan`: row_index, token, k i32[C]; inv_temp f32[C]; offsets i32[C + 1];
    num_rows i32[1]. top_p f32[C], for `normalise_top_p`.
    """

    row_index: Tensor
    token: Tensor
    k: Tensor
    inv_temp: Tensor
    row_offset: Tensor
    topk_offset: Tensor
    num_rows: Tensor
    top_p: Tensor


class ScoreColumns(NamedTuple):
    """f32[L] logprob, i32[L] rank, i32[T] topk_token, f32[T] topk_logprob."""

    logprob: Tensor
    rank: Tensor
    topk_token: Tensor
    topk_logprob: Tensor


class Seeds(NamedTuple):
    """i32[S]: starts and first (given), rows, positions and contexts (written)."""

    starts: Tensor
    first: Tensor
    rows: Tensor
    positions: Tensor
    contexts: Tensor


class NextStep(NamedTuple):
    """What S sequences feed in a step: q = 1 + K tokens each, the newest and its drafts.

    Attributes:
        tokens, position: i32[S * q], sequence by sequence.
        contexts, first, count: i32[S]: behind the last token, the first one's position, and the
            drafts; 0, 0 and 0 for a sequence that is not there.
        draws: i64[S], the output position of the token that is chosen first.
        draft: i32[S, max(K, 1)].
    """

    tokens: Tensor
    position: Tensor
    contexts: Tensor
    first: Tensor
    count: Tensor
    draws: Tensor
    draft: Tensor
