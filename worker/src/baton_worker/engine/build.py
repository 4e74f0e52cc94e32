"""From a configuration to a running engine.

Owns the order of start: model shape, device, limits, weights, ranks. Imports Paddle only when
called for a device that computes, so that a simulating process stays light.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from baton_worker.config import EngineConfig, ProcessConfig
from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device.seam import Device, Kernels
from baton_worker.engine.backends.sim.engine import SimEngine, sim_shape
from baton_worker.engine.closing import closing_on_failure
from baton_worker.engine.engine import StepEngine
from baton_worker.engine.kv.pool import PoolTooLargeError
from baton_worker.engine.load_progress import LoadProgress
from baton_worker.engine.model.shape import ModelShape, load_shape
from baton_worker.engine.model.shards import Shard
from baton_worker.engine.model.unread_fields import unread_fields
from baton_worker.engine.model.weights import load_weights
from baton_worker.engine.options import EngineOptions, resolve_options

log = logging.getLogger(__name__)


def build_engine(
    config: ProcessConfig,
    clock: Callable[[], float] = time.monotonic,
    on_rank_death: Callable[[Exception], None] = lambda error: None,
    progress: LoadProgress | None = None,
) -> StepEngine:
    """Load the model that `config` names, or pretend to (device sim), and return its engine.

    Args:
        on_rank_death: told on another thread when a tensor-parallel rank dies, which no step
            survives.
        progress: is told how far the weights are, None for the log alone.

    Raises:
        ConfigError: a limit does not fit the model.
        ModelShapeError: config.json is unreadable or unsupported.
        CheckpointError: the checkpoint does not match it.
        DeviceError: what is installed, or the device, cannot serve `engine.device`.
        RankDiedError: a tensor-parallel rank did not start.
    """
    device = config.engine.device
    progress = progress or LoadProgress()
    _tell_unread(Path(config.model.path))
    try:
        match device:
            case "sim":
                engine: StepEngine = _simulated(config, clock)
            case "cpu":
                engine = _loaded(config, clock, on_rank_death, progress)
            case "gpu":
                engine = _on_a_gpu(config, clock, on_rank_death, progress)
    except PoolTooLargeError as error:
        raise DeviceError(f"{error}; {_limits_told(config.engine)}") from error
    log.info(
        "engine ready",
        extra={
            "device": device,
            "fingerprint": engine.model_fingerprint,
            "kv_blocks": engine.options.n_blocks,
            "kv_tokens": engine.options.n_blocks * engine.options.block_size,
            "max_model_len": engine.options.max_model_len,
            "num_speculative_tokens": engine.options.n_draft,
            "draft_layers": engine.options.n_mtp,
            "tensor_parallel_size": engine.options.tensor_parallel_size,
        },
    )
    return engine


def _limits_told(engine: EngineConfig) -> str:
    longest = engine.max_model_len or "0, all that the model can"
    return (
        f"engine.kv_blocks is {engine.kv_blocks}, engine.max_running {engine.max_running}, "
        f"engine.max_model_len {longest}"
    )


def _tell_unread(path: Path) -> None:
    """Before anything is loaded: a name that cannot be read is not to cost minutes."""
    shape = load_shape(path)
    if unread := unread_fields(path, shape.experts is not None):
        log.warning(
            "config.json has fields that nothing reads: %s",
            ", ".join(unread),
            extra={"path": str(path), "fields": list(unread)},
        )


def _simulated(config: ProcessConfig, clock: Callable[[], float]) -> StepEngine:
    sim = config.engine.sim
    shape = sim_shape(sim, load_shape(Path(config.model.path)))
    return SimEngine(sim, shape, resolve_options(config, shape), clock)


def _on_a_gpu(
    config: ProcessConfig,
    clock: Callable[[], float],
    on_rank_death: Callable[[Exception], None],
    progress: LoadProgress,
) -> StepEngine:
    from baton_worker.engine.backends.device.start import refuse_unserved, start_engine
    from baton_worker.engine.backends.gpu import open_device
    from baton_worker.engine.backends.kernels import OpsKernels
    from baton_worker.engine.backends.ranked.start import start_over_ranks

    # Before a device is looked for: nobody is to install one for a model it would not serve.
    path = Path(config.model.path)
    refuse_unserved(path, load_shape(path), OpsKernels.expert_limits)

    def opened() -> tuple[Device, Kernels]:
        device = open_device(config.engine.framework)
        return device, OpsKernels(device)

    if config.engine.tensor_parallel_size > 1:
        copier = partial(open_device, config.engine.framework)
        return start_over_ranks(config, opened, clock, on_rank_death, copier, progress=progress)
    return start_engine(config, *opened(), clock, progress)


def _loaded(
    config: ProcessConfig,
    clock: Callable[[], float],
    on_rank_death: Callable[[Exception], None],
    progress: LoadProgress,
) -> StepEngine:
    from baton_worker.engine.backends.paddle.framework import require_device

    require_device("cpu")
    from baton_worker.engine.backends.paddle.engine import PaddleEngine

    path = Path(config.model.path)
    shape = load_shape(path)
    options = resolve_options(config, shape)
    if options.tensor_parallel_size > 1:
        return _over_ranks(path, shape, options, clock, on_rank_death, progress)
    weights = load_weights(path, shape, n_mtp=options.n_mtp, progress=progress)
    return PaddleEngine(shape, weights, options, clock)


def _over_ranks(
    path: Path,
    shape: ModelShape,
    options: EngineOptions,
    clock: Callable[[], float],
    on_rank_death: Callable[[Exception], None],
    progress: LoadProgress,
) -> StepEngine:
    """Start the other ranks first: they load their shards while this one loads its own."""
    from baton_worker.engine.backends.paddle.engine import PaddleEngine, TensorParallel
    from baton_worker.engine.backends.parallel.group import RankGroup
    from baton_worker.engine.backends.parallel.shard import ShardSizes

    size = options.tensor_parallel_size
    ranks = RankGroup(path, size, ShardSizes.of(options), on_rank_death)
    with closing_on_failure() as made:
        made.append(ranks.close)
        weights = load_weights(path, shape, Shard(0, size), options.n_mtp, progress)
        parallel = TensorParallel(ranks, ranks.join(weights.identity))
        return PaddleEngine(shape, weights, options, clock, parallel)
