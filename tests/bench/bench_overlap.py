"""What overlap scheduling gains: a worker's loop with `engine.overlap` on against off.

Two whole worker loops over the same weights, their records encoded on a link thread as in a worker,
take a few turns each with equal full batches, so every pair of blocks compares the same steps on
the same machine some milliseconds apart; who begins alternates. A block ends when the step in
flight has landed, so both did as many passes. Ratios are medians over pairs of wall time, on
against off: below 1 is a gain. `tiny` is the committed model and `32k` one of random weights with
that vocabulary, both computing on the CPU, so what overlaps shares its cores. `sim` is the
simulated device that takes 10 ms a step and no CPU: there the host's work hides behind the device,
as behind a GPU.

    python tests/bench/bench_overlap.py [--seconds 150] [--json PATH]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import os
import platform
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry

from baton_worker.config import SimConfig
from baton_worker.engine.backends.paddle.engine import PaddleEngine
from baton_worker.engine.backends.sim.engine import SimEngine
from baton_worker.engine.engine import StepEngine
from baton_worker.engine.metrics import EngineMetrics
from baton_worker.engine.model.shape import ModelShape, load_shape
from baton_worker.engine.model.weights import (
    LayerWeights,
    MlpWeights,
    MtpWeights,
    Weights,
    load_weights,
)
from baton_worker.engine.options import NO_DRAFTS, DraftSources, EngineOptions
from baton_worker.handoff.ledger import HandoffLedger
from baton_worker.identity import RequestKey, Role, make_handle
from baton_worker.link.api import CommandReceived, Pressure
from baton_worker.messages import Submit
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import ErrorCode, StepColumns
from baton_worker.records.encode import encode_step
from baton_worker.records.header import StepHeader
from baton_worker.roles.loop import WorkerLoop
from baton_worker.roles.metrics import RoleMetrics
from baton_worker.roles.parts import LoopParts
from baton_worker.sampling import SamplingParams

TINY = Path(__file__).parents[2] / "examples" / "tiny-mtp"
GATEWAY = 7
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 96
BLOCK_TURNS = 5
VOCAB_SIZE = 32_768
HEADER = StepHeader(epoch=1, seq=1, step_id=1, role=Role.MIXED, semantic_hash=1, sent_unix_ns=1)


@dataclass(frozen=True)
class Shape:
    """One case: which model, K, requests at once, logprob alternatives (-1: none)."""

    model: str
    drafts: int
    batch: int
    logprobs_k: int


SHAPES = (
    *(Shape("tiny", d, b, k) for d, b, k in itertools.product((0, 1), (8, 32), (-1, 20))),
    *(Shape("32k", 0, b, k) for b, k in itertools.product((8, 32), (-1, 0, 20))),
    *(Shape("sim", 0, b, k) for b, k in itertools.product((8, 32, 64), (-1, 0, 20))),
    *(Shape("sim", 3, 16, k) for k in (-1, 0, 20)),
)


@dataclass(frozen=True)
class Cell:
    """One shape's outcome; `ratio` is wall time with overlap against without, by pair.

    `quiet_ratio` compares the fastest tenth of the blocks of either kind instead: on a machine that
    others use, those are the blocks that had it to themselves.
    """

    shape: Shape
    pairs: int
    step_milliseconds: float
    quiet_ratio: float
    ratio: float
    ratio_low: float
    ratio_high: float


@dataclass
class EncodingLink:
    """The worker's side of a link whose own thread encodes what the engine thread publishes."""

    rows: queue.SimpleQueue[StepColumns | None] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._encode, daemon=True)
        self.thread.start()

    def _encode(self) -> None:
        while (columns := self.rows.get()) is not None:
            encode_step(columns, HEADER)

    def publish(self, incarnation: int, columns: StepColumns, step_id: int) -> None:
        """Queue the rows."""
        self.rows.put(columns)

    def pressure(self, incarnation: int) -> Pressure:
        """Say that there is room."""
        return Pressure.OPEN


class NoTransport:
    """A mixed worker hands nothing over; it only says that its requests have left."""

    has_places = False

    def leave(self, key: RequestKey, *, code: ErrorCode | None) -> None:
        """Give back no place."""


class Worker:
    """A mixed worker's loop, without sockets."""

    def __init__(self, engine: StepEngine, shape: Shape) -> None:
        factory = MetricFactory(CollectorRegistry(), "bench", "mixed")
        engine_metrics = EngineMetrics(factory)
        self.engine = engine
        self.link = EncodingLink()
        parts = LoopParts(
            engine=self.engine,
            link=self.link,  # type: ignore[arg-type]
            transport=NoTransport(),  # type: ignore[arg-type]
            ledger=HandoffLedger(64, 60.0),
            metrics=RoleMetrics(factory),
            handoff_deadline_seconds=10.0,
            observe=engine_metrics.observe,
            observe_load=engine_metrics.observe_load,
            on_draining=lambda is_draining: None,
        )
        self.loop = WorkerLoop(parts)
        self._shape = shape
        self._numbers = itertools.count(1)
        self._left = 0

    def block(self) -> float:
        """Take some turns; return wall milliseconds of each."""
        if self._left < BLOCK_TURNS:
            self._refill()
        self._left -= BLOCK_TURNS
        started = time.perf_counter()
        for _ in range(BLOCK_TURNS):
            self.loop.turn(0.0)
        self._settle()
        return (time.perf_counter() - started) / BLOCK_TURNS * 1e3

    def _settle(self) -> None:
        flight = self.engine._in_flight
        if flight is not None:
            flight.landed()

    def _refill(self) -> None:
        """End the old batch and bring a new one past its prompts."""
        while self.engine.has_work():
            self.loop.turn(0.0)
        rng = np.random.default_rng(0)
        for _ in range(self._shape.batch):
            prompt = tuple(rng.integers(5, 500, PROMPT_TOKENS).tolist())
            sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
            handle = make_handle(GATEWAY, next(self._numbers))
            submit = Submit(
                handle,
                0,
                prompt_token_ids=prompt,
                sampling=sampling,
                logprobs_k=self._shape.logprobs_k,
            )
            self.loop.inbox.put(CommandReceived(GATEWAY, submit))
        for _ in range(2):
            self.loop.turn(0.0)
        self._settle()
        self._left = OUTPUT_TOKENS // (1 + self._shape.drafts) - 4

    def close(self) -> None:
        """End its threads."""
        self.engine.close()
        self.link.rows.put(None)
        self.link.thread.join()


def _engine(model: Model, shape: Shape, overlap: bool) -> StepEngine:
    options = _options(shape, overlap)
    if isinstance(model.source, SimConfig):
        return SimEngine(model.source, model.model_shape, options, time.monotonic)
    return PaddleEngine(model.model_shape, model.source, options, time.monotonic)


def _options(shape: Shape, overlap: bool) -> EngineOptions:
    return EngineOptions(
        block_size=16,
        n_blocks=shape.batch * 8,
        max_running=shape.batch,
        max_waiting=shape.batch,
        max_model_len=128,
        prefill_tokens=2048,
        n_draft=shape.drafts,
        use_mtp=shape.drafts > 0,
        max_top_k=20,
        overlap=overlap,
        drafts=DraftSources() if shape.drafts else NO_DRAFTS,
        prefix_caching=False,
    )


class Model(NamedTuple):
    """What an engine serves."""

    model_shape: ModelShape
    source: Weights | SimConfig


def model_of(name: str) -> Model:
    """Return the committed model, one with random weights, or a simulated one."""
    tiny = load_shape(TINY)
    if name == "tiny":
        return Model(tiny, load_weights(TINY, tiny))
    if name == "sim":
        model_shape = dataclasses.replace(tiny, vocab_size=VOCAB_SIZE, n_mtp_layers=1)
        return Model(model_shape, SimConfig(decode_step_seconds=0.01, decode_row_seconds=0.0))
    model_shape = dataclasses.replace(
        tiny,
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        head_dim=32,
        intermediate_size=768,
    )
    return Model(model_shape, _random_weights(model_shape, np.random.default_rng(0)))


def _random_weights(model_shape: ModelShape, rng: np.random.Generator) -> Weights:
    def matrix(rows: int, columns: int) -> Any:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(rows**-0.5)

    def norm() -> Any:
        return np.ones(model_shape.hidden_size, np.float32)

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=norm(),
            qkv=matrix(model_shape.hidden_size, model_shape.q_size + 2 * model_shape.kv_size),
            o=matrix(model_shape.q_size, model_shape.hidden_size),
            post_norm=norm(),
            mlp=MlpWeights(
                gate_up=matrix(model_shape.hidden_size, 2 * model_shape.intermediate_size),
                down=matrix(model_shape.intermediate_size, model_shape.hidden_size),
            ),
        )

    proj = matrix(2 * model_shape.hidden_size, model_shape.hidden_size)
    return Weights(
        embed=matrix(model_shape.vocab_size, model_shape.hidden_size),
        layers=tuple(layer() for _ in range(model_shape.n_layers)),
        mtp=(MtpWeights(norm(), norm(), proj, layer(), norm()),),
        final_norm=norm(),
        lm_head=matrix(model_shape.hidden_size, model_shape.vocab_size),
        identity="random",
    )


def measure(shape: Shape, model: Model, seconds: float) -> Cell:
    """Take blocks with overlap off and on in turn for `seconds`, at least eight pairs."""
    workers = [Worker(_engine(model, shape, overlap), shape) for overlap in (False, True)]
    walls: list[tuple[float, float]] = []
    for worker in workers:
        worker.block()
    deadline = time.perf_counter() + seconds
    for number in itertools.count(1):
        pair = [0.0, 0.0]
        for index in (0, 1) if number % 2 else (1, 0):
            pair[index] = workers[index].block()
        walls.append((pair[0], pair[1]))
        if time.perf_counter() > deadline and number >= 8:
            break
    for worker in workers:
        worker.close()
    off, on = np.array(walls).T
    low, middle, high = np.percentile(on / off, (25, 50, 75))
    quiet_off, quiet_on = np.percentile(off, 10), np.percentile(on, 10)
    return Cell(
        shape=shape,
        pairs=len(walls),
        step_milliseconds=round(float(quiet_off), 2),
        quiet_ratio=round(float(quiet_on / quiet_off), 3),
        ratio=round(float(middle), 3),
        ratio_low=round(float(low), 3),
        ratio_high=round(float(high), 3),
    )


def table(cells: Sequence[Cell]) -> str:
    """Return the results as text."""
    lines = [
        f"{'model':>6} {'K':>2} {'batch':>5} {'k':>4} {'step ms':>8} |"
        " wall, on/off: quiet blocks, all (quartiles)"
    ]
    for c in cells:
        k = "off" if c.shape.logprobs_k < 0 else str(c.shape.logprobs_k)
        lines.append(
            f"{c.shape.model:>6} {c.shape.drafts:2d} {c.shape.batch:5d} {k:>4} "
            f"{c.step_milliseconds:8.2f} | {c.quiet_ratio:6.3f} {c.ratio:6.3f} "
            f"({c.ratio_low:.3f}..{c.ratio_high:.3f}), {c.pairs} pairs"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all shapes, print the table, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0, help="in all")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    cells = []
    for name, shapes in itertools.groupby(SHAPES, lambda shape: shape.model):
        model = model_of(name)
        cells += [measure(shape, model, options.seconds / len(SHAPES)) for shape in shapes]
    sys.stdout.write(table(cells) + "\n")
    if options.json:
        document = {
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "load_average": os.getloadavg(),
            "results": [asdict(cell) for cell in cells],
        }
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
