"""Both ways to other workers' pools end, whatever one of them says to it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from baton_worker.handoff.nixl_agents import NixlAgents
from baton_worker.handoff.peer_pools import PeerPools


class Way:
    """A way that fails to close if `error` says so."""

    def __init__(self, error: OSError | None = None) -> None:
        self._error = error
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        if self._error is not None:
            raise self._error


def test_nixl_is_closed_behind_a_door_that_fails_to() -> None:
    door, nixl = Way(PermissionError("the door is not ours")), Way()
    with pytest.raises(PermissionError, match="the door is not ours"):
        PeerPools(cast(Any, door), cast(Any, nixl)).close()
    assert door.is_closed
    assert nixl.is_closed


def test_ranks_behind_one_that_is_gone_are_told_too() -> None:
    gone, there = Way(BrokenPipeError("nobody reads")), Way()
    with pytest.raises(BrokenPipeError, match="nobody reads"):
        NixlAgents(cast(Any, None), cast(Any, (gone, there))).close()
    assert there.is_closed
