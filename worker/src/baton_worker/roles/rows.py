"""Step columns on their way out: whose rows they are, which of them end a request, error rows.

Pure functions over StepColumns; the engine knows nothing of gateways and the link nothing of
requests, so the split between them is made here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton_worker.identity import COUNTER_BITS, RequestKey
from baton_worker.records.coalesce import select_rows
from baton_worker.records.columns import (
    FINISH_MASK,
    FLAG_ECHO,
    ErrorCode,
    Finish,
    RowError,
    StepColumns,
)


def error_columns(key: RequestKey, code: ErrorCode, message: str) -> StepColumns:
    """Return the single row that ends `key` with an explicit error."""
    return StepColumns(
        handle=np.array([key.handle], np.uint64),
        position=np.zeros(1, np.uint32),
        n_tokens=np.zeros(1, np.uint8),
        width=np.zeros(1, np.uint8),
        flags=np.array([int(Finish.ERROR)], np.uint8),
        attempt=np.array([key.attempt], np.uint8),
        errors=(RowError(0, code, message),),
    )


def ends(columns: StepColumns) -> list[tuple[RequestKey, Finish]]:
    """Return the requests whose rows carry a finish, and which."""
    finishes = columns.flags & FINISH_MASK
    where = finishes != 0
    told = [Finish(finish) for finish in finishes[where].tolist()]
    return list(zip(_keys(columns, where), told, strict=True))


def emitting_keys(columns: StepColumns) -> list[RequestKey]:
    """Return the requests whose rows carry tokens of this worker's own, no echoes."""
    return _keys(columns, (columns.n_tokens > 0) & ((columns.flags & FLAG_ECHO) == 0))


def _keys(columns: StepColumns, where: npt.NDArray[np.bool_]) -> list[RequestKey]:
    pairs = zip(columns.handle[where].tolist(), columns.attempt[where].tolist(), strict=True)
    return [RequestKey(handle, attempt) for handle, attempt in pairs]


def by_incarnation(columns: StepColumns) -> dict[int, StepColumns]:
    """Split rows by the gateway process that owns them; order within each is kept."""
    owners = columns.handle >> np.uint64(COUNTER_BITS)
    distinct = sorted(set(owners.tolist()))
    if len(distinct) <= 1:
        return {owner: columns for owner in distinct}
    return {owner: select_rows(columns, owners == owner) for owner in distinct}
