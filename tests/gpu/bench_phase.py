"""A decode phase of real requests: tokens a second, and how long the GPU idles, from a trace.

Owns the requests and the reading of PyTorch's profiler. The engine's own loop steps; nothing is
made up but the model. Needs a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import bench_profile
import numpy as np

from baton_testing.engine_bench import Bench, Reader
from baton_testing.exactness.asks import Ask, submit

PHASES = ({"rows": 64, "k": 0}, {"rows": 64, "k": 3}, {"rows": 256, "k": 0})
PROMPT, TOKENS, TRACED, TIMED = 256, 160, 20, 60


def phases(make: Callable[..., Any], few: bool = False) -> list[dict[str, Any]]:
    """Measure each phase, with and without logprobs; `make(use_mtp, **options)` gives an engine."""
    found = []
    for phase in PHASES:
        for logprobs_k in (0,) if few else (-1, 0):
            for overlap in (True,) if few else (True, False):
                record: dict[str, Any] = dict(phase) | {"top": logprobs_k, "overlap": overlap}
                try:
                    record |= measured(make, phase["rows"], phase["k"], logprobs_k, overlap)
                except Exception as error:  # noqa: BLE001 - the others are still worth having
                    record["error"] = f"{type(error).__name__}: {str(error)[:300]}"
                found.append(record)
                print(record, flush=True)
    return found


def measured(
    make: Callable[..., Any], rows: int, k: int, logprobs_k: int, overlap: bool
) -> dict[str, Any]:
    """Serve a full batch of equal requests and look at its decode steps."""
    rng = np.random.default_rng(0)
    options = {"max_running": rows, "overlap": overlap, "n_draft": k, "max_model_len": 1024}
    with make(use_mtp=k > 0, n_blocks=rows * 64, prefill_tokens=4096, **options) as engine:
        bench = Bench(engine, Reader())
        for number in range(rows):
            prompt = tuple(rng.integers(2, 150_000, PROMPT).tolist())
            sampling = {"temperature": 0.8, "seed": number}
            submit(bench, number + 1, Ask(prompt, TOKENS * (1 + k), sampling, logprobs_k))
        while step_of(engine).prefill_tokens or engine.load().waiting:
            pass  # until every prompt is done, so that the steps below decode alone
        for _ in range(10):
            engine.step()
        emitted, seconds = timed_steps(engine, TIMED)
        shares = traced(engine)
        return {"tokens_per_s": emitted / seconds, "step_ms": seconds / TIMED * 1e3} | shares


def step_of(engine: Any) -> Any:
    """Step once and return what the step did."""
    return engine.step().stats


def timed_steps(engine: Any, count: int) -> tuple[int, float]:
    """Return the tokens of so many steps and the seconds that they took."""
    began = time.perf_counter()
    emitted = sum(step_of(engine).emitted_tokens for _ in range(count))
    return emitted, time.perf_counter() - began


def traced(engine: Any) -> dict[str, float]:
    """Return the share of a decode phase in which no kernel or copy runs, from a trace."""
    spans = [span[1:] for span in bench_profile.spans(engine.step, TRACED)]
    return {"idle_share": idle_share(spans), "traced_events": float(len(spans))}


def idle_share(spans: Sequence[tuple[float, float]]) -> float:
    """Return the share of the time, from the first span to the last, that none covers."""
    ordered = sorted(spans)
    busy, until = 0.0, ordered[0][0]
    for begin, end in ordered:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    whole = until - ordered[0][0]
    return 1 - busy / whole if whole else 0.0
