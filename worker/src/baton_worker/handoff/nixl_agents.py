"""NIXL's agents of a worker: this process's, and one in each other rank that has a part of the
pool.

Owns whether they are wanted, and what becomes of a worker that cannot have them, or what it needs
of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from baton_worker.config import ConfigError, HandoffConfig
from baton_worker.engine.closing import close_all
from baton_worker.engine.kv.sharing import KvSharing
from baton_worker.handoff.nixl_agent import NixlAgent, NixlError, NixlMissingError
from baton_worker.handoff.nixl_ranks import FarRank, far_ranks

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class NixlAgents(NamedTuple):
    """See the module."""

    own: NixlAgent
    others: tuple[FarRank, ...]

    def close(self) -> None:
        """Let the other ranks know that nothing is asked of them any more, whoever is gone."""
        close_all([rank.close for rank in self.others])


def agents_of(
    config: HandoffConfig, pool_id: bytes, sharing: KvSharing | None
) -> NixlAgents | None:
    """Return a worker's agents, by which the pool can be read, or None where they are not wanted,
    or cannot be had and need not.

    Args:
        sharing: of its pool; None where it shares none.

    Raises:
        ConfigError: NIXL is not installed, or it must be had.
    """
    if config.nixl == "off" or sharing is None:
        return None
    name, is_rdma_only = pool_id.hex(), config.nixl == "rdma"

    def make() -> NixlAgents:
        own = NixlAgent(name, is_rdma_only=is_rdma_only)
        own.register(sharing.region)
        others = far_ranks(sharing.connect(), name, is_rdma_only=is_rdma_only)
        return NixlAgents(own, others)

    return had(config, make)


def had(config: HandoffConfig, make: Callable[[], _T]) -> _T | None:
    """Return what is made of NIXL; None, with a warning, where that cannot be and need not.

    Raises:
        ConfigError: NIXL is not installed, or it must be had.
    """
    try:
        return make()
    except NixlMissingError as error:
        raise ConfigError(f"handoff.nixl is {config.nixl!r}, but {error}") from error
    except NixlError as error:
        if config.require == "rdma":
            message = f"handoff.require is 'rdma', and KV cannot go so from here: {error}"
            raise ConfigError(message) from error
        log.warning("KV will not be read by NIXL", extra={"why": str(error)})
        return None
