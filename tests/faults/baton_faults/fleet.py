"""The processes of a deployment, each of which a test may kill, freeze, and start again.

Ports and names stay over restarts, as a pod's do in a StatefulSet, and each start may run another
version of the program.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar

import httpx
import msgspec
import psutil

from baton_faults.nursery import READY_FD, Nursery
from baton_faults.text import SimText
from baton_testing.processes import metric_in, pause_seconds, stand_still
from baton_worker.config import ProcessConfig
from baton_worker.engine.model.shape import load_shape
from baton_worker.local.layout import LocalOptions, plan_processes
from baton_worker.ports import port_of, reserve_port
from baton_worker.readiness import Ready

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]
MODEL = ROOT / "examples" / "tiny-mtp"
PATIENCE_SECONDS = 600.0
"""How long a condition may take on a busy machine; what never comes true is told by name then."""
HTTP = httpx.Client(
    timeout=PATIENCE_SECONDS, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
)
T = TypeVar("T")


def wait_until(wanted: str, look: Callable[[], T], claim: Callable[[T], bool]) -> T:
    """Look until what is seen satisfies the claim, and return it."""
    begun = time.monotonic()
    while not claim(seen := look()):
        waited = time.monotonic() - begun
        assert waited < PATIENCE_SECONDS, f"{wanted}: not so after {PATIENCE_SECONDS} s: {seen}"
        time.sleep(pause_seconds(waited))
    return seen


def sim_text(seed: int = 0) -> SimText:
    """Return what the example model's simulation says."""
    shape = load_shape(MODEL)
    return SimText(shape.vocab_size, shape.eos_token_ids, seed)


def set_fields(config: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that are not their defaults: what an older program knows of them."""
    found: dict[str, Any] = {}
    for known in msgspec.structs.fields(config):
        value = getattr(config, known.name)
        if value == known.default:
            continue
        is_section = isinstance(value, msgspec.Struct)
        found[known.name] = set_fields(value) if is_section else msgspec.to_builtins(value)
    return found


class Running(Protocol):
    """A process of ours: what of `subprocess.Popen` is used."""

    @property
    def pid(self) -> int:
        """Its id."""

    def poll(self) -> int | None:
        """Return how it ended, None while it runs."""

    def wait(self) -> int:
        """Wait for its end, and return how it ended."""

    def kill(self) -> None:
        """kill -9."""

    def send_signal(self, number: int) -> None:
        """Send it a signal."""


@dataclass
class Process:
    """One running process."""

    popen: Running
    ready: Ready

    @property
    def pid(self) -> int:
        """Its id."""
        return self.popen.pid

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum over all samples of a name with these labels."""
        return metric_in(HTTP.get(self.ready.metrics_url).text, name, **labels)

    def wait_metric(self, name: str, want: float, **labels: str) -> None:
        """Wait until a metric is so."""
        where = f"{self.ready.role} {name} {labels or ''} is {want:g}"
        wait_until(where, lambda: self.metric(name, **labels), lambda value: value == want)

    def n_descriptors(self) -> int:
        """Return how many files and sockets it has open."""
        return psutil.Process(self.pid).num_fds()

    def resident_bytes(self) -> int:
        """Return how much memory it has."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def forget_peak(self) -> None:
        """Let `peak_bytes` speak of what comes from now on."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Return the most memory that it ever had."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10


@dataclass(frozen=True)
class Start:
    """How one process is started.

    Attributes:
        config: what it is told.
        under: words to run the program under: a network namespace, say.
        program: what Python is asked to run.
        environment: what it gets beside this process's.
    """

    role: str
    config: ProcessConfig
    under: tuple[str, ...] = ()
    program: tuple[str, ...] = ("-m", "baton_worker.main")
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Fleet:
    """The processes by name; a name stays when its process is replaced.

    `nursery`: who starts workers, if it is not this process; then of this version alone.
    """

    folder: Path
    plans: dict[str, Start]
    running: dict[str, Process] = field(default_factory=dict)
    nursery: Nursery | None = None

    def __getitem__(self, name: str) -> Process:
        return self.running[name]

    @property
    def url(self) -> str:
        """The gateway's HTTP address."""
        return self["gateway"].ready.url

    @property
    def workers(self) -> list[str]:
        """Names of all but the gateways."""
        return [name for name, start in self.plans.items() if start.role != "gateway"]

    def start(self, *names: str, source: Path | None = None) -> None:
        """Start processes side by side and wait until each is ready.

        `source`: the folder of another version's packages.
        """
        begun = [(name, *self._begin(name, source)) for name in names]
        for name, popen, read_fd in begun:
            with os.fdopen(read_fd, "rb") as pipe:
                line = pipe.readline()
            assert line, f"{name} ended with {popen.wait()} before it was ready: {self._last(name)}"
            self.running[name] = Process(popen, msgspec.json.decode(line, type=Ready))

    def _last(self, name: str, n_characters: int = 300) -> str:
        """Return what a process said last."""
        log = self.folder / f"{name}.log"
        return log.read_text(errors="replace").strip()[-n_characters:] or "it said nothing"

    def _begin(self, name: str, source: Path | None) -> tuple[Running, int]:
        plan = self.plans[name]
        path = self.folder / f"{name}.yaml"
        path.write_bytes(msgspec.yaml.encode(set_fields(plan.config)))
        read_fd, write_fd = os.pipe()
        words = ["--log-level", "warning", plan.role, "--config", str(path), "--with-parent"]
        known = os.environ.get("PYTHONPATH")  # where nothing is installed, all modules
        path_of_modules = os.pathsep.join(str(p) for p in (source, HERE, known) if p)
        environment = dict(os.environ) | {"PYTHONPATH": path_of_modules} | dict(plan.environment)
        log = self.folder / f"{name}.log"
        if self.nursery is not None and plan.role != "gateway":
            told = [*words, "--ready-fd", READY_FD]
            running: Running = self.nursery.start(told, environment, log, write_fd)
        else:
            words = [*plan.under, sys.executable, *plan.program, *words]
            words += ["--ready-fd", str(write_fd)]
            with log.open("ab") as file:
                running = subprocess.Popen(
                    words,
                    pass_fds=[write_fd],
                    stdin=subprocess.DEVNULL,
                    stderr=file,
                    stdout=file,
                    env=environment,
                )
        os.close(write_fd)
        return running, read_fd

    def kill(self, *names: str) -> None:
        """kill -9, and wait until each is gone."""
        for name in names:
            self[name].popen.kill()
        for name in names:
            self[name].popen.wait()

    def freeze(self, name: str) -> None:
        """Let a process stand still; its sockets stay open."""
        stand_still(self[name].popen.pid)

    def thaw(self, name: str) -> None:
        """Let it go on."""
        self[name].popen.send_signal(signal.SIGCONT)

    def wait_usable(self, *names: str) -> None:
        """Wait until the gateway gives requests to these workers (all, when none is named)."""
        wanted = len(names or self.workers)

        def said() -> dict[str, Any]:
            try:
                return dict(HTTP.get(f"{self.url}/readyz").json())
            except httpx.HTTPError as error:
                return {"status": repr(error), "workers": []}

        wait_until(
            f"{wanted} workers are usable",
            said,
            lambda s: s["status"] == "ready" and len(s["workers"]) >= wanted,
        )

    def wait_empty(self) -> None:
        """Wait until no process owes anybody anything."""
        for name in self.workers:
            for metric in ("live_requests", "engine_kv_blocks_used", "engine_held_handoffs"):
                self[name].wait_metric(f"baton_{metric}", 0)
            self[name].wait_metric("baton_reserved_requests", 0)
        self["gateway"].wait_metric("baton_gateway_live_requests", 0)

    def ended(self) -> dict[str, int]:
        """Return the exit codes of processes that ended although nobody killed them."""
        codes = {name: process.popen.poll() for name, process in self.running.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def logs(self) -> str:
        """Return the end of what each process said."""
        found = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in found)


Change = Callable[[str, Start], Start]


def with_another_gateway(plans: dict[str, Start], link_port: int) -> dict[str, Start]:
    """Return the processes with a second gateway, `gateway-1`, which all workers link with too."""
    first = plans["gateway"].config
    endpoint = f"tcp://127.0.0.1:{link_port}"
    http = msgspec.structs.replace(first.gateway.http, port=0)
    config = msgspec.structs.replace(
        first,
        worker_id="gateway-1",
        link=msgspec.structs.replace(first.link, bind=endpoint, gateways=(endpoint,)),
        gateway=msgspec.structs.replace(first.gateway, http=http),
    )
    both = (*first.link.gateways, endpoint)

    def told(start: Start) -> Start:
        link = msgspec.structs.replace(start.config.link, gateways=both)
        return replace(start, config=msgspec.structs.replace(start.config, link=link))

    workers = {name: told(start) for name, start in plans.items() if start.role != "gateway"}
    return {"gateway": plans["gateway"], "gateway-1": Start("gateway", config), **workers}


@contextlib.contextmanager
def fleet(
    folder: Path,
    change: Change = lambda name, start: start,
    model: Path = MODEL,
    *,
    has_two_gateways: bool = False,
    nursery: Nursery | None = None,
    **options: Any,
) -> Iterator[Fleet]:
    """Start a gateway and workers, wait until all are usable, and kill them in the end.

    Args:
        folder: for configuration and logs.
        change: makes of how a process would be started plainly how it is.
        model: folder of the model, which is served under the example's name.
        has_two_gateways: start `gateway-1` beside `gateway`.
        nursery: who starts workers; it ends with the fleet.
        options: of `LocalOptions`.
    """
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(reserve_port("127.0.0.1")) for _ in range(3)]
        http, link, other = map(port_of, ports)
        asked = LocalOptions(str(model), served_name=MODEL.name, port=http, **options)
        # Of a short name: a Unix socket's path has 107 characters and no more.
        sockets = stack.enter_context(TemporaryDirectory()) if asked.share_kv else ""
        plain = plan_processes(asked, [link], {}, sockets)
        plans = {p.name: Start(p.role, p.config) for p in plain}
        if has_two_gateways:
            plans = with_another_gateway(plans, other)
        plans = {name: change(name, start) for name, start in plans.items()}
        running = Fleet(folder, plans, nursery=nursery)
        if nursery is not None:
            stack.callback(nursery.close)
        stack.callback(end, running)
        running.start(*running.plans)
        running.wait_usable()
        yield running


def previous_version(folder: Path) -> Path | None:
    """Unpack the packages of the commit before this one; None in a clone that has none.

    BATON_PREVIOUS names another commit or tag.
    """
    name = os.environ.get("BATON_PREVIOUS", "HEAD~1")
    command = ["git", "archive", "--format=tar", name, "worker/src"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "worker" / "src"


def end(running: Fleet) -> None:
    """Kill what runs, frozen or not."""
    for process in running.running.values():
        process.popen.kill()
    for process in running.running.values():
        process.popen.wait()
