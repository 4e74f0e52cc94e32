"""Operator processes outside the cluster, with the rights that the chart gives them."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from baton_cluster.processes import Processes, Started
from baton_cluster.waiting import NotReadyError, wait_until


class OperatorProcess:
    """One operator: start, stop or kill it, and look at its health and metrics."""

    def __init__(
        self, processes: Processes, identity: str, program: Path, environment: Mapping[str, str]
    ) -> None:
        """Prepare; start nothing."""
        self.identity = identity
        self._processes = processes
        self._program = program
        self._environment = dict(environment)
        self._process: Started | None = None

    @property
    def pid(self) -> int:
        """Return the pid of the running process."""
        assert self._process is not None, "the operator was not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Return whether it was started and has not ended."""
        return self._process is not None and self._processes.is_alive(self.identity)

    def start(self, **settings: str) -> None:
        """Start it; settings are BATON_ variables in lower case."""
        mine = {f"BATON_{name.upper()}": value for name, value in settings.items()}
        environment = {**os.environ, **self._environment, **mine}
        self._process = self._processes.start(self.identity, [self._program, "run"], environment)

    def stop(self) -> None:
        """Ask it to end, and wait."""
        if self._process is not None:
            self._processes.stop(self._process)
            self._process = None

    def kill(self) -> None:
        """End it as a crash would."""
        assert self._process is not None, "the operator was not started"
        self._processes.stop(self._process, signal.SIGKILL)
        self._process = None

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of its HTTP answer; status 0 when it does not answer."""
        url = f"http://127.0.0.1:{self._environment['BATON_HTTP_PORT']}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str) -> float:
        """Return the sum of the samples whose line begins with `name`.

        Raises:
            NotReadyError: it does not answer; no answer is not zero.
        """
        text = wait_until(f"{self.identity} shows metrics", self._metrics, 60, 0.05, self._gone)
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def _metrics(self) -> str:
        status, text = self.get("/metrics")
        return text if status == 200 else ""

    def wait_ready(self) -> None:
        """Wait until /readyz says so.

        Raises:
            NotReadyError: it does not; the text holds its answer and the end of its log.
        """
        self._wait("is ready", lambda: self.get("/readyz")[0] == 200)

    def wait_leading(self) -> None:
        """Wait until it leads and has read the cluster."""
        self.wait_ready()
        self._wait("leads", lambda: self.metric("baton_operator_leader ") == 1)

    def _wait(self, claim: str, look: Callable[[], bool]) -> None:
        try:
            wait_until(f"{self.identity} {claim}", look, 90, 0.05, self._gone)
        except NotReadyError as error:
            raise NotReadyError(f"{error}\n{self.get('/readyz')}\n{self.log()}") from error

    def log(self, lines: int = 60) -> str:
        """Return the end of its log."""
        return self._processes.log_tail(self.identity, lines)

    def _gone(self) -> str:
        return "" if self.is_running else f"it ended:\n{self.log()}"
