"""Workers that are forked from a process which has imported what they need, and run nothing else.

Importing a framework is most of a worker's start, and the same each time. Where workers are killed
by the hundred a nursery does it once: it forks, and the child runs `baton-worker` as any process
does. Owns that process and its words. A device is first touched in the child.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

READY_FD = "READY_FD"
"""Stands in a worker's words for the descriptor on which it says that it is ready."""
_WITHOUT_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""tvm-ffi asks PyTorch for devices when it is imported. Plainly, PyTorch starts CUDA to tell, and a
child of a process where it was started can use no device; told this, it asks the driver's NVML.
"""
_MOST_BYTES = 1 << 18
_LOOK_SECONDS = 0.005


class Forked:
    """A worker: what of `subprocess.Popen` a fleet uses."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return how it ended, None while it runs."""
        if self._code is None:
            self._code = self._nursery.ended(self.pid)
        return self._code

    def wait(self) -> int:
        """Wait for its end, and return how it ended."""
        while (code := self.poll()) is None:
            time.sleep(_LOOK_SECONDS)
        return code

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send it a signal while it runs; until `poll` told its end its number is no other's."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Nursery:
    """The process that forks; ends when this one does, and its workers with it.

    Args:
        modules: to import before the first fork; none may touch a device.
        environment: of the process; a child's is told with it.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-m", "baton_faults.nursery", str(theirs.fileno()), *modules]
        with theirs:
            self._process = subprocess.Popen(
                words,
                pass_fds=[theirs.fileno()],
                env=dict(environment) | _WITHOUT_CUDA,
                stdin=subprocess.DEVNULL,
            )
        self._answer()  # it has imported all

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path, ready_fd: int
    ) -> Forked:
        """Fork a worker with these words of `baton-worker`; see `READY_FD`."""
        told = {"words": list(words), "environment": dict(environment)}
        with log.open("ab") as file:
            answer = self._ask(told, [file.fileno(), ready_fd])
        return Forked(self, answer["pid"])

    def ended(self, pid: int) -> int | None:
        """Return how a child ended, None while it runs; after its end once."""
        code: int | None = self._ask({"ended": pid})["code"]
        return code

    def close(self) -> None:
        """End it, and what it has started."""
        self._socket.close()
        self._process.wait()

    def _ask(self, told: Mapping[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # there will be no answer, which says so
            socket.send_fds(self._socket, [json.dumps(told).encode()], fds)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        data = self._socket.recv(_MOST_BYTES)
        if not data:
            raise ChildProcessError(f"the nursery ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(data)
        return answer


def _run(words: Sequence[str], environment: Mapping[str, str], log_fd: int, ready_fd: int) -> int:
    """Be a worker; runs in the child."""
    from baton_worker.main import main

    os.environ.clear()
    os.environ.update(environment)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    return main([str(ready_fd) if word == READY_FD else word for word in words])


def _fork(told: Mapping[str, Any], fds: Sequence[int], ours: socket.socket) -> int:
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    code = 1
    try:
        ours.close()
        code = _run(told["words"], told["environment"], *fds)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ended(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _serve(ours: socket.socket) -> None:
    ours.send(b"{}")
    while True:
        data, fds, _, _ = socket.recv_fds(ours, _MOST_BYTES, 2)
        if not data:
            return
        told = json.loads(data)
        if "ended" in told:
            answer: dict[str, Any] = {"code": _ended(told["ended"])}
        else:
            answer = {"pid": _fork(told, fds, ours)}
        ours.send(json.dumps(answer).encode())


if __name__ == "__main__":
    for _name in sys.argv[2:]:
        importlib.import_module(_name)
    _serve(socket.socket(fileno=int(sys.argv[1])))
