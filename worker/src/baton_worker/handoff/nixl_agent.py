"""NVIDIA's NIXL, which reads the memory of processes elsewhere: one agent of this process.

Owns how NIXL is asked - by its bindings, for its Python class sets its progress thread to spin,
half a processor's worth, where this one waits for events - and how its errors are told. Its backend
is UCX, which chooses among RDMA, a GPU's IPC, the host's memory and TCP. Knows no pool and no
request.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton_worker.engine.kv.memory import Region

INSTALL = "pip install 'baton-worker[nixl]'"
_PACKAGES = ("nixl_cu13", "nixl_cu12")
_WAKE_MICROSECONDS = 100_000
"""How long NIXL's thread waits when no event of UCX wakes it: UCX has missed some."""


class NixlError(Exception):
    """NIXL cannot do what it was asked; the text says what, and NIXL's word."""


class NixlMissingError(NixlError):
    """It is not installed."""


class Place(NamedTuple):
    """Memory that is read or written by address: of which agent ("" is this one), what kind."""

    agent: str
    device: int | None


class NixlAgent:
    """See the module. Methods may be called on any thread; none waits for another process.

    Args:
        name: what others know it by, for the whole of its life.
        is_rdma_only: nothing may go over TCP; without RDMA there is no agent then.

    Raises:
        NixlMissingError: NIXL is not installed.
        NixlError: it cannot be used, or not so.
    """

    def __init__(self, name: str, *, is_rdma_only: bool) -> None:
        self._nixl = _bindings()
        if is_rdma_only:
            check_environment(os.environ)
        self.name = name
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _WAKE_MICROSECONDS
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        with _Telling("make an agent"):
            self._agent = self._nixl.nixlAgent(name, config)
            options = {"engine_config": "TLS=^tcp"} if is_rdma_only else {}
            self._backend = self._agent.createBackend("UCX", options)

    def register(self, region: Region) -> None:
        """Let memory be read, or written by one's own reads; it stays as long as the process."""
        kind = self._kind(region.device)
        places = [(region.address, region.n_bytes, region.device or 0, "")]
        with _Telling(f"register {region.n_bytes} bytes"):
            self._agent.registerMem(self._nixl.nixlRegDList(kind, places), [self._backend])

    def metadata(self) -> bytes:
        """Return what another agent needs to read what was registered: a capability."""
        with _Telling("describe itself"):
            return bytes(self._agent.getLocalMD())

    def add(self, metadata: bytes) -> str:
        """Learn of another agent; returns its name."""
        with _Telling("take another agent's metadata"):
            name = self._agent.loadRemoteMD(metadata)
        return bytes(name).decode(errors="replace") if isinstance(name, bytes) else str(name)

    def remove(self, agent: str) -> None:
        """Forget another agent, no read of whose memory is under way."""
        with _Telling(f"forget {agent}"):
            self._agent.invalidateRemoteMD(agent)

    def read(self, theirs: Place, here: int | None, pieces: npt.NDArray[np.int64]) -> Reading:
        """Prepare to read memory of another agent.

        Args:
            here: the device that is read to, None for the host's memory.
            pieces: [pieces, 3]: address there, address here, bytes.
        """
        from_, to, sizes = pieces.T.astype(np.uint64)
        with _Telling(f"read {len(pieces)} pieces"):
            lists = [
                self._nixl.nixlXferDList(self._kind(device), _descriptors(at, sizes, device))
                for at, device in ((to, here), (from_, theirs.device))
            ]
            read = self._nixl.NIXL_READ
            handle = self._agent.createXferReq(read, *lists, theirs.agent, "", [self._backend])
        return Reading(self._nixl, self._agent, handle)

    def _kind(self, device: int | None) -> Any:
        return self._nixl.DRAM_SEG if device is None else self._nixl.VRAM_SEG


class Reading:
    """A transfer. It is released by `close`, which is for one that was not begun or has ended:
    what is under way cannot be taken back, for nobody tells when a device has stopped writing.
    """

    def __init__(self, nixl: Any, agent: Any, handle: int) -> None:
        self._nixl = nixl
        self._agent = agent
        self._handle = handle

    def expected_seconds(self) -> float:
        """Return how long UCX thinks that it takes over the way it has chosen; 0: no time."""
        with _Telling("estimate a read"):
            microseconds, _, _ = self._agent.estimateXferCost(self._handle)
        return float(microseconds) / 1e6

    def begin(self) -> bool:
        """Begin; returns whether it has ended at once."""
        with _Telling("begin to read"):
            return bool(self._agent.postXferReq(self._handle) == self._nixl.NIXL_SUCCESS)

    def has_ended(self) -> bool:
        """Return whether all is here.

        Raises:
            NixlError: it will not come; nothing is under way.
        """
        with _Telling("read"):
            return bool(self._agent.getXferStatus(self._handle) == self._nixl.NIXL_SUCCESS)

    def close(self) -> None:
        """Release it."""
        with _Telling("release a read"):
            self._agent.releaseXferReq(self._handle)


class Work(Protocol):
    """What is asked of NIXL, by this process or by one that is asked to; see `Reading`."""

    def begin(self) -> bool:
        """See `Reading.begin`."""

    def has_ended(self) -> bool:
        """See `Reading.has_ended`."""

    def close(self) -> None:
        """See `Reading.close`."""


def seen_to_its_end(work: Work) -> Iterator[None]:
    """Begin it, and yield until it has ended and is released.

    Raises:
        NixlError: it failed; nothing is under way.
    """
    try:
        has_ended = work.begin()
        while not has_ended:
            yield
            has_ended = work.has_ended()
    except NixlError:
        work.close()
        raise
    work.close()


def add_named(agent: NixlAgent, name: str, metadata: bytes) -> None:
    """Learn of another agent, which must be called so.

    Raises:
        NixlError: it cannot be learnt of, or is called otherwise.
    """
    found = agent.add(metadata)
    if found != name:
        agent.remove(found)
        raise NixlError(f"its agent is {found!r}, not named by its pool")


class _Telling:
    """Turns the errors of NIXL, which have classes of their own, into one that says what failed."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            name = type(error).__name__.removeprefix("nixl")
            raise NixlError(f"NIXL cannot {self._what}: {name} {error}") from error


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse an environment that lets UCX use TCP after all: it goes before what is asked here.

    Raises:
        NixlError: naming the variable.
    """
    value = environment.get("UCX_TLS", "")
    names = {name.strip() for name in value.lstrip("^").split(",")}
    allows_tcp = "tcp" not in names if value.startswith("^") else bool(names & {"tcp", "all"})
    if value and allows_tcp:
        raise NixlError(f"UCX_TLS is {value!r}, which lets KV go over TCP: unset it, or say ^tcp")


def _descriptors(
    at: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], device: int | None
) -> npt.NDArray[np.uint64]:
    return np.stack([at, sizes, np.full_like(at, device or 0)], axis=1)


def _bindings() -> Any:
    # It would speak on stdout; read once, on import.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    for package in _PACKAGES:
        try:
            importlib.import_module(package)
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError as error:
            if error.name != package:
                raise NixlError(f"{package} is installed and broken: {error}") from error
        except ImportError as error:
            raise NixlError(f"{package} is installed and cannot be used here: {error}") from error
    raise NixlMissingError(f"NIXL is not installed: {INSTALL}")
