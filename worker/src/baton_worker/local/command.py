"""`baton-worker local`: start a deployment, show each process's state, stop on Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from baton_worker import addresses
from baton_worker.config import ConfigError
from baton_worker.config_errors import cannot_listen
from baton_worker.link.curve import generate_key_files
from baton_worker.local.layout import (
    GATEWAY,
    CurveFiles,
    LocalOptions,
    loopback_of,
    plan_processes,
    process_names,
)
from baton_worker.local.scratch import scratch_folder
from baton_worker.local.supervisor import Child, Reports, Supervisor
from baton_worker.ports import port_of, reserve_port
from baton_worker.readiness import EXIT_BAD_CONFIG


def run_local(options: LocalOptions, *, as_json: bool, log_options: list[str]) -> int:
    """Run the deployment until SIGINT or SIGTERM; return the exit code.

    Ports that nobody chose stay the deployment's, so that a gateway that died is back where its
    workers and clients look for it.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        curve = _make_keys(options, folder) if options.has_curve else {}
        if not options.port or options.gateways > 1:  # that share it, and with nobody else
            http = stack.enter_context(_reserved("--host", options.host, options.port))
            options = replace(options, port=port_of(http))
        if options.gateways > 1:
            stack.enter_context(_taken_for_sharing(options.port))
        links = [
            port_of(stack.enter_context(_reserved("link.bind", loopback_of(options))))
            for _ in range(options.gateways)
        ]
        plans = plan_processes(options, links, curve, str(folder))
        screen = _JsonLines() if as_json else _Status(options)
        reports = Reports(screen.ready, screen.died)
        supervisor = Supervisor(plans, reports, log_options, folder)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: supervisor.stop())
        screen.starting(supervisor.children)
        supervisor.run(on_tick=lambda: screen.tick(supervisor.children))
        screen.stopped()
    return 1 if supervisor.has_failed else 0


def _reserved(field: str, host: str, port: int = 0) -> socket.socket:
    try:
        return reserve_port(addresses.bindable_host(host), port)
    except OSError as error:
        where = f"{addresses.bracketed(host)}:{port}" if port else host
        raise ConfigError(cannot_listen(field, where, error.errno)) from error


def _taken_for_sharing(port: int) -> socket.socket:
    """Return what one deployment alone of this network namespace can hold for a port.

    Whose gateways share a port would share it with another deployment's that do: the port itself
    keeps nobody out before somebody listens.

    Raises:
        ConfigError: another one holds it.
    """
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0baton-gateways-on-port-{port}")
    except OSError as error:
        lock.close()
        raise ConfigError(
            f"--port is {port}, which the gateways of another deployment share: choose another"
        ) from error
    return lock


def _make_keys(options: LocalOptions, folder: Path) -> dict[str, CurveFiles]:
    """Write a key pair for every process, and one list that lets each worker be itself alone."""
    roles = {GATEWAY if role == GATEWAY else name: role for name, role in process_names(options)}
    names = list(roles)
    pairs = [generate_key_files(folder / f"{n}.public", folder / f"{n}.secret") for n in names]
    allowed = folder / "allowed"
    allowed.write_text(
        "".join(
            f"{pair.public.decode()} {name} role={roles[name]}\n"
            for name, pair in zip(names, pairs, strict=True)
            if roles[name] != GATEWAY
        )
    )
    return {
        name: CurveFiles(
            public_key=str(folder / f"{name}.public"),
            secret_key=str(folder / f"{name}.secret"),
            gateway_public_key=str(folder / f"{GATEWAY}.public"),
            allowed_keys=str(allowed),
        )
        for name in names
    }


def how_it_ended(code: int) -> str:
    """Return a process's end in words: its exit code, or the signal by name (SIGILL, say)."""
    if code >= 0:
        return f"ended with code {code}"
    known = -code in {number.value for number in signal.Signals}
    return f"ended with {signal.Signals(-code).name if known else f'signal {-code}'}"


class _JsonLines:
    """For programs: one line on stdout for each process that becomes ready."""

    def starting(self, children: list[Child]) -> None:
        """Nothing is ready yet."""

    def ready(self, child: Child) -> None:
        """Print the process."""
        if child.ready is not None:
            sys.stdout.write(msgspec.json.encode(child.ready).decode() + "\n")
            sys.stdout.flush()

    def died(self, child: Child, code: int) -> None:
        """Say so on stderr: stdout holds readiness alone."""
        sys.stderr.write(f"[local] {child.plan.name} {how_it_ended(code)}\n")

    def tick(self, children: list[Child]) -> None:
        """Nothing to refresh."""

    def stopped(self) -> None:
        """Nothing to add."""


@dataclass(slots=True)
class _Status:
    """For people: a line whenever a process changes, and where to point a client once all run."""

    options: LocalOptions
    _announced: bool = field(default=False)

    def starting(self, children: list[Child]) -> None:
        names = ", ".join(child.plan.name for child in children)
        self._line("starting", names)

    def ready(self, child: Child) -> None:
        if child.ready is not None:
            facts = f"pid {child.ready.pid}  metrics {child.ready.metrics_url}"
            if child.ready.control:
                facts += f"  control {child.ready.control}"
            self._line("ready", f"{child.plan.name:<10} {facts}")

    def died(self, child: Child, code: int) -> None:
        self._announced = False
        state = "giving up" if code == EXIT_BAD_CONFIG else "restarting"
        self._line(state, f"{child.plan.name} {how_it_ended(code)}")

    def tick(self, children: list[Child]) -> None:
        if self._announced or any(child.ready is None for child in children):
            return
        self._announced = True
        url = next(c.ready.url for c in children if c.ready is not None and c.ready.url)
        self._line("serving", f"{url}/v1  (Ctrl-C stops everything)")
        self._line("look", f"{url}/playground  (tokens as they stream)")

    def stopped(self) -> None:
        self._line("stopped", "all processes ended")

    def _line(self, state: str, text: str) -> None:
        sys.stdout.write(f"[local] {state:<10} {text}\n")
        sys.stdout.flush()
