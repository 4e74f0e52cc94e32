"""1,000 streams at once on one core of a simulated worker: `python tests/bench/bench_sim.py`.

A mixed worker on the simulated engine is held to one core; gateway and client share the others. All
streams are open at the same time, each an HTTP stream of its own. The floor is the simulated
device's own pace: what a worker that cost nothing would give.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-mtp"
READY_SECONDS = 60.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Result:
    """What one round measured; `share_of_pace` is tokens over what the pace allows."""

    streams: int
    step_seconds: float
    tokens: int
    seconds: float
    worker_cores: float
    gateway_cores: float
    share_of_pace: float
    inter_token_p50_seconds: float
    inter_token_p99_seconds: float


@dataclass(frozen=True)
class Deployment:
    """Processes of one run."""

    port: int
    worker: int
    gateway: int


class Stream:
    """One HTTP stream: when its chunks came."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.arrivals: list[float] = []
        self.is_whole = False

    async def run(self, port: int, number: int, max_tokens: int, opened: asyncio.Barrier) -> None:
        """Ask and read to the end; `opened` holds everyone until all have their first token."""
        body = json.dumps(
            {
                "model": "tiny-mtp", "stream": True, "max_tokens": max_tokens, "seed": number,
                "prompt": [2 + number % 400, 7, 9, 11], "logprobs": 0,
                "temperature": 0.0, "ignore_eos": True,
            }
        ).encode()  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        await opened.wait()
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                self.arrivals.append(time.perf_counter())
            elif line.startswith(b"data: [DONE]"):
                self.is_whole = True
                break
        writer.close()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


async def measure(deployment: Deployment, streams: int, tokens: int, step_seconds: float) -> Result:
    """Open all streams, read them to the end."""
    all_streams = [Stream() for _ in range(streams)]
    opened = asyncio.Barrier(streams)
    pids = (deployment.worker, deployment.gateway)
    before = [cpu_seconds(pid) for pid in pids]
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, stream in enumerate(all_streams):
            group.create_task(stream.run(deployment.port, number, tokens, opened))
    seconds = time.perf_counter() - started
    used = [(cpu_seconds(pid) - start) / seconds for pid, start in zip(pids, before, strict=True)]
    assert all(stream.is_whole for stream in all_streams), "a stream did not end"
    gaps = sorted(
        later - earlier
        for stream in all_streams
        for earlier, later in zip(stream.arrivals, stream.arrivals[1:], strict=False)
    )
    count = streams * tokens
    return Result(
        streams=streams,
        step_seconds=step_seconds,
        tokens=count,
        seconds=seconds,
        worker_cores=used[0],
        gateway_cores=used[1],
        share_of_pace=tokens * step_seconds / seconds,
        inter_token_p50_seconds=gaps[len(gaps) // 2],
        inter_token_p99_seconds=gaps[len(gaps) * 99 // 100],
    )


def start(streams: int, step_seconds: float) -> tuple[subprocess.Popen[str], Deployment]:
    """Start gateway and worker; the worker keeps to the last core, the gateway to the others."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "baton_worker.main", "--log-level", "error", "local"]
    command += ["--model", str(MODEL), "--port", str(port), "--json", "--engine", "sim", "-k", "0"]
    command += ["--prefill", "0", "--decode", "0", "--mixed", "1", "--max-running", str(streams)]
    command += ["--sim", f"decode_step_seconds={step_seconds}", "--sim", "decode_row_seconds=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = [json.loads(process.stdout.readline()) for _ in range(2)]
    pids = {line["role"]: line["pid"] for line in ready}
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(pids["mixed"], cores[-1:])
    if len(cores) > 1:
        os.sched_setaffinity(pids["gateway"], cores[:-1])
        os.sched_setaffinity(0, cores[:-1])
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2).close()
            return process, Deployment(port, pids["mixed"], pids["gateway"])
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"not ready after {READY_SECONDS} s")


def row(result: Result) -> str:
    """Return a line of the table."""
    return (
        f"| {result.streams} | {1000 * result.step_seconds:.0f} | "
        f"{result.tokens / result.seconds:.0f} | {result.share_of_pace:.2f} | "
        f"{result.worker_cores:.2f} | {result.gateway_cores:.2f} | "
        f"{1000 * result.inter_token_p50_seconds:.0f} | "
        f"{1000 * result.inter_token_p99_seconds:.0f} |"
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=60, help="output tokens of each stream")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[200.0, 100.0, 50.0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    results = []
    for step_ms in options.step_ms:
        process, deployment = start(options.streams, step_ms / 1000)
        try:
            results += [
                asyncio.run(measure(deployment, options.streams, options.tokens, step_ms / 1000))
                for _ in range(options.rounds)
            ]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=20)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    print("| streams | step, ms | tokens/s | share of pace | worker cores | gateway cores |"
          " inter-token p50, ms | p99, ms |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for result in results:
        print(row(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
