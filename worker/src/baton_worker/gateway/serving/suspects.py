"""Requests that ended as suspect, known again when somebody sends them again: they may harm fewer
workers then, and at last none.

Pure; the caller gives the time. After one verdict a request is served as any other, but one worker
that fails under it ends it: who merely stood beside two deaths loses nothing by that. After a
second one it is refused for ten minutes. Copies of it that had begun when the first one fell may
have stood beside the same deaths: they are of the same verdict. What is kept is a digest of prompt
and parameters under a key of this process, without the seed, which is another one each time.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from typing import NamedTuple

import msgspec

from baton_worker.gateway.request import GenerationRequest

REMEMBERED_SECONDS = 600.0
MAX_REMEMBERED = 1024
_KEY_BYTES, _DIGEST_BYTES = 32, 16


class _Known(NamedTuple):
    n_verdicts: int
    prompt_tokens: int
    until: float


class Suspects:
    """See the module. `n_condemned` tells whether there has been a verdict since."""

    def __init__(self) -> None:
        self.n_condemned = 0
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    def condemn(self, request: GenerationRequest, known_verdicts: int, now: float) -> None:
        """Note that a request ended as suspect, which began when it had `known_verdicts`."""
        digest = self._digest(request)
        n_verdicts = max(known_verdicts + 1, self._verdicts(digest, now))
        self.n_condemned += 1
        until = now + REMEMBERED_SECONDS
        self._known[digest] = _Known(n_verdicts, request.prompt_tokens, until)
        self._known.move_to_end(digest)
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)

    def verdicts(self, request: GenerationRequest, now: float) -> int:
        """Return how often such a request has ended as suspect lately."""
        n_tokens = request.prompt_tokens
        if not any(known.prompt_tokens == n_tokens for known in self._known.values()):
            return 0  # a long prompt takes milliseconds to digest
        return self._verdicts(self._digest(request), now)

    def _verdicts(self, digest: bytes, now: float) -> int:
        known = self._known.get(digest)
        return known.n_verdicts if known is not None and now < known.until else 0

    def _digest(self, request: GenerationRequest) -> bytes:
        params = request.params
        sampling = msgspec.structs.replace(params.sampling, seed=0)
        asked = (request.prompts, sampling, params.logprobs, params.logprobs_k)
        encoded = msgspec.msgpack.encode(asked)
        return hashlib.blake2b(encoded, key=self._key, digest_size=_DIGEST_BYTES).digest()
