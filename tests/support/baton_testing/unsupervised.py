"""The processes of a deployment without a supervisor.

Nobody restarts them, and no time limit that a busy machine could miss ends a request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from baton_testing.processes import HTTP, metric, wait_until
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import ProcessConfig, dump_config
from baton_worker.link.curve import generate_key_files
from baton_worker.local.layout import CurveFiles, LocalOptions, plan_processes, process_names
from baton_worker.ports import port_of, reserve_port
from baton_worker.readiness import Ready

FOREVER = 3600.0
NEVER_SILENT_SECONDS = 120.0
"""Less than tests wait: behind a stall of its own a gateway gives as long to connections that ended
too.
"""


@dataclass
class Process:
    """One process and where it is."""

    popen: subprocess.Popen[bytes]
    ready: Ready

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum over all samples of a name with these labels."""
        return metric(self.ready.metrics_url, name, **labels)

    def wait_metric(self, name: str, want: float, **labels: str) -> None:
        wait_until(f"{name} is {want:g}", lambda: self.metric(name, **labels), lambda v: v == want)

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)


class Unsupervised(dict[str, Process]):
    """The running processes by name."""

    @property
    def url(self) -> str:
        return self["gateway"].ready.url

    def kill(self, name: str) -> None:
        """kill -9, and wait until the process is gone."""
        self[name].signal(signal.SIGKILL)
        self[name].popen.wait()


def _keys(options: LocalOptions, folder: Path) -> dict[str, CurveFiles]:
    names = [name for name, _ in process_names(options)]
    pairs = [generate_key_files(folder / f"{n}.pub", folder / f"{n}.sec") for n in names]
    allowed = folder / "allowed"
    allowed.write_text("".join(pair.public.decode() + "\n" for pair in pairs))
    shared = (str(folder / "gateway.pub"), str(allowed))
    return {
        n: CurveFiles(str(folder / f"{n}.pub"), str(folder / f"{n}.sec"), *shared) for n in names
    }


def _start(
    name: str, role: str, config: ProcessConfig, folder: Path, stack: contextlib.ExitStack
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a process; return it and the pipe on which it says that it is ready."""
    path = folder / f"{name}.yaml"
    path.write_bytes(dump_config(config))
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "baton_worker.main", "--log-level", "warning", role]
    command += ["--config", str(path), "--with-parent", "--ready-fd", str(write_fd)]
    popen = subprocess.Popen(command, pass_fds=[write_fd], stdin=subprocess.DEVNULL)
    os.close(write_fd)
    stack.callback(popen.wait)
    stack.callback(popen.kill)
    return popen, read_fd


def _wait_usable(url: str, n_workers: int) -> None:
    """Wait until requests are given to every worker: the link knows them a moment earlier."""
    wait_until(
        f"{n_workers} workers are usable",
        lambda: HTTP.get(f"{url}/readyz").json(),
        lambda said: said["status"] == "ready" and len(said["workers"]) == n_workers,
    )


def _patient(config: ProcessConfig) -> ProcessConfig:
    """Nothing but the end of a connection may tell of a dead process, and KV may wait in line."""
    return msgspec.structs.replace(
        config,
        link=msgspec.structs.replace(config.link, dead_after_seconds=NEVER_SILENT_SECONDS),
        handoff=msgspec.structs.replace(config.handoff, deadline_seconds=FOREVER),
    )


def _of_model(config: ProcessConfig, folder: Path | None) -> ProcessConfig:
    if folder is None:
        return config
    model = msgspec.structs.replace(config.model, path=str(folder))
    return msgspec.structs.replace(config, model=model)


@contextlib.contextmanager
def unsupervised(
    folder: Path,
    models: Mapping[str, Path] = MappingProxyType({}),
    gateway: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> Iterator[Unsupervised]:
    """Start the processes, wait until the gateway has all workers, and kill them in the end.

    `models`: folders of other models than the example's, by the name of the process. `gateway`:
    fields of the gateway's section that differ.
    """
    options = LocalOptions(str(TINY_MODEL), served_name=TINY_MODEL.name, port=0)
    options = dataclasses.replace(options, **changes)
    curve = _keys(options, folder) if options.has_curve else {}
    running = Unsupervised()
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(reserve_port("127.0.0.1"))
        plans = plan_processes(options, [port_of(link)], curve)
        configs = [_of_model(_patient(p.config), models.get(p.name)) for p in plans]
        configs = [replace(c, gateway=replace(c.gateway, **gateway)) for c in configs]
        started = [
            _start(p.name, p.role, config, folder, stack)
            for p, config in zip(plans, configs, strict=True)
        ]
        for plan, (popen, read_fd) in zip(plans, started, strict=True):
            with os.fdopen(read_fd, "rb") as pipe:
                running[plan.name] = Process(
                    popen, msgspec.json.decode(pipe.readline(), type=Ready)
                )
        _wait_usable(running.url, len(plans) - 1)
        yield running
