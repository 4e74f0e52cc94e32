"""The one error of the record layer, and the closed set of reasons it can have."""

from __future__ import annotations

import enum


class RefusalReason(enum.StrEnum):
    """Why a frame or a set of columns was refused; the value is a metric label."""

    FRAME_SIZE = "frame_size"
    MAGIC = "magic"
    MAJOR = "major"
    TYPE = "type"
    FLAGS = "flags"
    TOTAL_LEN = "total_len"
    HEADER_LEN = "header_len"
    HEADER_CRC = "header_crc"
    ROLE = "role"
    ROWS_CAP = "rows_cap"
    TOKENS_CAP = "tokens_cap"
    LOGPROBS_CAP = "logprobs_cap"
    TOPK_CAP = "topk_cap"
    DRAFTS_CAP = "drafts_cap"
    SECTION_SUM = "section_sum"
    EXTENSION_OFFSET = "extension_offset"
    BODY_CRC = "body_crc"
    ROW_TOKENS = "row_tokens"
    ROW_WIDTH = "row_width"
    ROW_SUMS = "row_sums"
    ROW_FLAGS = "row_flags"
    FINISH = "finish"
    DRAFT_FLAG = "draft_flag"
    TOKEN_RANGE = "token_range"  # noqa: S105 - a token id, not a secret
    LOGPROB_RANGE = "logprob_range"
    RANK_RANGE = "rank_range"
    EXTENSION_COUNT = "extension_count"
    EXTENSION_LENGTH = "extension_length"
    EXTENSION_CRITICAL = "extension_critical"
    EXTENSION_DUPLICATE = "extension_duplicate"
    VERIFICATION = "verification"
    ERROR_DETAIL = "error_detail"
    SCORED_TOKENS = "scored_tokens"
    REUSED_TOKENS = "reused_tokens"
    CONTROL_BODY = "control_body"
    CONTROL_TEXT = "control_text"
    COLUMN_SHAPE = "column_shape"
    FIELD_RANGE = "field_range"


class RecordError(ValueError):
    """A frame, or columns about to become one, break the layout. Never worth a retry.

    Attributes:
        reason: which rule, as a metric label.
        detail: the field and its value, for the log line.
    """

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail
