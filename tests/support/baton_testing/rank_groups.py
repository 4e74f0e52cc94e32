"""Tensor-parallel ranks on this machine's GPUs: in one process on streams, or a process each.

Owns their exchange buffers, how ranks in one process see each other's, how processes find each
other, and the ordered sum in PyTorch. Knows no test.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton_ops.ranks import Exchange, exchange_bytes, head_bytes

SECOND_NS = 1_000_000_000
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Multicast can put GPUs out of service that others share: every process of ranks is without it."""
_BLOCKS_OF_A_DEVICE = 264
"""That are resident at once for certain: two on each of 132 processors."""
_ROWS_PER_BLOCK = 256 * 16
"""Bytes of a part that a block takes at least."""


def ordered_sum(parts: Sequence[Any], dtype: Any) -> Any:
    """Return what every rank must have: in fp32 from rank 0's part on, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(dtype)


def skip_crowds(torch: Any, ranks: int) -> None:
    """Skip where more ranks would share a GPU than surely run at once, each on a queue of its own:
    two on a machine with one GPU, else four.
    """
    n_devices = torch.cuda.device_count()
    if ranks > n_devices * (2 if n_devices == 1 else 4):
        pytest.skip(f"{ranks} ranks are too many for {n_devices} CUDA devices")


class RankGroup:
    """Ranks of one process, each with a stream, on the machine's GPUs in turns."""

    def __init__(
        self, torch: Any, ranks: int, half_bytes: int, limit_ns: int = 5 * SECOND_NS
    ) -> None:
        self.torch, self.ranks, self.half_bytes = torch, ranks, half_bytes
        n_devices = torch.cuda.device_count()
        self.devices = [rank % n_devices for rank in range(ranks)]
        self._let_peers_read()
        size = exchange_bytes(half_bytes)
        self.buffers = [
            torch.zeros(size, dtype=torch.uint8, device=f"cuda:{device}") for device in self.devices
        ]
        addresses = torch.tensor([buffer.data_ptr() for buffer in self.buffers])
        self.exchanges = [Exchange(addresses, rank, half_bytes, limit_ns) for rank in range(ranks)]
        self.streams = [torch.cuda.Stream(device=device) for device in self.devices]
        self.synchronize()

    def _let_peers_read(self) -> None:
        """Copy between all pairs, at which PyTorch lets one device into the other's memory."""
        torch = self.torch
        for one in set(self.devices):
            for other in set(self.devices) - {one}:
                if not torch.cuda.can_device_access_peer(one, other):
                    raise RuntimeError(f"GPU {one} has no access to GPU {other}")
                torch.ones(1, device=f"cuda:{one}").to(f"cuda:{other}")

    def fits(self, part_bytes: int) -> bool:
        """Whether ranks that share a GPU surely run at once: each with two launches, as the next
        one's blocks may become resident early. Else they would wait for each other for ever.
        """
        shared = max(map(self.devices.count, self.devices))
        blocks = min(128, -(-part_bytes // _ROWS_PER_BLOCK))
        return shared == 1 or 2 * shared * blocks <= _BLOCKS_OF_A_DEVICE

    @contextmanager
    def rank(self, rank: int) -> Iterator[Any]:
        """Work on a rank's stream."""
        stream = self.streams[rank]
        with self.torch.cuda.device(self.devices[rank]), self.torch.cuda.stream(stream):
            yield stream

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """Do for every rank, on its stream, without waiting for any."""
        done = []
        for rank in range(self.ranks):
            with self.rank(rank):
                done.append(work(rank))
        return done

    def half(self, rank: int, half: int, shape: tuple[int, int], dtype: Any) -> Any:
        """Return the part at the beginning of a half of a rank's buffer."""
        first = head_bytes() + half * self.half_bytes
        size = shape[0] * shape[1] * dtype.itemsize
        return self.buffers[rank][first : first + size].view(dtype).view(shape)

    def errors(self) -> list[int]:
        """Return every rank's error, once all of them are through."""
        self.synchronize()
        return [int(buffer[:4].view(self.torch.int32)[0]) for buffer in self.buffers]

    def reset(self) -> None:
        """Make the buffers as they were before the first call."""
        self.synchronize()
        for buffer in self.buffers:
            buffer[: head_bytes()] = 0
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for all that runs on any GPU."""
        for device in set(self.devices):
            self.torch.cuda.synchronize(device)


def run_processes(program: Path, ranks: int, *arguments: str, seconds: float = 240) -> list[str]:
    """Run a program as so many ranks, each told its number as torchrun does; return the outputs.

    Raises:
        RuntimeError: one of them failed, upon which the others are stopped, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(ranks)]
        processes = [
            _started([sys.executable, str(program), *arguments], environment, log)
            for environment, log in zip(_environments(ranks), logs, strict=True)
        ]
        try:
            _await(processes, time.monotonic() + seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        outputs = [log.read_text() for log in logs]
    failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
    if failed:
        told = "\n".join(f"rank {rank}:\n{outputs[rank][-3000:]}" for rank in range(ranks))
        raise RuntimeError(f"of {ranks} ranks {failed} failed or were stopped\n{told}")
    return outputs


def _environments(ranks: int) -> list[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    path = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    shared = dict(os.environ) | NO_MULTICAST | found | path
    return [shared | {"RANK": str(rank)} for rank in range(ranks)]


def _started(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def _await(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """Return when all have ended, one has failed, or time is up."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return
        time.sleep(0.05)


class RankProcess:
    """This process as one of the ranks that `run_processes` started, with a GPU of its own.

    The buffers are mapped by PyTorch's symmetric memory: cuMemCreate and file descriptors.
    """

    def __init__(self, torch: Any, half_bytes: int, limit_ns: int = 5 * SECOND_NS) -> None:
        import torch.distributed as distributed
        from torch.distributed import _symmetric_memory as symmetric

        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", self.rank)
        torch.cuda.set_device(self.device)
        distributed.init_process_group("nccl", device_id=self.device)
        self.torch, self.distributed, self.half_bytes = torch, distributed, half_bytes
        size = exchange_bytes(half_bytes)
        self.buffer = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        self._mapped = symmetric.rendezvous(self.buffer, distributed.group.WORLD.group_name)
        self.buffer.zero_()
        begins = [int(pointer) for pointer in self._mapped.buffer_ptrs]
        within = self.buffer.data_ptr() - begins[self.rank]
        addresses = torch.tensor([begin + within for begin in begins])
        self.exchange = Exchange(addresses, self.rank, half_bytes, limit_ns)
        self._turn = 0
        self.meet()

    def meet(self) -> None:
        """Return once all ranks' GPUs are through."""
        self.torch.cuda.synchronize()
        self.distributed.barrier()
        self.torch.cuda.synchronize()

    def next_half(self) -> int:
        """Return the half that is next in turn."""
        self._turn += 1
        return self._turn % 2

    def half(self, half: int, shape: tuple[int, int], dtype: Any) -> Any:
        """Return the part at the beginning of a half."""
        first = head_bytes() + half * self.half_bytes
        size = shape[0] * shape[1] * dtype.itemsize
        return self.buffer[first : first + size].view(dtype).view(shape)

    def error(self) -> int:
        """Return this rank's error."""
        self.torch.cuda.synchronize()
        return int(self.buffer[:4].view(self.torch.int32)[0])

    def close(self) -> None:
        """Leave the group, all at once."""
        self.meet()
        self.distributed.destroy_process_group()
