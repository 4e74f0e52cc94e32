"""What rank 0 tells the other ranks of its worker to do on their devices, and what they answer.

Owns the messages and their bytes. A step is one order: its shape, and the numbers that rank 0
uploads for it. Every rank makes the same launches of these on its part of the model, and the same
tokens, so nothing of a step comes back and no rank is ever told of a request. `engine` numbers what
rank 0 has opened: pool, memory and graphs of one set of limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec

from baton_worker.engine.backends.device.seam import MemoryUse
from baton_worker.engine.backends.device.shapes import StepShape
from baton_worker.engine.options import EngineOptions


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Make the pool, memory and programs of an engine; answered by `Opened` if others are to map
    the pool.
    """

    engine: int
    options: EngineOptions


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Attend to who reads the pool by address, and into it, as is said over a way of its own.

    Its descriptor goes over with this, and is whoever's to close that has received it: no step's
    order waits for a read, and the end of a read is told at any time.
    """

    engine: int
    descriptor: int = -1


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """Come to a sum of nothing: what any rank launches behind it is behind all before it on all."""


class Shut(msgspec.Struct, frozen=True, tag="shut"):
    """Give them back."""

    engine: int


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Take a step; `inputs` are the bytes of `inputs.Inputs` as rank 0's host filled them."""

    engine: int
    shape: StepShape
    lane: int
    is_ahead: bool
    inputs: bytes


class Penalise(msgspec.Struct, frozen=True, tag="penalise"):
    """Fill a request's place: counts i32[V], seen u8[V]."""

    engine: int
    slot: int
    counts: bytes
    seen: bytes


class Remember(msgspec.Struct, frozen=True, tag="remember"):
    """Fill a request's place: its tokens."""

    engine: int
    slot: int
    tokens: tuple[int, ...]


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Compute the logits of rows `start : stop` of the last step's `n_tokens` normed states."""

    engine: int
    n_tokens: int
    start: int
    stop: int


class Import(msgspec.Struct, frozen=True, tag="import"):
    """Write this rank's heads into blocks: E[blocks, layers, 2, heads, block_size, head_dim]."""

    engine: int
    blocks: tuple[int, ...]
    data: bytes


class Export(msgspec.Struct, frozen=True, tag="export"):
    """Read this rank's heads out of blocks; answered by `Exported`, in the order asked."""

    engine: int
    blocks: tuple[int, ...]
    n_positions: int


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Finish all work and tell what is used; answered by `Measured`."""


Order = (
    Open | Connect | Meet | Shut | Step | Penalise | Remember | Score | Import | Export | Measure
)


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The pool can be mapped by a descriptor, which goes over with this and is whoever's to close
    that has received it.
    """

    n_bytes: int
    descriptor: int


class Exported(msgspec.Struct, frozen=True, tag="exported"):
    """As `Import.data`."""

    data: bytes


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """The rank's memory."""

    use: MemoryUse


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank cannot do what it was told, for want of memory say, and ends."""

    reason: str


Answer = Opened | Exported | Measured | Failed


class Followers(Protocol):
    """The other ranks as rank 0's engine sees them. One thread at a time."""

    def new_number(self) -> int:
        """Return a number for an engine, each once."""

    def tell(self, orders: Sequence[Order]) -> None:
        """Send the one order to all, or each rank its own, that of rank 1 first.

        Raises:
            RankDiedError: one of them is gone.
        """

    def connect(self, engine: int) -> list[Connection]:
        """Send `Connect` to all; return the near ends, that of rank 1 first.

        Raises:
            RankDiedError: one of them is gone.
        """

    def answers(self) -> list[Answer]:
        """Return the next answer of each rank, that of rank 1 first.

        Raises:
            RankDiedError: one of them is gone, is silent, or could not do what it was told.
        """


def encode(message: Order | Answer) -> bytes:
    """Return the bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode_order(data: bytes) -> Order:
    """Return the order in `data`, which rank 0 made."""
    order: Order = msgspec.msgpack.decode(data, type=Order)
    return order


def decode_answer(data: bytes) -> Answer:
    """Return the answer in `data`, which another rank of this worker made."""
    answer: Answer = msgspec.msgpack.decode(data, type=Answer)
    return answer
