"""Two network namespaces with a cable between them, made by the test that uses them.

The calling thread, and so all processes that it starts, moves into the left one; what is started
under `right` is on the other host. Both vanish with the processes in them: nothing has a name, and
nothing of the machine's own network is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from baton_faults.fleet import HERE
from baton_faults.wire import Carried, Side, Weather

LEFT, RIGHT = "10.77.0.1", "10.77.0.2"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 9000
_TUN = Path("/dev/net/tun")


def _libc_call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _namespace() -> int:
    """Return a descriptor of the calling thread's network namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _new_namespace(address: str) -> tuple[int, int]:
    """Move the thread to a new namespace; return descriptors of it and of its end of the cable."""
    _libc_call("unshare", _CLONE_NEWNET)
    device = os.open(_TUN, os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", b"cable", _IFF_TUN | _IFF_NO_PI))
    for words in (
        "link set lo up",
        f"address add {address}/30 dev cable",
        f"link set cable mtu {_MTU} txqueuelen 2000 up",
    ):
        subprocess.run(["/usr/bin/env", "ip", *words.split()], check=True, capture_output=True)
    return _namespace(), device


@dataclass
class Network:
    """The two hosts and what is between them.

    Attributes:
        under_right: words to run a program under so that it is on the right host.
    """

    under_right: tuple[str, ...]
    _orders: socket.socket

    def set(self, weather: Weather) -> Carried:
        """Change what happens to packets; return what was carried until then."""
        self._orders.sendall(msgspec.json.encode(weather) + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            part = self._orders.recv(4096)
            assert part, "the cable's program ended"
            line += part
        return msgspec.json.decode(line, type=Carried)

    def both(self, side: Side) -> Carried:
        """Let both directions be alike."""
        return self.set(Weather(side, side))

    def heal(self) -> Carried:
        """Carry everything at once again."""
        return self.set(Weather())


def missing_here() -> str:
    """Return what this machine lacks for namespaces with a cable; empty if nothing."""
    if os.geteuid() != 0:
        return "root"
    if not _TUN.exists():
        return str(_TUN)
    programs = [name for name in ("ip", "nsenter") if shutil.which(name) is None]
    return ", ".join(programs)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Move into the left of two new namespaces; back again in the end.

    Skips the test, and says what is missing, where that is not possible.
    """
    if lacking := missing_here():
        pytest.skip(f"no network namespaces without {lacking}: NOT TESTED")
    with contextlib.ExitStack() as stack:
        home = _namespace()
        stack.callback(os.close, home)
        stack.callback(_libc_call, "setns", home, _CLONE_NEWNET)
        try:
            right, right_end = _new_namespace(RIGHT)
        except OSError as error:
            pytest.skip(f"no network namespaces: {error}: NOT TESTED")
        left, left_end = _new_namespace(LEFT)
        ours, theirs = socket.socketpair()
        for fd in (right, right_end, left, left_end):
            stack.callback(os.close, fd)
        command = [sys.executable, "-m", "baton_faults.wire"]
        command += [str(fd) for fd in (left_end, right_end, theirs.fileno())]
        cable = subprocess.Popen(
            command,
            pass_fds=[left_end, right_end, theirs.fileno()],
            env=dict(os.environ) | {"PYTHONPATH": str(HERE)},
        )
        theirs.close()
        stack.callback(cable.wait)
        stack.callback(ours.close)
        yield Network(("nsenter", f"--net=/proc/{os.getpid()}/fd/{right}"), ours)
