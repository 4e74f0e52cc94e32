"""From a configuration to an engine over several GPUs: rank 0's part of it.

Owns the order: the other ranks first, which load their parts while this one loads its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from baton_worker.config import ProcessConfig
from baton_worker.engine.api import RankDiedError
from baton_worker.engine.backends.device.engine import DeviceEngine
from baton_worker.engine.backends.device.seam import Device, Kernels
from baton_worker.engine.backends.device.start import prepare, serve_from
from baton_worker.engine.backends.ranked.group import COMMAND, DeviceRanks
from baton_worker.engine.closing import closing_on_failure
from baton_worker.engine.load_progress import LoadProgress
from baton_worker.engine.model.shards import Shard

log = logging.getLogger(__name__)


def start_over_ranks(
    config: ProcessConfig,
    opened: Callable[[], tuple[Device, Kernels]],
    clock: Callable[[], float],
    on_rank_death: Callable[[RankDiedError], None],
    copier: Callable[[int], Device],
    command: Sequence[str] = COMMAND,
    progress: LoadProgress | None = None,
) -> DeviceEngine:
    """Start `engine.tensor_parallel_size` ranks, of which the caller is the first.

    Args:
        opened: returns rank 0's device.
        on_rank_death: told on another thread when another rank dies, which no step survives.
        copier: returns another rank's device, for copies into its memory.
        command: starts another rank, whose pipe's descriptor is added to it.
        progress: is told how far rank 0's weights are.

    Raises:
        RankDiedError: another rank did not start.
        ConfigError, ModelShapeError, CheckpointError, DeviceError: see `start_engine`.
    """
    ranks = DeviceRanks(config, on_rank_death, command)
    with closing_on_failure() as made:
        made.append(ranks.close)
        shard = Shard(0, config.engine.tensor_parallel_size)
        prepared = prepare(config, *opened(), clock, shard, progress)
        team = ranks.meet(prepared)._replace(copier=copier)
        model = prepared.model._replace(team=team)
        engine = serve_from(config, prepared._replace(model=model), clock)
    engine.on_close(ranks.close)
    return engine
