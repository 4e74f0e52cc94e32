"""Starts the processes of a local deployment, restarts those that die, and ends them all together.

One thread, one selector: children's readiness pipes, their exits (through pidfds) and the restart
timers. A child that dies soon after its start waits longer each time, so a broken one does not
spin. Knows commands and processes, nothing of engines or sockets.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton_worker.config import dump_config
from baton_worker.local.layout import ProcessPlan
from baton_worker.readiness import EXIT_BAD_CONFIG, Ready

log = logging.getLogger(__name__)

_FIRST_RESTART_SECONDS = 0.2
_LONGEST_RESTART_SECONDS = 5.0
_HEALTHY_AFTER_SECONDS = 10.0
_TERM_SECONDS = 6.0
_TICK_SECONDS = 0.2


@dataclass(slots=True)
class Child:
    """One process of the deployment, through all its lives."""

    plan: ProcessPlan
    config_path: Path
    process: subprocess.Popen[bytes] | None = None
    ready: Ready | None = None
    started_at_seconds: float = 0.0
    restart_at_seconds: float | None = None
    quick_deaths: int = 0


@dataclass(frozen=True, slots=True)
class Reports:
    """Who hears of changes: each callable gets the child, `died` its exit code too."""

    became_ready: Callable[[Child], None]
    died: Callable[[Child, int], None]


class Supervisor:
    """Runs `plans` until `stop` or a signal, with their configurations in `folder`; see `run`."""

    def __init__(
        self, plans: list[ProcessPlan], reports: Reports, log_options: list[str], folder: Path
    ) -> None:
        self._folder = folder
        self._reports = reports
        self._log_options = log_options
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self.has_failed = False
        self.children = [self._child(plan) for plan in plans]

    def _child(self, plan: ProcessPlan) -> Child:
        path = self._folder / f"{plan.name}.yaml"
        path.write_bytes(dump_config(plan.config))
        return Child(plan, path)

    def stop(self) -> None:
        """Make `run` end; safe in a signal handler."""
        self._stopping = True

    def run(self, on_tick: Callable[[], None]) -> None:
        """Start everything and keep it running; `on_tick` is called a few times a second."""
        try:
            for child in self.children:
                self._start(child)
            while not self._stopping:
                for key, _ in self._selector.select(_TICK_SECONDS):
                    key.data()
                self._restart_due()
                on_tick()
        finally:
            self._end_all()
            self._selector.close()

    def _start(self, child: Child) -> None:
        read_fd, write_fd = os.pipe()
        command = [
            sys.executable,
            "-m",
            "baton_worker.main",
            *self._log_options,
            child.plan.role,
            "--config",
            str(child.config_path),
            "--ready-fd",
            str(write_fd),
            "--with-parent",
        ]
        child.process = subprocess.Popen(  # noqa: S603 - our own program
            command,
            env=os.environ | child.plan.environment,
            pass_fds=[write_fd],
            stdin=subprocess.DEVNULL,
            stdout=2,  # a program may read ours, and a library says its last words there
            start_new_session=True,
        )
        os.close(write_fd)
        child.ready, child.restart_at_seconds = None, None
        child.started_at_seconds = time.monotonic()
        self._watch(read_fd, lambda: self._on_ready(child, read_fd))
        exit_fd = os.pidfd_open(child.process.pid)
        self._watch(exit_fd, lambda: self._on_exit(child, exit_fd))

    def _watch(self, fd: int, callback: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def _unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def _on_ready(self, child: Child, fd: int) -> None:
        line = os.read(fd, 65536)
        self._unwatch(fd)
        if line:  # an empty read means that the child died before it was ready
            child.ready = msgspec.json.decode(line, type=Ready)
            self._reports.became_ready(child)

    def _on_exit(self, child: Child, fd: int) -> None:
        self._unwatch(fd)
        if child.process is None:
            return
        code = child.process.wait()
        child.process, child.ready = None, None
        lived = time.monotonic() - child.started_at_seconds
        child.quick_deaths = 0 if lived > _HEALTHY_AFTER_SECONDS else child.quick_deaths + 1
        pause = min(_FIRST_RESTART_SECONDS * 2**child.quick_deaths, _LONGEST_RESTART_SECONDS)
        child.restart_at_seconds = time.monotonic() + pause
        if code == EXIT_BAD_CONFIG:
            self.has_failed = self._stopping = True
        self._reports.died(child, code)

    def _restart_due(self) -> None:
        now = time.monotonic()
        for child in self.children:
            if child.restart_at_seconds is not None and child.restart_at_seconds <= now:
                self._start(child)

    def _end_all(self) -> None:
        """SIGTERM to all, then SIGKILL to whoever is left."""
        running = [c.process for c in self.children if c.process is not None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _TERM_SECONDS
        for process in running:
            try:
                process.wait(max(0.05, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("killing a process that did not end", extra={"pid": process.pid})
                process.kill()
                process.wait()
