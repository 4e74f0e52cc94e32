"""Tries a request again on other workers when one of its own is lost or cannot serve it.

The next attempt is told what the client has been given and goes on behind it: the engine takes
those tokens as output that it already gave, as it does after a preemption, so penalties, lengths
and the noise of a seed are those of an undisturbed run. Nothing is given twice and nothing is lost,
since the merge goes on at the same position and rows of earlier attempts are stale. What one model
began no other goes on with. Where all workers that could do that are full, the next attempt waits
for the first of them that is not, before all that wait to begin (`waiting_retries`). Where none
can, the request ends with the error that it would have had; where two workers failed that the
request itself may have ended, with one that says so. What each failure means is `failures`'.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable
from functools import partial

from baton_worker.gateway.errors import (
    SUSPECT_REQUEST,
    WORKER_LOST,
    ApiError,
    internal,
    suspect,
)
from baton_worker.gateway.serving.balance import Needs, Pair
from baton_worker.gateway.serving.commands import Unsent, commands_of, send_all
from baton_worker.gateway.serving.failures import MAX_HARMS, TREATMENTS, Blame, Cause, Treatment
from baton_worker.gateway.serving.live_requests import LiveRequest
from baton_worker.gateway.serving.pairing import weights_of
from baton_worker.gateway.serving.parts import ServingParts
from baton_worker.gateway.serving.suspects import Suspects
from baton_worker.gateway.serving.waiting_retries import Tried, Waiting, WaitingRetries
from baton_worker.identity import Role
from baton_worker.sampling import RESUME
from baton_worker.supervision import going_on

log = logging.getLogger(__name__)


class Retrier:
    """Moves live requests to other workers, each at most `max_retries` times, and keeps account of
    how workers do.

    Attributes:
        suspects: requests under which workers failed.
    """

    def __init__(
        self,
        parts: ServingParts,
        *,
        max_retries: int,
        max_wait_seconds: float,
        reserve_seconds: float,
    ) -> None:
        self._link, self._workers, self._requests, self._metrics, _, self._listened = parts
        self._max_retries = max_retries
        self._max_wait_seconds = max_wait_seconds
        self._reserve_seconds = reserve_seconds
        self._waiting = WaitingRetries()
        self._lacking: set[Hashable] = set()  # what the last ones of this turn found no room for
        self.suspects = Suspects()

    def __len__(self) -> int:
        """Return how many choices wait for a worker."""
        return len(self._waiting)

    def serve(self) -> bool:
        """Begin the attempts that there is room for now; False: call again, some were not tried."""
        self._lacking.clear()
        is_done = self._waiting.serve(self._go_on_or_end)
        self._metrics.waiting_retries.set(len(self._waiting))
        return is_done

    def expire(self, listened: float) -> None:
        """End those that have waited for too long, and forget those that ended otherwise.

        Args:
            listened: a reading of the clock that waits are timed by, `ServingParts.listened`.
        """
        for one in self._waiting.take(lambda one: not _is_live(one.live) or listened >= one.until):
            with going_on("waiting_retries"):  # each has left already: one must not cost the others
                if _is_live(one.live):
                    self._end(one)
        self._metrics.waiting_retries.set(len(self._waiting))

    def recover(
        self, live: LiveRequest, cause: Cause, worker_id: str, error: ApiError
    ) -> ApiError | None:
        """Begin another attempt and return None, or return the error to end the request with.

        Args:
            live: a live request whose attempt cannot go on.
            cause: why.
            worker_id: the worker that reported it or was lost.
            error: what the client is told if this is the end.
        """
        treatment, generation = TREATMENTS[cause], live.generation
        blamed = _blamed(live, treatment.blame, worker_id)
        if treatment.ejects:
            self._count_failure(live, treatment, blamed, error.message)
        if treatment.harms:
            generation.harmed |= {" or ".join(blamed) or worker_id}
        if not treatment.retries:
            return error
        if treatment.harms and len(generation.harmed) + generation.verdicts >= MAX_HARMS:
            return self._give_up(live, error)
        return self._retry(live, blamed, error)

    def worked(self, live: LiveRequest, worker_id: str, *, is_whole: bool) -> None:
        """Note that the attempt that `live` stands at goes well at a worker; `is_whole`: the worker
        has done all of its part.
        """
        n_rows = math.inf if is_whole else live.n_rows[worker_id]
        if self._workers.worked(worker_id, live.begun, n_rows):
            self._note_restored(worker_id)

    def _note_restored(self, worker_id: str) -> None:
        log.info("a worker is given requests again", extra={"worker": worker_id})
        self._metrics.forget_worker(worker_id)

    def _count_failure(
        self, live: LiveRequest, treatment: Treatment, blamed: tuple[str, ...], why: str
    ) -> None:
        """One request counts once, however many choices it has: it may be what is at fault."""
        is_full, generation = treatment.is_full, live.generation
        newly = [worker_id for worker_id in blamed if worker_id not in generation.counted]
        generation.counted |= frozenset(newly)
        if treatment.harms:
            generation.excusable |= frozenset(newly)
        for worker_id in newly:
            n_rows = live.n_rows[worker_id]
            if self._workers.failed(worker_id, live.begun, why, is_full=is_full, n_rows=n_rows):
                role = self._workers.role(worker_id) or Role.MIXED
                facts = {"worker": worker_id, "worker_role": role.label, "last": why}
                log.warning("a worker is ejected: it fails request after request", extra=facts)
                self._metrics.ejected(worker_id, role.label)

    def _give_up(self, live: LiveRequest, error: ApiError) -> ApiError:
        generation = live.generation
        facts = {
            "request": generation.request_id,
            "key": live.key,
            "workers": sorted(generation.harmed),
            "last": error.message,
        }
        log.error("a request is not tried again: workers failed under it", extra=facts)
        self._metrics.not_retried(SUSPECT_REQUEST)
        self.suspects.condemn(generation.request, generation.verdicts, self._workers.now())
        for worker_id in generation.excusable:
            if self._workers.excuse(worker_id):
                self._note_restored(worker_id)
        generation.excusable = frozenset()
        return suspect(generation.harmed, error.message)

    def _retry(
        self, live: LiveRequest, blamed: tuple[str, ...], error: ApiError
    ) -> ApiError | None:
        while live.key.attempt < self._max_retries:
            pair = self._assign(live, blamed)
            if pair is None:
                return self._wait(live, blamed, error)
            unsent = self._begin(live, pair, error.message)
            if unsent is None:
                return None
            if unsent.error.code != WORKER_LOST:
                return unsent.error
            blamed = (unsent.worker_id,)
        self._metrics.not_retried("attempts")
        return error

    def _begin(self, live: LiveRequest, pair: Pair, why: str) -> Unsent | None:
        n_given = len(live.merge.delivered)
        live.weights = weights_of(pair.prefill.info)
        self._requests.begin_attempt(live, pair.worker_ids)
        live.output.goes_on_at(pair.alone)
        facts: dict[str, object] = {"key": live.key, "why": why}
        facts |= {"request": live.generation.request_id, "after_tokens": n_given}
        log.warning("a request is tried again", extra=facts)
        self._metrics.retried("from_token" if n_given else "from_start")
        return send_all(self._link, commands_of(live, pair, self._reserve_seconds))

    def _wait(self, live: LiveRequest, blamed: tuple[str, ...], error: ApiError) -> ApiError | None:
        """Let the next attempt wait, if there are workers that it can wait for."""
        if not self._max_wait_seconds or not self._may_have_room(live, blamed):
            self._metrics.not_retried("no_workers")
            return error
        self._requests.end_attempt(live)
        until = self._listened() + self._max_wait_seconds
        self._waiting.join(Waiting(live, blamed, error, until))
        self._metrics.waiting_retries.set(len(self._waiting))
        facts = {"request": live.generation.request_id, "why": error.message}
        log.warning("a request waits to be tried again: every worker is full", extra=facts)
        return None

    def _go_on_or_end(self, one: Waiting) -> Tried:
        """As `_go_on`; a request that this gateway has a defect with ends, and harms no other."""
        tried = Tried.OVER
        with going_on("waiting_retries", partial(self._break_off, one.live)):
            tried = self._go_on(one)
        if tried is Tried.OVER:
            self._lacking.clear()  # where a request ends there is room
        return tried

    def _break_off(self, live: LiveRequest) -> None:
        with going_on("break_off"):
            error = internal("the gateway failed to try the request again")
            self._requests.fail(live.generation, error)

    def _go_on(self, one: Waiting) -> Tried:
        """Begin an attempt that has waited, if there is room for it now."""
        live, blamed, error, _ = one
        if not _is_live(live):
            return Tried.OVER
        kind = self._kind_of(live, blamed)
        if kind in self._lacking:
            return Tried.NOT
        pair = self._assign(live, blamed)
        if pair is None:
            if self._may_have_room(live, blamed):
                self._lacking.add(kind)
                return Tried.IN_VAIN
            self._end(one)
            return Tried.OVER
        unsent = self._begin(live, pair, error.message)
        if unsent is not None:
            ended: ApiError | None = unsent.error
            if unsent.error.code == WORKER_LOST:
                ended = self._retry(live, (unsent.worker_id,), error)
            if ended is not None:
                self._requests.fail(live.generation, ended)
        return Tried.OVER

    def _kind_of(self, live: LiveRequest, blamed: tuple[str, ...]) -> Hashable:
        """Return what is equal of choices of which all lack room where one does."""
        needs = _needs(live)
        kind = self._workers.kind_of({needs: 1})
        return (kind, needs.weights, live.avoided, blamed)

    def _end(self, one: Waiting) -> None:
        """Nobody came in time: it ends as it would have without waiting."""
        self._metrics.not_retried("no_workers")
        self._requests.fail(one.live.generation, one.error)

    def _assign(self, live: LiveRequest, blamed: tuple[str, ...]) -> Pair | None:
        """Find workers for the next attempt, and avoid those that are to blame from now on."""
        for avoided in _to_avoid(blamed):
            pair = self._workers.assign(_needs(live), live.avoided | avoided)
            if pair is not None:
                live.avoided |= avoided
                return pair
        return None

    def _may_have_room(self, live: LiveRequest, blamed: tuple[str, ...]) -> bool:
        """Whether there are workers for the next attempt, which are full now."""
        return any(
            self._workers.most_choices(_needs(live), live.avoided | avoided)
            for avoided in _to_avoid(blamed)
        )


def _is_live(live: LiveRequest) -> bool:
    return live.key.handle in live.generation.live


def _needs(live: LiveRequest) -> Needs:
    """Return what the next attempt asks of its workers."""
    if not live.merge.next_position:
        return live.needs
    features = (*live.needs.features, RESUME)
    return live.needs._replace(features=features, weights=live.weights)


def _blamed(live: LiveRequest, blame: Blame, worker_id: str) -> tuple[str, ...]:
    """Return the workers that a failure speaks against; of a pair, decode is the last."""
    match blame:
        case Blame.REPORTER:
            return (worker_id,)
        case Blame.DECODE:
            return live.holders[-1:]
        case Blame.EITHER:
            return live.holders
        case Blame.NOBODY:
            return ()


def _to_avoid(blamed: tuple[str, ...]) -> Iterable[frozenset[str]]:
    """Return which workers to do without: all that may be to blame, else one that may be."""
    each = (frozenset({worker_id}) for worker_id in reversed(blamed))
    return dict.fromkeys((frozenset(blamed), *each))
