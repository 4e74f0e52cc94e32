"""The bench of overlap makes a worker's loop of its own, which the loop's contracts must fit."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from baton_worker.config import SimConfig
from baton_worker.engine.model.shape import load_shape

BENCH = Path(__file__).resolve().parents[1] / "bench" / "bench_overlap.py"


@pytest.mark.slow  # Paddle, which the bench imports
def test_its_worker_serves_one_batch_after_the_other() -> None:
    bench = runpy.run_path(str(BENCH))
    at_once = SimConfig(prefill_token_seconds=0.0, decode_step_seconds=0.0, decode_row_seconds=0.0)
    model = bench["Model"](load_shape(bench["TINY"]), at_once)
    shape = bench["Shape"]("sim", 1, 2, -1)
    worker = bench["Worker"](bench["_engine"](model, shape, True), shape)
    try:
        for _ in range(2):
            worker._refill()
            worker.block()
        assert worker.engine.load().running == shape.batch
        assert next(worker._numbers) == 2 * shape.batch + 1
    finally:
        worker.close()
