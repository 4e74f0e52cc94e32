"""The engine's requests by key, and what is still to be said of those that end.

Owns who is here. A request that ends from outside leaves at once, unless a launched step carries
it: that one reads and writes its blocks, so its end is noted and takes effect when the step has
landed. Either way it leaves a terminal, which the next result tells, and until then its key is
not free. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from baton_worker.engine.api import EngineRefusedError, FailedRequest
from baton_worker.engine.scheduling.requests import Ending, RequestState, Terminal
from baton_worker.engine.scheduling.scheduler import Scheduler
from baton_worker.identity import RequestKey
from baton_worker.records.columns import ErrorCode, Finish


class RequestBook:
    """See the module.

    Args:
        scheduler: has those that are here in its queues.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._requests: dict[RequestKey, RequestState] = {}
        self._endings: dict[RequestKey, Ending] = {}
        self._terminals: list[Terminal] = []

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests

    def __getitem__(self, key: RequestKey) -> RequestState:
        return self._requests[key]

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._requests)

    @property
    def endings(self) -> Mapping[RequestKey, Ending]:
        """Of those that a launched step carries, who ends when it has landed, and how."""
        return self._endings

    @property
    def has_terminals(self) -> bool:
        """Whether there is an end to be told."""
        return bool(self._terminals)

    def check_new(self, key: RequestKey) -> None:
        """Verify that a request of this key may enter.

        Raises:
            EngineRefusedError: it is here, or its end was not told yet; the queue is full.
        """
        if key in self._requests or any(terminal.key == key for terminal in self._terminals):
            raise EngineRefusedError(ErrorCode.INVALID_REQUEST, f"request {key} is already held")
        if self._scheduler.is_full:
            message = f"{self._scheduler.max_waiting} requests are waiting"
            raise EngineRefusedError(ErrorCode.QUEUE_FULL, message)

    def enter(self, request: RequestState) -> None:
        """Put a new request in line."""
        self._requests[request.key] = request
        self._scheduler.enqueue(request)

    def holds(self, request: RequestState) -> bool:
        """Whether it is here, and not another one of its key."""
        return self._requests.get(request.key) is request

    def is_staying(self, request: RequestState) -> bool:
        """Whether it is here, and no end of it is noted."""
        return self.holds(request) and request.key not in self._endings

    def end(
        self, key: RequestKey, ending: Ending, is_carried: Callable[[RequestState], bool]
    ) -> bool:
        """End a request from outside; False if it is not here, or ends already.

        Args:
            is_carried: whether a launched step carries a request.
        """
        request = self._requests.get(key)
        if request is None or key in self._endings:
            return False
        if is_carried(request):
            self._endings[key] = ending
        else:
            self._part(request, request.n_output, ending)
        return True

    def take_endings(
        self, failed: Iterable[FailedRequest], positions: Mapping[RequestKey, int]
    ) -> dict[RequestKey, Ending]:
        """End whom the step that has landed carried and who ended meanwhile, or failed in it.

        Args:
            failed: of whom no end is noted.
            positions: at which output position each one stood when it was launched.

        Returns:
            Who has left now.
        """
        endings = {f.key: Ending(Finish.ERROR, f.code, f.message) for f in failed} | self._endings
        self._endings = {}
        for key, ending in endings.items():
            self._part(self._requests[key], positions[key], ending)
        return endings

    def forget(self, request: RequestState) -> None:
        """Let a request go whose end is told elsewhere, or was."""
        self._scheduler.remove(request)
        del self._requests[request.key]

    def take_terminals(self) -> tuple[Terminal, ...]:
        """Return the ends that were not told yet; they count as told from now on."""
        terminals, self._terminals = tuple(self._terminals), []
        return terminals

    def check_integrity(self, held_elsewhere: Iterable[Sequence[int]]) -> None:
        """See `Scheduler.check_integrity`."""
        self._scheduler.check_integrity(self._requests, held_elsewhere)

    def _part(self, request: RequestState, position: int, ending: Ending) -> None:
        self._terminals.append(Terminal(request.key, position, *ending))
        self.forget(request)
