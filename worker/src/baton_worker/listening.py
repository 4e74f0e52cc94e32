"""How long this process has listened: the time by which it may say that others are late.

While a process stands still it hears nobody, and that time is no one else's lateness. Pure: told
whenever what hears has its turn (`look`), with the caller's steady clock. Three rules:

1. From one look to the next it goes on with the caller's clock, and by `most_seconds` at most; more
   is a stall. So what began at one reading has been waited for as long as the difference to another
   says, whatever stood still.
2. What was said before a look is heard before the next one. So who is late is judged by a reading
   of one look ago (`judged`), and nobody is blamed for what lay there unheard.
3. Behind a stall there is more to catch up with: connections that it broke, credit that was not
   given. So for `catch_up_seconds` of listening `judged` goes no further than to where the stall
   began, and then on as if it had waited for nothing. It is never further behind than that and one
   look: stalls without end delay a verdict by no more.
"""

from __future__ import annotations


class ListeningClock:
    """See the module.

    Attributes:
        seconds: the reading at the last look; at first it is the caller's time.
        judged: the reading by which somebody may be late.
    """

    def __init__(self, now: float, *, most_seconds: float, catch_up_seconds: float = 0.0) -> None:
        self.seconds = self.judged = now
        self._most_seconds = most_seconds
        self._catch_up_seconds = catch_up_seconds
        self._caught_up_at = self._looked_at = now

    def at(self, now: float) -> float:
        """Return the reading at a time that is no earlier than the last look."""
        return self.seconds + min(max(now - self._looked_at, 0.0), self._most_seconds)

    def look(self, now: float, late_seconds: float = 0.0) -> bool:
        """Note that there is listening now, and whether it stood still before.

        Args:
            now: seconds of the caller's steady clock.
            late_seconds: how long something that was heard since the last look had lain there.
        """
        was_still = max(now - self._looked_at, late_seconds) > self._most_seconds
        heard = self.seconds
        self.seconds, self._looked_at = self.at(now), now
        if was_still:
            self._caught_up_at = self.seconds + self._catch_up_seconds
        is_behind = self.seconds < self._caught_up_at
        behind = self._catch_up_seconds + self._most_seconds if is_behind else 0.0
        self.judged = max(self.judged, heard - behind)
        return was_still
