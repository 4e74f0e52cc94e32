"""Requests this worker still owes an ending, and where they are to be handed over.

Pure bookkeeping for the engine thread: every request enters once, leaves when its terminal row is
published or decode has taken it, and is found by the gateway process that owns it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_worker.identity import RequestKey, incarnation_of
from baton_worker.messages import DecodeTarget


@dataclass(slots=True)
class OpenRequests:
    """The open requests of one worker process."""

    _targets: dict[RequestKey, DecodeTarget | None] = field(default_factory=dict, init=False)
    _ending: set[RequestKey] = field(default_factory=set, init=False)
    _of_incarnation: dict[int, dict[RequestKey, None]] = field(default_factory=dict, init=False)

    def enter(self, key: RequestKey, target: DecodeTarget | None = None) -> None:
        """Note a request; `target` is set when it is to be handed over."""
        self._of_incarnation.setdefault(incarnation_of(key.handle), {})[key] = None
        self._targets[key] = target

    def target(self, key: RequestKey) -> DecodeTarget | None:
        """Return where the request goes after its first token; None if it stays or is unknown."""
        return self._targets.get(key)

    def holds(self, key: RequestKey) -> bool:
        """Whether the request is open here."""
        return key in self._targets

    def end(self, key: RequestKey) -> None:
        """Note that the engine will give a request's terminal row: no other may be made."""
        if key in self._targets:
            self._ending.add(key)

    def is_ending(self, key: RequestKey) -> bool:
        """Whether a terminal row is on its way."""
        return key in self._ending

    def leave(self, key: RequestKey) -> bool:
        """Forget a request; False if it was not here."""
        if key not in self._targets:
            return False
        del self._targets[key]
        self._ending.discard(key)
        incarnation = incarnation_of(key.handle)
        del self._of_incarnation[incarnation][key]
        if not self._of_incarnation[incarnation]:
            del self._of_incarnation[incarnation]
        return True

    def incarnations(self) -> list[int]:
        """Return the gateway processes that have open requests here."""
        return list(self._of_incarnation)

    def of_handle(self, handle: int, up_to_attempt: int) -> list[RequestKey]:
        """Return the attempts of one request that an abort of `up_to_attempt` means."""
        candidates = (RequestKey(handle, attempt) for attempt in range(up_to_attempt + 1))
        return [key for key in candidates if key in self._targets]

    def of_incarnation(self, incarnation: int) -> list[RequestKey]:
        """Return every request of one gateway process."""
        return list(self._of_incarnation.get(incarnation, ()))

    def all(self) -> list[RequestKey]:
        """Return every open request."""
        return list(self._targets)

    def __len__(self) -> int:
        return len(self._targets)
