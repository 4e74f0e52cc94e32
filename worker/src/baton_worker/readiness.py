"""How a process tells whoever started it that it is ready, and ends when its parent does.

The supervisor passes the write end of a pipe as `--ready-fd`; the child writes one JSON line there
once. A pipe rather than a polled port: the child may listen on a port that the system chose.
"""

from __future__ import annotations

import ctypes
import os
import signal

import msgspec

EXIT_BAD_CONFIG = 78
"""Exit code (sysexits' EX_CONFIG) of a process whose configuration no restart can cure."""

_PR_SET_PDEATHSIG = 1


class Ready(msgspec.Struct, frozen=True):
    """One process is ready: what it is, where its metrics are, its HTTP address and its control
    socket, if any.
    """

    role: str
    pid: int
    metrics_url: str
    url: str = ""
    control: str = ""


def announce(ready: Ready, ready_fd: int) -> None:
    """Write the line and close the pipe; -1 means that nobody asked."""
    if ready_fd < 0:
        return
    os.write(ready_fd, msgspec.json.encode(ready) + b"\n")
    os.close(ready_fd)


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent goes, so that a killed supervisor leaves no
    orphan.

    Raises:
        OSError: the kernel refused.
        SystemExit: the parent is already gone.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise SystemExit("the supervisor is gone")
