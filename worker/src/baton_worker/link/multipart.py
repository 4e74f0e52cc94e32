"""Reading messages of several frames, of which a peer may send any number in one.

libzmq bounds how large a frame is, not how many a message has: five million empty ones are 10 MB to
send, and minutes of this thread to make a list of. Owns how much of a message is looked at, and
that the rest of one that is too long is thrown away in pieces, between which other work goes on.
"""

from __future__ import annotations

import zmq

_SKIPPED_AT_ONCE = 64


class Multipart:
    """The messages of one socket.

    Args:
        socket: read by nobody else.
        most_frames: of a message that is given out whole, route included.
    """

    def __init__(self, socket: zmq.Socket[bytes], most_frames: int) -> None:
        self._socket = socket
        self._most_frames = most_frames
        self._is_skipping = False

    def take(self) -> list[zmq.Frame]:
        """Return the next message; of one that is too long `most_frames + 1` frames, and no more.

        Nothing while the rest of that is thrown away, a piece with each call.

        Raises:
            zmq.Again: no message waits.
        """
        if self._is_skipping:
            self._skip()
            return []
        frames = [self._next()]
        while frames[-1].more:
            if len(frames) > self._most_frames:
                self._is_skipping = True
                break
            frames.append(self._next())
        return frames

    def _skip(self) -> None:
        for _ in range(_SKIPPED_AT_ONCE):
            if not self._next().more:
                self._is_skipping = False
                return

    def _next(self) -> zmq.Frame:
        # Frames rather than bytes: only they tell which key authenticated the sender. All frames of
        # a message are here when the first one is.
        return self._socket.recv(zmq.NOBLOCK, copy=False)
