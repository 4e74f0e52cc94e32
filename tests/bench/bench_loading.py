"""Loading a checkpoint against reading its files and copying them, which is the least it can take.

A checkpoint of random bits in the shape of a dense model, in several shards, is written once. Then
contenders take turns, so that a busy machine is busy for all:

    read      every byte of the files, by as many threads as a load has, in as large pieces
    copy      as many bytes from such a buffer to the device
    both      the two at once, nothing else: pieces are read ahead and copied in order
    baton     `open_checkpoint` and `load_device_weights`: keys checked, tensors placed, hashed

The device is memory of the host that was touched before, so that no contender pays for the first
touch, as none does on a GPU; a copy is the processor's, where a GPU's is its own. Ratios are of
times in this run: `quiet` of the fastest turn of either, `all` the median of each round's pair,
`worst` the largest of those. `cold` drops the files from the page cache before each turn, which the
kernel does for files that lie on a disk.

Run: python tests/bench/bench_loading.py [--gigabytes 1.0] [--rounds 5] [--folder DIR] [--json PATH]
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from baton_testing.random_checkpoint import (
    SMALL,
    drop_from_cache,
    write_checkpoint,
)
from baton_worker.engine.backends.device.loading import load_device_weights
from baton_worker.engine.backends.device.staging import AHEAD, PIECE_BYTES, READERS
from baton_worker.engine.model.checkpoint import open_checkpoint
from baton_worker.engine.model.files import THREADS
from baton_worker.engine.model.shape import load_shape

Bytes = npt.NDArray[np.uint8]


class _Done:
    def wait(self) -> None:
        """See `Event.wait`: what was copied is there."""


class HostDevice:
    """As much of `Device` as a load needs, over one piece of memory that is given out again."""

    def __init__(self, n_bytes: int) -> None:
        self.memory: Bytes = np.full(n_bytes, 1, np.uint8)
        self._given = 0

    def reset(self) -> None:
        """Take all memory back."""
        self._given = 0

    def empty(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        """See `Device.empty`."""
        kind = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        n_bytes = int(np.prod(shape)) * kind.itemsize
        start, self._given = self._given, self._given + -(-n_bytes // 64) * 64
        return self.memory[start : start + n_bytes].view(kind).reshape(shape)

    def rows(self, tensor: npt.NDArray[Any], start: int, stop: int) -> npt.NDArray[Any]:
        """See `Device.rows`."""
        return tensor[start:stop]

    def host(self, n_bytes: int) -> Bytes:
        """See `Device.host`."""
        return np.full(n_bytes, 1, np.uint8)

    def upload(self, source: npt.NDArray[Any], to: npt.NDArray[Any]) -> None:
        """See `Device.upload`."""
        np.copyto(to, source)

    def record(self) -> _Done:
        """See `Device.record`."""
        return _Done()

    def synchronise(self) -> None:
        """See `Device.synchronise`."""


def _pieces(files: list[Path], descriptors: list[int]) -> Iterator[tuple[int, int, int]]:
    for path, descriptor in zip(files, descriptors, strict=True):
        size = path.stat().st_size
        for at in range(0, size, PIECE_BYTES):
            yield descriptor, at, min(PIECE_BYTES, size - at)


def read_and_pass_on(files: list[Path], pass_on: Callable[[Bytes], None]) -> None:
    """Read every byte by as many threads as a load does, and pass pieces on in order."""
    descriptors = [os.open(path, os.O_RDONLY) for path in files]
    n_threads = READERS * THREADS
    buffers = [np.full(PIECE_BYTES, 1, np.uint8) for _ in range(n_threads + AHEAD)]
    waiting: collections.deque[tuple[Future[int], Bytes, int]] = collections.deque()

    def oldest() -> None:
        done, buffer, size = waiting.popleft()
        assert done.result() == size
        pass_on(buffer[:size])
        buffers.append(buffer)

    with ThreadPoolExecutor(n_threads) as readers:
        for descriptor, at, size in _pieces(files, descriptors):
            if not buffers:
                oldest()
            buffer = buffers.pop(0)
            done = readers.submit(os.preadv, descriptor, [buffer[:size].data], at)
            waiting.append((done, buffer, size))
        while waiting:
            oldest()
    for descriptor in descriptors:
        os.close(descriptor)


class Contenders:
    """What takes turns over the same files and the same device."""

    def __init__(self, folder: Path, files: list[Path]) -> None:
        self._folder, self._files = folder, files
        self.n_bytes = sum(path.stat().st_size for path in files)
        self._device = HostDevice(self.n_bytes + (64 << 20))

    def read(self) -> None:
        """Read alone."""
        read_and_pass_on(self._files, lambda piece: None)

    def copy(self) -> None:
        """Copy alone."""
        self._fill(lambda put: self._each(put))

    def _each(self, put: Callable[[Bytes], None]) -> None:
        source = np.full(PIECE_BYTES, 1, np.uint8)
        for start in range(0, self.n_bytes, PIECE_BYTES):
            put(source[: min(PIECE_BYTES, self.n_bytes - start)])

    def both(self) -> None:
        """Read and copy at once."""
        self._fill(lambda put: read_and_pass_on(self._files, put))

    def _fill(self, work: Callable[[Callable[[Bytes], None]], None]) -> None:
        at = 0

        def put(piece: Bytes) -> None:
            nonlocal at
            np.copyto(self._device.memory[at : at + len(piece)], piece)
            at += len(piece)

        work(put)
        assert at == self.n_bytes

    def baton(self) -> None:
        """Load."""
        self._device.reset()
        device: Any = self._device
        checkpoint = open_checkpoint(self._folder)
        load_device_weights(device, checkpoint, load_shape(self._folder), "bfloat16", 0)


@dataclass(frozen=True, slots=True)
class Measured:
    """One way's medians over rounds, in seconds; `quiet`, `ratio` and `worst` are of baton over
    both, `apart` of baton over read and copy.
    """

    storage: str
    cache: str
    n_bytes: int
    read: float
    copy: float
    both: float
    baton: float
    quiet: float
    ratio: float
    worst: float
    apart: float


def measure(storage: str, options: argparse.Namespace) -> Iterator[Measured]:
    """Write a checkpoint, time every contender over it, and remove it."""
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        n_layers = SMALL.layers_of(options.gigabytes)
        files = write_checkpoint(Path(name), SMALL, n_layers, storage)
        contenders = Contenders(Path(name), files)
        contenders.both()  # the files are in the cache, as far as there is room
        for cache in ("warm", "cold") if options.cold else ("warm",):
            yield _measured(contenders, files, storage, cache, options.rounds)


def _measured(
    contenders: Contenders, files: list[Path], storage: str, cache: str, rounds: int
) -> Measured:
    seconds: dict[str, list[float]] = {name: [] for name in ("read", "copy", "both", "baton")}
    for _ in range(rounds):
        for name, times in seconds.items():
            if cache == "cold":
                drop_from_cache(files)
            started = time.perf_counter()
            getattr(contenders, name)()
            times.append(time.perf_counter() - started)
    rows = list(zip(*seconds.values(), strict=True))
    ratios = [baton / both for _, _, both, baton in rows]
    apart = [baton / (read + copy) for read, copy, _, baton in rows]
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    return Measured(
        storage,
        cache,
        contenders.n_bytes,
        **middle,
        quiet=min(seconds["baton"]) / min(seconds["both"]),
        ratio=statistics.median(ratios),
        worst=max(ratios),
        apart=statistics.median(apart),
    )


def table(results: list[Measured]) -> str:
    """Return the results for people."""
    lines = [
        "stored | page cache | GB | read, s | copy, s | both, s | baton, s | baton/both: quiet | "
        "all | worst | baton/(read + copy)"
    ]
    lines += [
        f"{r.storage} | {r.cache} | {r.n_bytes / 1e9:.2f} | {r.read:.2f} | {r.copy:.2f} | "
        f"{r.both:.2f} | {r.baton:.2f} | {r.quiet:.2f} | {r.ratio:.2f} | {r.worst:.2f} | "
        f"{r.apart:.2f}"
        for r in results
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure both storage forms, print the table, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where it is written (the temporary folder)")
    parser.add_argument("--cold", action="store_true", help="also with the page cache dropped")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    results = [found for storage in ("BF16", "F16") for found in measure(storage, options)]
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    sys.stdout.write(table(results) + "\n")
    sys.stdout.write(f"peak of this process: {peak_bytes / 1e9:.2f} GB, the device among it\n")
    if options.json:
        document = {
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "python": platform.python_version(),
            "load": os.getloadavg(),
            "peak_bytes": peak_bytes,
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
