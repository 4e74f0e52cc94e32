"""How much a connection may say: nothing honest comes near it.

Owns one allowance per connection that time refills. ZeroMQ queues whatever arrives (see `sockets`
for why it must), so a peer that talks faster than it is read would fill this process's memory. No
clock: `now` is seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict

BURST_MESSAGES = 20_000
MESSAGES_PER_SECOND = 4_000.0
"""A worker acknowledges each command and each heartbeat, and prefill says three words to decode for
each request, one for each further chunk of its prompt and up to three of the last one's layers:
hundreds a second.
"""
_REMEMBERED = 4096


class Pace:
    """See the module.

    Args:
        burst: messages that may come at once.
        per_second: messages that may come for ever.
    """

    def __init__(
        self, burst: float = BURST_MESSAGES, per_second: float = MESSAGES_PER_SECOND
    ) -> None:
        self._burst = burst
        self._per_second = per_second
        self._left: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def exceeded(self, route: bytes, now: float) -> bool:
        """Count one message of a connection; True when that is one too many."""
        left, at = self._left.get(route, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_second) - 1
        if left < 0:
            self._left.pop(route, None)
            return True
        self._left[route] = left, now
        self._left.move_to_end(route)
        if len(self._left) > _REMEMBERED:
            self._left.popitem(last=False)
        return False
