"""The other ranks' devices as one engine's runner and pool see them: what is done here, there too.

Owns which order each thing is. Knows no pipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy.typing as npt

from baton_worker.engine.backends.device import orders
from baton_worker.engine.backends.device.orders import Followers
from baton_worker.engine.backends.device.seam import Host
from baton_worker.engine.backends.device.shapes import StepShape
from baton_worker.engine.options import EngineOptions


class EngineFollowers:
    """Of one engine: opened with it, and shut."""

    def __init__(self, followers: Followers, options: EngineOptions) -> None:
        self._followers = followers
        self._engine = followers.new_number()
        self._is_open = True
        self.n_steps = 0
        self._n_exporting = 0  # `export_blocks` that `exported` has not returned yet
        followers.tell([orders.Open(self._engine, options)])

    def step(self, shape: StepShape, lane: int, is_ahead: bool, inputs: Host) -> None:
        """Take the step that this rank takes next."""
        self.n_steps += 1
        self._tell(orders.Step(self._engine, shape, lane, is_ahead, inputs.tobytes()))

    def penalise(self, slot: int, counts: npt.NDArray[Any], seen: npt.NDArray[Any]) -> None:
        """Fill a request's place as here."""
        self._tell(orders.Penalise(self._engine, slot, counts.tobytes(), seen.tobytes()))

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Fill a request's place as here."""
        self._tell(orders.Remember(self._engine, slot, tuple(tokens)))

    def score(self, n_tokens: int, rows: range) -> None:
        """Compute the logits that this rank computes next."""
        self._tell(orders.Score(self._engine, n_tokens, rows.start, rows.stop))

    def import_blocks(self, blocks: Sequence[int], parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write each rank's heads, those of rank 1 first."""
        told = tuple(blocks)
        self._followers.tell([orders.Import(self._engine, told, p.tobytes()) for p in parts])

    def export_blocks(self, blocks: Sequence[int], n_positions: int) -> None:
        """Read each rank's heads, for `exported`."""
        self._tell(orders.Export(self._engine, tuple(blocks), n_positions))
        self._n_exporting += 1

    def exported(self) -> list[bytes]:
        """Return what the oldest `export_blocks` read, rank 1's first."""
        told = self._followers.answers()
        self._n_exporting -= 1
        return [answer.data for answer in told if isinstance(answer, orders.Exported)]

    def shares(self) -> list[orders.Opened]:
        """Return what each rank's pool is mapped by, rank 1's first; to be asked once, before
        anything else, of an engine whose pool is mapped.
        """
        told = self._followers.answers()
        return [answer for answer in told if isinstance(answer, orders.Opened)]

    def connect(self) -> list[Connection]:
        """Return a new way to each rank's pool, rank 1's first; see `orders.Connect`."""
        return self._followers.connect(self._engine)

    def meet(self) -> None:
        """Come to the sum that this rank comes to next; see `Collective.meet`."""
        self._tell(orders.Meet())

    def close(self) -> None:
        """Give back what the engine has there, and take what it has asked for and not read: the
        next engine's answers come behind. Idempotent.
        """
        if self._is_open:
            self._is_open = False
            self._tell(orders.Shut(self._engine))
            while self._n_exporting:
                self.exported()

    def _tell(self, order: orders.Order) -> None:
        self._followers.tell([order])
