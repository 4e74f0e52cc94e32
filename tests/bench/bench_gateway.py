"""Gateway throughput: streamed tokens per second and core through the real HTTP application.

A scripted link feeds real records (encoded, then decoded as the link's thread does) to the real
application on the real server; clients in another process read the streams over loopback. "Per
core" divides by the gateway's CPU seconds, the making of the records taken off. The baseline is the
same server sending as many prepared chunks: what HTTP alone costs.

    python tests/bench/bench_gateway.py [--seconds 3] [--streams 64] [--row-tokens 2]
        [--completions] [--cases k=0 k=20] [--tokenizer FOLDER] [--json FILE]

`--tokenizer` reads the tokenizer.json of a folder; alternatives are then drawn from all of it,
which no cache of a processor holds, and not from the signs of a small one.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import uvicorn
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton_worker.config import GatewayConfig, HttpConfig, ModelConfig, ProcessConfig
from baton_worker.gateway.server.server import listen, serve
from baton_worker.gateway.server.service import GatewayService
from baton_worker.gateway.text.tokenizer import load_tokenizer
from baton_worker.identity import GatewayIdentity, Role
from baton_worker.link.api import GatewayLinkEvent, StepMeta, StepReceived, WorkerUp
from baton_worker.messages import Abort, Command, Submit, WorkerInfo
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import Finish, StepColumns
from baton_worker.records.decode import decode_step
from baton_worker.records.encode import encode_step
from baton_worker.records.header import StepHeader

Array = npt.NDArray[Any]

TOKENS_PER_REQUEST = 512
UNAPPLIED_STEPS = 4
_PRINTABLE = (5, 90)  # ids of ASCII letters and signs: every row is text, so none is held back
_INFO = WorkerInfo(
    worker_id="mixed-0", role=int(Role.MIXED), wire_min=1, wire_max=1, semantic_hash=1,
    config_hash="c", revision="", model="bench", vocab_size=1 << 20, max_model_len=4096,
    max_top_k=64, max_running=4096, max_waiting=4096, kv_capacity_tokens=1 << 30,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One measurement: what clients ask for; `k` None means no logprobs."""

    name: str
    k: int | None

    def body(self, path: str) -> dict[str, Any]:
        """Return what that endpoint is asked."""
        base: dict[str, Any] = {"stream": True, "max_tokens": TOKENS_PER_REQUEST}
        if path == COMPLETIONS:
            base |= {"prompt": [7, 8, 9]}
            return base if self.k is None else base | {"logprobs": self.k}
        base |= {"messages": [{"role": "user", "content": "go"}]}
        return base if self.k is None else base | {"logprobs": True, "top_logprobs": self.k}


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CASES = (Case("no logprobs", None), Case("k=0", 0), Case("k=5", 5), Case("k=20", 20))


class Load(NamedTuple):
    """What is asked, of which endpoint, for how long a case, and of which folder's tokenizer."""

    seconds: float
    streams: int
    row_tokens: int
    path: str
    tokenizer: str


@dataclass
class _Job:
    handle: int
    width: int
    position: int = 0


class BenchLink:
    """A GatewayLink whose one mixed worker has the next step ready whenever one is applied."""

    def __init__(self, row_tokens: int, alternatives: tuple[int, int]) -> None:
        """`alternatives`: the ids from which they are drawn."""
        self._rng = np.random.default_rng(1)
        self._drawn = alternatives
        self._row_tokens = row_tokens
        self._jobs: dict[int, _Job] = {}
        self._inbox: deque[Command] = deque()
        self._ready = threading.Condition()
        self._applied = self._seq = -1
        self._closed = False
        self.making_seconds = 0.0

    def start(self, on_events: Callable[[Sequence[GatewayLinkEvent]], None]) -> None:
        self._on_events = on_events
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, worker_id: str, command: Command) -> bool:
        with self._ready:
            self._inbox.append(command)
            self._ready.notify()
        return True

    def applied(self, worker_id: str, epoch: int, seq: int) -> None:
        with self._ready:
            self._applied = seq
            self._ready.notify()

    def set_lag(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._thread.join()

    def _run(self) -> None:
        self._on_events([WorkerUp("mixed-0", 5, _INFO)])
        while self._wait():
            started = time.thread_time()
            frame = self._frame()
            self.making_seconds += time.thread_time() - started
            _, columns = decode_step(frame)
            meta = StepMeta(5, self._seq, self._seq, int(Role.MIXED), 0, False, len(frame))
            self._on_events([StepReceived("mixed-0", meta, columns)])

    def _wait(self) -> bool:
        with self._ready:
            while True:
                self._take()
                if self._closed or (self._jobs and self._seq - self._applied < UNAPPLIED_STEPS):
                    return not self._closed
                self._ready.wait()

    def _take(self) -> None:
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, Submit):
                self._jobs[command.handle] = _Job(command.handle, command.logprobs_k + 1)
            elif isinstance(command, Abort):
                self._jobs.pop(command.handle, None)

    def _frame(self) -> bytes:
        jobs = list(self._jobs.values())
        self._seq += 1
        header = StepHeader(5, self._seq, self._seq, Role.MIXED, 1, 0)
        columns = self._columns(jobs)
        for job, n in zip(jobs, columns.n_tokens.tolist(), strict=True):
            job.position += n
            if job.position >= TOKENS_PER_REQUEST:
                del self._jobs[job.handle]
        return encode_step(columns, header, max_bytes=2 << 20)

    def _alternatives(self, n: Array, width: Array) -> Array:
        """Return each token's alternatives, no two of which are the same in a small vocabulary, and
        hardly ever in a large one.
        """
        counts = np.repeat(np.maximum(width.astype(np.int64) - 1, 0), n)
        low, high = self._drawn
        if high > 512:
            anywhere: Array = self._rng.integers(low, high, int(counts.sum()), np.int32)
            return anywhere
        firsts = np.repeat(self._rng.integers(0, high - low, len(counts)), counts)
        ends = np.cumsum(counts)
        within = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
        found: Array = ((firsts + within) % (high - low) + low).astype(np.int32)
        return found

    def _columns(self, jobs: list[_Job]) -> StepColumns:
        """Rows of `row_tokens` in the mean; the last row of a request ends it by length."""
        position = np.array([job.position for job in jobs], np.uint32)
        width = np.array([job.width for job in jobs], np.uint8)
        left = TOKENS_PER_REQUEST - position.astype(np.int64)
        n = np.minimum(self._rng.integers(1, 2 * self._row_tokens, len(jobs)), left)
        t = int(n.sum())
        with_logprobs = int((n * (width > 0)).sum())
        k = int((n * np.maximum(width.astype(np.int64) - 1, 0)).sum())
        return StepColumns(
            handle=np.array([job.handle for job in jobs], np.uint64),
            position=position,
            n_tokens=n.astype(np.uint8),
            width=width,
            flags=np.where(n == left, Finish.LENGTH, Finish.NONE).astype(np.uint8),
            attempt=np.zeros(len(jobs), np.uint8),
            token=self._rng.integers(*_PRINTABLE, t).astype(np.int32),
            logprob=-self._rng.random(with_logprobs).astype(np.float32),
            rank=np.ones(with_logprobs, np.int32),
            topk_token=self._alternatives(n, width),
            topk_logprob=-self._rng.random(k).astype(np.float32),
            n_proposed=np.full(len(jobs), 2, np.uint8),
            n_accepted=(n - 1).astype(np.uint8),
        )


def _model_folder(folder: Path, tokenizer: str) -> Path:
    if tokenizer:
        shutil.copy(Path(tokenizer) / "tokenizer.json", folder)
    else:
        _train(folder / "tokenizer.json")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def _train(path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    text = (Path(__file__).parent.parent.parent / "LICENSE").read_text()  # which no edit changes
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    tokenizer.save(str(path))


def _client(port: int, path: str, streams: int, body: bytes, pipe: Connection) -> None:
    """Keep `streams` requests open until told to stop; count events. Runs in its own process."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    request = head.encode() + body

    async def one(stop: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        while not stop.is_set():
            writer.write(request)
            while True:
                data = await reader.read(1 << 18)
                if not data:
                    raise ConnectionError("the gateway closed the stream")
                if data.endswith(b"0\r\n\r\n"):
                    break
        writer.close()

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), stop.set)
        await asyncio.gather(*(one(stop) for _ in range(streams)))

    asyncio.run(main())
    pipe.send("done")


class _Clients:
    def __init__(self, port: int, path: str, streams: int, body: dict[str, Any]) -> None:
        self._pipe, other = multiprocessing.Pipe()
        data = json.dumps(body).encode()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_client, args=(port, path, streams, data, other))
        self._process.start()

    def stop(self) -> None:
        self._pipe.send("stop")
        if not self._pipe.poll(60):
            raise TimeoutError("the clients did not finish")
        self._process.join()


@dataclass(frozen=True)
class Measured:
    """Over `seconds`: what went out, and the CPU the gateway's own work took."""

    tokens: float
    cpu_seconds: float
    kernel_seconds: float
    seconds: float

    @property
    def per_core(self) -> float:
        return self.tokens / self.cpu_seconds


def _window(
    seconds: float, tokens: Callable[[], float], making_seconds: Callable[[], float]
) -> Measured:
    time.sleep(1.0)  # clients connect and every stream is under way

    def now() -> tuple[float, ...]:
        cpu = time.process_time() - making_seconds()
        return tokens(), cpu, os.times().system, time.monotonic()

    before = now()
    time.sleep(seconds)
    return Measured(*(b - a for a, b in zip(before, now(), strict=True)))


def measure_gateway(load: Load, cases: Sequence[Case]) -> dict[str, Measured]:
    """Return each case's rate."""
    model = tempfile.TemporaryDirectory()
    atexit.register(model.cleanup)  # the service reads it on its own thread, later
    tokenizer = load_tokenizer(_model_folder(Path(model.name), load.tokenizer))
    gateway = GatewayConfig(http=HttpConfig(port=0))
    config = ProcessConfig(model=ModelConfig(model.name, "bench"), gateway=gateway)
    drawn = (0, tokenizer.vocabulary.size) if load.tokenizer else _PRINTABLE
    link, registry = BenchLink(load.row_tokens, drawn), CollectorRegistry()
    factory = MetricFactory(registry, "bench", "gateway")
    service: list[GatewayService] = []

    def build() -> GatewayService:
        service.append(GatewayService(config, link, tokenizer, GatewayIdentity(7), factory))
        return service[0]

    def tokens() -> float:
        name, labels = (
            "baton_gateway_completion_tokens_total",
            {"model": "bench", "role": "gateway"},
        )
        under_way = sum(live.output.n_tokens for live in service[0].requests.live())
        return (registry.get_sample_value(name, labels) or 0.0) + under_way

    listener = listen(config.gateway.http)
    ready, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=serve, args=(build, listener, ready.set, stop))
    thread.start()
    ready.wait()
    results = {}
    for case in cases:
        port, asked = listener.getsockname()[1], case.body(load.path)
        clients = _Clients(port, load.path, load.streams, asked)
        results[case.name] = _window(load.seconds, tokens, lambda: link.making_seconds)
        clients.stop()
    stop.set()
    thread.join()
    return results


def measure_ceiling(load: Load) -> Measured:
    """Return the rate of the same server sending prepared chunks, one a row."""
    chunk = (
        b'data: {"id":"cmpl-0","created":1,"model":"bench","choices":[{"index":0,"text":" tokens"'
    )
    chunk += b',"logprobs":null,"finish_reason":null}],"object":"text_completion"}\n\n'
    sent = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(TOKENS_PER_REQUEST // load.row_tokens):
            sent += load.row_tokens
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(0)  # a step of all streams, as when workers feed them
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = uvicorn.Server(
        uvicorn.Config(app, http="httptools", loop="uvloop", lifespan="off", log_config=None)
    )
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    clients = _Clients(listener.getsockname()[1], load.path, load.streams, {})
    measured = _window(load.seconds, lambda: float(sent), lambda: 0.0)
    clients.stop()
    server.should_exit = True
    thread.join()
    return measured


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="per case")
    parser.add_argument("--streams", type=int, default=64, help="requests open at once")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--row-tokens", type=int, default=2, help="tokens of a row, in the mean")
    parser.add_argument("--completions", action="store_true", help="not of the chat endpoint")
    parser.add_argument("--tokenizer", default="", help="a folder with a tokenizer.json")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, help="which of them")
    options = parser.parse_args()
    path = COMPLETIONS if options.completions else CHAT
    load = Load(options.seconds, options.streams, options.row_tokens, path, options.tokenizer)
    ceiling = measure_ceiling(load)
    rates = measure_gateway(load, [case for case in CASES if case.name in options.cases])
    rows = [
        {
            "case": name,
            "tokens_per_second_per_core": rate.per_core,
            "tokens_per_second": rate.tokens / rate.seconds,
            "of_baseline": rate.per_core / ceiling.per_core,
            "us_per_token": 1e6 / rate.per_core,
            "kernel_us_per_token": 1e6 * rate.kernel_seconds / rate.tokens,
        }
        for name, rate in {"prepared chunks, same server": ceiling, **rates}.items()
    ]
    if options.json:
        result = {"bench": "gateway", **load._asdict(), "rows": rows}
        options.json.write_text(json.dumps(result) + "\n")
    sys.stdout.write(f"{path}, {load.streams} streams, {load.row_tokens} tokens a row\n")
    for row in rows:
        sys.stdout.write(
            f"  {row['case']:<30} {row['tokens_per_second_per_core']:>10,.0f} tokens/s per core   "
            f"{row['of_baseline']:.2f} of baseline; {row['us_per_token']:.1f} us a token, "
            f"{row['kernel_us_per_token']:.1f} of them the kernel's\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
