"""Prompts that decode keeps no place for yet: held back, and computed by nobody.

A first token that is told to a client is a promise that decode must be able to keep. Owns what
waits for that, and what is asked of decode for it: by prefill over the KV channel, and by decode of
itself for a prompt that it computes. Runs on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_worker.engine.api import Engine
from baton_worker.handoff.api import KvTransport
from baton_worker.handoff.room import Wish
from baton_worker.identity import RequestKey
from baton_worker.messages import HANDOFF_PLACES, Submit
from baton_worker.records.columns import ErrorCode


@dataclass(slots=True)
class Placeless:
    """The prompts in line, `most` at once.

    `deadline_seconds`: how long decode may leave an ask unanswered.
    """

    engine: Engine
    transport: KvTransport
    most: int
    deadline_seconds: float
    _requests: dict[RequestKey, Submit] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._requests)

    def needs_place(self, request: Submit) -> bool:
        """Whether decode has to keep a place for it; not a mixed worker, nor one that is older."""
        if request.decode is None:
            return self.transport.has_places
        return HANDOFF_PLACES in request.decode.features

    def ask(self, request: Submit) -> bool:
        """Hold a prompt back and ask for its place; False when too many are held."""
        if len(self._requests) >= self.most:
            return False
        self._requests[request.key] = request
        n_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        wish = Wish(0, n_tokens, request.priority, request.turn)
        if request.decode is None:
            self.transport.ask_here(request.key, wish)  # none of its KV is to come
            return True
        wish = wish._replace(kv_bytes=self.engine.handoff_bytes(n_tokens))
        self.transport.ask(request.decode, request.key, wish, self.deadline_seconds)
        return True

    def take(self, key: RequestKey) -> Submit | None:
        """Return the prompt that may be computed now; None if it has left meanwhile."""
        return self._requests.pop(key, None)

    def leave(self, key: RequestKey, code: ErrorCode | None) -> None:
        """A request has left this worker: whatever place it had or asked for is free. `code`: as
        `KvTransport.leave` has it.
        """
        self._requests.pop(key, None)
        self.transport.leave(key, code=code)
