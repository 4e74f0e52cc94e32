"""How many ranks the operator gave a worker: the part of the pod contract about parallelism.

`BATON_TENSOR_PARALLEL` is a replica's ranks and `BATON_NODES` the nodes that they are spread over.
Owns how these join the configuration. Reads only the mapping it is given.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from baton_worker.config import ConfigError, ProcessConfig

_MOST_RANKS = 64


def with_ranks(config: ProcessConfig, environment: Mapping[str, str]) -> ProcessConfig:
    """Return `config` with the environment's number of ranks, if that says one.

    Raises:
        ConfigError: not a number of ranks, another than the configuration's, or several nodes.
    """
    nodes = _count(environment, "BATON_NODES")
    if nodes > 1:
        raise ConfigError(f"BATON_NODES is {nodes}, but a worker's ranks run on one node")
    ranks, configured = _count(environment, "BATON_TENSOR_PARALLEL"), config.engine
    if ranks == 1 or ranks == configured.tensor_parallel_size:
        return config
    if configured.tensor_parallel_size > 1:
        raise ConfigError(
            f"BATON_TENSOR_PARALLEL is {ranks}, but engine.tensor_parallel_size is "
            f"{configured.tensor_parallel_size}: set one of them"
        )
    if configured.device == "sim":
        raise ConfigError(
            f"BATON_TENSOR_PARALLEL is {ranks}, but engine.device is {configured.device!r}, "
            "which has one rank: let parallelism.tensor of the role be 1"
        )
    try:
        engine = msgspec.structs.replace(configured, tensor_parallel_size=ranks)
    except ValueError as error:
        raise ConfigError(f"BATON_TENSOR_PARALLEL is {ranks}: {error}") from error
    return msgspec.structs.replace(config, engine=engine)


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name) or "1"
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_RANKS:
        raise ConfigError(f"{name} is {text!r}, not a number in 1..{_MOST_RANKS}")
    return int(text)
