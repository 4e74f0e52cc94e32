"""Step records per second from a worker process to a gateway process, against bare pyzmq.

Both transports carry the same frames over loopback TCP in the same run, so their ratio says what
numbering, credit, acknowledgement, encoding and full validation cost, whatever the machine. Bare
pyzmq sends frames that were encoded beforehand and does not decode them. The link is measured
twice: one frame a step (the publisher stays within its credit), and flat out, where steps coalesce.
CPU is that of both processes, I/O threads included: on a busy machine it says more than the rates.

Run: `python tests/bench/bench_link.py [--seconds 1] [--json PATH]`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import zmq
from prometheus_client import CollectorRegistry

from baton_worker.config import CurveConfig, LinkConfig
from baton_worker.identity import GatewayIdentity, Role, make_handle
from baton_worker.link.api import GatewayUp, Pressure, StepReceived
from baton_worker.link.gateway import ZmqGatewayLink
from baton_worker.link.parts import FrameWriter, StepPart
from baton_worker.link.worker import ZmqWorkerLink
from baton_worker.messages import WorkerInfo
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import StepColumns

INCARNATION = 7
SHAPES = ((1, 0), (64, 0), (512, 0), (512, 5))
STOP = b"stop"


@dataclass(frozen=True)
class Result:
    """One shape's outcome; rates are per second, times in microseconds."""

    rows: int
    top_k: int
    frame_bytes: int
    raw_frames_per_second: float
    link_frames_per_second: float
    ratio: float
    raw_cpu_us_per_frame: float
    link_cpu_us_per_frame: float
    flat_out_steps_per_second: float
    flat_out_frames_per_second: float
    publish_p50_us: float
    publish_p99_us: float


def step_columns(n_rows: int, top_k: int) -> StepColumns:
    """Return a decode step of MTP: 2 or 3 tokens a row, mean 2.4, logprobs of every token."""
    rng = np.random.default_rng(n_rows + top_k)
    n_tokens = rng.choice(np.array([2, 3], np.uint8), n_rows, p=[0.6, 0.4])
    total = int(n_tokens.sum())
    handles = [make_handle(INCARNATION, row) for row in range(n_rows)]
    return StepColumns(
        handle=np.array(handles, np.uint64),
        position=np.zeros(n_rows, np.uint32),
        n_tokens=n_tokens,
        width=np.full(n_rows, 1 + top_k, np.uint8),
        flags=np.zeros(n_rows, np.uint8),
        attempt=np.zeros(n_rows, np.uint8),
        token=rng.integers(0, 32_000, total, np.int32),
        logprob=-rng.random(total, np.float32),
        rank=np.ones(total, np.int32),
        topk_token=rng.integers(0, 32_000, total * top_k, np.int32),
        topk_logprob=-rng.random(total * top_k, np.float32),
    )


def serve_raw() -> None:
    """Count frames on a ROUTER until told to stop; answer with the count."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    sys.stdout.write(f"tcp://127.0.0.1:{port}\n")
    sys.stdout.flush()
    count = 0
    while True:
        route, frame = router.recv_multipart()
        if frame == STOP:
            break
        count += 1
    router.send_multipart([route, str(count).encode()])
    router.close()
    context.term()


def serve_link() -> None:
    """Apply every record at once until standard input ends."""
    config = LinkConfig(bind="tcp://127.0.0.1:0", curve=CurveConfig(enabled=False))
    link = ZmqGatewayLink(
        config, GatewayIdentity(INCARNATION), MetricFactory(CollectorRegistry(), "m", "gateway")
    )

    def take(events: Sequence[object]) -> None:
        for event in events:
            if isinstance(event, StepReceived):
                link.applied(event.worker_id, event.meta.epoch, event.meta.seq)

    link.start(take)
    sys.stdout.write(link.endpoint + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    link.close()


class Server:
    """This script as a serving process."""

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()
        self.cpu_seconds = 0.0

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        said, _ = self._process.communicate()
        self.cpu_seconds = float(said)


@dataclass(frozen=True)
class RawRun:
    """What one run over bare pyzmq gave."""

    frames_per_second: float
    cpu_us_per_frame: float


def raw_run(frame: bytes, seconds: float) -> RawRun:
    """Send over a bare DEALER for `seconds`; the clock stops when the last frame has arrived."""
    with Server("raw") as server:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(server.endpoint)
        begin, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - begin < seconds:
            for _ in range(32):
                dealer.send(frame)
        dealer.send(STOP)
        count = int(dealer.recv())
        elapsed, cpu = time.perf_counter() - begin, time.process_time() - cpu
        dealer.close()
        context.term()
    return RawRun(count / elapsed, 1e6 * (cpu + server.cpu_seconds) / count)


@dataclass(frozen=True)
class LinkRun:
    """What one run over the link gave."""

    steps_per_second: float
    frames_per_second: float
    cpu_us_per_frame: float
    publish_us: np.ndarray


def link_run(columns: StepColumns, seconds: float, ring_frames: int) -> LinkRun:
    """Publish under the ladder's rules for `seconds`; the clock stops when all is acknowledged.

    A ring of no more frames than the credit makes the ladder stop the publisher before credit is
    short, so that nothing coalesces.
    """
    registry = CollectorRegistry()
    with Server("link") as server:
        config = LinkConfig(
            gateways=(server.endpoint,), curve=CurveConfig(enabled=False), ring_frames=ring_frames
        )
        link = ZmqWorkerLink(config, worker_info(), MetricFactory(registry, "m", "decode"))
        begun = []
        link.start(lambda event: begun.append(event) if isinstance(event, GatewayUp) else None)
        while not begun:
            time.sleep(0.001)
        times: list[float] = []
        begin, cpu = time.perf_counter(), time.process_time()
        now = begin
        while now - begin < seconds:
            if link.pressure(INCARNATION) >= Pressure.STOP_ADMITTING:
                time.sleep(0.0001)
                now = time.perf_counter()
                continue
            before = time.perf_counter()
            link.publish(INCARNATION, columns, len(times))
            now = time.perf_counter()
            times.append(now - before)
        link.close(30.0)
        elapsed, cpu = time.perf_counter() - begin, time.process_time() - cpu
    labels = {"model": "m", "role": "decode"}
    lost = registry.get_sample_value("baton_link_discarded_frames_total", labels)
    frames = registry.get_sample_value("baton_link_sent_frames_total", labels) or 0.0
    assert lost == 0, f"{lost} records were never acknowledged"
    cpu_us = 1e6 * (cpu + server.cpu_seconds) / frames
    return LinkRun(len(times) / elapsed, frames / elapsed, cpu_us, 1e6 * np.array(times))


def worker_info() -> WorkerInfo:
    """Return what the benchmark's worker says of itself."""
    return WorkerInfo(
        worker_id="bench",
        role=int(Role.DECODE),
        wire_min=1,
        wire_max=1,
        semantic_hash=1,
        config_hash="",
        revision="",
        model="m",
        vocab_size=32_000,
        max_model_len=1024,
        max_top_k=20,
        max_running=512,
        max_waiting=512,
        kv_capacity_tokens=1 << 20,
    )


def measure(n_rows: int, top_k: int, seconds: float) -> Result:
    """Measure one shape: bare pyzmq first, then the link."""
    columns = step_columns(n_rows, top_k)
    frame = FrameWriter(Role.DECODE, 1).write([StepPart(columns, 0)], 1, 1, 0)
    raw = raw_run(frame, seconds)
    framed = link_run(columns, seconds, LinkConfig().credit_frames)
    flat_out = link_run(columns, seconds, LinkConfig().ring_frames)
    return Result(
        rows=n_rows,
        top_k=top_k,
        frame_bytes=len(frame),
        raw_frames_per_second=round(raw.frames_per_second),
        link_frames_per_second=round(framed.frames_per_second),
        ratio=round(framed.frames_per_second / raw.frames_per_second, 3),
        raw_cpu_us_per_frame=round(raw.cpu_us_per_frame, 1),
        link_cpu_us_per_frame=round(framed.cpu_us_per_frame, 1),
        flat_out_steps_per_second=round(flat_out.steps_per_second),
        flat_out_frames_per_second=round(flat_out.frames_per_second),
        publish_p50_us=round(float(np.percentile(framed.publish_us, 50)), 1),
        publish_p99_us=round(float(np.percentile(framed.publish_us, 99)), 1),
    )


def main() -> None:
    """Parse the command line; measure, or serve for the measuring process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="per shape and transport")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there, too")
    parser.add_argument("--serve", choices=("raw", "link"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    imported = time.process_time()
    if options.serve:
        {"raw": serve_raw, "link": serve_link}[options.serve]()
        sys.stdout.write(f"{time.process_time() - imported}\n")
        return
    results = [measure(n_rows, top_k, options.seconds) for n_rows, top_k in SHAPES]
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    sys.stdout.write("rows k   bytes   raw/s  link/s ratio | cpu us raw/link")
    sys.stdout.write(" | flat out steps/s (frames/s) | publish p50/p99 us\n")
    for r in results:
        sys.stdout.write(
            f"{r.rows:4} {r.top_k} {r.frame_bytes:7} {r.raw_frames_per_second:7.0f}"
            f" {r.link_frames_per_second:7.0f} {r.ratio:.3f}"
            f" | {r.raw_cpu_us_per_frame:.0f}/{r.link_cpu_us_per_frame:.0f}"
            f" | {r.flat_out_steps_per_second:8.0f} ({r.flat_out_frames_per_second:.0f})"
            f" | {r.publish_p50_us:.1f}/{r.publish_p99_us:.1f}\n"
        )


if __name__ == "__main__":
    main()
