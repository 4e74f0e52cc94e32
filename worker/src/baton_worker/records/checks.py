"""What must hold between and inside the columns of one record, whoever made them.

Encoder and decoder share these, so a sender cannot write what a reader refuses. Works on numpy
columns; knows nothing of frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton_worker.records.columns import (
    COLUMNS,
    FINISH_MASK,
    FLAG_ECHO,
    FLAG_FIRST_TOKEN,
    FLAG_HAS_DRAFT,
    Finish,
    StepColumns,
)
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.layout import Limits
from baton_worker.records.scored import COLUMNS as SCORED_COLUMNS
from baton_worker.records.scored import NO_SCORED
from baton_worker.records.table import TOKEN_IDS, Counts, Range

_RANGES = [(column.name, column.values) for column in COLUMNS if column.values]
_SCORED_RANGES = [(column.name, column.values) for column in SCORED_COLUMNS if column.values]
_highest, _lowest = np.maximum.reduce, np.minimum.reduce
_ALL_BYTES = bytes(range(256))
_KNOWN_ROW_FLAGS = FINISH_MASK | FLAG_HAS_DRAFT | FLAG_FIRST_TOKEN | FLAG_ECHO
_GOOD_FLAGS = bytes(
    flags
    for flags in _ALL_BYTES
    if not flags & ~_KNOWN_ROW_FLAGS and flags & FINISH_MASK <= max(Finish)
)
_GOOD_FLAGS_WITHOUT_DRAFT = bytes(flags for flags in _GOOD_FLAGS if not flags & FLAG_HAS_DRAFT)


def row_counts(
    n_tokens: npt.NDArray[np.uint8], width: npt.NDArray[np.uint8], drafts: int
) -> Counts:
    """Return the section sizes that the rows call for.

    L sums n over rows with width > 0 and K sums n * (width - 1) over them, hence
    K = sum(n * width) - L.
    """
    n, widths = n_tokens.astype(np.int64), width.tobytes()
    tokens = int(np.add.reduce(n))
    if widths.count(widths[:1]) == len(widths):  # all rows ask for the same, as they mostly do
        asked = tokens * widths[0]
        logprobs = tokens if widths[0] else 0
    else:
        asked = int(n.dot(width.astype(np.int64)))
        logprobs = int(n.dot((width != 0).astype(np.int64)))
    return Counts(len(n), tokens, logprobs, asked - logprobs, drafts)


def check_caps(counts: Counts, limits: Limits) -> None:
    """Check section sizes against the reader's caps.

    Raises:
        RecordError: ROWS_CAP, TOKENS_CAP, LOGPROBS_CAP, TOPK_CAP or DRAFTS_CAP.
    """
    for reason, value, cap in (
        (RefusalReason.ROWS_CAP, counts.rows, limits.rows),
        (RefusalReason.TOKENS_CAP, counts.tokens, limits.tokens),
        (RefusalReason.LOGPROBS_CAP, counts.logprobs, counts.tokens),
        (RefusalReason.TOPK_CAP, counts.topk, limits.topk),
        (RefusalReason.DRAFTS_CAP, counts.drafts, limits.drafts),
    ):
        if value > cap:
            raise RecordError(reason, f"{value} exceeds {cap}")


def check_rows(
    n_tokens: npt.NDArray[np.uint8],
    width: npt.NDArray[np.uint8],
    draft_count: npt.NDArray[np.uint8],
    counts: Counts,
    limits: Limits,
) -> None:
    """Check each row's counts (u8[R]; `draft_count` may be empty) and that they sum to `counts`.

    Raises:
        RecordError: ROW_TOKENS, ROW_WIDTH or ROW_SUMS.
    """
    _check_max(RefusalReason.ROW_TOKENS, n_tokens, limits.tokens_per_row)
    _check_max(RefusalReason.ROW_WIDTH, width, limits.width)
    drafts = int(draft_count.sum(dtype=np.int64)) if len(draft_count) else 0
    summed = row_counts(n_tokens, width, drafts)
    if summed != counts:
        raise RecordError(RefusalReason.ROW_SUMS, f"rows call for {summed}, header says {counts}")


def check_values(columns: StepColumns, limits: Limits) -> None:
    """Check what the columns say, once their shapes are known to agree.

    Raises:
        RecordError: ROW_FLAGS, FINISH, DRAFT_FLAG, TOKEN_RANGE, LOGPROB_RANGE, RANK_RANGE or
            VERIFICATION.
    """
    _check_flags(columns)
    _check_ranges(_RANGES, columns, limits.vocab_size)
    for tokens in columns.beside():
        if tokens is not NO_SCORED:
            _check_ranges(_SCORED_RANGES, tokens, limits.vocab_size)
    if len(columns.n_proposed) and 1 in (columns.n_accepted > columns.n_proposed).tobytes():
        raise RecordError(RefusalReason.VERIFICATION, "a row accepts more drafts than it proposed")
    shown = columns.verified_drafts
    if shown.n_rows and (not len(columns.n_proposed) or (shown.count > columns.n_proposed).any()):
        raise RecordError(RefusalReason.VERIFICATION, "a row shows more drafts than it proposed")


def _check_ranges(
    ranges: Sequence[tuple[str, Range]], columns: object, vocab_size: int | None
) -> None:
    # Signalling NaNs in a hostile frame must not become a RuntimeWarning.
    with np.errstate(invalid="ignore"):
        for name, values in ranges:
            array = getattr(columns, name)
            if not len(array):
                continue
            if values is TOKEN_IDS:
                _check_token_ids(array, vocab_size)
                continue
            reason, least, most = values
            # The extremes propagate NaN, and NaN fails every comparison.
            if most is not None and not (highest := _highest(array)) <= most:
                raise RecordError(reason, f"{name} {highest} is not at most {most}")
            if least is not None and not (lowest := _lowest(array)) >= least:
                raise RecordError(reason, f"{name} {lowest} is not at least {least}")


def _check_max(reason: RefusalReason, column: npt.NDArray[np.uint8], cap: int) -> None:
    # Deleting the allowed values from a byte string is several times cheaper than a reduction.
    if column.tobytes().translate(None, _ALL_BYTES[: cap + 1]):
        raise RecordError(reason, f"{int(column.max())} exceeds {cap}")


def _check_flags(columns: StepColumns) -> None:
    flags, has_counts = columns.flags, len(columns.draft_count) > 0
    allowed = _GOOD_FLAGS if has_counts else _GOOD_FLAGS_WITHOUT_DRAFT
    if bad := flags.tobytes().translate(None, allowed):
        raise _flag_error(bad)
    if has_counts and (((flags & FLAG_HAS_DRAFT) != 0) != (columns.draft_count != 0)).any():
        raise RecordError(RefusalReason.DRAFT_FLAG, "draft flags and draft counts disagree")


def _flag_error(bad: bytes) -> RecordError:
    for flags in bad:
        if unknown := flags & ~_KNOWN_ROW_FLAGS:
            return RecordError(RefusalReason.ROW_FLAGS, f"0x{unknown:02x} not understood")
        if (finish := flags & FINISH_MASK) > max(Finish):
            return RecordError(RefusalReason.FINISH, f"{finish} is not a finish code")
    return RecordError(RefusalReason.DRAFT_FLAG, "a draft flag in a record without drafts")


def _check_token_ids(tokens: npt.NDArray[np.int32], vocab_size: int | None) -> None:
    bound = 1 << 31 if vocab_size is None else vocab_size
    # Read as unsigned, a negative id is huge: one pass checks both ends.
    highest = int(_highest(tokens.view(np.uint32)))
    if highest >= bound:
        raise RecordError(RefusalReason.TOKEN_RANGE, f"0x{highest:08x} is not in [0, {bound})")
