"""The engine: requests in, one step at a time, rows and handoffs out.

Owns the requests by key and the order of a step: launch, collect, and the output work, which with
overlap happens while the next step is in flight. Scheduling, arithmetic and columns are its parts'.
All calls come from one thread. Knows no socket and no wall clock: its clock is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from baton_worker.engine.api import (
    EngineLoad,
    EngineRefusedError,
    FailedRequest,
    Handoff,
    KvFilled,
    StepResult,
    TellFilled,
)
from baton_worker.engine.kv.pool import KvStore, clear_blocks
from baton_worker.engine.kv.sharing import Leases
from baton_worker.engine.options import MAX_DRAFTS, EngineOptions
from baton_worker.engine.output.columns import build_columns, emitted_columns
from baton_worker.engine.output.handoff_state import handoff_state
from baton_worker.engine.output.snapshot import EmittedRow, StepOut, StepSnapshot
from baton_worker.engine.output.stats import step_stats
from baton_worker.engine.parts import EngineParts
from baton_worker.engine.progress import Progress
from baton_worker.engine.sampling.logprobs import TokenColumns
from baton_worker.engine.scheduling.admission import KvIdentity, check_handoff, check_request
from baton_worker.engine.scheduling.kv_ahead import KvAhead
from baton_worker.engine.scheduling.kv_transfers import PULL_WAIT_SECONDS, KvTransfers
from baton_worker.engine.scheduling.requests import (
    Ending,
    Phase,
    RequestLimits,
    RequestState,
    Terminal,
    imported_state,
    new_state,
)
from baton_worker.engine.step.in_flight import (
    AheadRunner,
    InFlightStep,
    Running,
    StepLauncher,
    positions_of,
)
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
        self.shape = shape = parts.shape
        self.model_fingerprint = parts.fingerprint
        self._clock = clock
        self._n_draft = options.n_draft
        self._limits = RequestLimits.of(shape, options)
        self._parts, runner = parts, parts.runner
        self._ahead = runner if options.overlap and isinstance(runner, AheadRunner) else None
        self._launcher = StepLauncher(options.overlap and self._ahead is None)
        self.progress = Progress(options.stuck_seconds, options.first_step_seconds, clock)
        self._transfers = KvTransfers(parts.pool, options.kv_bytes_per_step)
        self._pulls = KvAhead(parts.pool, parts.scheduler.leaving, options.kv_bytes_per_step)
        self._identity = KvIdentity(self.model_fingerprint, self._parts.pool.shape)
        self._requests: dict[RequestKey, RequestState] = {}
        self._terminals: list[Terminal] = []
        self._in_flight: InFlightStep | None = None
        self._endings: dict[RequestKey, Ending] = {}
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
        return self._n_draft

    @property
    def max_speculative_tokens(self) -> int:
        """Largest K that may be set: 0 without a drafting method."""
        return 0 if self.options.drafts.is_none else MAX_DRAFTS

    def set_num_speculative_tokens(self, count: int) -> None:
        """See `Engine.set_num_speculative_tokens`."""
        if not 0 <= count <= MAX_DRAFTS:
            raise ValueError(f"num_speculative_tokens is {count}, allowed are 0..{MAX_DRAFTS}")
        if count > self.max_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens is {count}, but this engine makes no drafts: "
                "speculative.method is 'none'"
            )
        self._n_draft = count

    def submit(self, request: Submit, kv_stays: bool = False) -> None:
        """See `Engine.submit`."""
        self._check_new(request.key)
        check_request(request, self._limits)
        assert not kv_stays or self._parts.pool.sharing is not None, "others cannot read this pool"
        self._enqueue(new_state(request, self._limits, self._clock(), kv_stays))

    def admit_handoff(self, handoff: Handoff) -> None:
        """See `Engine.admit_handoff`."""
        self._check_new(handoff.state.key)
        check_handoff(handoff, self._identity, self._limits)
        request = imported_state(handoff, self._limits, self._clock())
        request.ahead = self._pulls.take(handoff)
        self._enqueue(request)

    def pull_ahead(self, filled: KvFilled, n_tokens: int) -> None:
        """See `Engine.pull_ahead`."""
        if filled.key not in self._requests:
            most = self._identity.shape.blocks_for(min(n_tokens, self.max_model_len))
            spare = self._parts.scheduler.n_spoken_for(self._model_steps)
            self._pulls.pull(filled, most, spare)

    def drop_ahead(self, key: RequestKey) -> None:
        """See `Engine.drop_ahead`."""
        self._pulls.drop(key)

    def handoff_bytes(self, n_tokens: int) -> int:
        """See `Engine.handoff_bytes`."""
        return self._identity.shape.bytes_of(n_tokens)

    def release_handoff(self, key: RequestKey) -> None:
        """See `Engine.release_handoff`."""
        request = self._requests.get(key)
        if request is not None and request.phase is Phase.HELD:
            self._forget(request)

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
        return is_busy or bool(self._terminals) or is_awaited or self._can_launch()

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
            num_speculative_tokens=self._n_draft,
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
        self._in_flight = launched = self._in_flight or self._launch()
        following = None
        if self._may_go_ahead(launched):
            before_next()
            following = self._launch_ahead(launched)
        landed = self._collect(launched, tell_filled)
        if self.options.overlap:
            if following is None:
                before_next()  # once more where none went ahead: something came during the wait
                if self._can_launch():
                    following = self._launch()
            self._in_flight = following
        self.progress.output()
        return self._finish(landed)

    def close(self) -> None:
        """Wait for a step in flight and drop it; the engine is of no use afterwards."""
        launched, self._in_flight = self._in_flight, None
        if launched is not None:
            launched.landed()

    def check_integrity(self) -> None:
        """See `Scheduler.check_integrity`."""
        self._parts.scheduler.check_integrity(self._requests, self._pulls.held())

    @property
    def _model_steps(self) -> int:
        return self.options.drafts.model_steps(self._n_draft)

    def _can_launch(self) -> bool:
        return self._parts.scheduler.can_progress(self._model_steps)

    def _launch(self) -> InFlightStep:
        """Plan a step, import some KV of handoffs (they decode once all is in), run."""
        started, n_draft = self._clock(), self._n_draft
        if not self._can_launch():
            self._pulls.wait(PULL_WAIT_SECONDS)
        self._pulls.settle()
        plan = self._parts.scheduler.plan(self._model_steps)
        clear_blocks(self._parts.pool, self._parts.allocator.take_uncleared())
        for request in plan.admitted:
            if request.admitted_at is None:
                request.admitted_at = started
        positions = positions_of(plan)
        has_rows = bool(plan.decode or plan.prefill)
        imports = self._transfers.import_some(plan.imports, may_wait=not has_rows)
        if not self.options.overlap:  # it is run here
            self.progress.stepping(plan.most_tokens, tuple(positions))
        if self._ahead is not None and has_rows:
            with self.progress.launching(plan.most_tokens, tuple(positions)):
                flight = self._ahead.start(plan, n_draft)
            lands = Running(partial(flight.landed, self._is_here), flight.layers)
            return InFlightStep(plan, n_draft, started, *imports, positions, *lands, flight)
        work = partial(self._parts.runner.run, plan, n_draft) if has_rows else None
        lands = self._launcher.launch(work)
        return InFlightStep(plan, n_draft, started, *imports, positions, *lands)

    def _may_go_ahead(self, launched: InFlightStep) -> bool:
        """Whether a step might be launched behind one before that has landed."""
        is_ours = self._ahead is not None and launched.flight is not None
        return is_ours and any(self._parts.scheduler.going_on(launched.plan, self._endings))

    def _launch_ahead(self, launched: InFlightStep) -> InFlightStep | None:
        """Launch the step behind one that has not landed, if the device can know what it feeds."""
        started, n_draft = self._clock(), self._n_draft
        if self._ahead is None or launched.flight is None or n_draft != launched.n_draft:
            return None
        scheduler, allocator = self._parts.scheduler, self._parts.allocator
        self._pulls.settle()
        plan = scheduler.plan_ahead(launched.plan, self._endings, n_draft, self._model_steps)
        if plan is None:
            return None
        clear_blocks(self._parts.pool, allocator.take_uncleared())
        with self.progress.launching(plan.most_tokens, tuple(positions_of(plan))):
            flight = self._ahead.start_ahead(launched.flight, plan, n_draft)
            if flight is None:  # the blocks that the plan took stay with who will need them next
                self.progress.gave_up()
                return None
        lands = Running(partial(flight.landed, self._is_here), flight.layers)
        return InFlightStep(plan, n_draft, started, {}, {}, {}, *lands, flight, True)

    def _collect(self, launched: InFlightStep, tell_filled: TellFilled) -> _Landed:
        """Wait for the step, telling of last chunks' layers, then end what ended meanwhile.

        Who was ended from outside while its step was in flight leaves no other trace of that step:
        its rows are dropped and its blocks become free only now.
        """
        self._in_flight, launched = None, launched.settled(self._is_here)
        if self.options.overlap:
            self.progress.stepping(launched.plan.most_tokens, tuple(launched.positions))
        for request, *at in launched.told_by_layers():
            if self._is_here(request) and request.key not in self._endings:
                tell_filled(self._transfers.filled_so_far(request, *at))
        snapshot = launched.landed()
        self.progress.output()
        failed = self._failed(launched, snapshot)
        endings = {f.key: Ending(Finish.ERROR, f.code, f.message) for f in failed} | self._endings
        snapshot, self._endings = snapshot.without(endings), {}
        for key, ending in endings.items():
            self._terminals.append(Terminal(key, launched.positions[key], *ending))
            self._forget(self._requests[key])
        for row in snapshot.rows:
            if row.prefilled is not None:
                self._parts.scheduler.hold(self._requests[row.key])
            elif row.finish is not Finish.NONE:
                self._forget(self._requests[row.key])
        terminals, self._terminals = tuple(self._terminals), []
        imports = tuple(state for key, state in launched.imports.items() if key not in endings)
        prompts = [c.request for c in launched.plan.prefill if self._is_here(c.request)]
        filled = self._transfers.filled([r for r in prompts if r.phase is Phase.RUNNING])
        return _Landed(launched, snapshot, terminals, imports, filled, failed)

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
            if key not in self._endings
        )

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
        handoffs = self._transfers.export_some(self._is_here)
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

    def _check_new(self, key: RequestKey) -> None:
        if key in self._requests or any(terminal.key == key for terminal in self._terminals):
            raise EngineRefusedError(ErrorCode.INVALID_REQUEST, f"request {key} is already held")
        if self._parts.scheduler.is_full:
            message = f"{self.options.max_waiting} requests are waiting"
            raise EngineRefusedError(ErrorCode.QUEUE_FULL, message)

    def _enqueue(self, request: RequestState) -> None:
        self._requests[request.key] = request
        self._parts.scheduler.enqueue(request)

    def _end(
        self, key: RequestKey, finish: Finish, code: ErrorCode | None = None, message: str = ""
    ) -> bool:
        request = self._requests.get(key)
        if request is None or key in self._endings:
            return False
        if self._in_flight is not None and self._in_flight.carries(request):
            self._endings[key] = Ending(finish, code, message)
            return True
        self._terminals.append(Terminal(key, request.n_output, finish, code, message))
        self._forget(request)
        return True

    def _is_here(self, request: RequestState) -> bool:
        return self._requests.get(request.key) is request

    def _forget(self, request: RequestState) -> None:
        self._parts.scheduler.remove(request)
        del self._requests[request.key]
