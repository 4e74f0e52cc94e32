"""Measure the engine on a GPU: steps against memory's roof, and a whole decode phase from a trace.

    python3 tools/gpu.py bench [--json FILE] [--few] [--only PART ...] [--kinds KIND ...]

Qwen3-8B's shape with random bfloat16 weights, and an MTP layer. A step is a replayed graph, its
inputs made up (see bench_steps); the roof is weights and KV once, at the rate of a kernel that
copies, measured in the same run. The baseline is PyTorch's step (see cublas_step), which promises
no order of sums, samples greedily and tells no logprobs; transformers' continuous batching serves
the decode phase's requests too, where it is installed (see bench_transformers). `--few` measures
the cases of the goals alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "bench" / "gpu"), str(HERE.parents[1] / "tools")]

import bench_cases  # noqa: E402
import bench_profile  # noqa: E402
import bench_steps  # noqa: E402
import bench_transformers  # noqa: E402
import roof  # noqa: E402
import torch  # noqa: E402
from bench_cases import BASELINE, CASES, FEW, POOL_TOKENS  # noqa: E402
from bench_phase import phases  # noqa: E402
from bench_steps import Case, launched, timed, timed_alone  # noqa: E402
from cublas_step import CublasStep  # noqa: E402

import gpu  # noqa: E402
from baton_testing.exactness import devices  # noqa: E402
from baton_testing.exactness.random_model import qwen3_8b, random_weights  # noqa: E402

BYTES = 2
PARTS = ("steps", "baselines", "phases", "transformers")


class Bench(NamedTuple):
    """The model under measurement, and the sizes of what is made up for it."""

    loaded: devices.LoadedModel
    block_size: int
    n_blocks: int

    @property
    def vocab_size(self) -> int:
        """Tokens."""
        return self.loaded.model_shape.vocab_size


def weight_bytes(loaded: devices.LoadedModel) -> int:
    """Return what a step reads of the main model's weights."""
    weights = loaded.weights
    parts = [p for w in weights.layers for p in (w.qkv, w.o, w.gate_up, w.down)]
    return BYTES * sum(p.numel() for p in [*parts, weights.lm_head])


def draft_bytes(loaded: devices.LoadedModel) -> int:
    """Return what one draft reads: the MTP layer's weights and the head."""
    mtp = loaded.weights.mtp[0]
    layer = mtp.layer
    parts = [mtp.proj, layer.qkv, layer.o, layer.gate_up, layer.down, loaded.weights.lm_head]
    return BYTES * sum(p.numel() for p in parts)


def flops(loaded: devices.LoadedModel, case: Case) -> float:
    """Return the operations of a prompt: products of all layers and causal attention."""
    model_shape, n = loaded.model_shape, case.prefill
    products = 2 * n * (weight_bytes(loaded) // BYTES - loaded.weights.lm_head.numel())
    return products + 2 * 2 * n * n / 2 * model_shape.q_size * model_shape.n_layers


def roof_us(bench: Bench, case: Case, memory: roof.Roof) -> float:
    """Return microseconds to read weights and KV once, those of drafts too, at the copy rate."""
    model_shape = bench.loaded.model_shape
    kv = case.batch * case.context * model_shape.kv_size * 2 * BYTES
    made = case.drafts if case.makes_drafts else 0
    read = weight_bytes(bench.loaded) + kv * model_shape.n_layers
    read += made * (draft_bytes(bench.loaded) + kv)
    return read / memory.copy * 1e6


def load() -> devices.LoadedModel:
    """Return the random model on the GPU, with the engine's kernels."""
    from baton_worker.engine.backends.kernels import OpsKernels
    from baton_worker.engine.backends.torch.device import TorchDevice

    device = TorchDevice()
    device.synchronise()
    model_shape = qwen3_8b()
    return devices.LoadedModel(
        device, OpsKernels(device), model_shape, random_weights(torch, model_shape)
    )


@contextmanager
def engine_for(loaded: devices.LoadedModel, use_mtp: bool, **options: Any) -> Iterator[Any]:
    """Give an engine whose pool and workspace hold every case."""
    engine = devices.engine_of(loaded, bench_cases.options(use_mtp, **options))
    try:
        yield engine
    finally:
        engine.close()
        vars(engine).clear()  # the caller's name still holds it; its pool and graphs shall go
        gc.collect()
        torch.cuda.empty_cache()


def measured(bench: Bench, programs: Any, kind: str, case: Case, memory: roof.Roof) -> Any:
    """Time a case; return its record, with the error's text in place of times if it has none."""
    record: dict[str, Any] = {"kind": kind} | asdict(case) | {"choice": case.choice.name}
    try:
        with launched(programs, case, bench) as program:
            run = bench_steps.alone(program)
            reset = bench_steps.back(program, bench.loaded.device)
            spread = timed(run, reset)
            if kind in ("goal", "prefill"):
                record["host_us"] = timed_alone(lambda: program.start(bench_steps.LANE)).median
                record["eager_us"] = timed_alone(program._launch, reset).median
            if kind not in ("batch", "context"):
                record["kernels"] = [kernel._asdict() for kernel in bench_profile.kernels(run)]
        if (plain := bench_cases.plain_of(kind, case)) is not None:
            device = bench.loaded.device
            record["over"] = bench_steps.in_turns(programs, case, plain, bench, device)._asdict()
    except Exception as error:  # noqa: BLE001 - a case that fails must not cost the others
        return record | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    record |= {"us": spread.median, "low_us": spread.low, "high_us": spread.high}
    record["roof_us"] = roof_us(bench, case, memory)
    if case.prefill:
        record["tflops"] = flops(bench.loaded, case) / spread.median / 1e6
    return record


def baselines(loaded: devices.LoadedModel) -> list[dict[str, Any]]:
    """Time PyTorch's step at the shapes of the goals."""
    found = []
    for batch, rows, context in BASELINE:
        record: dict[str, Any] = {"batch": batch, "rows": rows, "context": context}
        try:
            step = CublasStep(loaded.weights, loaded.model_shape, batch, rows, context, rows <= 8)
            record["us"] = bench_steps.as_graph(step.run).median
            del step
        except Exception as error:  # noqa: BLE001 - as above
            record["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        found.append(record)
        print(record, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return found


def line(record: dict[str, Any]) -> str:
    """Return a record as a row of a table."""
    if "error" in record:
        return f"| {record['kind']} | {record['batch']} | {record['context']} | {record['error']} |"
    share = record["roof_us"] / record["us"]
    more = f"{record['tflops']:.0f} TFLOP/s" if "tflops" in record else f"{100 * share:.0f} %"
    what = f"{record['choice'].lower()}, logprobs {record['top']}"
    drafts = f"{record['drafts']}{' made' if record['makes_drafts'] else ''}"
    cells = [record["kind"], record["batch"], record["context"], drafts, what]
    cells += [f"{record['us'] / 1e3:.3f}", f"{record['roof_us'] / 1e3:.3f}", more]
    if "eager_us" in record:
        cells.append(f"eager {record['eager_us'] / 1e3:.2f}, whole {record['host_us'] / 1e3:.2f}")
    return "| " + " | ".join(map(str, cells)) + " |"


def steps(
    loaded: devices.LoadedModel, cases: Sequence[tuple[str, Case]], memory: roof.Roof
) -> list[dict[str, Any]]:
    """Time all cases: those without drafts on an engine without the draft layer."""
    found: list[dict[str, Any]] = []
    for use_mtp in (False, True):
        some = [(kind, case) for kind, case in cases if case.makes_drafts is use_mtp]
        if not some:
            continue
        blocks = POOL_TOKENS // 16
        with engine_for(loaded, use_mtp) as engine:
            engine.pool.tensor.normal_()
            bench = Bench(loaded, 16, blocks)
            for kind, case in some:
                programs = engine.runner._programs
                found.append(measured(bench, programs, kind, bench_cases.fitting(case), memory))
                del programs  # nor may they outlive it
                print(line(found[-1]), flush=True)
    return found


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("out/bench/gpu-engine.json"))
    parser.add_argument("--few", action="store_true", help="the cases of the goals alone")
    parser.add_argument("--only", nargs="+", metavar="PART", help="steps, baselines, phases, ...")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="of steps: goal, prefill, ...")
    options = parser.parse_args()
    kinds = {kind for kind, _ in (FEW if options.few else CASES)}
    for name, given, known in (("--only", options.only, PARTS), ("--kinds", options.kinds, kinds)):
        if unknown := sorted(set(given or ()) - set(known)):
            parser.error(f"{name} {unknown[0]}: known are {', '.join(sorted(known))}")
    memory = roof.measured()
    print(f"read {memory.read / 1e12:.2f} TB/s, copied {memory.copy / 1e12:.2f} TB/s", flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    loaded = load()
    record: dict[str, Any] = {"machine": gpu.machine(), "commit": gpu.commit()}
    record |= {"roof": {"read": memory.read, "copy": memory.copy}, "repeats": bench_steps.REPEATS}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    cases = [c for c in (FEW if options.few else CASES) if c[0] in (options.kinds or c)]
    measures: dict[str, Callable[[], Any]] = {
        "steps": lambda: steps(loaded, cases, memory),
        "baselines": lambda: baselines(loaded),
        "phases": lambda: phases(lambda **some: engine_for(loaded, **some), options.few),
        "transformers": lambda: bench_transformers.measured_apart(bench_transformers.LIMITS),
    }
    for name in PARTS:
        if name not in (options.only or PARTS):
            continue
        record[name] = measures[name]()
        options.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
