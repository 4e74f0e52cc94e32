"""From a configuration and a device to an engine that is ready to serve.

Owns the order: dtype, weights, the pool's size, graphs. Knows no framework: device and kernels are
given.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from baton_worker.config import EngineConfig, ProcessConfig
from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device.budget import Budget
from baton_worker.engine.backends.device.engine import (
    DeviceEngine,
    LoadedModel,
    kv_form,
    kv_shape,
)
from baton_worker.engine.backends.device.expert_kernels import ExpertLimits
from baton_worker.engine.backends.device.loading import load_device_weights, model_dtype
from baton_worker.engine.backends.device.seam import Device, DType, Kernels, MemoryUse
from baton_worker.engine.backends.device.sizing import (
    FOR_LESS_WEIGHTS,
    check_memory,
    measured_budget,
    weight_bytes,
)
from baton_worker.engine.backends.device.warm_up import warm_up
from baton_worker.engine.closing import closing_on_failure
from baton_worker.engine.load_progress import LoadProgress
from baton_worker.engine.model.checkpoint import open_checkpoint
from baton_worker.engine.model.shape import ModelShape, load_shape
from baton_worker.engine.model.shards import WHOLE, Shard
from baton_worker.engine.options import EngineOptions, resolve_options

log = logging.getLogger(__name__)

_KV_BYTES_PER_STEP = 64 << 20
"""KV of handoffs that a step moves at most: a few milliseconds of the host's, while the device
computes."""


class Prepared(NamedTuple):
    """What a rank has before it meets the others, or an engine of one before its pool.

    Attributes:
        budget: of its device, with the weights on it; None where nobody will size a pool by it.
    """

    model: LoadedModel
    options: EngineOptions
    budget: Budget | None = None


def start_engine(
    config: ProcessConfig,
    device: Device,
    kernels: Kernels,
    clock: Callable[[], float],
    progress: LoadProgress | None = None,
) -> DeviceEngine:
    """Load the model that `config` names onto the device and return its engine.

    Args:
        progress: is told how far the weights are.

    Raises:
        ConfigError: a limit does not fit the model.
        ModelShapeError: config.json is unreadable or unsupported.
        CheckpointError: the checkpoint does not match it.
        DeviceError: the device has too little memory, or cannot do what a step needs.
    """
    prepared = prepare(config, device, kernels, clock, progress=progress)
    return serve_from(config, prepared, clock)


def refuse_unserved(path: Path, shape: ModelShape, limits: ExpertLimits) -> None:
    """Refuse a model that the kernels do not compute.

    Raises:
        DeviceError: its mixture is larger than they take.
    """
    what = f"engine.device is 'gpu', but {path} (model_type {shape.model_type})"
    if (experts := shape.experts) is None:
        return
    for name, has, most in (
        ("experts in a layer", experts.count, limits.experts),
        ("experts a token", experts.chosen, limits.chosen),
        ("groups of experts", experts.n_groups, limits.groups),
    ):
        if has > most:
            raise DeviceError(
                f"{what} has {has} {name}, and the CUDA kernels take at most {most}: only "
                "engine.device 'cpu' computes it"
            )


def prepare(
    config: ProcessConfig,
    device: Device,
    kernels: Kernels,
    clock: Callable[[], float],
    shard: Shard = WHOLE,
    progress: LoadProgress | None = None,
) -> Prepared:
    """Load a rank's part of the model.

    Raises:
        As `start_engine` does.
    """
    path = Path(config.model.path)
    model_shape = load_shape(path)
    refuse_unserved(path, model_shape, kernels.expert_limits)
    options = dataclasses.replace(
        resolve_options(config, model_shape), kv_bytes_per_step=_KV_BYTES_PER_STEP
    )
    checkpoint = open_checkpoint(path)
    dtype = model_dtype(checkpoint, config.engine.dtype)
    before = device.memory()
    budget = _expected(config, model_shape, options, dtype, shard.size, before)
    check_memory(budget, before.free, config.engine.kv_blocks)
    started = clock()
    try:
        weights = load_device_weights(
            device, checkpoint, model_shape, dtype, options.n_mtp, shard, progress
        )
    except DeviceError as error:
        raise DeviceError(
            f"{error}: no room for the model's weights: {FOR_LESS_WEIGHTS}"
        ) from error
    use = device.memory()
    log.info(
        "weights are on the device",
        extra={
            "device_name": device.name,
            "dtype": dtype,
            "rank": shard.rank,
            "seconds": round(clock() - started, 3),
            "free_bytes": use.free,
            "total_bytes": use.total,
        },
    )
    budget = dataclasses.replace(budget, weights=max(before.free - use.free, 0))
    return Prepared(LoadedModel(device, kernels, model_shape, weights), options, budget)


def _expected(
    config: ProcessConfig,
    model_shape: ModelShape,
    options: EngineOptions,
    dtype: DType,
    ranks: int,
    use: MemoryUse,
) -> Budget:
    """Return the budget of a device that a model is to come to."""
    item_bytes = 4 if dtype == "float32" else 2
    return Budget(
        total=use.total,
        share=config.engine.gpu_memory_utilization,
        others=use.total - use.free,
        weights=weight_bytes(model_shape, options.n_mtp, item_bytes, ranks),
        working=None,
        block_bytes=kv_form(model_shape, options, dtype, ranks).block_bytes,
        block_size=options.block_size,
        max_model_len=options.max_model_len,
        chunk_field=options.chunk_field,
    )


def serve_from(
    config: ProcessConfig, prepared: Prepared, clock: Callable[[], float]
) -> DeviceEngine:
    """Size the pool, make the engine and its graphs, on all ranks if there are several.

    Raises:
        As `start_engine` does.
    """
    model, options, known = prepared
    if not config.engine.kv_blocks:
        assert known is not None, "whoever loads a model keeps it"
        budget = measured_budget(model, options, known, clock)
        log.info("memory: %s", budget.told(), extra=budget.facts())
        options = dataclasses.replace(options, n_blocks=budget.n_blocks)
    engine = _engine(model, options, clock, config.engine)
    with closing_on_failure() as made:
        made.append(engine.close)
        warm_up(engine, clock)
    return engine


def _engine(
    model: LoadedModel, options: EngineOptions, clock: Callable[[], float], told: EngineConfig
) -> DeviceEngine:
    try:
        return DeviceEngine(model, options, clock)
    except DeviceError as error:
        block_bytes = kv_shape(model, options).block_bytes
        raise DeviceError(
            f"{error}: no room for {options.n_blocks} KV blocks of {block_bytes} bytes and a step "
            f"of engine.max_running {options.max_running} and {options.chunk_field} "
            f"{options.prefill_tokens}; {_for_less_memory(options, told)}"
        ) from error


def _for_less_memory(options: EngineOptions, told: EngineConfig) -> str:
    """Return what to do where a pool and a step do not fit together."""
    if not told.kv_blocks:
        return (
            "they were found to fit, so others have taken memory since: lower "
            f"engine.gpu_memory_utilization {told.gpu_memory_utilization:g}"
        )
    needed = -(-options.max_model_len // options.block_size)
    longest = f"one request of engine.max_model_len {options.max_model_len} needs {needed}"
    if needed < options.n_blocks:
        return f"lower engine.kv_blocks ({longest}), or set it to 0 for what fits"
    return f"{longest}: lower that, and engine.kv_blocks, or what a step takes"
