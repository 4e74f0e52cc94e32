"""libzmq's threads: what may wait for a name server has one of its own.

libzmq looks a peer's name up on the thread that moves the bytes of all connections of its context,
each time it calls that peer, and waits for the answer. One name that is gone, behind a name server
that does not answer, would hold every other connection for ten seconds at a time. So connections to
addresses share a context, and each name has its own.
"""

from __future__ import annotations

import ipaddress
import threading
from urllib.parse import urlsplit

import zmq

Context = zmq.Context[zmq.Socket[bytes]]


def is_by_name(endpoint: str) -> bool:
    """Whether connecting there takes a look at a name server."""
    try:
        ipaddress.ip_address(urlsplit(endpoint).hostname or "")
    except ValueError:
        return True
    return ";" in endpoint  # a source address, behind which anything may stand


class Contexts:
    """See the module.

    Args:
        common: of all connections to addresses; whoever made it ends it.
    """

    def __init__(self, common: Context) -> None:
        self._common = common
        self._named: dict[str, Context] = {}

    def of(self, endpoint: str) -> Context:
        """Return the context for sockets that connect there."""
        if not is_by_name(endpoint):
            return self._common
        if endpoint not in self._named:
            self._named[endpoint] = zmq.Context(io_threads=1)
        return self._named[endpoint]

    def leave(self, endpoint: str) -> None:
        """Nothing connects there any more, and its sockets are closed."""
        context = self._named.pop(endpoint, None)
        if context is not None:
            _ending(context)

    def close(self, seconds: float) -> None:
        """End all, whose sockets are closed; wait so long for what they still have to send."""
        ending = [_ending(context) for context in self._named.values()]
        self._named.clear()
        for thread in ending:
            thread.join(seconds)


def _ending(context: Context) -> threading.Thread:
    """End a context, which waits for the name server as well."""
    thread = threading.Thread(target=context.term, name="zmq-context-end", daemon=True)
    thread.start()
    return thread
