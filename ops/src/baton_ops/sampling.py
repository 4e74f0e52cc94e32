"""CUDA ops of a sampler that stays on the device: from logits to what verification draws from.

Processing (bias, penalties, masks), the most likely token, truncated probabilities, uniforms, and
what a step leaves for the next one. A row's results depend on that row alone, nothing allocates or
waits, and rows behind the last sequence's are left alone. Owns the Python form of these ops. Knows
no request and no engine.

S sequences own R rows of logits over V tokens: sequence s the rows `cu_rows[s] : cu_rows[s + 1]`.
All tensors are contiguous and on one device; every op raises TypeError or ValueError with the name
of the argument whose dtype, shape or device is wrong.
"""

from __future__ import annotations

from typing import NamedTuple

from baton_ops._library import Tensor, library
from baton_ops.cuda import Accepted


class Penalised(NamedTuple):
    """What penalties count.

    Attributes:
        slot: i32[S], the sequence's place in `counts` and `seen`; -1 for no penalties.
        counts: i32[slots, V], how often a token was emitted; 0 where it was not seen.
        seen: u8[slots, V], not 0 where a token is in the prompt or the output.
        draft: i32[S, K], K <= 64: a sequence's row j assumes the first j; an id outside 0..V-1 is
            none.
    """

    slot: Tensor
    counts: Tensor
    seen: Tensor
    draft: Tensor


class Rules(NamedTuple):
    """What changes logits.

    Attributes:
        repetition, frequency, presence: f32[S], the penalties; 1, 0 and 0 change nothing.
        bias_starts: i32[S + 1]; sequence s has biases `bias_starts[s] : bias_starts[s + 1]`.
        bias_ids: i32, distinct within a sequence.
        bias: f32, added to those tokens' logits.
        mask_starts: i32[R + 1]; row r has masks `mask_starts[r] : mask_starts[r + 1]`.
        masked: i32, tokens that the row may not choose.
    """

    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    bias_starts: Tensor
    bias_ids: Tensor
    bias: Tensor
    mask_starts: Tensor
    masked: Tensor


class RowParams(NamedTuple):
    """How each sequence is sampled.

    Attributes:
        temperature: f32[S]; 0 for the most likely token.
        top_p: f64[S]; 1 for all.
        min_p: f32[S]; 0 for all.
        top_k: i32[S]; 0 for all.
        cu_rows: i32[S + 1].
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    cu_rows: Tensor


class Seeds(NamedTuple):
    """Where drafting begins: starts and first i32[S], given; rows, positions and, where they are
    wanted, contexts i32[S], written.
    """

    starts: Tensor
    first: Tensor
    rows: Tensor
    positions: Tensor
    contexts: Tensor | None = None


def process_into(
    logits: Tensor,
    cu_rows: Tensor,
    state: Penalised,
    rules: Rules,
    processed: Tensor,
    broken: Tensor,
) -> None:
    """Write logits after bias, penalties and masks, rounded as on the CPU.

    Row j of a sequence is processed as if its first j drafts had been emitted. Rows behind the last
    sequence's are left alone.

    Args:
        logits: f32[R, V].
        cu_rows: i32[S + 1].
        state: what penalties count.
        rules: what changes logits.
        processed: f32[R, V]; may be the logits.
        broken: u8[R]; 1 is set where any logit is NaN or infinitely large, which a mask may hide
            from whoever looks at what is processed.
    """
    library().cuda_process(logits, cu_rows, *state, *rules, processed, broken)


def argmax_into(logits: Tensor, token: Tensor, broken: Tensor) -> None:
    """Write the lowest id of each row's largest logit.

    Args:
        logits: f32[R, V].
        token: i32[R].
        broken: u8[R]; 1 is set where the largest logit is infinite or any is NaN.
    """
    library().cuda_argmax(logits, token, broken)


def probabilities_into(logits: Tensor, params: RowParams, probs: Tensor, broken: Tensor) -> None:
    """Write what is sampled from, not normalised: temperature, min_p, top_k, top_p, in that order.

    The likeliest token weighs 1. A token is dropped below `min_p`, behind the `top_k` largest, and
    where the mass ahead of it exceeds `top_p` of what top_k left; ties go to the lower id. A broken
    row, like one of temperature 0, gets 1 for one token.

    Args:
        logits: f32[R, V].
        params: by sequence.
        probs: f32[R, V]; may be the logits.
        broken: u8[R]; 1 is set where the largest logit is infinite or any is NaN.
    """
    library().cuda_probabilities(logits, *params, probs, broken)


def uniforms_into(seeds: Tensor, positions: Tensor, cu_rows: Tensor, out: Tensor) -> None:
    """Write the uniform in [0, 1) of each row: SplitMix64 of its sequence's seed at its position.

    Args:
        seeds: i64[S], read as unsigned.
        positions: i64[S], of each sequence's first row; the others follow.
        cu_rows: i32[S + 1].
        out: f64[R].
    """
    library().cuda_uniforms(seeds, positions, cu_rows, out)


def count_tokens_into(accepted: Accepted, slot: Tensor, counts: Tensor, seen: Tensor) -> None:
    """Count each sequence's first n_accepted + 1 tokens, those >= 0, as emitted and seen.

    Args:
        accepted: what verification wrote.
        slot: i32[S], distinct; -1 for a sequence that nothing counts.
        counts: i32[slots, V].
        seen: u8[slots, V].
    """
    library().cuda_count_tokens(*accepted, slot, counts, seen)


def scatter_tokens_into(accepted: Accepted, count: Tensor, starts: Tensor, tokens: Tensor) -> None:
    """Write each sequence's tokens behind each other, and 0 for the drafts that were rejected.

    `tokens[starts[s] + j]` becomes `token[s, j]` for j <= n_accepted[s], and 0 for j up to
    `count[s]` behind them.

    Args:
        accepted: what verification wrote.
        count: i32[S], how many drafts it was given.
        starts: i32[S]; -1 writes nothing.
        tokens: i32[N].
    """
    library().cuda_scatter_tokens(*accepted, count, starts, tokens)


def seed_drafts_into(accepted: Accepted, seeds: Seeds, ahead: int = 0) -> None:
    """Write rows[s] = starts[s] + n_accepted[s], positions[s] = first[s] + n_accepted[s] + ahead
    and contexts[s] = positions[s] + 1.

    They are -1, -1 and 0 where `starts[s]` is -1.
    """
    library().cuda_seed_drafts(accepted.n_accepted, *seeds, ahead)


class NextStep(NamedTuple):
    """What S sequences feed: 1 + K tokens each, the newest and its drafts.

    Attributes:
        tokens, position: i32[S * (1 + K)].
        contexts, first, draft_count: i32[S].
        draws: i64[S].
        draft: i32[S, max(K, 1)], -1 behind the drafts.
    """

    tokens: Tensor
    position: Tensor
    contexts: Tensor
    first: Tensor
    draft_count: Tensor
    draws: Tensor
    draft: Tensor


def advance_into(
    accepted: Accepted, starts: Tensor, drafts: Tensor, fed: NextStep, out: NextStep
) -> None:
    """Write what the step behind this one feeds, each sequence n_accepted + 1 positions further.

    Args:
        accepted: what verification wrote.
        starts: i32[S]; -1: the sequence is not there, and feeds zeros.
        drafts: i32[K, *], one draft of all sequences after the other, in the first S columns; -1
            from where a sequence has none on.
        fed: `first` and `draws` of this step; may be `out`.
        out: the next step's.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong; the message names it.
    """
    library().cuda_advance(*accepted, starts, drafts, fed.first, fed.draws, *out)


class Histories(NamedTuple):
    """The tokens of sequences, and where S of them stand in a step.

    Attributes:
        starts: i32[S]; -1: the sequence is not there.
        first: i32[S], the position of the newest token that the step was fed, which is there.
        slot: i32[S], distinct; -1 for a sequence that has no history.
        tokens: i32[slots, L], by position.
    """

    starts: Tensor
    first: Tensor
    slot: Tensor
    tokens: Tensor


class Ngrams(NamedTuple):
    """Lengths of the n-grams looked up, both included; 16 at most."""

    shortest: int
    longest: int


def look_up_into(
    accepted: Accepted, histories: Histories, drafts: Tensor, n_before: int, ngrams: Ngrams
) -> None:
    """Add a step's tokens to the histories, and write what followed the last time they occurred.

    Of the longest n-gram at the end of a sequence and of its drafts that stands in the sequence
    with a token behind it, the latest place counts; what stood there is copied on into its own
    copy. -1 where there is none, and where a history has no room for the newest token.

    Args:
        accepted: what verification wrote.
        histories: of the same sequences.
        drafts: i32[K, *], in the first S columns; those from `n_before` on are written.
        n_before: drafts that others have made; none is -1.
        ngrams: lengths.

    Raises:
        TypeError, ValueError: a dtype, shape, length or device is wrong; the message names it.
    """
    library().cuda_look_up(*accepted, *histories, drafts, n_before, *ngrams)
