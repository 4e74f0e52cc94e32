"""Who runs in the next step: admission, chunked prefill, preemption.

Owns the queues and who gets blocks (`tables` accounts for them), as policy without clock, model or
tensors. Prompts and handoffs wait in one queue (`waiting_queue` owns its order), to which a
preempted request returns. A request is admitted only when all its known tokens fit, so a prefill
never stalls half-way; only growth, of what decodes or because K was raised, can run out of blocks,
and then the least urgent running request is recomputed later.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton_worker.engine.kv.pool import BlockAllocator
from baton_worker.engine.options import EngineOptions
from baton_worker.engine.scheduling.chunks import cut
from baton_worker.engine.scheduling.leaving_blocks import LeavingBlocks
from baton_worker.engine.scheduling.plans import (
    GoingOn,
    PrefillChunk,
    StepPlan,
    going_on,
    told_by_layers,
)
from baton_worker.engine.scheduling.prefix_cache import NO_HITS, PrefixCache, hits_of
from baton_worker.engine.scheduling.requests import Phase, RequestState
from baton_worker.engine.scheduling.tables import BlockTables
from baton_worker.engine.scheduling.waiting_queue import WaitingQueue
from baton_worker.identity import RequestKey, incarnation_of

PREEMPTED_PULL_SECONDS = 0.02
"""How long a plan waits for room that is needed now; a network may take longer than anybody can."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`prefill_tokens`: prompt tokens per step, all requests together."""

    block_size: int
    max_running: int
    max_waiting: int
    prefill_tokens: int

    @classmethod
    def of(cls, options: EngineOptions) -> SchedulerLimits:
        """Return the scheduler's share of an engine's limits."""
        return cls(
            block_size=options.block_size,
            max_running=options.max_running,
            max_waiting=options.max_waiting,
            prefill_tokens=options.prefill_tokens,
        )


class Scheduler:
    """The engine's queues. Every request it holds is in exactly one of waiting, running, held.

    Args:
        prefix: shares blocks between requests of equal beginnings; None for no sharing.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        allocator: BlockAllocator,
        prefix: PrefixCache | None = None,
    ) -> None:
        self._limits = limits
        self._allocator = allocator
        self._prefix = prefix
        self._waiting = WaitingQueue[RequestState]()
        self._running = WaitingQueue[RequestState]()
        self._early: list[RequestState] = []
        self._held: dict[RequestKey, RequestState] = {}
        self._paused: frozenset[int] = frozenset()
        self._tables = BlockTables(allocator, limits.block_size, prefix)

    @property
    def n_running(self) -> int:
        """Requests that step."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Requests in line."""
        return len(self._waiting)

    @property
    def n_held(self) -> int:
        """Prefilled requests whose blocks wait for the handoff's acknowledgement."""
        return len(self._held)

    @property
    def max_waiting(self) -> int:
        """Most requests in line, beside those that could run."""
        return self._limits.max_waiting

    @property
    def leaving(self) -> LeavingBlocks:
        """Blocks that a pull still writes to after their request's end."""
        return self._tables.leaving

    @property
    def is_full(self) -> bool:
        """Whether it takes no more: a slot that is free counts before who waits has got it."""
        n_held = len(self._waiting) + len(self._running)
        return n_held >= self._limits.max_running + self._limits.max_waiting

    def requests(self) -> Iterator[RequestState]:
        """Yield every request held."""
        yield from self._waiting
        yield from self._running
        yield from self._held.values()

    def check_integrity(
        self, known: Mapping[RequestKey, RequestState], held_elsewhere: Iterable[Sequence[int]]
    ) -> None:
        """Verify that blocks and requests account for each other exactly.

        Raises:
            ValueError: a block or a request is lost, doubled, or owned by nobody.
        """
        queued = list(self.requests())
        tables = [request.blocks for request in queued]
        self._allocator.check_integrity([*tables, *self._tables.leaving.held(), *held_elsewhere])
        if len(queued) != len(known) or any(known.get(r.key) is not r for r in queued):
            raise ValueError(f"{len(known)} requests by key, {len(queued)} in queues")

    def enqueue(self, request: RequestState) -> None:
        """Put a new request in line."""
        self._waiting.join(request, (other for other in self._running if not other.is_decoding))

    def set_paused(self, incarnations: frozenset[int]) -> None:
        """Hold back the requests of these gateways, in their places and with their blocks."""
        self._paused = incarnations

    def can_progress(self, n_model_drafts: int) -> bool:
        """Whether `plan` would yield anything."""
        return bool(self._stepping()) or self._next_admissible(n_model_drafts) is not None

    def n_spoken_for(self, n_model_drafts: int) -> int:
        """Return the free blocks that are not for what nobody has asked for yet: one for each who
        runs to grow into, and those of who stands first in line.
        """
        first = self._first_in_line()
        if first is None:
            return len(self._running)
        return len(self._running) + self._tables.missing(first, _reach(first, n_model_drafts))

    def plan(
        self,
        n_model_drafts: int,
        bring_in: Callable[[list[RequestState]], object] = lambda requests: None,
    ) -> StepPlan:
        """Decide the next step, taking and freeing blocks.

        Args:
            n_model_drafts: drafts that the MTP layer makes per sequence and step; each but the
                first writes KV ahead of the tokens known.
            bring_in: is given the running requests whose KV is not all here, the most urgent first,
                once all have their blocks; whose is when it returns decodes in this step.
        """
        # In this order: what the step before computed is findable before anybody is preempted or
        # admitted; who grows comes before who is admitted, or both would be preempted in turn; and
        # KV comes in behind both: nobody who has it makes room in the same plan.
        self._tables.remember(*self._running)
        preempted = self._grow(n_model_drafts)
        admitted = [request for request in self._early if request.phase is Phase.RUNNING]
        self._early.clear()
        admitted += [] if preempted else self._admit(n_model_drafts)
        if incoming := self.incoming():
            bring_in(incoming)
        decode: list[RequestState] = []
        prefill: list[RequestState] = []
        imports: list[RequestState] = []
        for request in self._stepping():
            if request.incoming is not None:
                imports.append(request)
            else:
                (decode if request.is_decoding else prefill).append(request)
        chunks = cut([(r, r.n_computed) for r in prefill], self._limits.prefill_tokens)
        return StepPlan(
            admitted=tuple(admitted),
            imports=tuple(imports),
            decode=tuple(decode),
            prefill=chunks,
            preempted=tuple(preempted),
            most_tokens=_most_tokens(decode, chunks),
            prefix=NO_HITS if self._prefix is None else hits_of(admitted),
            told_by_layers=told_by_layers(chunks),
        )

    def incoming(self) -> list[RequestState]:
        """Return the running requests whose KV is not all here."""
        return [request for request in self._stepping() if request.incoming is not None]

    def admit_early(
        self, n_model_drafts: int, is_early: Callable[[RequestState], bool]
    ) -> list[RequestState]:
        """Let in who stands first in line while a step is under way, as long as it `is_early`.

        Its blocks are none of that step's, so they may be filled meanwhile. The next `plan` counts
        it among those that it admitted.
        """
        if not len(self._waiting):
            return []
        self._tables.remember(*self._running)  # what earlier steps computed may be what it needs
        early = self._admit(n_model_drafts, is_early)
        self._early += early
        return early

    def going_on(self, before: StepPlan, ending: Container[RequestKey]) -> GoingOn:
        """Return who is in the step behind `before`; see `plans.going_on`. Whose KV is on its way
        is in no step.
        """
        stepping = [
            request
            for request in self._stepping()
            if (request.pull is None or not request.is_on_its_way) and request.key not in ending
        ]
        return going_on(before, stepping)

    def plan_ahead(
        self,
        before: StepPlan,
        ending: Container[RequestKey],
        n_draft: int,
        n_model_drafts: int,
    ) -> StepPlan | None:
        """Decide the step behind `before`, which is under way, by what its tokens can be at most.

        It is what `plan` would decide if nobody ended in `before`: who decodes there decodes here,
        and prompts go on behind what `before` feeds of them (who is computed anew, but for his
        newest token, is fed that as a chunk). None where somebody else is to be let in, or there
        are no blocks without taking some away: then it waits for `before`.

        Args:
            ending: requests that end when `before` has landed, whatever it says.
            n_draft: K of both.
            n_model_drafts: see `plan`.
        """
        decode, prompts = self.going_on(before, ending)
        if len(self._waiting):  # what earlier steps computed may be what lets the first one in
            self._tables.remember(*self._running)
        if not (decode or prompts) or self._next_admissible(n_model_drafts) is not None:
            return None
        ahead = n_draft + 1 + max(n_model_drafts - 1, 0)
        reach = [(r, _most_fed(r) + ahead) for r in decode]
        reach += [(r, _reach(r, n_model_drafts)) for r, _ in prompts]
        if not self._extend_all(reach):
            return None
        chunks = cut(prompts, self._limits.prefill_tokens)
        most_tokens = len(decode) * (1 + n_draft) + sum(chunk.n_tokens for chunk in chunks)
        told = told_by_layers(chunks)
        return StepPlan((), (), decode, chunks, (), most_tokens, told_by_layers=told)

    def _extend_all(self, reach: Iterable[tuple[RequestState, int]]) -> bool:
        """Give each the blocks of so many positions; nobody any where there are too few for all."""
        size = self._limits.block_size
        missing = [(r, self._tables.missing(r, n)) for r, n in reach if n > r.n_blocks * size]
        if sum(count for _, count in missing) > self._tables.n_free:
            return False
        for request, count in missing:
            if count:
                self._tables.extend(request, count)
        return True

    def hold(self, request: RequestState) -> None:
        """Stop stepping a prefilled request, its blocks kept."""
        self._running.remove(request)
        self._tables.remember(request)
        request.phase = Phase.HELD
        self._held[request.key] = request

    def remove(self, request: RequestState) -> None:
        """Forget a request and free its blocks."""
        if request.phase is Phase.WAITING:
            self._waiting.remove(request)
        elif request.phase is Phase.RUNNING:
            self._running.remove(request)
            self._early = [early for early in self._early if early is not request]
        else:
            del self._held[request.key]
        self._tables.release(request)

    def _grow(self, n_model_drafts: int) -> list[RequestState]:
        """Give each running request the blocks of its next step, the most urgent first.

        A prompt got its own at admission, and those of the drafting behind it; it is given more
        when K has been raised since, before its last chunk drafts.
        """
        preempted: list[RequestState] = []
        ahead, patience = max(n_model_drafts - 1, 0), PREEMPTED_PULL_SECONDS
        for request in self._stepping():
            missing = self._tables.missing(request, _most_fed(request) + ahead)
            while missing > self._tables.n_free and request.phase is Phase.RUNNING:
                victim = self._stepping()[-1]
                if victim.pull is not None:  # its room is needed now
                    victim.pull.wait(patience)
                    patience = 0.0  # all that decode stand still meanwhile, however many it are
                self._preempt(victim)
                preempted.append(victim)
            if missing and request.phase is Phase.RUNNING:
                self._tables.extend(request, missing)
        return preempted

    def _preempt(self, victim: RequestState) -> None:
        self._running.remove(victim)
        self._tables.release(victim)
        victim.n_computed = victim.n_imported_blocks = 0
        if victim.incoming is None:  # else its KV is at hand and is imported once more
            victim.drafts = ()
            victim.has_foreign_kv = False
        victim.phase = Phase.WAITING
        self._waiting.add(victim)

    def _admit(
        self, n_model_drafts: int, is_wanted: Callable[[RequestState], bool] = lambda request: True
    ) -> list[RequestState]:
        admitted: list[RequestState] = []
        while (request := self._next_admissible(n_model_drafts)) is not None and is_wanted(request):
            self._waiting.remove(request)  # before it passes the others: it is not among them
            for line in (self._waiting, self._running):
                line.let_pass(request, self._waits_its_turn)
            self._tables.reuse(request)
            n_wanted = self._tables.missing(request, _reach(request, n_model_drafts))
            self._tables.extend(request, n_wanted)
            request.phase = Phase.RUNNING
            self._running.add(request)
            admitted.append(request)
        return admitted

    def _next_admissible(self, n_model_drafts: int) -> RequestState | None:
        """Return the first in line if it fits and leaves each running request a block to grow."""
        if len(self._running) >= self._limits.max_running:
            return None
        request = self._first_in_line()
        if request is None:
            return None
        fits = self._tables.fits(request, _reach(request, n_model_drafts), len(self._running))
        return request if fits else None

    def _first_in_line(self) -> RequestState | None:
        return next((r for r in self._waiting if not self._is_held_back(r)), None)

    def _stepping(self) -> list[RequestState]:
        """Return the running requests that are not held back, the most urgent first."""
        if not self._paused:
            return list(self._running)
        return [request for request in self._running if not self._is_paused(request)]

    def _waits_its_turn(self, request: RequestState) -> bool:
        """Whether others' admission delays it: it waits, or its prompt is not computed yet."""
        return not self._is_held_back(request) and not request.is_decoding

    def _is_held_back(self, request: RequestState) -> bool:
        """Whether it could not begin if it stood first: others go before it meanwhile."""
        return request.is_coming or self._is_paused(request)

    def _is_paused(self, request: RequestState) -> bool:
        return bool(self._paused) and incarnation_of(request.key.handle) in self._paused


def _reach(request: RequestState, n_model_drafts: int) -> int:
    """Return the positions of all that is known, drafts of a handoff too, and of the drafting
    behind them.
    """
    return _most_fed(request) + max(n_model_drafts - 1, 0)


def _most_fed(request: RequestState) -> int:
    """Return the positions that may have KV behind a step. Who neither decodes nor brings KV has
    no drafts.
    """
    return len(request.tokens) + len(request.drafts)


def _most_tokens(decode: list[RequestState], chunks: tuple[PrefillChunk, ...]) -> int:
    """Each decode row at the longest proposal's length, and the chunks."""
    n_known = max((len(request.tokens) - request.n_computed for request in decode), default=0)
    per_row = n_known + max((len(request.drafts) for request in decode), default=0)
    return len(decode) * per_row + sum(chunk.n_tokens for chunk in chunks)
