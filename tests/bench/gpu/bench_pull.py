"""Measure how fast KV blocks are pulled out of another process's pool, on another GPU.

    python tests/bench/gpu/bench_pull.py [--json FILE]

Two processes, a GPU each: one shares a pool (`TorchDevice.shared`), the other maps it and pulls
scattered blocks, as decode does. Each case is run in the same namespaces and, where `unshare` and
root allow it, with the puller as user 65532 without privileges in PID, IPC, network, UTS and mount
namespaces of its own, as an ordinary pod has them. The baseline of the same run is PyTorch's copy
from GPU to GPU within one process.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from baton_worker.engine.backends.torch.device import TorchDevice

POOL_BYTES = 4 << 30
BLOCK = 2 * 36 * 8 * 16 * 128 * 2
"""Bytes of 16 tokens of Qwen3-8B."""
CASES = {
    "8,192 tokens": (512, BLOCK),
    "512 tokens": (32, BLOCK),
    "one block": (1, BLOCK),
    "1.2 GB in one piece": (1, 512 * BLOCK),
    "512 pieces of 64 KiB": (512, 64 << 10),
}
ROUNDS = 15
APART = (
    "unshare --pid --ipc --net --uts --mount --mount-proc --fork "
    "setpriv --reuid 65532 --regid 65532 --clear-groups --no-new-privs --bounding-set=-all"
)


def main() -> int:
    """Share a pool, let pullers measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--pull", metavar="SOCKET", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pull:
        return _pull(options.pull)
    if torch.cuda.device_count() < 2:
        sys.exit("two GPUs are needed")
    found = {"copy_gb_per_s": _copy_rate(), "gpu": torch.cuda.get_device_name(0)}
    print(f"{found['gpu']}: PyTorch copies {found['copy_gb_per_s']:.0f} GB/s from 0 to 1")
    for name, words in (("same", ""), ("apart", APART)):
        found[name] = _measured(words)
        for case, numbers in found[name].items():
            print(f"{name:6} {case:24} {json.dumps(numbers)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def _copy_rate() -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0").random_()
    to = torch.empty_like(source, device="cuda:1")
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        started = time.perf_counter()
        to.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        times.append(time.perf_counter() - started)
    return float((1 << 30) / median(times) / 1e9)


def _measured(words: str) -> dict[str, Any]:
    """Return what a puller says that is started with `words` before its command."""
    if words and (os.getuid() or not shutil.which("unshare") or not shutil.which("setpriv")):
        return {"not run": "needs root, unshare and setpriv"}
    device = TorchDevice(0)
    shared = device.shared(POOL_BYTES)
    shared.tensor.random_()
    device.synchronise()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/pool"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(path)
        Path(folder).chmod(0o755)
        Path(path).chmod(0o777)
        listener.listen(1)
        listener.settimeout(60)
        command = [*words.split(), sys.executable, __file__, "--pull", path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as puller:
            try:
                connection, _ = listener.accept()
                descriptors = array.array("i", [shared.descriptor])
                beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
                sample = shared.tensor[-4096:].cpu().numpy().tobytes()
                connection.sendmsg([shared.n_bytes.to_bytes(8, "little") + sample], beside)
                told, _ = puller.communicate(timeout=120)
            except (TimeoutError, subprocess.TimeoutExpired, OSError) as error:
                puller.kill()
                return {"failed": repr(error)}
    os.close(shared.descriptor)
    return dict(json.loads(told.splitlines()[-1])) if told.strip() else {"failed": "said nothing"}


def _pull(path: str) -> int:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    message, beside, _, _ = connection.recvmsg(8192, socket.CMSG_SPACE(16))
    descriptor = int.from_bytes(beside[0][2][:4], sys.byteorder)
    n_bytes = int.from_bytes(message[:8], "little")
    device = TorchDevice(1)
    device.synchronise()
    started = time.perf_counter()
    memory = device.map(descriptor, n_bytes)
    found: dict[str, Any] = {"map": {"ms": round((time.perf_counter() - started) * 1e3, 2)}}
    pool = device.zeros((POOL_BYTES,), "uint8")
    device.pull(memory, pool, np.array([[POOL_BYTES - 4096, 0, 4096]])).wait()
    found["right"] = {"bytes": pool[:4096].cpu().numpy().tobytes() == message[8:]}
    for name, (count, size) in CASES.items():
        found[name] = _timed(device, memory, pool, count, size)
    print(json.dumps(found))
    return 0


def _timed(device: Any, memory: Any, pool: Any, count: int, size: int) -> dict[str, float]:
    rng = np.random.default_rng(1)
    places = POOL_BYTES // size
    calls, times = [], []
    for _ in range(ROUNDS):
        theirs, ours = (rng.choice(places, count, replace=False) * size for _ in range(2))
        pieces = np.stack([theirs, ours, np.full(count, size)], axis=1).astype(np.int64)
        device.synchronise()
        started = time.perf_counter()
        event = device.pull(memory, pool, pieces)
        calls.append(time.perf_counter() - started)
        event.wait()
        times.append(time.perf_counter() - started)
    middle = median(times)
    return {
        "ms": round(middle * 1e3, 3),
        "gb_per_s": round(count * size / middle / 1e9, 1),
        "call_ms": round(median(calls) * 1e3, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
