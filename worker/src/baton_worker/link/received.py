"""A well-formed record, held against what its sender said of itself. Pure."""

from __future__ import annotations

import numpy as np

from baton_worker.identity import COUNTER_BITS
from baton_worker.link.api import StepMeta
from baton_worker.messages import WorkerInfo
from baton_worker.records.columns import StepColumns
from baton_worker.records.header import StepHeader


def contradiction(header: StepHeader, info: WorkerInfo) -> str:
    """Return what of a record cannot come from the worker that said HELLO, or ""."""
    if header.role != info.role:
        return "role"
    return "semantic_hash" if header.semantic_hash != info.semantic_hash else ""


def n_rows_of(incarnation: int, columns: StepColumns) -> int:
    """Return how many rows belong to requests of this gateway process."""
    ours = columns.handle >> np.uint64(COUNTER_BITS) == incarnation
    return int(np.count_nonzero(ours))


def meta_of(header: StepHeader) -> StepMeta:
    """Return what readers of a record care about."""
    return StepMeta(
        epoch=header.epoch,
        seq=header.seq,
        step_id=header.step_id,
        role=int(header.role),
        sent_unix_ns=header.sent_unix_ns,
        is_replay=header.is_replayed,
        frame_bytes=header.frame_bytes,
    )
