"""A step under way: launched, and not yet collected.

Owns where a launched step runs: at once on the caller's thread, or on a thread of its own so that
the caller builds the step before's output meanwhile (Paddle, and NumPy and baton_ops over large
arrays, release the GIL while they compute). While a step is in flight nobody but it changes the
requests that it carries: the end of one of them is noted and takes effect when it has landed. Knows
no model and no queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, runtime_checkable

from baton_worker.engine.kv.layers import is_short
from baton_worker.engine.output.snapshot import NO_SNAPSHOT, StepSnapshot
from baton_worker.engine.scheduling.plans import StepPlan
from baton_worker.engine.scheduling.requests import RequestState
from baton_worker.identity import RequestKey
from baton_worker.messages import HandoffState
from baton_worker.records.columns import ErrorCode

Work = Callable[[], StepSnapshot]
Mark = Callable[[int], None]
"""Is told how many of the model's layers are done with."""
_NO_MORE = 0


class StepRunner(Protocol):
    """What advances sequences by a step, on whatever it computes."""

    def run(self, plan: StepPlan, n_draft: int, mark: Mark = ...) -> StepSnapshot:
        """Advance every sequence of `plan` and propose `n_draft` drafts for those that go on.

        Changes request state only by what was fed, emitted and proposed.

        Args:
            mark: told of layers (`kv.layers.marked_layers`) if the plan has chunks that are; who
                cannot tell leaves it.
        """


class Flight(Protocol):
    """A step that a device was given."""

    def layers(self) -> Iterator[int]:
        """Yield of a plan with chunks that are told by layers how many are done with, as they are.

        Raises:
            DeviceError: what `landed` would raise.
        """

    def landed(self, is_live: Callable[[RequestState], bool]) -> StepSnapshot:
        """Wait for its results and return its snapshot.

        Args:
            is_live: whether a request is still the engine's; others are neither changed nor told.
        """


@runtime_checkable
class AheadRunner(Protocol):
    """A runner whose steps compute elsewhere, so that one may be launched behind another."""

    def start(self, plan: StepPlan, n_draft: int) -> Any:
        """Launch what `StepRunner.run` does and return its `Flight`."""

    def start_ahead(self, behind: Any, plan: StepPlan, n_draft: int) -> Any:
        """Launch the step behind a flight that has not landed, before its tokens are known.

        Args:
            plan: by `Scheduler.plan_ahead`.

        Returns:
            Its `Flight`; None where that needs the tokens.
        """


class Running(NamedTuple):
    """A step that runs.

    Attributes:
        landed: waits for the forward pass and returns its snapshot; raises what it raised.
        layers: see `Flight.layers`.
        flight: the same for an `AheadRunner`.
    """

    landed: Work
    layers: Callable[[], Iterator[int]]
    flight: Flight | None = None


@dataclass(frozen=True, slots=True, eq=False)
class InFlightStep:
    """One launched step.

    Attributes:
        n_draft: K of this step.
        started: engine clock at the launch, seconds.
        imports: the handoffs whose import was completed at the launch.
        arrived: those whose KV had come before it was planned, told of with the step before.
        refused: those whose KV was found unfit or gone, as (code, why).
        positions: every request it carries, with the output position it stood at; nobody until
            it is settled, if it is ahead.
        running: how it is waited for.
        is_ahead: it was launched before the step before it had landed.
    """

    plan: StepPlan
    n_draft: int
    started: float
    running: Running
    imports: Mapping[RequestKey, HandoffState] = field(default_factory=dict)
    arrived: Mapping[RequestKey, HandoffState] = field(default_factory=dict)
    refused: Mapping[RequestKey, tuple[ErrorCode, str]] = field(default_factory=dict)
    positions: Mapping[RequestKey, int] = field(default_factory=dict)
    is_ahead: bool = False

    def landed(self) -> StepSnapshot:
        """Wait for the forward pass and return its snapshot; raise what it raised."""
        return self.running.landed()

    def told_by_layers(self) -> Iterator[tuple[RequestState, int, int, int]]:
        """Yield whose last chunk is computed from and to which positions up to which layer, as soon
        as it is; of a short chunk the first time alone.
        """
        chunks = self.plan.told_by_layers
        for number, n_layers in enumerate(self.running.layers() if chunks else ()):
            for chunk in chunks:
                if not number or not is_short(chunk.n_tokens):
                    yield chunk.request, chunk.start, chunk.stop, n_layers

    def settled(self, is_live: Callable[[RequestState], bool]) -> InFlightStep:
        """Return it as it is now that all before it have landed: who goes on in it, and where."""
        if not self.is_ahead:
            return self
        live = {r.key: r.n_output for r in _carried(self.plan) if is_live(r)}
        return replace(self, positions=live)

    def carries(self, request: RequestState) -> bool:
        """Whether it reads or changes this request, and not one of the same key that has ended."""
        return request in _carried(self.plan) if self.is_ahead else request.key in self.positions


class StepLauncher:
    """Runs steps one after the other.

    Args:
        overlap: run them on a thread of their own; it ends with this object.
    """

    def __init__(self, overlap: bool) -> None:
        self._executor = ThreadPoolExecutor(1, "engine-step") if overlap else None

    def launch(self, work: Callable[[Mark], StepSnapshot] | None) -> Running:
        """Start `work` (None: a step without a forward pass) and return how to wait for it.

        Its layers are told where it runs on a thread; else it is over when they might be.
        """
        if work is None:
            return Running(lambda: NO_SNAPSHOT, _no_layers)
        if self._executor is None:
            snapshot = work(lambda n_layers: None)
            return Running(lambda: snapshot, _no_layers)
        marks = SimpleQueue[int]()
        landed = self._executor.submit(_marked, work, marks.put).result
        return Running(landed, lambda: iter(marks.get, _NO_MORE))


def _marked(work: Callable[[Mark], StepSnapshot], mark: Mark) -> StepSnapshot:
    """Do work; who listens for its layers is told that there are no more, however it ends."""
    try:
        return work(mark)
    finally:
        mark(_NO_MORE)


def _no_layers() -> Iterator[int]:
    return iter(())


def positions_of(plan: StepPlan) -> dict[RequestKey, int]:
    """Return the requests that a launch of `plan` reads or changes, and where each one stands."""
    return {request.key: request.n_output for request in _carried(plan)}


def _carried(plan: StepPlan) -> tuple[RequestState, ...]:
    return (*plan.imports, *plan.decode, *(chunk.request for chunk in plan.prefill))
