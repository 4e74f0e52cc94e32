"""Measure steps of published shapes on a GPU, dense ones and mixtures, against memory's roof.

    python3 tools/gpu.py run tests/gpu/bench_models.py [--models NAME ...] [--batches N ...]
        [--layers N] [--kernels] [--beside] [--json FILE]

Random weights in the real shape, all layers, in bfloat16 or, where the name ends in -fp8, decoder
layers' matrices in FP8, made layer by layer on the device. A step is a replayed graph with greedy
sampling and no logprobs, its inputs made up (see bench_steps), 2,048 tokens of context. The roof is
what the step must read once - of a mixture the experts that its rows choose, counted in that step,
layer by layer - and its KV, at the rate of a kernel that copies, measured in the same run. Of FP8
that is a byte for each number and a scale for each 128 x 128, as checkpoints have them, and so what
is read of matrices that are whole blocks of them; of others (GLM's qkv, whose heads are in another
order) one for each row is read, which the roof leaves out. A pool that does not fit holds fewer
sequences, and the row says how many were measured. With --kernels each step's kernels follow its
row, the one that takes longest first, in microseconds of a layer. With --beside, and where
transformers can build the model, the decode phase of real requests follows (see bench_phase): the
engine's, and that of transformers' continuous batching.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "bench" / "gpu"), str(HERE.parents[1] / "tools")]

import bench_cases  # noqa: E402
import bench_phase  # noqa: E402
import bench_profile  # noqa: E402
import bench_steps  # noqa: E402
import bench_transformers  # noqa: E402
import roof  # noqa: E402
import torch  # noqa: E402
from bench_steps import Case  # noqa: E402

import gpu  # noqa: E402
from baton_testing.exactness import devices, random_fp8, random_model  # noqa: E402
from baton_worker.engine.api import DeviceError  # noqa: E402
from baton_worker.engine.backends.device.budget import told  # noqa: E402
from baton_worker.engine.backends.device.scaled_kernels import Scaled, Weight  # noqa: E402
from baton_worker.engine.backends.device.sizing import weight_bytes  # noqa: E402
from baton_worker.engine.backends.device.weights import DeviceLayer, DeviceWeights  # noqa: E402
from baton_worker.engine.model.experts import Experts  # noqa: E402
from baton_worker.engine.model.shape import ModelShape  # noqa: E402

BYTES = 2
BLOCK_TOKENS = 16
CONTEXT = 2048
SPARE_BYTES = 6 << 30
"""Beside weights and pool: the workspace, graphs, the copies of the roof."""
IN_BFLOAT16: dict[str, Callable[..., ModelShape]] = {
    "mimo-7b": random_model.mimo_7b,
    "qwen3-30b-a3b": random_model.qwen3_30b_a3b,
    "ernie-4.5-21b-a3b": random_model.ernie_21b_a3b,
}
"""What is measured unless told otherwise."""
MODELS = IN_BFLOAT16 | {
    "qwen3-8b": random_model.qwen3_8b,
    "qwen3-8b-fp8": random_model.qwen3_8b,
    "qwen3-30b-a3b-fp8": random_model.qwen3_30b_a3b,
    "glm-4.5-air-fp8": random_model.glm_45_air,
}
CASES = [Case(batch, CONTEXT) for batch in (1, 8, 64, 256)]
CASES += [Case(1, n, prefill=n) for n in (2048, 8192)]


class Bench(NamedTuple):
    """What bench_steps asks of a model under measurement."""

    loaded: devices.LoadedModel
    block_size: int
    n_blocks: int

    @property
    def vocab_size(self) -> int:
        """Tokens."""
        return self.loaded.model_shape.vocab_size


class CountingKernels:
    """Kernels that note of each mixture, while `counts` is a list, how many experts are chosen."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.counts: list[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def norm_route(self, *given: Any) -> None:
        """See `ExpertKernels.norm_route`."""
        self._kernels.norm_route(*given)
        if self.counts is not None:
            starts = given[-1].starts
            self.counts.append((starts[1:] > starts[:-1]).sum())


def values_of(weight: Weight) -> int:
    """Return how many values a matrix has."""
    return int((weight.values if isinstance(weight, Scaled) else weight).numel())


def stored_bytes(weight: Weight) -> float:
    """Return what a matrix takes in a checkpoint: FP8 has a float32 scale for each block."""
    each = 1 + 4 / random_fp8.IN_GROUPS.group**2 if isinstance(weight, Scaled) else BYTES
    return each * values_of(weight)


def dense_of(layer: DeviceLayer) -> list[Weight]:
    """Return the matrices that every token is multiplied with."""
    return [part for part in (layer.qkv, layer.o, layer.gate_up, layer.down) if part is not None]


def layer_bytes(layer: DeviceLayer, experts: Experts | None, chosen: int) -> float:
    """Return what a step reads of a layer's weights, of so many experts."""
    read = sum(map(stored_bytes, dense_of(layer)))
    if (mixture := layer.mixture) is not None and experts is not None:
        of_all = stored_bytes(mixture.gate_up) + stored_bytes(mixture.down)
        read += of_all * chosen / experts.count + 4 * mixture.router.numel()
    return read


def read_bytes(
    shape: ModelShape, weights: DeviceWeights, case: Case, chosen: Sequence[int]
) -> float:
    """Return what a step must read: weights and, of sequences that decode, KV.

    Args:
        chosen: how many experts of each mixture the step's rows chose.
    """
    counts = iter(chosen)
    read = sum(
        layer_bytes(layer, shape.experts, next(counts) if layer.mixture is not None else 0)
        for layer in weights.layers
    )
    kv = 0 if case.prefill else case.batch * case.context
    kv_bytes = kv * shape.kv_size * 2 * BYTES * shape.n_layers
    return read + BYTES * weights.lm_head.numel() + kv_bytes


def flops(shape: ModelShape, weights: DeviceWeights, n: int) -> float:
    """Return the operations of a prompt of n tokens: products and causal attention."""
    total = 0.0
    for index, layer in enumerate(weights.layers):
        total += 2 * n * sum(map(values_of, dense_of(layer)))
        if layer.mixture is not None and (experts := shape.experts_of(index)) is not None:
            total += 2 * n * 3 * experts.chosen * experts.intermediate_size * shape.hidden_size
    return total + 2 * 2 * n * n / 2 * shape.q_size * shape.n_layers


def shape_of(name: str, n_layers: int | None) -> ModelShape:
    """Return a model's shape without draft layers, of all layers or so many."""
    whole = MODELS[name]() if n_layers is None else MODELS[name](n_layers)
    is_fp8 = name.endswith(devices.FP8)
    return replace(whole, n_mtp_layers=0, quantisation=random_fp8.IN_GROUPS if is_fp8 else None)


def load(shape: ModelShape) -> devices.LoadedModel:
    """Return the random model on the GPU, with the engine's kernels.

    Raises:
        DeviceError: its weights do not fit.
    """
    from baton_worker.engine.backends.kernels import OpsKernels
    from baton_worker.engine.backends.torch.device import TorchDevice

    device = TorchDevice()
    device.synchronise()
    needed, free = weight_bytes(shape, 0, BYTES), device.memory().free
    if needed + SPARE_BYTES > free:
        raise DeviceError(f"{told(needed)} of weights and {told(SPARE_BYTES)}, {told(free)} free")
    kernels = OpsKernels(device)
    kept_as = partial(random_fp8.quantised_layer, device, kernels, shape)
    as_made = {} if shape.quantisation is None else {"kept_as": kept_as}
    weights = random_model.random_weights(torch, shape, **as_made)
    return devices.LoadedModel(device, CountingKernels(kernels), shape, weights)


def pool_tokens(shape: ModelShape) -> int:
    """Return how many tokens of KV are measured with: all cases', or what memory is left for."""
    free, _ = torch.cuda.mem_get_info()
    each = shape.kv_size * 2 * BYTES * shape.n_layers
    most = max(free - SPARE_BYTES, 0) // each
    return int(min(most, bench_cases.POOL_TOKENS)) // BLOCK_TOKENS * BLOCK_TOKENS


def chosen_experts(bench: Bench, program: Any) -> list[int]:
    """Return how many experts of each mixture a launch of the step chooses."""
    kernels: Any = bench.loaded.kernels
    kernels.counts = []
    program._launch()
    found = [int(count) for count in kernels.counts]
    kernels.counts = None
    return found


def measured(bench: Bench, programs: Any, case: Case, memory: roof.Roof) -> dict[str, Any]:
    """Time a case and the kernels in it."""
    shape, weights = bench.loaded.model_shape, bench.loaded.weights
    with bench_steps.launched(programs, case, bench) as program:
        run = bench_steps.alone(program)
        spread = bench_steps.timed(run, bench_steps.back(program, bench.loaded.device))
        kernels = [kernel._asdict() for kernel in bench_profile.kernels(run)]
        chosen = chosen_experts(bench, program)
    record: dict[str, Any] = {"batch": case.batch, "prefill": case.prefill, "context": case.context}
    record |= {"us": spread.median, "low_us": spread.low, "high_us": spread.high}
    record["roof_us"] = read_bytes(shape, weights, case, chosen) / memory.copy * 1e6
    record["experts"] = sum(chosen) / len(chosen) if chosen else 0.0
    if case.prefill:
        record["tflops"] = flops(shape, weights, case.prefill) / spread.median / 1e6
    return record | {"kernels": kernels}


def that_fit(cases: Sequence[Case], tokens: int) -> list[Case]:
    """Return cases with as many sequences as a pool of so many tokens holds, each once."""
    found = []
    for case in cases:
        if case.context > tokens - 2 * BLOCK_TOKENS:
            continue
        batch = case.batch if case.prefill else min(case.batch, tokens // case.context)
        found.append(Case(batch, case.context, prefill=case.prefill))
    return list(dict.fromkeys(found))


def steps(
    name: str, loaded: devices.LoadedModel, cases: Sequence[Case], memory: roof.Roof
) -> Iterator[dict[str, Any]]:
    """Yield a record of each case of a model."""
    tokens = pool_tokens(loaded.model_shape)
    options = bench_cases.options(use_mtp=False, n_blocks=tokens // BLOCK_TOKENS)
    engine: Any = devices.engine_of(loaded, options)
    engine.pool.tensor.normal_()
    bench = Bench(loaded, BLOCK_TOKENS, tokens // BLOCK_TOKENS)
    for fits in that_fit(cases, tokens):
        about = {"model": name, "layers": loaded.model_shape.n_layers}
        yield about | measured(bench, engine.runner._programs, fits, memory)
    engine.close()
    vars(engine).clear()


@contextmanager
def engine_for(loaded: devices.LoadedModel, use_mtp: bool, **options: Any) -> Iterator[Any]:
    """Give an engine with a pool of its own, of which nothing is left behind."""
    engine: Any = devices.engine_of(loaded, bench_cases.options(use_mtp, **options))
    try:
        yield engine
    finally:
        engine.close()
        vars(engine).clear()
        gc.collect()
        torch.cuda.empty_cache()


def served(name: str, loaded: devices.LoadedModel) -> Iterator[dict[str, Any]]:
    """Serve the requests of `bench_phase`; yield a record of each number of them."""
    for rows in bench_transformers.ROWS:
        record: dict[str, Any] = {"model": name, "rows": rows, "server": "baton"}
        try:
            record |= bench_phase.measured(partial(engine_for, loaded), rows, 0, -1, overlap=True)
        except DeviceError as error:  # no room for so many
            record["error"] = str(error)[:300]
        yield record


def served_line(record: dict[str, Any]) -> str:
    """Return a record of served requests as a row of a table."""
    who = f"{record['model']} | {record['server']} | {record['rows']}"
    if "error" in record:
        return f"| {who} | {record['error']} |"
    return f"| {who} | {record['tokens_per_s']:,.0f} tokens/s | {record['step_ms']:.2f} ms |"


def transformers_beside(name: str) -> Iterator[dict[str, Any]]:
    """Yield records of what transformers' continuous batching serves of the same requests."""
    found = bench_transformers.measured_apart(bench_transformers.LIMITS, name)
    for phase in found["phases"]:
        server = f"transformers {found['version']}, {phase['attention']}"
        yield {"model": name, "server": server} | phase


def line(record: dict[str, Any]) -> str:
    """Return a record as a row of a table."""
    what = f"a prompt of {record['prefill']:,}" if record["prefill"] else f"batch {record['batch']}"
    share = f"{100 * record['roof_us'] / record['us']:.0f} %"
    speed = f"{record['tflops']:.0f} TFLOP/s" if record["prefill"] else share
    times = f"{record['us'] / 1e3:.3f} | {record['roof_us'] / 1e3:.3f}"
    experts = f"{record['experts']:.0f}" if record["experts"] else "-"
    return f"| {record['model']} | {what} | {experts} | {times} | {speed} |"


def by_kernel(record: dict[str, Any]) -> Iterator[str]:
    """Yield a row for each kernel of a step: launches and microseconds, both a layer."""
    yield "\n| kernel | launches a layer | us a layer |\n|---|---|---|"
    for kernel in record["kernels"]:
        launches, us = (kernel[name] / record["layers"] for name in ("launches", "us"))
        yield f"| {kernel['name']} | {launches:.2f} | {us:.2f} |"
    yield ""


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*IN_BFLOAT16])
    parser.add_argument("--batches", nargs="+", type=int, help="decode of so many sequences alone")
    parser.add_argument("--layers", type=int, help="instead of all")
    parser.add_argument("--kernels", action="store_true", help="tell what each kernel takes")
    parser.add_argument(
        "--beside", action="store_true", help="serve requests too, and have transformers serve them"
    )
    parser.add_argument("--json", type=Path, default=Path("out/bench/gpu-models.json"))
    options = parser.parse_args()
    cases = [Case(batch, CONTEXT) for batch in options.batches] if options.batches else CASES
    memory = roof.measured()
    record: dict[str, Any] = {"machine": gpu.machine(), "commit": gpu.commit()}
    record |= {"roof": {"read": memory.read, "copy": memory.copy}, "steps": [], "served": []}
    options.json.parent.mkdir(parents=True, exist_ok=True)

    def keep(kind: str, found: dict[str, Any], row: str) -> None:
        record[kind].append(found)
        print(row, flush=True)
        options.json.write_text(json.dumps(record) + "\n")

    print(
        "| model | step | experts | ms | roof, ms | share |\n|---|---|---|---|---|---|", flush=True
    )
    for name in options.models:
        loaded = load(shape_of(name, options.layers))
        for found in steps(name, loaded, cases, memory):
            rows = [line(found), *(by_kernel(found) if options.kernels else ())]
            keep("steps", found, "\n".join(rows))
        beside = options.beside and name in bench_transformers.CONFIGS
        for found in served(name, loaded) if beside else ():
            keep("served", found, served_line(found))
        del loaded
        gc.collect()
        torch.cuda.empty_cache()
        for found in transformers_beside(name) if beside else ():
            keep("served", found, served_line(found))


if __name__ == "__main__":
    main()
