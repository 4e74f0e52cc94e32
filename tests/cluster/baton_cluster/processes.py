"""Child processes of a cluster: each with its log file, ended in reverse order, by pid.

Attached processes end with the process that started them, however that ends. Detached ones (a
cluster that a person plays with) are written to a file, with their start times, so that a later
command ends these very processes and never another that got the same pid.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton_cluster.waiting import NotReadyError, wait_until

_STOP_SECONDS = 60.0
"""What is killed before it has ended by itself leaves behind what it would have given back."""


@dataclass(frozen=True, slots=True)
class Started:
    """A process by name, pid and the kernel's start time (clock ticks since boot)."""

    name: str
    pid: int
    start_ticks: int


class Processes:
    """Starts processes into a folder and ends them."""

    def __init__(self, folder: Path, *, is_detached: bool = False) -> None:
        """Use `folder` for logs and, when detached, for the list of processes."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._is_detached = is_detached
        self._started: list[Started] = []
        self._handles: dict[int, subprocess.Popen[bytes]] = {}

    @classmethod
    def detached_before(cls, folder: Path) -> Processes:
        """Return the processes that an earlier command left in this folder."""
        known = cls(folder, is_detached=True)
        listing = folder / "processes.json"
        if listing.is_file():
            known._started = [Started(**entry) for entry in json.loads(listing.read_text())]
        return known

    def start(
        self, name: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None
    ) -> Started:
        """Start a process in its own session; its output goes to `<folder>/<name>.log`."""
        words = [str(word) for word in command]
        if not self._is_detached:
            words = ["setpriv", "--pdeathsig", "TERM", *words]
        with (self._folder / f"{name}.log").open("ab") as log:
            handle = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, env=dict(env) if env is not None else None,
            )  # fmt: skip
        started = Started(name, handle.pid, _start_ticks(handle.pid) or 0)
        self._handles[handle.pid] = handle
        self._started.append(started)
        self._save()
        return started

    def dead(self) -> str:
        """Return which process ended by itself and the end of its log, else an empty string."""
        for process in self._started:
            if not self._is_alive(process):
                return f"{process.name} ended:\n{self.log_tail(process.name)}"
        return ""

    def pids(self) -> list[int]:
        """Return the pids of those that run."""
        return [process.pid for process in self._started if self._is_alive(process)]

    def is_alive(self, name: str) -> bool:
        """Return whether the newest process of this name runs."""
        newest = [process for process in self._started if process.name == name][-1:]
        return any(self._is_alive(process) for process in newest)

    def log_tail(self, name: str, lines: int = 30) -> str:
        """Return the last lines of a process's log."""
        text = (self._folder / f"{name}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, process: Started, first: signal.Signals = signal.SIGTERM) -> None:
        """End one process and wait until it is gone; SIGKILL when it does not leave."""
        for number in (first, signal.SIGKILL):
            if self._is_alive(process):
                os.kill(process.pid, number)
                try:
                    wait_until(
                        f"{process.name} leaves", lambda: not self._is_alive(process), _STOP_SECONDS
                    )
                except NotReadyError:
                    continue
        self._started = [other for other in self._started if other != process]
        self._handles.pop(process.pid, None)
        self._save()

    def stop_named(self, name: str) -> None:
        """End every process of this name."""
        for process in [each for each in self._started if each.name == name]:
            self.stop(process)

    def stop_all(self) -> None:
        """End every process, the newest first."""
        for process in reversed(self._started.copy()):
            self.stop(process)

    def _is_alive(self, process: Started) -> bool:
        handle = self._handles.get(process.pid)
        if handle is not None:
            return handle.poll() is None
        return _start_ticks(process.pid) == process.start_ticks

    def _save(self) -> None:
        if self._is_detached:
            entries = [asdict(process) for process in self._started]
            (self._folder / "processes.json").write_text(json.dumps(entries))


def _start_ticks(pid: int) -> int | None:
    """Return field 22 of /proc/PID/stat, or None when there is no such process or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold spaces: fields count from behind it.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
