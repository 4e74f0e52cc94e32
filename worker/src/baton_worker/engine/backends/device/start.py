"""From a configuration and a device to an engine that is ready to serve.

Owns the order: dtype, weights, the pool's size, graphs. Knows no framework: device and kernels are
given.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from baton_worker.config import ProcessConfig
from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device.engine import DeviceEngine, LoadedModel, kv_shape
from baton_worker.engine.backends.device.loading import load_device_weights, model_dtype
from baton_worker.engine.backends.device.seam import Device, Kernels
from baton_worker.engine.backends.device.sizing import check_weights, fitting_blocks
from baton_worker.engine.backends.device.warm_up import warm_up
from baton_worker.engine.model.checkpoint import open_checkpoint
from baton_worker.engine.model.shape import ModelShape, load_shape
from baton_worker.engine.options import EngineOptions, resolve_options

log = logging.getLogger(__name__)

_KV_BYTES_PER_STEP = 64 << 20
"""KV of handoffs that a step moves at most: a few milliseconds of the host's, while the device
computes."""


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
    path = Path(config.model.path)
    model_shape = load_shape(path)
    options = dataclasses.replace(
        resolve_options(config, model_shape), kv_bytes_per_step=_KV_BYTES_PER_STEP
    )
    if options.use_mtp and model_shape.n_mtp_layers > 1:
        log.warning("only the first of the model's MTP layers drafts", extra={"path": str(path)})
    model = _loaded(config, device, kernels, model_shape, int(options.use_mtp), clock)
    if not config.engine.kv_blocks:
        n_blocks = fitting_blocks(model, options, config.engine.gpu_memory_utilization, clock)
        options = dataclasses.replace(options, n_blocks=n_blocks)
    engine = _engine(model, options, clock)
    warm_up(engine, clock)
    return engine


def _loaded(
    config: ProcessConfig,
    device: Device,
    kernels: Kernels,
    model_shape: ModelShape,
    n_mtp: int,
    clock: Callable[[], float],
) -> LoadedModel:
    checkpoint = open_checkpoint(Path(config.model.path))
    dtype = model_dtype(checkpoint, config.engine.dtype)
    check_weights(device.memory(), model_shape, n_mtp, 4 if dtype == "float32" else 2)
    started = clock()
    weights = load_device_weights(device, checkpoint, model_shape, dtype, n_mtp)
    use = device.memory()
    log.info(
        "weights are on the device",
        extra={
            "device_name": device.name,
            "dtype": dtype,
            "seconds": round(clock() - started, 3),
            "free_bytes": use.free,
            "total_bytes": use.total,
        },
    )
    return LoadedModel(device, kernels, model_shape, weights)


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
