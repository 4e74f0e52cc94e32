"""Measure how fast NIXL reads KV blocks of another process's pool, on another GPU.

    python tests/bench/gpu/bench_pull_nixl.py [--json FILE]

The same sizes as `bench_pull.py`, which maps the pool and copies. Two processes, a GPU each: one
registers a pool, the other reads scattered blocks as decode does (`handoff.nixl_agent`). The pool
lies in plain memory, which NIXL's UCX maps by CUDA's older IPC: with the reader in the same
namespaces, in a PID namespace of its own, as an ordinary pod has it, and over TCP alone; and in
memory that has a descriptor. What UCX expects of the way that it has chosen stands beside what was
measured. A minute and a half; what is slow is read once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from bench_pull import CASES, POOL_BYTES, ROUNDS

from baton_worker.engine.backends.torch.device import TorchDevice
from baton_worker.engine.kv.memory import Region
from baton_worker.handoff.nixl_agent import NixlAgent, Place

SETTINGS: dict[str, tuple[str, dict[str, str]]] = {
    "plain, same": ("", {}),
    "plain, pid": ("unshare --pid --mount-proc --fork --kill-child", {}),
    "plain, tcp": ("", {"UCX_TLS": "tcp,cuda_copy"}),
    "mapped, same": ("", {}),
}
SLOW_SECONDS = 1.0
"""What a case may take before its rounds end."""
PATIENCE_SECONDS = 60.0


def main() -> int:
    """Share a pool, let readers measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each case (%(default)s)")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--own", metavar="KIND", help=argparse.SUPPRESS)
    parser.add_argument("--read", metavar="KIND", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.own:
        return _own(options.own)
    if options.read:
        return _read(options.read, options.rounds)
    if torch.cuda.device_count() < 2:
        sys.exit("two GPUs are needed")
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0)}
    for name in options.settings:
        found[name] = _measured(name, options.rounds)
        for case, numbers in found[name].items():
            print(f"{name:14} {case:24} {json.dumps(numbers)}", flush=True)
        if options.json:  # each time: who ends this early has what there is
            options.json.write_text(json.dumps(found, indent=1))
    return 0


def _measured(name: str, rounds: int) -> dict[str, Any]:
    kind, (words, environment) = name.split(",")[0], SETTINGS[name]
    if words and (os.getuid() or not shutil.which("unshare")):
        return {"not run": "needs root and unshare"}
    env = os.environ | environment
    command = [*words.split(), sys.executable, __file__, "--read", kind, "--rounds", str(rounds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, **pipes) as reader:  # while the other starts
        try:
            with _owner(kind, env) as facts:
                told, _ = reader.communicate(f"{facts}\n", timeout=PATIENCE_SECONDS)
        except (subprocess.TimeoutExpired, OSError) as error:
            reader.kill()
            return {"failed": {"why": repr(error)}}
    lines = told.strip().splitlines() or [""]
    return dict(json.loads(lines[-1])) if lines[-1].startswith("{") else {"failed": {"said": lines}}


@contextmanager
def _owner(kind: str, env: dict[str, str]) -> Iterator[str]:
    command = [sys.executable, __file__, "--own", kind]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        try:
            facts = next((line for line in owner.stdout if line.startswith("{")), "")
            if not facts:
                raise OSError("the owner of the pool said nothing")
            yield facts.strip()
        finally:
            owner.stdin.close()


def _pool(index: int, kind: str) -> tuple[TorchDevice, Any, Region]:
    device = TorchDevice(index)
    if kind == "mapped":
        tensor = device.shared(POOL_BYTES).tensor
    else:
        tensor = device.zeros((POOL_BYTES,), "uint8")
    return device, tensor, Region(device.address(tensor), POOL_BYTES, index)


def _own(kind: str) -> int:
    device, tensor, region = _pool(0, kind)
    tensor.random_()
    device.synchronise()
    agent = NixlAgent("owner", is_rdma_only=False)
    agent.register(region)
    sample = tensor[-4096:].cpu().numpy().tobytes().hex()
    facts = {"metadata": agent.metadata().hex(), "address": region.address, "sample": sample}
    print(json.dumps(facts), flush=True)
    sys.stdin.read()  # until the other end closes it
    return 0


def _read(kind: str, rounds: int) -> int:
    device, tensor, region = _pool(1, kind)
    device.synchronise()
    agent = NixlAgent("reader", is_rdma_only=False)
    agent.register(region)
    facts = json.loads(sys.stdin.readline())
    started = time.perf_counter()
    theirs = Place(agent.add(bytes.fromhex(facts["metadata"])), 0)
    last = np.array([[POOL_BYTES - 4096, 0, 4096]])
    base = np.array([facts["address"], region.address, 0])
    _once(agent, theirs, last + base)
    found: dict[str, Any] = {"connect": {"ms": round((time.perf_counter() - started) * 1e3, 1)}}
    device.synchronise()
    found["right"] = {"bytes": tensor[:4096].cpu().numpy().tobytes().hex() == facts["sample"]}
    for name, (count, size) in CASES.items():
        found[name] = _timed(agent, theirs, base, count, size, rounds)
    print(json.dumps(found))
    return 0


def _timed(
    agent: NixlAgent, theirs: Place, base: Any, count: int, size: int, rounds: int
) -> dict[str, float]:
    rng = np.random.default_rng(1)
    places = POOL_BYTES // size
    times, calls, expected = [], [], 0.0
    for _ in range(rounds):
        blocks = [rng.choice(places, count, replace=False) * size for _ in range(2)]
        pieces = np.stack([*blocks, np.full(count, size)], axis=1).astype(np.int64) + base
        seconds, call, expected = _once(agent, theirs, pieces)
        times.append(seconds)
        calls.append(call)
        if sum(times) > SLOW_SECONDS:
            break
    middle = median(times)
    return {
        "ms": round(middle * 1e3, 3),
        "gb_per_s": round(count * size / middle / 1e9, 2),
        "call_ms": round(median(calls) * 1e3, 3),
        "expected_gb_per_s": round(count * size / expected / 1e9, 2) if expected else 0.0,
    }


def _once(agent: NixlAgent, theirs: Place, pieces: Any) -> tuple[float, float, float]:
    """Read once; returns seconds, of these the calls', and what UCX expected."""
    started = time.perf_counter()
    reading = agent.read(theirs, 1, pieces)
    has_ended = reading.begin()
    called = time.perf_counter()
    while not has_ended:
        has_ended = reading.has_ended()
        if time.perf_counter() - started > PATIENCE_SECONDS:
            sys.exit("a read has not ended")
    ended = time.perf_counter()
    expected = reading.expected_seconds()
    reading.close()
    return ended - started, called - started, expected


if __name__ == "__main__":
    sys.exit(main())
