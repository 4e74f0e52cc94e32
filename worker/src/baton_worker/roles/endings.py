"""How requests end at this worker: each once, told and counted.

Owns their last rows: those that a step brings, and those that this worker makes itself for a
request that its engine does not hold. Whoever has left keeps no place at decode and no KV on its
way. Runs on the engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from baton_worker.engine.api import FailedRequest
from baton_worker.identity import RequestKey, incarnation_of
from baton_worker.link.api import RowsRefused
from baton_worker.records.columns import ErrorCode, Finish, StepColumns
from baton_worker.roles.metrics import Outcome
from baton_worker.roles.open_requests import OpenRequests
from baton_worker.roles.parts import LoopParts
from baton_worker.roles.placeless import Placeless
from baton_worker.roles.rows import by_incarnation, ends, error_columns

log = logging.getLogger(__name__)

_OUTCOMES = {
    Finish.STOP: Outcome.FINISHED,
    Finish.LENGTH: Outcome.FINISHED,
    Finish.ABORT: Outcome.ABORTED,
}
"""How a request left whose last row a step brought; with any other finish it failed."""


@dataclass(slots=True)
class Endings:
    """See the module.

    Attributes:
        live: requests that this worker owes an ending.
        placeless: prompts among them that are held back.
    """

    parts: LoopParts
    live: OpenRequests
    placeless: Placeless
    clock: Callable[[], float]
    _step_id: int = field(default=0, init=False)

    def publish(self, columns: StepColumns) -> None:
        """Give a step's rows to the gateways that own them; who ends in it leaves."""
        self._step_id += 1
        for incarnation, rows in by_incarnation(columns).items():
            self.parts.link.publish(incarnation, rows, self._step_id)
        self.parts.metrics.emitted(columns, self.clock())
        for key, finish in ends(columns):
            self.leave(key, _OUTCOMES.get(finish, Outcome.FAILED))

    def end(self, key: RequestKey, code: ErrorCode, message: str, *, is_over: bool = False) -> None:
        """End a request that is not in the engine with an error row of its own; `is_over`: of which
        decode has heard that nobody waits for it, so that it is no failure.
        """
        log.info("request ended", extra={"key": key, "code": code.name, "why": message})
        if not is_over:
            self.parts.metrics.refused(code)
        row = error_columns(key, code, message)
        self.parts.link.publish(incarnation_of(key.handle), row, self._step_id)
        is_full = code in (ErrorCode.DECODE_FULL, ErrorCode.QUEUE_FULL)
        told = ErrorCode.DECODE_FULL if is_full else ErrorCode.HANDOFF_REFUSED
        self.leave(key, Outcome.ABORTED if is_over else Outcome.FAILED, told)

    def fail(self, key: RequestKey, code: ErrorCode, message: str) -> None:
        """End a request that may be in the engine; its row comes with the next step."""
        if self.live.is_ending(key):
            return
        self.parts.transport.cancel(key)
        if self.parts.ledger.give_up(key, self.clock()):
            self.parts.transport.refuse(key, code, message)
        if self.parts.engine.fail(key, code, message):
            self.live.end(key)
            self.parts.metrics.refused(code)
        elif self.live.holds(key):
            self.end(key, code, message)

    def note_failure(self, failure: FailedRequest) -> None:
        """Count and log a request that the engine ended; its row is among the step's."""
        key, code, message = failure
        log.error("request failed", extra={"key": key, "code": code.name, "why": message})
        self.parts.metrics.refused(code)
        if self.parts.ledger.give_up(key, self.clock()):
            self.parts.transport.refuse(key, code, message)

    def rows_refused(self, event: RowsRefused) -> None:
        """End the requests whose rows are lost, those too that this worker was done with."""
        message = f"the gateway refused rows: {event.reason}"
        for key in event.keys:
            if self.live.holds(key):
                self.fail(key, ErrorCode.INTERNAL, message)
            elif key in event.ended:
                self.end(key, ErrorCode.INTERNAL, message)

    def leave(
        self, key: RequestKey, outcome: Outcome, code: ErrorCode = ErrorCode.HANDOFF_REFUSED
    ) -> None:
        """Note that nothing more is to be said of a request: its end was told, or decode has it.
        `code`: as what its handoff is refused if it comes nevertheless, unless it was aborted.
        """
        self.parts.metrics.gone(key)
        self.placeless.leave(key, None if outcome is Outcome.ABORTED else code)
        if self.live.leave(key):
            self.parts.metrics.left(outcome)
            self.parts.traces.left(key, outcome)
