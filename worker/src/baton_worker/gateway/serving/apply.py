"""Applies what the link brings: workers come and go, rows become deltas, credit is returned.

Runs on the event loop; the link's thread only hands batches over. Each row can harm its own request
alone. Records are acknowledged after they are applied, never before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from baton_worker.gateway.errors import (
    CLIENT_GONE,
    WORKER_LOST,
    ApiError,
    internal,
    unavailable,
    worker_error,
)
from baton_worker.gateway.output.merge import Fault, Merged
from baton_worker.gateway.output.sequence import LogprobsMissingError
from baton_worker.gateway.serving.failures import Cause, Loss, loss_of
from baton_worker.gateway.serving.live_requests import LiveRequest
from baton_worker.gateway.serving.parts import ServingParts
from baton_worker.gateway.serving.retry import Retrier
from baton_worker.identity import RequestKey, Role
from baton_worker.link.api import (
    GatewayLinkEvent,
    StepReceived,
    StepsLost,
    WorkerDown,
    WorkerUp,
)
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.records.rows import Row, rows
from baton_worker.records.scored import ScoredRow
from baton_worker.supervision import going_on, report

log = logging.getLogger(__name__)

_IN_ORDER = (Finish.STOP, Finish.LENGTH)
_AT_ONCE = (Finish.ERROR, Finish.ABORT)


class _Now(NamedTuple):
    """When a batch is applied: `time` of the clock, `listened` of that by which others are late."""

    time: float
    listened: float


class Applier:
    """Turns link events into what clients and accounts see."""

    def __init__(self, parts: ServingParts, retrier: Retrier) -> None:
        self._link, self._workers, self._requests, self._metrics, *clocks = parts
        self._clock, self._listened = clocks
        self._retrier = retrier
        self._gaps: dict[float, int] = {}
        self._told_of_no_help = False

    def apply(self, events: Sequence[GatewayLinkEvent]) -> None:
        """Apply one batch of events in order."""
        applied: dict[tuple[str, int], int] = {}
        for event in events:
            with going_on("link_event", partial(self._set_aside, event)):
                self._event(event)
            if isinstance(event, StepReceived):
                applied[event.worker_id, event.meta.epoch] = event.meta.seq
        for (worker_id, epoch), seq in applied.items():
            with going_on("acknowledge"):
                self._link.applied(worker_id, epoch, seq)

    def _set_aside(self, event: GatewayLinkEvent) -> None:
        """An event could not be applied: what depends on its worker goes on at others, and one
        whose coming or going is not in the books is given nothing more until it comes again.
        """
        worker_id = event.worker_id
        with going_on("link_event"):
            lost = "sent what this gateway failed to apply"
            self._fail_all(worker_id, lost, Loss.RECORDS_LOST)
        if isinstance(event, WorkerUp | WorkerDown):
            with going_on("link_event"):
                self._workers.down(worker_id)
                self._count_workers()

    def _event(self, event: GatewayLinkEvent) -> None:
        if isinstance(event, StepReceived):
            self._step(event)
        elif isinstance(event, WorkerUp):
            self._up(event)
        elif isinstance(event, WorkerDown):
            self._down(event)
        else:
            self._lost(event)

    def expire_gaps(self, listened: float) -> None:
        """End the requests whose rows have waited too long for a gap to close.

        Args:
            listened: a reading of the clock that gaps are timed by, `ServingParts.listened`.
        """
        for live in self._requests.with_expired_gap(listened):
            with going_on("gaps", partial(self._break_off, live)):
                self._fault(live, Fault.GAP_TIMEOUT)

    def _break_off(self, live: LiveRequest) -> None:
        """End a request that this gateway has a defect with: it harms no other."""
        with going_on("break_off"):
            error = internal("the gateway failed to apply what a worker said of the request")
            self._requests.fail(live.generation, error)

    def _up(self, event: WorkerUp) -> None:
        known = self._workers.epoch(event.worker_id)
        if known is not None and known != event.epoch:
            self._fail_all(event.worker_id, "was replaced by a new process", Loss.DIED)
        if not self._workers.up(event.worker_id, event.epoch, event.info):
            reasons = "; ".join(self._workers.turned_away())
            log.warning("a worker is turned away", extra={"reasons": reasons})
        if self._workers.lacks_help() and not self._told_of_no_help:
            self._told_of_no_help = True
            log.warning(
                "gateway.decode_prompts is set, but no linked decode worker computes prompts: set "
                "their engine.decode_prompt_chunk_tokens (local: --decode-prompt-chunk)"
            )
        self._requests.aborts.linked(event.worker_id)
        self._count_workers()

    def _down(self, event: WorkerDown) -> None:
        """A WorkerDown of an epoch that was replaced already changes nothing."""
        if self._workers.epoch(event.worker_id) == event.epoch:
            self._fail_all(event.worker_id, f"is gone: {event.reason}", loss_of(event.reason))
            self._workers.down(event.worker_id)
            self._metrics.forget_worker(event.worker_id)
            self._requests.aborts.lost(event.worker_id)
            self._count_workers()
        self._workers.forget(event.worker_id, event.epoch)

    def _lost(self, event: StepsLost) -> None:
        if self._workers.epoch(event.worker_id) == event.epoch:
            lost = f"lost records {event.first_seq} to {event.last_seq}"
            self._fail_all(event.worker_id, lost, Loss.RECORDS_LOST)

    def _fail_all(self, worker_id: str, what: str, loss: Loss) -> None:
        affected = self._requests.depending_on(worker_id)
        facts = {"worker": worker_id, "what": what, "requests": len(affected)}
        level = logging.WARNING if affected else logging.INFO
        log.log(level, "a worker was lost", extra=facts)
        for live in affected:
            with going_on("worker_lost", partial(self._break_off, live)):
                self._lose(live, worker_id, what, loss)

    def _lose(self, live: LiveRequest, worker_id: str, what: str, loss: Loss) -> None:
        if live.key.handle in live.generation.live:
            error = unavailable(f"worker {worker_id} {what}", WORKER_LOST)
            was_there = loss is not Loss.DIED or live.may_be_at(worker_id)
            cause = loss if was_there else Loss.LEFT
            self._recover(live, cause, worker_id, error)

    def _recover(
        self,
        live: LiveRequest,
        cause: Cause,
        worker_id: str,
        error: ApiError,
        *,
        has_reported: bool = False,
    ) -> None:
        """Try a request elsewhere, or end it; `has_reported`: the worker ended it by itself."""
        ended = self._retrier.recover(live, cause, worker_id, error)
        if ended is None:
            return
        reported = (live.key, worker_id) if has_reported else None
        self._requests.fail(live.generation, ended, reported=reported)

    def _count_workers(self) -> None:
        for role in Role:
            self._metrics.workers(role.label, self._workers.count(role))
        self._metrics.usable.set(self._workers.limits is not None)

    def _step(self, event: StepReceived) -> None:
        now, worker_id = _Now(self._clock(), self._listened()), event.worker_id
        from_decode = event.meta.role == Role.DECODE
        try:
            self._rows(event, worker_id, now, from_decode=from_decode)
        finally:
            self._tell_gaps()

    def _rows(self, event: StepReceived, worker_id: str, now: _Now, *, from_decode: bool) -> None:
        for row in rows(event.columns):
            live = self._requests.get(row.handle)
            if live is None or worker_id not in live.holders:
                self._metrics.dropped("foreign_worker" if live else "unknown_request")
                with going_on("orphan"):
                    self._stop_orphan(row, worker_id)
                continue
            try:  # `going_on` says the same, and takes as long as a tenth of what is within
                is_good = self._row(live, row, worker_id, now)
                is_new = row.attempt == live.key.attempt
                if live.computing and live.merge.next_position > live.began_at:
                    self._requests.prompt_computed(live)
                if from_decode and is_new and len(live.sources) > 1:
                    self._decode_may_speak(live, row, worker_id)
                if is_good and is_new:
                    self._went_well(live, worker_id)
            except Exception as error:  # noqa: BLE001 - reported
                report("row", error)
                self._not_applied(live, worker_id)

    def _not_applied(self, live: LiveRequest, worker_id: str) -> None:
        with going_on("row", partial(self._break_off, live)):
            error = internal("the gateway failed to apply a row")
            self._recover(live, Loss.NOT_APPLIED, worker_id, error)

    def _went_well(self, live: LiveRequest, worker_id: str) -> None:
        """Count a good row, which matters of a worker that has failed."""
        live.n_rows[worker_id] += 1
        if self._workers.is_doubted(worker_id):
            is_over = self._requests.get(live.key.handle) is None
            self._retrier.worked(live, worker_id, is_whole=is_over)

    def _stop_orphan(self, row: Row, worker_id: str) -> None:
        """End a request that only the worker still knows."""
        if row.finish is Finish.NONE:
            self._requests.aborts.send_for_row(worker_id, RequestKey(row.handle, row.attempt))

    def _decode_may_speak(self, live: LiveRequest, row: Row, decode_id: str) -> None:
        """Once decode holds the whole state prefill is done, and its loss would do no harm."""
        if live.merge.next_position > row.position:
            for source in live.sources:
                if source != decode_id:
                    self._requests.release_source(live, source)
                    self._retrier.worked(live, source, is_whole=True)

    def _row(self, live: LiveRequest, row: Row, worker_id: str, now: _Now) -> bool:
        """Merge a row and deliver what it adds; whether its worker did what it should."""
        if row.n_reused and row.attempt == live.key.attempt:
            live.n_reused = row.n_reused
        merged = live.merge.offer(row, now.listened)
        parts, finish, fault, duplicates, held, is_stale, prompt = merged
        if parts and not (finish or fault or held or duplicates or prompt):  # nearly every row
            return self._deliver(live, merged, worker_id, now.time)
        if held:
            self._requests.note_held(live, held)
        if is_stale:
            self._metrics.dropped("stale_attempt")
        elif duplicates:
            self._metrics.dropped("echo" if row.is_echo else "duplicate", duplicates)
        if prompt and not self._deliver_prompt(live, prompt, worker_id):
            return False
        if (parts or finish in _IN_ORDER) and not self._deliver(live, merged, worker_id, now.time):
            return False
        if finish in _AT_ONCE:
            self._worker_gave_up(live, row, worker_id)
        elif fault is not None:
            self._fault(live, fault)
        return finish not in _AT_ONCE and fault is None

    def _deliver(self, live: LiveRequest, merged: Merged, worker_id: str, now: float) -> bool:
        """Queue what a row adds; False if it lacks what was asked for."""
        generation = live.generation
        try:
            delta = live.output.push(merged.parts, merged.finish)
        except LogprobsMissingError as error:
            self._logprobs_missing(live, error, worker_id)
            return False
        self._observe(live, len(delta.token_ids), now)
        if not generation.queue.put(delta):
            self._metrics.client_aborted("slow_client")
            slow = ApiError(CLIENT_GONE, "the client reads too slowly", code="slow_client")
            self._requests.fail(generation, slow, discard=True)
        elif delta.finish_reason is not None:
            self._requests.finish(live, worker_id if merged.finish else None)
        return True

    def _deliver_prompt(
        self, live: LiveRequest, told: tuple[ScoredRow, ...], worker_id: str
    ) -> bool:
        """Queue the prompt's logprobs before all output; False if they cannot be right."""
        generation = live.generation
        prompt = generation.request.prompt_of(live.output.index)
        try:
            delta = live.output.tell_prompt(
                told, prompt, generation.request.params.logprobs.prompt_k
            )
        except LogprobsMissingError as error:
            self._logprobs_missing(live, error, worker_id)
            return False
        generation.queue.put(delta)
        return True

    def _logprobs_missing(
        self, live: LiveRequest, error: LogprobsMissingError, worker_id: str
    ) -> None:
        facts = {"key": live.key, "request": live.generation.request_id, "worker": worker_id}
        log.error("a row lacks logprobs", extra={**facts, "detail": str(error)})
        missing = ApiError(500, str(error), code="logprobs_missing")
        cause = Loss.LOGPROBS_MISSING
        self._recover(live, cause, worker_id, missing)

    def _observe(self, live: LiveRequest, n_tokens: int, now: float) -> None:
        generation = live.generation
        if generation.first_token is None and n_tokens:
            generation.first_token = now
            self._metrics.ttft.observe(now - generation.arrived)
        if live.last_row and n_tokens:
            gap = (now - live.last_row) / n_tokens
            self._gaps[gap] = self._gaps.get(gap, 0) + n_tokens
        live.last_row = now

    def _tell_gaps(self) -> None:
        """Count the gaps of a step: those who were in the step before have the same ones."""
        gaps, self._gaps = self._gaps, {}
        for gap, n_tokens in gaps.items():
            self._metrics.inter_token.observe_many(gap, n_tokens)

    def _worker_gave_up(self, live: LiveRequest, row: Row, worker_id: str) -> None:
        """Prefill may give up a handoff whose acknowledgement was lost: decode goes on."""
        if worker_id not in live.sources:
            self._metrics.dropped("released_worker")
            return
        cause: Cause = Loss.ABORTED
        if row.finish is Finish.ABORT:
            error = unavailable(f"worker {worker_id} aborted the request", "worker_aborted")
        else:
            detail = row.error
            cause = detail.code if detail else ErrorCode.INTERNAL
            error = worker_error(worker_id, cause, detail.message if detail else "")
        facts = {"key": live.key, "request": live.generation.request_id, "detail": error.message}
        log.warning("a worker ended a request with an error", extra=facts)
        self._recover(live, cause, worker_id, error, has_reported=True)

    def _fault(self, live: LiveRequest, fault: Fault) -> None:
        counter = (
            self._metrics.gap_timeouts
            if fault is Fault.GAP_TIMEOUT
            else self._metrics.overlap_mismatches
        )
        counter.inc()
        position = live.merge.next_position
        facts = {"key": live.key, "request": live.generation.request_id, "position": position}
        log.error("rows of a request do not join", extra={**facts, "fault": fault.value})
        error = ApiError(500, f"{fault.value} at output position {position}", code=fault.value)
        cause = Loss.GAP if fault is Fault.GAP_TIMEOUT else Loss.CONTRADICTION
        self._recover(live, cause, live.holders[-1], error)
