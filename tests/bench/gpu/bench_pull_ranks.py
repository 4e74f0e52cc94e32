"""Measure how fast KV goes from the ranks of one worker to those of another, all copies by one.

    python tests/bench/gpu/bench_pull_ranks.py [--json FILE]

As `DeviceSharing` does it: rank 0 of decode, on the last GPU but one or the last, has mapped the
parts of prefill's ranks and of its own other rank, and has each GPU copy into its part. Every part
is made by a process of its own that sees only its GPU. Four GPUs: prefill's two ranks on the first
two; with two, each has a rank of either. The baseline of the same run is one GPU's pool pulled
whole into another's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from socket import socketpair
from statistics import median
from typing import Any

import numpy as np

from baton_worker.engine.backends.device.pool_sharing import (
    RESERVED_BLOCKS,
    DeviceSharing,
    SharedParts,
)
from baton_worker.engine.backends.torch.device import TorchDevice
from baton_worker.engine.kv.payload import KvShape

SHAPE = KvShape(36, 8, 16, 128, 1024, "bfloat16", is_by_block=True)
"""16,384 tokens of Qwen3-8B."""
N_BLOCKS = 512
ROUNDS = 15
CASES = ((1, 1), (2, 2), (1, 2), (2, 1))


class Part:
    """A part of a pool on a GPU that this process may not see."""

    def __init__(self, gpu: int, ranks: int) -> None:
        ours, theirs = socketpair()
        command = [sys.executable, __file__, "--part", str(theirs.fileno()), "--ranks", str(ranks)]
        visible = {"CUDA_VISIBLE_DEVICES": str(gpu)}
        self._process = subprocess.Popen(
            command, env=os.environ | visible, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._pipe = Connection(ours.detach())
        self.n_bytes = int(self._pipe.recv())
        self.descriptor = int(recv_handle(self._pipe))

    def filled(self, value: int) -> None:
        """Have all of its bytes set."""
        self._pipe.send(value)
        self._pipe.recv()

    def is_filled(self, block: int, values: Any) -> bool:
        """Whether a block holds these bytes, head after head."""
        self._pipe.send((block, values))
        return bool(self._pipe.recv())

    def close(self) -> None:
        """End its process."""
        self._pipe.close()
        self._process.wait(60)


def be_a_part(descriptor: int, ranks: int) -> int:
    """Own a part on the one GPU that is seen, until nobody asks any more."""
    pipe, device, shape = Connection(descriptor), TorchDevice(0), SHAPE.part(ranks)
    n_blocks = shape.n_blocks + RESERVED_BLOCKS
    shared = device.shared(n_blocks * shape.block_bytes)
    device.synchronise()
    pipe.send(shared.n_bytes)
    send_handle(pipe, shared.descriptor, 0)
    per_head = (n_blocks, shape.n_layers * 2, shape.kv_heads, -1)
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return 0
        if isinstance(asked, int):
            shared.tensor.fill_(asked)
            device.synchronise()
            pipe.send(True)
        else:
            block, values = asked
            found = shared.tensor[: n_blocks * shape.block_bytes].view(per_head)[block].cpu()
            wanted = np.asarray(values, np.uint8)[None, :, None]
            pipe.send(bool((found.numpy() == wanted).all()))


def measured(there: int, here: int, gpus: int) -> dict[str, Any]:
    """Pull 8,192 tokens in scattered blocks out of `there` ranks' parts into those of `here`."""
    first = gpus // 2 if gpus > 2 else 0
    if here == there == 1:
        first = gpus - 1
    device = TorchDevice(first)
    theirs = [Part(gpu, there) for gpu in range(there)]
    others = [Part(first + rank, here) for rank in range(1, here)]
    shape = SHAPE.part(here)
    own = device.shared((shape.n_blocks + RESERVED_BLOCKS) * shape.block_bytes)
    copiers = (device, *(TorchDevice(first + rank) for rank in range(1, here)))
    memory = [
        copier.map(part.descriptor, part.n_bytes)
        for copier, part in zip(copiers[1:], others, strict=True)
    ]
    descriptors = (own.descriptor, *(part.descriptor for part in others))
    parts = SharedParts((own.tensor, *memory), descriptors, own.n_bytes, copiers)
    sharing = DeviceSharing(device, SHAPE, parts)
    peer = sharing.attach([part.descriptor for part in theirs], theirs[0].n_bytes, SHAPE)
    for rank, part in enumerate(theirs):
        part.filled(11 + rank)
    rng = np.random.default_rng(1)
    times, calls = [], []
    for _ in range(ROUNDS):
        from_, to = (
            (rng.permutation(SHAPE.n_blocks)[:N_BLOCKS] + RESERVED_BLOCKS).tolist()
            for _ in range(2)
        )
        device.synchronise()
        started = time.perf_counter()
        copy = sharing.begin_pull(to, peer, from_)
        calls.append(time.perf_counter() - started)
        copy.wait()
        times.append(time.perf_counter() - started)
    heads = [11 + head * there // SHAPE.kv_heads for head in range(SHAPE.kv_heads)]
    each = SHAPE.kv_heads // here
    is_right = all(
        part.is_filled(to[0], heads[rank * each : (rank + 1) * each])
        for rank, part in enumerate(others, 1)
    )
    for part in (*theirs, *others):
        part.close()
    n_bytes = N_BLOCKS * SHAPE.block_bytes
    middle = median(times)
    return {
        "prefill_ranks": there,
        "decode_ranks": here,
        "is_right": is_right,
        "ms": round(middle * 1e3, 3),
        "gb_per_s": round(n_bytes / middle / 1e9, 1),
        "call_ms": round(median(calls) * 1e3, 3),
    }


def main() -> int:
    """Measure every case; 1 if bytes came wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        return be_a_part(options.part, options.ranks)
    import torch

    gpus = torch.cuda.device_count()
    if gpus < 2:
        sys.exit("two GPUs are needed")
    told = {"gpu": torch.cuda.get_device_name(0), "gpus": gpus, "tokens": 16 * N_BLOCKS}
    cases = []
    for there, here in CASES:
        cases.append(measured(there, here, gpus))
        print(json.dumps(cases[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(told | {"cases": cases}, indent=1))
    return int(not all(case["is_right"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
