"""The sequences of a step that goes ahead of its inputs' tokens, in their places.

Owns what stays the same for as long as the same requests are stepped ahead, so that it is worked
out and written once: all that a host tells of such a step, but for the tables, which grow. Knows no
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.device.inputs import fill_ahead
from baton_worker.engine.backends.device.program import N_LANES, Program
from baton_worker.engine.backends.device.rules import StepRules
from baton_worker.engine.scheduling.batch import FedSequence
from baton_worker.engine.scheduling.requests import RequestState


@dataclass(frozen=True, slots=True, eq=False)
class Lineup:
    """Requests that decode, each in a place of its own.

    Attributes:
        decode: as the plan has them.
        order: whose each of the step's places is; None: nobody's.
        sampled: the sequences by place; their drafts say how many, not which.
        at: i64[*], the place of each among the step's B sequences, ascending.
        q_len: tokens that each feeds.
        rules: of the same sequences. They do not change either: a request that may be stepped ahead
            has none that depend on its tokens.
    """

    decode: tuple[RequestState, ...]
    order: tuple[RequestState | None, ...]
    sampled: tuple[FedSequence, ...]
    at: npt.NDArray[np.int64]
    q_len: int
    rules: StepRules


def places(
    decode: Sequence[RequestState], before: Sequence[RequestState | None]
) -> tuple[RequestState | None, ...]:
    """Return `before` with the places empty of those who do not go on."""
    live = set(decode)
    return tuple(request if request in live else None for request in before)


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    program: Program
    lineup: Lineup
    n_blocks: list[int]


class LaneInputs:
    """What each lane's memory holds of a step ahead, so that only what is new is written."""

    def __init__(self) -> None:
        """Nothing is known of any lane."""
        self._written: list[_Written | None] = [None] * N_LANES

    def forget(self) -> None:
        """A step is laid out anew, before which tables may have changed in any way."""
        self._written = [None] * N_LANES

    def fill(self, lane: int, program: Program, lineup: Lineup) -> None:
        """Write a lineup to a lane, where it may lie but for its newest blocks."""
        inputs, shape = program.inputs[lane], program.shape
        n_blocks = [sequence.request.n_blocks for sequence in lineup.sampled]
        written = self._written[lane]
        if written is None or written.program is not program or written.lineup is not lineup:
            fill_ahead(inputs, lineup.sampled, lineup.at, shape, lineup.rules)
        elif n_blocks != written.n_blocks:
            for index, (now, before) in enumerate(zip(n_blocks, written.n_blocks, strict=True)):
                if now != before:
                    table = lineup.sampled[index].request.table
                    inputs.tables[lineup.at[index]] = table[: shape.width]
        self._written[lane] = _Written(program, lineup, n_blocks)
