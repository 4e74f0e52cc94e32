"""What rank 0 tells the other ranks of its worker, and what they answer.

Owns the messages between them and their bytes. Orders travel over a pipe on which the ranks wait
between steps, so that nobody sits in a collective that may idle: gloo raises after 30 s. A rank is
told tokens, positions and block tables and never of a request, so it keeps nothing that would have
to be cleaned when one ends or is preempted (R18).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from baton_worker.engine.kv.layout import TokenGroup


class Group(msgspec.Struct, frozen=True, array_like=True):
    """A `TokenGroup`; `tables` as i32[S, table_width], `first_position` as i64[S]."""

    q_len: int
    table_width: int
    tables: bytes
    first_position: bytes


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Load shard `rank` of `size`; sizes as in `shard.ShardSizes`. Answered by `Loaded`."""

    model_path: str
    rank: int
    size: int
    block_size: int
    n_blocks: int
    max_positions: int
    n_mtp: int


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Enter the group whose meeting point is at this port of the loopback address."""

    port: int


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Begin a step: feed tokens i64[N] in these groups. Whatever the last step left is dropped."""

    tokens: bytes
    groups: tuple[Group, ...]


class ForwardMtp(msgspec.Struct, frozen=True, tag="forward_mtp"):
    """Run MTP layer `layer`.

    Attributes:
        tokens: i64[N], for each flat token.
        source: feed the last output, which is this MTP layer's; None: the step's hidden states.
        rows: i64[R] of that only; None for all.
        groups: where the rows stand; None: as the step's `Forward`.
    """

    tokens: bytes
    layer: int
    source: int | None
    rows: bytes | None
    groups: tuple[Group, ...] | None


class Import(msgspec.Struct, frozen=True, tag="import"):
    """Write this rank's heads into `blocks`: 2 * n_layers arrays, float32."""

    blocks: tuple[int, ...]
    arrays: tuple[bytes, ...]


class Export(msgspec.Struct, frozen=True, tag="export"):
    """Read this rank's heads out of `blocks`; answered by `Exported`."""

    blocks: tuple[int, ...]
    n_positions: int


Order = Start | Join | Forward | ForwardMtp | Import | Export


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The shard is loaded from the checkpoint of this identity."""

    identity: str


class Exported(msgspec.Struct, frozen=True, tag="exported"):
    """2 * n_layers arrays, float32."""

    arrays: tuple[bytes, ...]


Answer = Loaded | Exported


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


def pack_groups(groups: Sequence[TokenGroup]) -> tuple[Group, ...]:
    """Return the groups as they travel."""
    return tuple(
        Group(g.q_len, g.tables.shape[1], g.tables.tobytes(), g.first_position.tobytes())
        for g in groups
    )


def unpack_groups(groups: Sequence[Group]) -> tuple[TokenGroup, ...]:
    """Return what `pack_groups` was given."""
    return tuple(
        TokenGroup(
            tables=np.frombuffer(g.tables, np.int32).reshape(-1, g.table_width),
            first_position=np.frombuffer(g.first_position, np.int64),
            q_len=g.q_len,
        )
        for g in groups
    )


def as_bytes(array: npt.NDArray[Any]) -> bytes:
    """Return an array's elements in C order."""
    return array.tobytes()


def as_indices(data: bytes) -> npt.NDArray[np.int64]:
    """Return i64[N], writable."""
    return np.frombuffer(data, np.int64).copy()
