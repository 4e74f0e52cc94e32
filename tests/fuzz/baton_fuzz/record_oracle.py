"""What must hold for any bytes: only RecordError, quickly, without amplifying memory."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field

from baton_worker.records.columns import StepColumns
from baton_worker.records.control import Control, decode_control, encode_control
from baton_worker.records.decode import decode_step
from baton_worker.records.encode import encode_step
from baton_worker.records.errors import RecordError
from baton_worker.records.header import StepHeader
from baton_worker.records.layout import MAX_FRAME_BYTES, STEP_HEADER_BYTES, Limits
from baton_worker.records.rows import rows

MAX_SECONDS = 0.010
MOST_TIMINGS = 20
"""Thread time counts what a busy host takes from the processor too: only an input that is slow
each time is slow."""
MEMORY_FACTOR = 4
MEMORY_FLOOR_BYTES = 16 << 10
"""Room for what any call takes: frames, an error with its message, array objects."""
MEMORY_SAMPLE_EVERY = 64
LIMITS = Limits(vocab_size=512)


class BrokenPromiseError(AssertionError):
    """An input broke one of the promises; the message says which."""


@dataclass(slots=True)
class Tally:
    """What was seen so far."""

    inputs: int = 0
    accepted: int = 0
    memory_samples: int = 0
    slowest_seconds: float = 0.0
    worst_memory_ratio: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)


class Oracle:
    """Feeds inputs to both parsers and keeps the tally."""

    def __init__(self) -> None:
        self.tally = Tally()

    def check(self, data: bytes) -> None:
        """Run one input.

        Raises:
            BrokenPromiseError: slow, hungry, or an accepted frame that means nothing.
            Exception: whatever a parser raised besides RecordError.
        """
        self.tally.inputs += 1
        if self.tally.inputs % MEMORY_SAMPLE_EVERY == 0:
            self._check_memory(data)
        self._check_time(data)

    def _check_time(self, data: bytes) -> None:
        # The scheduler may take the CPU away, so that thread time alone tells; a repeat rules out
        # a collection of somebody else's garbage.
        seconds = self._timed(data)
        for _ in range(MOST_TIMINGS - 1):
            if seconds <= MAX_SECONDS:
                break
            seconds = self._timed(data)
        self.tally.slowest_seconds = max(self.tally.slowest_seconds, seconds)
        if seconds > MAX_SECONDS:
            raise BrokenPromiseError(f"{seconds * 1e3:.1f} ms for {len(data)} bytes")

    def _timed(self, data: bytes) -> float:
        started = time.thread_time()
        step, control = self._parse(data)
        seconds = time.thread_time() - started
        if step is not None:
            check_accepted_step(data, *step)
        if control is not None and decode_control(encode_control(control)) != control:
            raise BrokenPromiseError("an accepted control message does not survive a round trip")
        return seconds

    def _parse(self, data: bytes) -> tuple[tuple[StepHeader, StepColumns] | None, Control | None]:
        step: tuple[StepHeader, StepColumns] | None = None
        control: Control | None = None
        try:
            step = decode_step(data, LIMITS)
        except RecordError as error:
            self.tally.refused[error.reason.value] += 1
        try:
            control = decode_control(data)
        except RecordError as error:
            self.tally.refused[error.reason.value] += 1
        self.tally.accepted += step is not None or control is not None
        return step, control

    def _check_memory(self, data: bytes) -> None:
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            self._parse(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        self.tally.memory_samples += 1
        extra = peak - before - MEMORY_FLOOR_BYTES
        self.tally.worst_memory_ratio = max(
            self.tally.worst_memory_ratio, extra / max(1, len(data))
        )
        if extra > MEMORY_FACTOR * len(data):
            raise BrokenPromiseError(f"{peak - before} bytes allocated for {len(data)}")


def check_accepted_step(data: bytes, header: StepHeader, columns: StepColumns) -> None:
    """An accepted record has whole rows and, but for what a newer minor adds, encodes to itself."""
    if sum(len(row.tokens) for row in rows(columns)) != len(columns.token):
        raise BrokenPromiseError("rows do not cover the tokens")
    again = encode_step(columns, header, max_bytes=MAX_FRAME_BYTES, limits=LIMITS)
    counts_at = slice(64, 84)
    if again[counts_at] != data[counts_at]:
        raise BrokenPromiseError("counts do not survive a round trip")
    body_bytes = 4 * (len(columns.token) + len(columns.draft)) + 16 * columns.n_rows
    if len(again) < STEP_HEADER_BYTES + body_bytes:
        raise BrokenPromiseError("sections do not survive a round trip")
