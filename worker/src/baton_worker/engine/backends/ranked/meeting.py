"""How the ranks of a worker come together: what they say before the first order.

Owns those messages, and the way of exchange buffers: each rank makes its own, whose descriptor goes
over the pipe to rank 0 and from there to the others, who map it. Nothing else is shared, so ranks
need no common namespace but sight of each other's GPUs. Knows no step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import msgspec

from baton_worker.config import ProcessConfig
from baton_worker.engine.backends.device.collective import Collective, ExchangeSizes
from baton_worker.engine.backends.device.seam import Shared
from baton_worker.engine.backends.device.start import Prepared
from baton_worker.engine.backends.device.steps import sizes_of
from baton_worker.engine.model.shards import Shard

_ITEM_BYTES = {"bfloat16": 2, "float32": 4}
_LEAST_SECONDS = 2.0


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Load part `rank` of `size` of what `config` names; answered by `Loaded`, or `Refused`."""

    config: ProcessConfig
    rank: int
    size: int


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """Map the other ranks' buffers, so many bytes each; their descriptors follow, without one's
    own, in the ranks' order. Answered by `Met`.
    """

    n_bytes: tuple[int, ...]


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Of the checkpoint of this identity; the descriptor of a buffer of so many bytes follows."""

    identity: str
    n_bytes: int


class Met(msgspec.Struct, frozen=True, tag="met"):
    """All buffers are mapped: orders may come."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The rank cannot do its part, and ends."""

    reason: str


Told = Start | Meet
Answered = Loaded | Met | Refused


def encode(message: Told | Answered) -> bytes:
    """Return the bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode_told(data: bytes) -> Told:
    """Return what rank 0 said."""
    told: Told = msgspec.msgpack.decode(data, type=Told)
    return told


def decode_answered(data: bytes) -> Answered:
    """Return what another rank said."""
    answered: Answered = msgspec.msgpack.decode(data, type=Answered)
    return answered


def exchange_sizes(prepared: Prepared, size: int) -> ExchangeSizes:
    """Return the sizes of the ranks' exchange, the same on each."""
    model, options = prepared.model, prepared.options
    n_tokens = sizes_of(options).tokens
    return ExchangeSizes.of(model.model_shape, size, n_tokens, _ITEM_BYTES[model.weights.dtype])


def make_buffer(prepared: Prepared, size: int) -> Shared:
    """Return this rank's buffer.

    Raises:
        DeviceError: there is no memory for it, or it cannot be shared.
    """
    model = prepared.model
    return model.device.shared(exchange_sizes(prepared, size).buffer_bytes(model.kernels))


def collective_of(
    prepared: Prepared, shard: Shard, own: Shared, others: Sequence[tuple[int, int]]
) -> Collective:
    """Map the other ranks' buffers and return the rank's collective; descriptors are closed.

    Args:
        others: descriptor and bytes of each, in the ranks' order.

    Raises:
        DeviceError: a buffer cannot be mapped: the GPUs have no way to each other, say.
    """
    model, options = prepared.model, prepared.options
    limit_seconds = max(options.stuck_seconds / 2, _LEAST_SECONDS)
    with contextlib.ExitStack() as stack:
        for descriptor in (own.descriptor, *(descriptor for descriptor, _ in others)):
            stack.callback(os.close, descriptor)
        buffers = [model.device.map(descriptor, n_bytes) for descriptor, n_bytes in others]
        buffers.insert(shard.rank, own.tensor)
        model.device.synchronise()  # all of one's own is zeros before anybody meets
        return Collective(
            model.device,
            model.kernels,
            shard,
            exchange_sizes(prepared, shard.size),
            own,
            tuple(buffers),
            limit_seconds,
        )


def give(pipe: Connection, descriptor: int) -> None:
    """Send a descriptor behind the message that announces it."""
    send_handle(pipe, descriptor, 0)


def take(pipe: Connection) -> int:
    """Receive a descriptor, which is the caller's to close."""
    return int(recv_handle(pipe))
