"""The engine: requests in, one step at a time, rows and handoffs out.

Owns the order of a step: launch, collect, and the output work, which with overlap happens while the
next step is in flight. Who is here, scheduling, launches, arithmetic and columns are its parts'.
All calls come from one thread. Knows no socket and no wall clock: its clock is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton_worker.engine.api import (
    EngineLoad,
    FailedRequest,
    Handoff,
    KvFilled,
    StepResult,
    TellFilled,
)
from baton_worker.engine.draft_count import DraftCount
from baton_worker.engine.kv.leases import Leases
from baton_worker.engine.kv.pool import KvStore
from baton_worker.engine.launching import Launches
from baton_worker.engine.options import EngineOptions
from baton_worker.engine.output.columns import build_columns, emitted_columns
from baton_worker.engine.output.handoff_state import handoff_state
from baton_worker.engine.output.snapshot import EmittedRow, StepOut, StepSnapshot
from baton_worker.engine.output.stats import step_stats
from baton_worker.engine.parts import EngineParts
from baton_worker.engine.progress import Progress
from baton_worker.engine.sampling.logprobs import TokenColumns
from baton_worker.engine.scheduling.admission import KvIdentity, check_handoff, check_request
from baton_worker.engine.scheduling.kv_ahead import KvAhead
from baton_worker.engine.scheduling.kv_transfers import KvTransfers
from baton_worker.engine.scheduling.request_book import RequestBook
from baton_worker.engine.scheduling.requests import (
    Ending,
    Phase,
    RequestLimits,
    RequestState,
    Terminal,
    imported_state,
    new_state,
)
from baton_worker.engine.step.in_flight import InFlightStep
from baton_worker.identity import RequestKey
from baton_worker.messages import HandoffState, Submit
from baton_worker.records.columns import ErrorCode, Finish


@dataclass(frozen=True, slots=True, eq=False)
class _Landed:
    """A collected step, its ended requests' rows removed, ready for its output work."""

    launched: InFlightStep
    snapshot: StepSnapshot
    terminals: tuple[Terminal, ...]
    imports: tuple[HandoffState, ...]
    filled: tuple[KvFilled, ...]
    failed: tuple[FailedRequest, ...]

    def tells(self, key: RequestKey) -> bool:
        """Whether it tells of a request of this key already, so one that came since can wait."""
        ended = any(terminal.key == key for terminal in self.terminals)
        return ended or any(row.key == key for row in self.snapshot.rows)


class StepEngine:
    """`Engine` over a model that steps; which model is its parts' matter.

    Args:
        options: resolved limits.
        clock: monotonic seconds, for the times in `StepStats`.
    """

    def __init__(
        self, parts: EngineParts, options: EngineOptions, clock: Callable[[], float]
    ) -> None:
        self.options = options
        self.shape = parts.shape
        self.model_fingerprint = parts.fingerprint
        self.progress = Progress(options.stuck_seconds, options.first_step_seconds, clock)
        self._clock = clock
        self._parts = parts
        self._limits = RequestLimits.of(parts.shape, options)
        self._identity = KvIdentity(parts.fingerprint, parts.pool.shape)
        self._drafts = DraftCount(options.drafts, options.n_draft)
        self._requests = RequestBook(parts.scheduler)
        self._transfers = KvTransfers(parts.pool, options.kv_bytes_per_step)
        self._pulls = KvAhead(parts.pool, parts.scheduler.leaving, options.kv_bytes_per_step)
        self._launches = Launches(
            parts=parts,
            overlap=options.overlap,
            drafts=self._drafts,
            requests=self._requests,
            transfers=self._transfers,
            pulls=self._pulls,
            progress=self.progress,
            clock=clock,
        )
        self._in_flight: InFlightStep | None = None
        self._finished_at = float("-inf")

    @property
    def kv(self) -> KvStore:
        """Its KV pool."""
        return self._parts.pool

    @property
    def leases(self) -> Leases | None:
        """Of what lies in its pool for others to read."""
        return self._transfers.leases

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return self.options.max_model_len

    @property
    def num_speculative_tokens(self) -> int:
        """K, drafts proposed per sequence and step."""
        return self._drafts.count

    @property
    def max_speculative_tokens(self) -> int:
        """Largest K that may be set: 0 without a drafting method."""
        return self._drafts.most

    def set_num_speculative_tokens(self, count: int) -> None:
        """See `Engine.set_num_speculative_tokens`."""
        self._drafts.set(count)

    def submit(self, request: Submit, kv_stays: bool = False) -> None:
        """See `Engine.submit`."""
        self._requests.check_new(request.key)
        check_request(request, self._limits)
        assert not kv_stays or self._parts.pool.sharing is not None, "others cannot read this pool"
        self._requests.enter(new_state(request, self._limits, self._clock(), kv_stays))

    def admit_handoff(self, handoff: Handoff) -> None:
        """See `Engine.admit_handoff`."""
        self._requests.check_new(handoff.state.key)
        check_handoff(handoff, self._identity, self._limits)
        request = imported_state(handoff, self._limits, self._clock())
        request.ahead = self._pulls.take(handoff)
        self._requests.enter(request)

    def pull_ahead(self, filled: KvFilled, n_tokens: int) -> None:
        """See `Engine.pull_ahead`."""
        if filled.key not in self._requests:
            most = self._identity.shape.blocks_for(min(n_tokens, self.max_model_len))
            spare = self._parts.scheduler.n_spoken_for(self._drafts.model_steps)
            self._pulls.pull(filled, most, spare)

    def drop_ahead(self, key: RequestKey) -> None:
        """See `Engine.drop_ahead`."""
        self._pulls.drop(key)

    def handoff_bytes(self, n_tokens: int) -> int:
        """See `Engine.handoff_bytes`."""
        return self._identity.shape.bytes_of(n_tokens)

    def release_handoff(self, key: RequestKey) -> None:
        """See `Engine.release_handoff`."""
        if key in self._requests and self._requests[key].phase is Phase.HELD:
            self._requests.forget(self._requests[key])

    def abort(self, key: RequestKey) -> bool:
        """See `Engine.abort`."""
        return self._end(key, Finish.ABORT)

    def fail(self, key: RequestKey, code: ErrorCode, message: str) -> bool:
        """See `Engine.fail`."""
        return self._end(key, Finish.ERROR, code, message)

    def set_paused(self, incarnations: frozenset[int]) -> None:
        """See `Engine.set_paused`."""
        self._parts.scheduler.set_paused(incarnations)

    def has_work(self) -> bool:
        """See `Engine.has_work`."""
        self._pulls.settle()  # which may let in who waits for room
        is_busy = self._in_flight is not None or self._transfers.is_exporting
        is_awaited = self._parts.scheduler.n_waiting > 0 and self._pulls.is_under_way
        has_to_tell = self._requests.has_terminals
        return is_busy or is_awaited or has_to_tell or self._launches.can_launch()

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        scheduler, allocator, shape = self._parts.scheduler, self._parts.allocator, self.kv.shape
        n_behind = self._pulls.n_behind + self._transfers.n_pulled
        return EngineLoad(
            running=scheduler.n_running,
            waiting=scheduler.n_waiting,
            held_handoffs=scheduler.n_held,
            kv_blocks_used=allocator.n_used,
            kv_blocks_total=allocator.total,
            num_speculative_tokens=self._drafts.count,
            kv_blocks_cached=allocator.n_idle,
            kv_pulled_ahead_blocks=self._pulls.n_before / shape.n_layers,
            kv_pulled_behind_blocks=n_behind / shape.n_layers,
            kv_left_ahead=dict(self._pulls.n_left),
        )

    def step(
        self,
        before_next: Callable[[], object] = lambda: None,
        tell_filled: TellFilled = lambda filled: None,
    ) -> StepResult:
        """Advance every runnable request once; see `Engine.step`.

        1. Collect the step in flight, or launch and collect one. 2. With overlap, launch the next
        if there is work: over a device behind the other, before that is waited for, when it goes on
        with who is in that. 3. Only then do the output work of the collected one: logprobs,
        columns, KV of prompts to hand over. All of that comes from the collected snapshot (R16).
        """
        self._in_flight = launched = self._in_flight or self._launches.launch()
        following = None
        if self._launches.may_follow(launched):
            before_next()
            following = self._launches.launch_behind(launched)
        landed = self._collect(launched, tell_filled)
        if self.options.overlap:
            if following is None:
                before_next()  # once more where none went ahead: something came during the wait
                if self._launches.can_launch():
                    following = self._launches.launch(landed.tells)
            self._in_flight = following
        self.progress.output()
        if following is not None and following.arrived:
            landed = replace(landed, imports=(*landed.imports, *following.arrived.values()))
        return self._finish(landed)

    def close(self) -> None:
        """Wait for a step in flight and drop it; the engine is of no use afterwards."""
        launched, self._in_flight = self._in_flight, None
        if launched is not None:
            launched.landed()

    def check_integrity(self) -> None:
        """See `Scheduler.check_integrity`."""
        self._requests.check_integrity(self._pulls.held())

    def _collect(self, launched: InFlightStep, tell_filled: TellFilled) -> _Landed:
        """Wait for the step, telling of last chunks' layers, then end what ended meanwhile.

        Who was ended from outside while its step was in flight leaves no other trace of that step:
        its rows are dropped and its blocks become free only now.
        """
        requests, self._in_flight = self._requests, None
        launched = launched.settled(requests.holds)
        if self.options.overlap:
            self.progress.stepping(launched.plan.most_tokens, tuple(launched.positions))
        for request, *at in launched.told_by_layers():
            if requests.is_staying(request):
                tell_filled(self._transfers.filled_so_far(request, *at))
        snapshot = launched.landed()
        self.progress.output()
        failed = self._failed(launched, snapshot)
        endings = requests.take_endings(failed, launched.positions)
        snapshot = snapshot.without(endings)
        self._move_on(snapshot.rows)
        return _Landed(
            launched=launched,
            snapshot=snapshot,
            terminals=requests.take_terminals(),
            imports=tuple(s for key, s in launched.imports.items() if key not in endings),
            filled=self._transfers.filled(self._unfinished_prompts(launched)),
            failed=failed,
        )

    def _failed(self, launched: InFlightStep, snapshot: StepSnapshot) -> tuple[FailedRequest, ...]:
        """Return the requests that cannot go on, and bar the KV of broken ones from everybody else.

        A NaN that stayed in a block would spoil its next owner, and one found by its name whoever
        shares it. Who was ended from outside meanwhile has its own ending.
        """
        for key in snapshot.failures:
            self._parts.allocator.taint(self._requests[key].blocks)
        broken = {key: (ErrorCode.ARITHMETIC, why) for key, why in snapshot.failures.items()}
        return tuple(
            FailedRequest(key, code, reason)
            for key, (code, reason) in (broken | dict(launched.refused)).items()
            if key not in self._requests.endings
        )

    def _move_on(self, rows: Sequence[EmittedRow]) -> None:
        """Hold prompts that are to be handed over, and let go of those that the step ended."""
        for row in rows:
            if row.prefilled is not None:
                self._parts.scheduler.hold(self._requests[row.key])
            elif row.finish is not Finish.NONE:
                self._requests.forget(self._requests[row.key])

    def _unfinished_prompts(self, launched: InFlightStep) -> list[RequestState]:
        """Return the prompts that the step fed and that go on, as prompts or with output here."""
        fed = [chunk.request for chunk in launched.plan.prefill]
        return [r for r in fed if self._requests.holds(r) and r.phase is Phase.RUNNING]

    def _finish(self, landed: _Landed) -> StepResult:
        snapshot, launched = landed.snapshot, landed.launched
        tokens = TokenColumns({})
        if snapshot.emitted is not None and snapshot.scoring is not None:
            tokens = snapshot.scoring.columns(snapshot.emitted, self._clock)
        emitted = emitted_columns(snapshot.rows, tokens.columns)
        out = StepOut(snapshot.rows, emitted, tokens.op_seconds, snapshot.prompts)
        for row in self._to_hand_over(out):
            state = handoff_state(row, out, self._identity)
            self._transfers.begin_export(self._requests[row.key], state)
        handoffs = self._transfers.export_some(self._requests.holds)
        started, self._finished_at = max(launched.started, self._finished_at), self._clock()
        return StepResult(
            columns=build_columns(landed.terminals, landed.imports, out),
            handoffs=handoffs,
            imported=tuple(state.key for state in landed.imports),
            stats=step_stats(launched.plan, out, launched.n_draft, started, self._finished_at),
            failed=landed.failed,
            filled=landed.filled,
        )

    def _to_hand_over(self, out: StepOut) -> list[EmittedRow]:
        """Return the prompts to hand over; one that was ended since has no blocks any more."""
        return [row for row in out.rows if row.prefilled is not None and row.key in self._requests]

    def _end(
        self, key: RequestKey, finish: Finish, code: ErrorCode | None = None, message: str = ""
    ) -> bool:
        return self._requests.end(key, Ending(finish, code, message), self._carries)

    def _carries(self, request: RequestState) -> bool:
        return self._in_flight is not None and self._in_flight.carries(request)
