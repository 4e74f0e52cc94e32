"""Ranks of models with random weights, over GPUs or over NumPy: rank 0's side, and the processes.

Run as `python -m baton_testing.random_rank gpu|numpy cut|drawn FD`; the configuration that rank 0
sends names the shape where a worker's names a folder. Knows no test.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import Any

from baton_testing import drawn_parts
from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.backends.device.engine import LoadedModel
from baton_worker.engine.backends.device.start import Prepared
from baton_worker.engine.backends.ranked.follower import run
from baton_worker.engine.backends.ranked.group import DeviceRanks
from baton_worker.engine.model.shards import Shard
from baton_worker.engine.options import resolve_options
from baton_worker.handoff.nixl_rank import attend
from baton_worker.readiness import die_with_parent

_NUMPY_BYTES = 1 << 30


def config(shape: str, ranks: int, **engine: Any) -> ProcessConfig:
    """Return what ranks are started with: sizes of the largest step, and how long they wait."""
    has_mtp = bool(drawn_parts.shape_of(shape).n_mtp_layers)
    given = {"max_model_len": 4096, "stuck_seconds": 60.0} | engine
    return ProcessConfig(
        model=ModelConfig(shape),
        speculative=SpeculativeConfig("mtp", 1) if has_mtp else SpeculativeConfig("none", 0),
        engine=EngineConfig(device="gpu", tensor_parallel_size=ranks, **given),
    )


def prepared(device: str, how: str, chosen: ProcessConfig, shard: Shard) -> Prepared:
    """Return a rank's part."""
    shape = drawn_parts.shape_of(chosen.model.path)
    loaded = _on_numpy(shape, shard) if device == "numpy" else _on_gpu(how, shape, shard)
    return Prepared(loaded, resolve_options(chosen, shape))


def over_ranks(device: str, how: str, chosen: ProcessConfig) -> LoadedModel:
    """Return rank 0's model; of several ranks its `team.followers` are to be closed."""
    size = chosen.engine.tensor_parallel_size
    if size == 1:
        return prepared(device, how, chosen, Shard()).model
    command = (sys.executable, "-m", "baton_testing.random_rank", device, how)
    ranks = DeviceRanks(chosen, lambda error: None, command)
    try:
        own = prepared(device, how, chosen, Shard(0, size))
        return own.model._replace(team=ranks.meet(own))
    except BaseException:
        ranks.close()
        raise


def _on_numpy(shape: Any, shard: Shard) -> LoadedModel:
    from baton_testing.numpy_device import NumpyDevice
    from baton_testing.numpy_kernels import NumpyKernels

    device = NumpyDevice(_NUMPY_BYTES, runs_by_itself=shard.rank > 0)
    draw = drawn_parts.host_draw(device, shard.rank)
    weights = drawn_parts.drawn(shape, shard, draw, "float32")
    return LoadedModel(device, NumpyKernels(device), shape, weights)


def _on_gpu(how: str, shape: Any, shard: Shard) -> LoadedModel:
    import torch

    from baton_worker.engine.backends.kernels import OpsKernels
    from baton_worker.engine.backends.torch.device import TorchDevice

    device = TorchDevice(shard.rank)
    device.synchronise()  # its stream is this thread's from here on
    if how == "cut":
        weights = drawn_parts.cut(torch, shape, shard)
    else:
        draw = drawn_parts.torch_draw(torch, shard.rank)
        weights = drawn_parts.drawn(shape, shard, draw, "bfloat16")
    device.synchronise()
    torch.cuda.empty_cache()
    return LoadedModel(device, OpsKernels(device), shape, weights)


def main(device: str, how: str, descriptor: str) -> int:
    """Be a rank."""
    die_with_parent()
    pipe = Connection(int(descriptor))
    return run(pipe, lambda *given: prepared(device, how, *given), attend)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
