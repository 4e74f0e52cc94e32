"""Loading a checkpoint onto a GPU against reading its files and copying them, at the real size.

    python3 tools/gpu.py run tests/bench/gpu/bench_load.py [--folder DIR] [--rounds N]
        [--gigabytes N] [--storage BF16|F16] [--cold DIR] [--start] [--sizes]
        [--json FILE]

Qwen3-8B's shape, random numbers, four shards. What the load is held to is the best plain way that
was found (`both`): threads that take pieces as they come, each reads into page-locked memory of its
own and has the copy engine take it, and nothing is checked or placed; it is tried with several
numbers of threads and sizes of pieces, all of it made before the clock runs, and the fastest
counts. `read` and `copy` are the halves of it. `baton` is `open_checkpoint` and
`load_device_weights`, from nothing: memory of the device and page-locked memory are given back
before each turn. Turns alternate. With --sizes it is tried with other numbers of readers, pieces
and threads than its own. With --start a whole engine is built. `cold` is of a smaller checkpoint in
a folder on a disk: its files are dropped from the page cache before each turn, and how much of them
was left there is told; what a hypervisor caches beneath the disk nobody here can drop.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[3] / "tools")]

import torch  # noqa: E402

import gpu  # noqa: E402
from baton_testing.random_checkpoint import (  # noqa: E402
    QWEN3_8B,
    drop_from_cache,
    write_checkpoint,
)
from baton_worker.config import (  # noqa: E402
    EngineConfig,
    ModelConfig,
    ProcessConfig,
    SpeculativeConfig,
)
from baton_worker.engine.backends.device import staging  # noqa: E402
from baton_worker.engine.backends.device.loading import load_device_weights  # noqa: E402
from baton_worker.engine.backends.torch.device import TorchDevice  # noqa: E402
from baton_worker.engine.build import build_engine  # noqa: E402
from baton_worker.engine.model import files  # noqa: E402
from baton_worker.engine.model.checkpoint import open_checkpoint  # noqa: E402
from baton_worker.engine.model.shape import load_shape  # noqa: E402
from baton_worker.engine.model.shards import WHOLE, Shard  # noqa: E402

PAGE = mmap.PAGESIZE
MIB = 1 << 20


class Way(NamedTuple):
    """How the plain way reads: so many threads, two buffers of so many bytes each."""

    readers: int
    piece_bytes: int


WAYS = (Way(12, 32 * MIB), Way(16, 32 * MIB))
COLD_GIGABYTES, COLD_ROUNDS = 3.0, 1


class Sizes(NamedTuple):
    """How a load reads: `staging`'s readers, pieces ahead and a piece, `files`' threads a read."""

    readers: int
    ahead: int
    piece_bytes: int
    threads: int

    def take(self) -> Sizes:
        """Have loads read so, and return how they did before."""
        before = Sizes(staging.READERS, staging.AHEAD, staging.PIECE_BYTES, files.THREADS)
        staging.READERS, staging.AHEAD, staging.PIECE_BYTES, files.THREADS = self
        return before


TRIED = [
    Sizes(4, 2, 16 * MIB, 4),
    Sizes(4, 4, 16 * MIB, 4),
    Sizes(4, 4, 32 * MIB, 4),
    Sizes(2, 2, 24 * MIB, 8),
    Sizes(8, 4, 8 * MIB, 2),
    Sizes(6, 4, 12 * MIB, 4),
    Sizes(16, 4, 8 * MIB, 1),
]


class Plain:
    """Reads every byte of the files and copies it to one piece of device memory, in no order."""

    def __init__(self, files: list[Path], memory: torch.Tensor, way: Way) -> None:
        self._files, self._memory, self._way = files, memory, way
        self._lanes = [
            [torch.empty(way.piece_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            for _ in range(way.readers)
        ]
        self._streams = [torch.cuda.Stream() for _ in range(way.readers)]

    def run(self, reads: bool = True, copies: bool = True) -> None:
        """Do it; the device has everything at the end."""
        descriptors = [os.open(path, os.O_RDONLY) for path in self._files]
        pieces = self._pieces(descriptors)
        lock = threading.Lock()
        failed: list[BaseException] = []

        def work(number: int) -> None:
            try:
                self._lane(number, pieces, lock, reads, copies)
            except BaseException as error:  # noqa: BLE001 - raised again below
                failed.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(self._way.readers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        for descriptor in descriptors:
            os.close(descriptor)
        if failed:
            raise failed[0]

    def _pieces(self, descriptors: list[int]) -> Iterator[tuple[int, int, int, int]]:
        to = 0
        for path, descriptor in zip(self._files, descriptors, strict=True):
            size = path.stat().st_size
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            for at in range(0, size, self._way.piece_bytes):
                count = min(self._way.piece_bytes, size - at)
                yield descriptor, at, to, count
                to += count

    def _lane(
        self,
        number: int,
        pieces: Iterator[tuple[int, int, int, int]],
        lock: threading.Lock,
        reads: bool,
        copies: bool,
    ) -> None:
        buffers = [(memory, memory.numpy(), torch.cuda.Event()) for memory in self._lanes[number]]
        stream, turn = self._streams[number], 0
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            descriptor, at, to, count = piece
            memory, host, taken = buffers[turn % 2]
            turn += 1
            taken.synchronize()
            if reads:
                os.posix_fadvise(descriptor, at, count, os.POSIX_FADV_WILLNEED)
                got = os.preadv(descriptor, [host[:count].data], at)
                assert got == count, f"{got} of {count} bytes at {at}"
            if copies:
                with torch.cuda.stream(stream):
                    self._memory[to : to + count].copy_(memory[:count], non_blocking=True)
                    taken.record(stream)


class Loads:
    """Baton's load of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._device = TorchDevice()

    def run(self, shard: Shard = WHOLE) -> float:
        """Load from nothing, drop what was loaded, and return the seconds of the load."""
        give_back()
        began = time.perf_counter()
        shape = load_shape(self._folder)
        weights = load_device_weights(
            self._device, open_checkpoint(self._folder), shape, "bfloat16", 0, shard
        )
        seconds = time.perf_counter() - began
        del weights
        return seconds


def give_back() -> None:
    """Return all memory that PyTorch keeps, the device's and the page-locked."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()


def resident_share(files: list[Path]) -> float:
    """Return the share of the files' pages that the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = total = 0
    for path in files:
        size = path.stat().st_size
        pages = -(-size // PAGE)
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
            told = (ctypes.c_ubyte * pages)()
            first = ctypes.byref(ctypes.c_char.from_buffer(mapped))
            if libc.mincore(first, ctypes.c_size_t(size), told):
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
            held += sum(memoryview(told).tobytes().translate(_LOWEST_BIT))
            total += pages
            del first
            gc.collect()
    return held / total


_LOWEST_BIT = bytes(value & 1 for value in range(256))


def resident_bytes(field: str) -> int:
    """Return what /proc says of this process: VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"/proc/self/status has no {field}")


def peak_of_a_load(loads: Loads) -> dict[str, int]:
    """Load once more, and return how much host memory was resident before and at most."""
    give_back()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident_bytes("VmRSS")
    loads.run()
    return {"before_bytes": before, "peak_bytes": resident_bytes("VmHWM")}


def alternated(
    files: list[Path], plain: Plain, loads: Loads, rounds: int, is_cold: bool
) -> dict[str, Any]:
    """Take turns; return seconds of each way, and what was left in the page cache."""
    seconds: dict[str, list[float]] = {"read": [], "copy": [], "both": [], "baton": []}
    left: list[float] = []
    for _ in range(rounds):
        for name, times in seconds.items():
            if name in ("read", "copy") and is_cold:
                continue
            if is_cold:
                drop_from_cache(files)
                left.append(resident_share(files))
            began = time.perf_counter()
            if name == "baton":
                times.append(loads.run())
                continue
            plain.run(reads=name != "copy", copies=name != "read")
            times.append(time.perf_counter() - began)
    ratios = [b / a for a, b in zip(seconds["both"], seconds["baton"], strict=True)]
    return {
        "seconds": seconds,
        "median": {name: statistics.median(times) for name, times in seconds.items() if times},
        "quiet": min(seconds["baton"]) / min(seconds["both"]),
        "ratio": statistics.median(ratios),
        "worst": max(ratios),
        "resident": left,
    }


def by_sizes(loads: Loads) -> dict[str, list[float]]:
    """Return the seconds of two loads by each of the sizes that are tried."""
    took = {}
    for sizes in TRIED:
        own = sizes.take()
        name = f"{sizes.readers} + {sizes.ahead} of {sizes.piece_bytes // MIB} MiB"
        took[f"{name}, {sizes.threads} threads"] = [loads.run() for _ in range(2)]
        own.take()
    return took


def best_way(files: list[Path], memory: torch.Tensor) -> tuple[Way, dict[str, float]]:
    """Return the fastest of the plain ways over files that are in the page cache, and all times."""
    took: dict[Way, float] = {}
    for way in WAYS:
        plain = Plain(files, memory, way)
        plain.run()
        times = []
        for _ in range(2):
            began = time.perf_counter()
            plain.run()
            times.append(time.perf_counter() - began)
        took[way] = min(times)
        del plain
    best = min(took, key=lambda way: took[way])
    return best, {f"{w.readers} x {w.piece_bytes // MIB} MiB": s for w, s in took.items()}


def start_seconds(folder: Path) -> float:
    """Build an engine of the folder, and return how long it took."""
    give_back()
    began = time.perf_counter()
    engine = build_engine(
        ProcessConfig(
            model=ModelConfig(path=str(folder)),
            speculative=SpeculativeConfig(method="none", num_speculative_tokens=0),
            engine=EngineConfig(device="gpu", max_running=64),
        )
    )
    seconds = time.perf_counter() - began
    engine.close()
    return seconds


def cold(folder: Path, way: Way, rounds: int) -> dict[str, Any]:
    """Measure a smaller checkpoint whose files come from the disk."""
    files = write_checkpoint(folder, QWEN3_8B, QWEN3_8B.layers_of(COLD_GIGABYTES))
    n_bytes = sum(path.stat().st_size for path in files)
    plain = Plain(files, torch.empty(n_bytes, dtype=torch.uint8, device="cuda"), way)
    found = alternated(files, plain, Loads(folder), rounds, is_cold=True)
    return {"bytes": n_bytes, "file system": file_system(folder)} | found


def file_system(folder: Path) -> str:
    """Return the kind of it that a folder is on."""
    command = ["stat", "--file-system", "--format=%T", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure(folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Write the checkpoint and yield what was found, by name."""
    n_layers = QWEN3_8B.layers_of(options.gigabytes) if options.gigabytes else QWEN3_8B.n_layers
    began = time.perf_counter()
    files = write_checkpoint(folder, QWEN3_8B, n_layers, options.storage)
    n_bytes = sum(path.stat().st_size for path in files)
    yield "checkpoint", {"bytes": n_bytes, "layers": n_layers, "file system": file_system(folder)}
    yield "seconds of writing", time.perf_counter() - began
    loads = Loads(folder)
    memory = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    way, took = best_way(files, memory)
    yield "plain ways", took
    plain = Plain(files, memory, way)
    yield "first load", loads.run()
    yield "warm", alternated(files, plain, loads, options.rounds, is_cold=False)
    yield "host memory", peak_of_a_load(loads)
    yield "rank 0 of 2", [loads.run(Shard(0, 2)) for _ in range(3)]
    if options.sizes:
        yield "sizes", by_sizes(loads)
    del plain, memory
    if options.cold:
        with tempfile.TemporaryDirectory(dir=options.cold) as name:
            yield "cold", cold(Path(name), way, COLD_ROUNDS)
    if options.start:
        yield "start", start_seconds(folder)


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, help="instead of all 36 layers' 16.4")
    parser.add_argument("--storage", choices=["BF16", "F16"], default="BF16")
    parser.add_argument(
        "--cold", type=Path, help="a folder on a disk, for files that are not cached"
    )
    parser.add_argument("--sizes", action="store_true", help="try other sizes than the load's own")
    parser.add_argument("--start", action="store_true", help="build an engine, too")
    parser.add_argument("--json", type=Path, default=Path("out/bench/gpu-load.json"))
    options = parser.parse_args()
    record: dict[str, Any] = {"machine": gpu.machine(), "commit": gpu.commit()}
    record |= {"cpus": os.cpu_count(), "storage": options.storage, "rounds": options.rounds}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for what, found in measure(Path(name), options):
            record[what] = found
            print(f"{what}: {json.dumps(found)}", flush=True)
            options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
