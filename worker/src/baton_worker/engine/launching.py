"""How the next step gets under way: planned, its KV imported, and given to what computes it.

Owns when there is one, and the order of a launch. It comes behind a step that has landed, or, over
a device, behind one that has not, when it goes on with who is in that. Knows no row and no result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from baton_worker.engine.draft_count import DraftCount
from baton_worker.engine.kv.pool import clear_blocks
from baton_worker.engine.parts import EngineParts
from baton_worker.engine.progress import Progress
from baton_worker.engine.scheduling.kv_ahead import KvAhead
from baton_worker.engine.scheduling.kv_transfers import (
    PULL_WAIT_SECONDS,
    Imported,
    KvTransfers,
)
from baton_worker.engine.scheduling.plans import StepPlan
from baton_worker.engine.scheduling.request_book import RequestBook
from baton_worker.engine.scheduling.requests import RequestState
from baton_worker.engine.step.in_flight import (
    AheadRunner,
    Flight,
    InFlightStep,
    Running,
    StepLauncher,
    positions_of,
)
from baton_worker.identity import RequestKey


@dataclass(slots=True, eq=False)
class Launches:
    """See the module.

    Attributes:
        overlap: a step is computed while the caller does something else.
        clock: monotonic seconds.
    """

    parts: EngineParts
    overlap: bool
    drafts: DraftCount
    requests: RequestBook
    transfers: KvTransfers
    pulls: KvAhead
    progress: Progress
    clock: Callable[[], float]
    _ahead: AheadRunner | None = field(init=False)
    _launcher: StepLauncher = field(init=False)

    def __post_init__(self) -> None:
        runner = self.parts.runner
        self._ahead = runner if self.overlap and isinstance(runner, AheadRunner) else None
        self._launcher = StepLauncher(self.overlap and self._ahead is None)

    def can_launch(self) -> bool:
        """Whether a step would do anything."""
        return self.parts.scheduler.can_progress(self.drafts.model_steps)

    def launch(self, is_told: Callable[[RequestKey], bool] | None = None) -> InFlightStep:
        """Plan a step, import some KV of handoffs (they decode once all is in), run.

        Args:
            is_told: given if a step before it, which has landed, has still to be told of; whether
                that tells of a key. Whose KV has come by now, or is copied for it, can decode in
                this one then, and be told of with that: a request has one row in what is told of a
                step.
        """
        started, n_draft = self.clock(), self.drafts.count
        if not self.can_launch():
            self.pulls.wait(PULL_WAIT_SECONDS)
        self.pulls.settle()
        scheduler = self.parts.scheduler
        is_behind = is_told is not None
        arrived = self.transfers.arrived(scheduler.incoming() if is_behind else ())
        bring_in = _nothing if is_told is None else partial(self._copy_in, arrived, is_told)
        plan = scheduler.plan(self.drafts.model_steps, bring_in)
        self._clear_new_blocks()
        _note_admitted(plan.admitted, started)
        positions = positions_of(plan)  # before it runs: that changes where they stand
        # Who had to make room is not in it: it is pulled anew, and refused then.
        refused = {key: why for key, why in arrived.refused.items() if key in positions}
        coming = [request for request in plan.imports if request.key not in refused]
        if is_behind:  # the others had what a step moves
            coming = [request for request in coming if self.transfers.pulls_beside(request)]
        imported = self.transfers.import_some(coming, may_wait=not plan.has_rows)
        return InFlightStep(
            plan=plan,
            n_draft=n_draft,
            started=started,
            imports=imported.complete,
            arrived=arrived.complete,
            refused=refused | imported.refused,
            positions=positions,
            running=self._run(plan, n_draft, tuple(positions)),
        )

    def _copy_in(
        self,
        arrived: Imported,
        is_told: Callable[[RequestKey], bool],
        requests: Iterable[RequestState],
    ) -> None:
        """Copy what a step moves of KV that does not come by itself, and add to `arrived` whose is
        complete with it, and whose is not fit or gone.
        """
        self._clear_new_blocks()
        transfers = self.transfers
        copied = transfers.import_some(
            [r for r in requests if not (transfers.pulls_beside(r) or is_told(r.key))]
        )
        arrived.complete.update(copied.complete)
        arrived.refused.update(copied.refused)

    def may_follow(self, before: InFlightStep) -> bool:
        """Whether a step might be launched behind one before that has landed."""
        is_ours = self._ahead is not None and before.running.flight is not None
        return is_ours and any(self.parts.scheduler.going_on(before.plan, self.requests.endings))

    def launch_behind(self, before: InFlightStep) -> InFlightStep | None:
        """Launch the step behind one that has not landed, if the device can know what it feeds, and
        if nobody waits to be let in. Handoffs whose KV is pulled beside the steps are let in at
        once: it comes while this waits for the step before, and they decode in the next.
        """
        started, n_draft = self.clock(), self.drafts.count
        if before.running.flight is None or n_draft != before.n_draft:
            return None
        self.pulls.settle()
        if self._let_in_early(started):
            return None
        plan = self.parts.scheduler.plan_ahead(
            before.plan, self.requests.endings, n_draft, self.drafts.model_steps
        )
        if plan is None:
            return None
        self._clear_new_blocks()
        flight = self._start_behind(before.running.flight, plan, n_draft)
        if flight is None:  # the blocks that the plan took stay with who will need them next
            return None
        return InFlightStep(
            plan=plan,
            n_draft=n_draft,
            started=started,
            running=self._flying(flight),
            is_ahead=True,
        )

    def _let_in_early(self, now: float) -> bool:
        """Let in who stands first in line and is pulled, and begin that; whether anybody was."""
        scheduler, transfers = self.parts.scheduler, self.transfers
        early = scheduler.admit_early(self.drafts.model_steps, transfers.pulls_beside)
        self._clear_new_blocks()
        _note_admitted(early, now)
        transfers.begin_pulls(early)
        return bool(early)

    def _clear_new_blocks(self) -> None:
        clear_blocks(self.parts.pool, self.parts.allocator.take_uncleared())

    def _run(self, plan: StepPlan, n_draft: int, keys: tuple[RequestKey, ...]) -> Running:
        if not self.overlap:  # it is run here
            self.progress.stepping(plan.most_tokens, keys)
        if not plan.has_rows:
            return self._launcher.launch(None)
        if self._ahead is None:
            return self._launcher.launch(partial(self.parts.runner.run, plan, n_draft))
        with self.progress.launching(plan.most_tokens, keys):
            return self._flying(self._ahead.start(plan, n_draft))

    def _start_behind(self, before: Flight, plan: StepPlan, n_draft: int) -> Flight | None:
        assert self._ahead is not None, "whose flight it is"
        with self.progress.launching(plan.most_tokens, tuple(positions_of(plan))):
            flight: Flight | None = self._ahead.start_ahead(before, plan, n_draft)
            if flight is None:
                self.progress.gave_up()
            return flight

    def _flying(self, flight: Flight) -> Running:
        return Running(partial(flight.landed, self.requests.holds), flight.layers, flight)


def _nothing(requests: Iterable[RequestState]) -> None:
    """Bring in nobody's KV."""


def _note_admitted(requests: Iterable[RequestState], now: float) -> None:
    """Note when requests were let in for the first time."""
    for request in requests:
        if request.admitted_at is None:
            request.admitted_at = now
