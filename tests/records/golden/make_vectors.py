"""Write vectors.txt: one frame of each kind, in hex. Run after adding a frame to `vectors`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from baton_worker.identity import Role
from baton_worker.records.columns import (
    FLAG_ECHO,
    FLAG_FIRST_TOKEN,
    FLAG_HAS_DRAFT,
    ErrorCode,
    Finish,
    RowError,
    StepColumns,
)
from baton_worker.records.control import encode_control
from baton_worker.records.control_types import (
    AbortNotice,
    Ack,
    Bye,
    CommandFrame,
    ErrorNotice,
    Hello,
    Resume,
    Welcome,
    Who,
)
from baton_worker.records.encode import encode_step
from baton_worker.records.header import StepHeader
from baton_worker.records.scored import ScoredRow, ScoredTokens

FILE = Path(__file__).with_name("vectors.txt")
WIDTH = 96
HANDLE = 0xABCDEF << 40
HEADER = StepHeader(
    epoch=0x1122334455667788,
    seq=42,
    step_id=1000,
    role=Role.DECODE,
    semantic_hash=0xA1B2C3D4E5F60718,
    sent_unix_ns=1_700_000_000_123_456_789,
)


def decode_step_columns() -> StepColumns:
    """Four decode rows: top-2, sampled only, no logprobs, and an error without tokens."""
    return StepColumns(
        handle=np.array([HANDLE + 1, HANDLE + 2, HANDLE + 3, HANDLE + 4], np.uint64),
        position=np.array([0, 7, 70_000, 3], np.uint32),
        n_tokens=np.array([2, 1, 3, 0], np.uint8),
        width=np.array([3, 1, 0, 0], np.uint8),
        flags=np.array([FLAG_ECHO, Finish.STOP, Finish.LENGTH, Finish.ERROR], np.uint8),
        attempt=np.array([0, 1, 0, 2], np.uint8),
        token=np.array([5, 6, 102_399, 1, 2, 3], np.int32),
        logprob=np.array([-0.5, -np.inf, 0.0], np.float32),
        rank=np.array([1, 512, 2], np.int32),
        topk_token=np.array([5, 9, 6, 8], np.int32),
        topk_logprob=np.array([-0.5, -1.25, -2.0, -3.4028234663852886e38], np.float32),
        n_proposed=np.array([1, 5, 2, 0], np.uint8),
        n_accepted=np.array([1, 0, 2, 0], np.uint8),
        errors=(RowError(3, ErrorCode.HANDOFF_TIMEOUT, "no KV after 10 s: ✗"),),
    )


def prefill_step_columns() -> StepColumns:
    """One prefill row: the first token, its logprob, and two drafts."""
    return StepColumns(
        handle=np.array([HANDLE + 9], np.uint64),
        position=np.array([0], np.uint32),
        n_tokens=np.array([1], np.uint8),
        width=np.array([1], np.uint8),
        flags=np.array([FLAG_FIRST_TOKEN | FLAG_HAS_DRAFT], np.uint8),
        attempt=np.array([0], np.uint8),
        token=np.array([17], np.int32),
        logprob=np.array([-0.125], np.float32),
        rank=np.array([1], np.int32),
        topk_token=np.empty(0, np.int32),
        topk_logprob=np.empty(0, np.float32),
        draft_count=np.array([2], np.uint8),
        draft=np.array([18, 19], np.int32),
    )


def beside_step_columns() -> StepColumns:
    """A decode row that shows two verified drafts, the first scored; then prompt tokens alone."""
    return StepColumns(
        handle=np.array([HANDLE + 1, HANDLE + 5], np.uint64),
        position=np.array([3, 0], np.uint32),
        n_tokens=np.array([2, 0], np.uint8),
        width=np.array([1, 0], np.uint8),
        flags=np.zeros(2, np.uint8),
        attempt=np.zeros(2, np.uint8),
        token=np.array([11, 12], np.int32),
        logprob=np.array([-0.5, -0.75], np.float32),
        rank=np.array([1, 2], np.int32),
        topk_token=np.empty(0, np.int32),
        topk_logprob=np.empty(0, np.float32),
        n_proposed=np.array([2, 0], np.uint8),
        n_accepted=np.array([1, 0], np.uint8),
        verified_drafts=ScoredTokens.of([ScoredRow(3, [11, 13], 1, [-0.25], [1], [], []), None]),
        prompt_tokens=ScoredTokens.of([None, ScoredRow(1, [21], 2, [-1.5], [4], [22], [-0.125])]),
    )


def reused_step_columns() -> StepColumns:
    """A prompt of which 32 tokens were at hand gives its first token; another had none."""
    return StepColumns(
        handle=np.array([HANDLE + 6, HANDLE + 7], np.uint64),
        position=np.zeros(2, np.uint32),
        n_tokens=np.ones(2, np.uint8),
        width=np.zeros(2, np.uint8),
        flags=np.full(2, FLAG_FIRST_TOKEN, np.uint8),
        attempt=np.zeros(2, np.uint8),
        token=np.array([31, 32], np.int32),
        logprob=np.empty(0, np.float32),
        rank=np.empty(0, np.int32),
        topk_token=np.empty(0, np.int32),
        topk_logprob=np.empty(0, np.float32),
        n_reused=np.array([32, 0], np.uint32),
    )


def vectors() -> dict[str, bytes]:
    """Return every golden frame by name."""
    prefill = dataclasses.replace(
        HEADER, role=Role.PREFILL, dp_rank=3, is_coalesced=True, is_replayed=True, steps_merged=2
    )
    nothing = dataclasses.replace(prefill_step_columns(), **_no_rows())
    epoch = HEADER.epoch
    return {
        "step_empty": encode_step(nothing, HEADER),
        "step_decode": encode_step(decode_step_columns(), HEADER),
        "step_prefill": encode_step(prefill_step_columns(), prefill),
        "step_beside": encode_step(beside_step_columns(), HEADER),
        "step_reused": encode_step(reused_step_columns(), HEADER),
        "hello": encode_control(Hello(epoch, 43, 40, 7, 0xABCDEF, b"\x81\xa1w\x01")),
        "welcome": encode_control(Welcome(epoch, 9, 7, 40, 296, 8 << 20, 0xABCDEF)),
        "ack": encode_control(Ack(epoch, 9, 41, 297, 8 << 20)),
        "resume": encode_control(Resume(epoch, 9, 40)),
        "who": encode_control(Who(epoch, 9)),
        "abort": encode_control(AbortNotice(epoch, 9, HANDLE + 1, 2)),
        "bye": encode_control(Bye(epoch, 43)),
        "error": encode_control(ErrorNotice(epoch, 9, 41, 41, "body_crc")),
        "command": encode_control(CommandFrame(0xABCDEF, 8, b"\x81\xa4type\xa5abort")),
    }


def _no_rows() -> dict[str, np.ndarray]:
    empty = prefill_step_columns()
    return {
        field.name: getattr(empty, field.name)[:0]
        for field in dataclasses.fields(StepColumns)
        if isinstance(getattr(empty, field.name), np.ndarray)
    }


def text(frames: dict[str, bytes]) -> str:
    """Return the file's content: a name, then its hex in indented lines."""
    lines = []
    for name, frame in frames.items():
        digits = frame.hex()
        lines.append(name)
        lines += [f"  {digits[at : at + WIDTH]}" for at in range(0, len(digits), WIDTH)]
    return "\n".join(lines) + "\n"


def read(path: Path = FILE) -> dict[str, bytes]:
    """Return the committed frames by name."""
    frames: dict[str, str] = {}
    name = ""
    for line in path.read_text().splitlines():
        if not line.startswith(" "):
            name = line
            frames[name] = ""
        else:
            frames[name] += line.strip()
    return {name: bytes.fromhex(digits) for name, digits in frames.items()}


if __name__ == "__main__":
    FILE.write_text(text(vectors()))
    print(f"wrote {FILE}")
