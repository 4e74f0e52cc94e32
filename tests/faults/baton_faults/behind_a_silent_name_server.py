"""A worker's link whose name server never answers, and how long it leaves a live gateway alone.

    python -m baton_faults.behind_a_silent_name_server

Runs in a mount namespace of its own. One gateway of two is called by a name, the other by its
address. Ends with 0 if the connection to that one carried on, with 77 if it could not be tried.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import tempfile
from pathlib import Path

import zmq

from baton_worker.link.contexts import Contexts
from baton_worker.link.sockets import dealer

SILENT = "127.0.0.77"
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MS_BIND = 0x00020000, 0x4000, 1 << 18, 4096
LOOKUP_SECONDS = 30
LACKING = 77


def hide_name_servers() -> socket.socket:
    """Let this process have one name server only, which takes questions and says nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "no mount namespace")
    with tempfile.NamedTemporaryFile("w", suffix=".conf", delete=False) as file:
        file.write(f"nameserver {SILENT}\noptions timeout:{LOOKUP_SECONDS} attempts:1\n")
    resolved = str(Path("/etc/resolv.conf").resolve()).encode()
    if libc.mount(file.name.encode(), resolved, None, _MS_BIND, None):
        raise OSError(ctypes.get_errno(), "resolv.conf cannot be replaced")
    Path(file.name).unlink()
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind((SILENT, 53))
    return silent


def carries_on(silent: socket.socket, endpoint: str, server: zmq.Socket[bytes]) -> None:
    """Say something over a live connection, and hear it, while a name is being looked up.

    Raises:
        zmq.Again: nothing came for as long as two thirds of a lookup.
        TimeoutError: nobody looked the name up.
    """
    contexts = Contexts(zmq.Context(io_threads=1))
    live = dealer(contexts.of(endpoint), 1.0, 600.0)
    live.connect(endpoint)
    live.send(b"?")
    _echo(server, live)
    named = "tcp://gone.invalid:5555"
    gone = dealer(contexts.of(named), 1.0, 600.0)
    gone.connect(named)
    silent.settimeout(60.0)
    silent.recv(4096)  # and now whoever asked waits
    for _ in range(20):
        live.send(b"?")
        _echo(server, live)


def _echo(server: zmq.Socket[bytes], live: zmq.Socket[bytes]) -> None:
    for end in (server, live):
        end.set(zmq.RCVTIMEO, int(1000 * LOOKUP_SECONDS * 2 / 3))
    server.send_multipart(server.recv_multipart())
    live.recv()


def main() -> int:
    """Return 0 if the live connection carried on."""
    silent = hide_name_servers()
    server = zmq.Context().socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    carries_on(silent, f"tcp://127.0.0.1:{port}", server)
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        code = LACKING if not isinstance(error, TimeoutError | zmq.ZMQError) else 1
    sys.stderr.flush()
    os._exit(code)  # no context is ended: that takes as long as the lookup
