"""The requests that are alive, and the one place where each ends.

Owns every per-request map, the worker accounts behind it, and the promise that a request ends
exactly once: for the client, for each worker involved and in the metrics. Runs on the event loop;
knows neither HTTP nor how rows are merged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.metrics import GatewayMetrics
from baton_worker.gateway.output.client_queue import ClientQueue
from baton_worker.gateway.output.merge import RowMerge
from baton_worker.gateway.output.sequence import SequenceOutput
from baton_worker.gateway.request import Choice, GenerationRequest
from baton_worker.gateway.serving.aborts import Aborts
from baton_worker.gateway.serving.balance import Needs
from baton_worker.gateway.serving.pairing import WeightsIdentity
from baton_worker.gateway.serving.workers import LinkedWorkers
from baton_worker.identity import RequestKey, Role
from baton_worker.link.api import GatewayLink
from baton_worker.tracing.api import NoTracing, Span, Tracing


@dataclass(slots=True, eq=False)
class Generation:
    """One HTTP request being answered: its choices share a queue and a fate.

    `arrived` and `first_token` are seconds of the steady clock. `reused`: tokens of each prompt, by
    its index, that no worker computed for any of its choices that ended. `harmed`: workers that
    failed under it and may have done so because of it ("a or b" where one of a pair did).
    `counted`: workers whose failure under it was counted against them; `excusable`: those of them
    that would be excused if it were the request's fault. `verdicts`: how often such a request was
    found to be suspect before it began (`suspects`), as of the verdict `judged_at`.
    `request_id`: what its client knows it by. `client`: with whom it shares slots.
    """

    request: GenerationRequest
    queue: ClientQueue
    arrived: float
    live: dict[int, LiveRequest] = field(default_factory=dict)
    deadline: asyncio.TimerHandle | None = None
    first_token: float | None = None
    completion_tokens: int = 0
    accepted: int = 0
    rejected: int = 0
    reused: dict[int, int] = field(default_factory=dict)
    span: Span | None = None
    harmed: frozenset[str] = frozenset()
    counted: frozenset[str] = frozenset()
    excusable: frozenset[str] = frozenset()
    verdicts: int = 0
    judged_at: int = 0
    request_id: str = ""
    client: str = ""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens not computed: each prompt once, by the choice that had to compute most."""
        return sum(self.reused.values())

    def note_reused(self, choice_index: int, n_tokens: int) -> None:
        """Take in what one choice found of its prompt."""
        prompt = choice_index // self.request.n
        self.reused[prompt] = min(self.reused.get(prompt, n_tokens), n_tokens)

    @property
    def traceparent(self) -> str:
        """The trace context for its workers, or ""."""
        return self.span.traceparent if self.span else ""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One choice on its workers.

    `holders`: workers that may still hold something of it, and so would have to be told of its end.
    `sources`: workers whose loss would leave a hole; a prefill worker is none once decode has
    spoken. `avoided`: workers that failed an attempt. `n_reused`: prompt tokens whose KV was at
    hand, in the attempt that gave the first token. `weights`: those of the attempt's workers.
    `begun`, `began_at`: when the attempt began, and at which output position. `n_rows`: good rows
    that each worker has told of it. `turn`: its place among all that this gateway gave out.
    `computing`: the worker in whose line its prompt stands, "" when the first token has come.
    """

    key: RequestKey
    generation: Generation
    choice: Choice
    needs: Needs
    merge: RowMerge
    output: SequenceOutput
    holders: tuple[str, ...]
    sources: tuple[str, ...]
    weights: WeightsIdentity
    last_row: float = 0.0
    avoided: frozenset[str] = frozenset()
    n_reused: int = 0
    begun: float = 0.0
    began_at: int = 0
    n_rows: Counter[str] = field(default_factory=Counter)
    turn: int = 0
    computing: str = ""

    def may_be_at(self, worker_id: str) -> bool:
        """Whether a worker can have begun with the attempt: decode has nothing of it but a place,
        until prefill has told the first token.
        """
        is_first = worker_id == self.holders[0]
        return is_first or self.merge.next_position > self.began_at or bool(self.merge.held_rows)


class LiveRequests:
    """All live requests by handle and by worker; `on_end` is told of each choice that ends."""

    def __init__(
        self,
        link: GatewayLink,
        workers: LinkedWorkers,
        metrics: GatewayMetrics,
        tracing: Tracing | None = None,
    ) -> None:
        self.aborts = Aborts(link)
        self.on_end: Callable[[Generation], None] = lambda generation: None
        self._tracing = tracing or NoTracing()
        self._workers = workers
        self._metrics = metrics
        self._by_handle: dict[int, LiveRequest] = {}
        self._by_source: dict[str, dict[int, LiveRequest]] = {}
        self._holding: dict[int, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._by_handle)

    @property
    def is_empty(self) -> bool:
        """Whether every per-request map is empty."""
        return not (self._by_handle or self._holding or any(self._by_source.values()))

    def trace(self, generation: Generation, traceparent: str) -> None:
        """Begin a generation's span under its client's context; it ends with the generation."""
        generation.span = self._tracing.start("baton.request", traceparent)

    def add(self, live: LiveRequest) -> None:
        """Enter a choice that was accounted to its workers."""
        self._by_handle[live.key.handle] = live
        live.generation.live[live.key.handle] = live
        self._depend(live)
        self._metrics.live.set(len(self._by_handle))

    def _depend(self, live: LiveRequest) -> None:
        """Note whom a request depends on; the first of its workers is to compute its prompt."""
        live.computing = live.sources[0]
        role = self._workers.role(live.computing) or Role.MIXED
        self._metrics.prompt_given(role.label)
        for worker_id in live.sources:
            self._by_source.setdefault(worker_id, {})[live.key.handle] = live

    def prompt_computed(self, live: LiveRequest) -> None:
        """Note that the first token of its attempt has come, or that the attempt is over."""
        self._workers.prompt_computed(live.computing, live.needs)
        live.computing = ""

    def get(self, handle: int) -> LiveRequest | None:
        """Return the live request of a handle."""
        return self._by_handle.get(handle)

    def live(self) -> tuple[LiveRequest, ...]:
        """Return every live request."""
        return tuple(self._by_handle.values())

    def depending_on(self, worker_id: str) -> tuple[LiveRequest, ...]:
        """Return the requests that this worker's loss would leave with a hole."""
        return tuple(self._by_source.get(worker_id, {}).values())

    def generations(self) -> list[Generation]:
        """Return every live generation once."""
        return list(
            {id(live.generation): live.generation for live in self._by_handle.values()}.values()
        )

    def release_source(self, live: LiveRequest, worker_id: str) -> None:
        """Note that nothing more is needed of this worker: it may go without harm."""
        live.sources = tuple(source for source in live.sources if source != worker_id)
        self._forget_source(live, worker_id)

    def end_attempt(self, live: LiveRequest) -> None:
        """Take a request from its workers to its next attempt, which has none yet."""
        for worker_id in live.sources:
            self._forget_source(live, worker_id)
        for worker_id in live.holders:
            self.aborts.send(worker_id, live.key)
        live.key = RequestKey(live.key.handle, live.key.attempt + 1)
        self.note_held(live, -live.merge.begin_attempt(live.key.attempt))
        if not live.merge.delivered:
            live.n_reused = 0
        live.holders = live.sources = ()
        live.n_rows.clear()

    def begin_attempt(self, live: LiveRequest, worker_ids: tuple[str, ...]) -> None:
        """Move a request, accounted to other workers, to its next attempt, unless it stands there
        and waits for them.
        """
        if live.holders:
            self.end_attempt(live)
        live.holders = live.sources = worker_ids
        live.begun, live.began_at = self._workers.now(), live.merge.next_position
        self._depend(live)

    def note_held(self, live: LiveRequest, change: int) -> None:
        """Keep the set of requests with waiting rows; `change`: rows more, or fewer."""
        if live.merge.held_rows:
            self._holding[live.key.handle] = live
        else:
            self._holding.pop(live.key.handle, None)
        self._metrics.held_rows.inc(change)

    def with_expired_gap(self, listened: float) -> list[LiveRequest]:
        """Return the requests whose rows have waited too long for a gap to close, by the clock that
        they were offered by.
        """
        return [live for live in self._holding.values() if live.merge.gap_expired(listened)]

    def finish(self, live: LiveRequest, reported_by: str | None) -> None:
        """End a choice whose last delta is queued; `reported_by` ended it and needs no telling."""
        if live.key.handle in self._by_handle:
            with contextlib.ExitStack() as stack:
                stack.callback(self._end_of_last, live.generation)
                self._remove(live, reported_by)

    def _end_of_last(self, generation: Generation) -> None:
        if not generation.live:
            with contextlib.ExitStack() as stack:
                stack.callback(generation.queue.close)
                self._close(generation, "ok")

    def fail(
        self,
        generation: Generation,
        error: ApiError,
        *,
        reported: tuple[RequestKey, str] | None = None,
        discard: bool = False,
    ) -> None:
        """End a generation and all its choices with an error.

        Args:
            generation: may have ended already; then nothing happens.
            error: what the client is told.
            reported: the choice and the worker that ended it itself and needs no telling.
            discard: drop what waits for the client.
        """
        if not generation.live:
            return
        with contextlib.ExitStack() as stack:  # whatever breaks here, its client hears of the end
            stack.callback(generation.queue.fail, error, discard=discard)
            stack.callback(self._close, generation, error.outcome)
            for live in reversed(tuple(generation.live.values())):
                told = reported[1] if reported and reported[0] == live.key else None
                stack.callback(self._remove, live, told)

    def _remove(self, live: LiveRequest, reported_by: str | None) -> None:
        """Take a choice out of every map and tell the workers that do not know of its end."""
        handle = live.key.handle
        if self._by_handle.pop(handle, None) is None:
            return
        generation = live.generation
        del generation.live[handle]
        for worker_id in live.sources:
            self._forget_source(live, worker_id)
        if self._holding.pop(handle, None) is not None:
            self._metrics.held_rows.dec(live.merge.held_rows)
        generation.completion_tokens += live.output.n_tokens
        generation.accepted += live.output.accepted
        generation.rejected += live.output.rejected
        generation.note_reused(live.choice.choice_index, live.n_reused)
        self._metrics.live.set(len(self._by_handle))
        self._metrics.completion_tokens.inc(live.output.n_tokens)
        self.on_end(generation)
        for worker_id in live.holders:  # last: what is given back above is everybody's
            if worker_id != reported_by:
                self.aborts.send(worker_id, live.key)

    def _forget_source(self, live: LiveRequest, worker_id: str) -> None:
        if worker_id == live.computing:
            self.prompt_computed(live)
        of_worker = self._by_source.get(worker_id, {})
        if of_worker.pop(live.key.handle, None) is not None:
            self._workers.release(worker_id, live.needs)
        if not of_worker:
            self._by_source.pop(worker_id, None)

    def _close(self, generation: Generation, outcome: str) -> None:
        if generation.deadline is not None:
            generation.deadline.cancel()
        self._metrics.accepted.inc(generation.accepted)
        self._metrics.rejected.inc(generation.rejected)
        self._metrics.ended(generation.request.endpoint.value, outcome)
        if generation.span is not None:
            generation.span.end(_facts(generation, outcome))


def _facts(generation: Generation, outcome: str) -> dict[str, str | int | float]:
    """Return what a generation's span tells."""
    facts: dict[str, str | int | float] = {
        "baton.outcome": outcome,
        "baton.request_id": generation.request_id,
        "baton.endpoint": generation.request.endpoint.value,
        "baton.prompt_tokens": generation.request.prompt_tokens,
        "baton.cached_tokens": generation.cached_tokens,
        "baton.completion_tokens": generation.completion_tokens,
        "baton.accepted_drafts": generation.accepted,
        "baton.rejected_drafts": generation.rejected,
    }
    if generation.first_token is not None:
        facts["baton.first_token_seconds"] = generation.first_token - generation.arrived
    return facts
