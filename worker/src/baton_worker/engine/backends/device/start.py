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

from baton_worker.config import ProcessConfig
from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device.engine import DeviceEngine, LoadedModel, kv_shape
from baton_worker.engine.backends.device.loading import load_device_weights, model_dtype
from baton_worker.engine.backends.device.seam import Device, Kernels
from baton_worker.engine.backends.device.sizing import check_weights, fitting_blocks
from baton_worker.engine.backends.device.warm_up import warm_up
from baton_worker.engine.model.checkpoint import open_checkpoint
from baton_worker.engine.model.shape import ModelShape, load_shape
from baton_worker.engine.model.shards import WHOLE, Shard
from baton_worker.engine.options import EngineOptions, resolve_options

log = logging.getLogger(__name__)

_KV_BYTES_PER_STEP = 64 << 20
"""KV of handoffs that a step moves at most: a few milliseconds of the host's, while the device
computes."""


class Prepared(NamedTuple):
    """What a rank has before it meets the others, or an engine of one before its pool."""

    model: LoadedModel
    options: EngineOptions


def start_engine(
    config: ProcessConfig, device: Device, kernels: Kernels, clock: Callable[[], float]
) -> DeviceEngine:
    """Load the model that `config` names onto the device and return its engine.

    Raises:
        ConfigError: a limit does not fit the model.
        ModelSpecError: config.json is unreadable or unsupported.
        CheckpointError: the checkpoint does not match it.
        DeviceError: the device has too little memory, or cannot do what a step needs.
    """
    return serve_from(config, prepare(config, device, kernels, clock), clock)


def refuse_unserved(path: Path, shape: ModelShape, may_serve_experts: bool) -> None:
    """Refuse a model that the kernels may not compute.

    Raises:
        DeviceError: it is quantised, or a mixture, and they may serve none.
    """
    if shape.quantisation is not None:
        raise DeviceError(
            f"engine.device is 'gpu', but {path} (model_type {shape.model_type}) is quantised to "
            "FP8 (quantization_config), whose CUDA kernels no GPU has run yet: only engine.device "
            "'cpu' computes it"
        )
    if shape.experts is not None and not may_serve_experts:
        raise DeviceError(
            f"engine.device is 'gpu', but {path} (model_type {shape.model_type}) is a "
            "mixture of experts, whose CUDA kernels no GPU has run yet: only engine.device 'cpu' "
            "computes it"
        )


def prepare(
    config: ProcessConfig,
    device: Device,
    kernels: Kernels,
    clock: Callable[[], float],
    shard: Shard = WHOLE,
) -> Prepared:
    """Load a rank's part of the model.

    Raises:
        As `start_engine` does.
    """
    path = Path(config.model.path)
    model_shape = load_shape(path)
    refuse_unserved(path, model_shape, kernels.may_serve_experts)
    options = dataclasses.replace(
        resolve_options(config, model_shape), kv_bytes_per_step=_KV_BYTES_PER_STEP
    )
    if options.use_mtp and model_shape.n_mtp_layers > 1:
        log.warning("only the first of the model's MTP layers drafts", extra={"path": str(path)})
    n_mtp = int(options.use_mtp)
    checkpoint = open_checkpoint(path)
    dtype = model_dtype(checkpoint, config.engine.dtype)
    check_weights(device.memory(), model_shape, n_mtp, 4 if dtype == "float32" else 2, shard.size)
    started = clock()
    weights = load_device_weights(device, checkpoint, model_shape, dtype, n_mtp, shard)
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
    return Prepared(LoadedModel(device, kernels, model_shape, weights), options)


def serve_from(
    config: ProcessConfig, prepared: Prepared, clock: Callable[[], float]
) -> DeviceEngine:
    """Size the pool, make the engine and its graphs, on all ranks if there are several.

    Raises:
        As `start_engine` does.
    """
    model, options = prepared
    if not config.engine.kv_blocks:
        n_blocks = fitting_blocks(model, options, config.engine.gpu_memory_utilization, clock)
        options = dataclasses.replace(options, n_blocks=n_blocks)
    engine = _engine(model, options, clock)
    warm_up(engine, clock)
    return engine


def _engine(model: LoadedModel, options: EngineOptions, clock: Callable[[], float]) -> DeviceEngine:
    try:
        return DeviceEngine(model, options, clock)
    except DeviceError as error:
        block_bytes = kv_shape(model, options).block_bytes
        raise DeviceError(
            f"{error}: no room for {options.n_blocks} KV blocks of {block_bytes} bytes and a step "
            f"of engine.max_running {options.max_running} and engine.prefill_chunk_tokens "
            f"{options.prefill_tokens}; lower engine.kv_blocks, or set it to 0 for what fits"
        ) from error
