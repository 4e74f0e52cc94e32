"""What prefill and decode say to each other about a KV pool that NIXL reads.

Over the KV channel, which is authenticated: prefill says `[b"BKI1", Introduction]`, decode answers
`[b"BKW1", Welcome]`, and says one more when it can read no more. What prefill says lets whoever
has it read its pool. Pure: no socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from baton_worker.engine.kv.memory import Region
from baton_worker.engine.kv.payload import KvShape
from baton_worker.handoff.pool_words import MOST_RANKS, POOL_ID_BYTES, KvShapeWords, words_of

VERSION = 1
RANKS_VERSION = 2
"""Of an introduction of several ranks' pool: who knows the first one alone must not take rank 0's
part for all of it.
"""
INTRODUCTION_MAGIC = b"BKI1"
WELCOME_MAGIC = b"BKW1"
MOST_METADATA_BYTES = 256 << 10
"""Of an agent with many network cards and devices; on a small host it is half a kilobyte."""
HOST = -1

_T = TypeVar("_T", "Introduction", "Welcome")
_Metadata = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MOST_METADATA_BYTES)]
_Id = Annotated[bytes, msgspec.Meta(min_length=POOL_ID_BYTES, max_length=POOL_ID_BYTES)]
_Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
_Address = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
_Device = Annotated[int, msgspec.Meta(ge=HOST, le=1 << 16)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Rate = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class NixlWordsError(ValueError):
    """A message is not what it must be; the text says how."""


class Part(msgspec.Struct, frozen=True):
    """A rank's part of a pool, or all of one that has no others.

    Attributes:
        metadata: of the rank's agent.
        address, n_bytes, device: where it lies there; `HOST` is no device.
    """

    metadata: _Metadata
    address: _Address
    n_bytes: _Bytes
    device: _Device


class Introduction(KvShapeWords, frozen=True):
    """Prefill's pool.

    Attributes:
        pool_id: names the pool in offers, and in hex its agent; nobody can guess it.
        worker_id: whose it is, for logs and metrics.
        metadata, address, n_bytes, device: see `Part`; rank 0's, which has the leases.
        lease_address, lease_bytes: where its `Leases` lie, in the host's memory.
        others: those of the other ranks, rank 1's first; not said where there is none.
    """

    pool_id: _Id
    worker_id: _Name
    metadata: _Metadata
    address: _Address
    n_bytes: _Bytes
    device: _Device
    lease_address: _Address
    lease_bytes: _Bytes
    version: int = VERSION
    others: (
        Annotated[tuple[Part, ...], msgspec.Meta(min_length=1, max_length=MOST_RANKS - 1)]
        | msgspec.UnsetType
    ) = msgspec.UNSET

    @property
    def agent(self) -> str:
        """What its agent must be called, of several ranks rank 0's; see `agent_of`."""
        return self.pool_id.hex()

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return each rank's."""
        others = () if isinstance(self.others, msgspec.UnsetType) else self.others
        return (Part(self.metadata, self.address, self.n_bytes, self.device), *others)


class Welcome(msgspec.Struct, frozen=True):
    """Decode reads the pool, or says why it does not, or not any more.

    Attributes:
        expected_bytes_per_second: what UCX expects of the way that it has chosen; 0: unknown.
        measured_bytes_per_second: what reading one block showed.
    """

    pool_id: _Id
    why_not: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    expected_bytes_per_second: _Rate = 0.0
    measured_bytes_per_second: _Rate = 0.0


def rates_of(words: Welcome) -> dict[str, float]:
    """Return what decode says of the way, for logs and `/readyz`, in bytes per second."""
    return {
        "expected_bytes_per_second": words.expected_bytes_per_second,
        "measured_bytes_per_second": words.measured_bytes_per_second,
    }


def agent_of(agent: str, rank: int) -> str:
    """Return what a rank's agent is called, where rank 0's is `agent`."""
    return f"{agent}-{rank}" if rank else agent


def part_of(metadata: bytes, region: Region) -> Part:
    """Return what is said of a rank's part, or of a whole pool."""
    device = HOST if region.device is None else region.device
    return Part(metadata, region.address, region.n_bytes, device)


def introduction_of(
    pool_id: bytes,
    worker_id: str,
    metadata: bytes,
    shape: KvShape,
    pool: Region,
    leases: Region,
    others: Sequence[Part] = (),
) -> Introduction:
    """Return what a pool's owner says.

    Args:
        metadata, pool: of several ranks those of rank 0.
        others: the other ranks' parts, rank 1's first.
    """
    return Introduction(
        pool_id=pool_id,
        worker_id=worker_id,
        lease_address=leases.address,
        lease_bytes=leases.n_bytes,
        version=RANKS_VERSION if others else VERSION,
        others=tuple(others) if others else msgspec.UNSET,
        **msgspec.structs.asdict(part_of(metadata, pool)),
        **words_of(shape),
    )


def encode_introduction(words: Introduction) -> list[bytes]:
    """Return the frames of an introduction."""
    return [INTRODUCTION_MAGIC, msgspec.msgpack.encode(words)]


def is_introduction(frames: Sequence[Any]) -> bool:
    """Whether a message that prefill sent is one."""
    return bool(frames) and bytes(frames[0]) == INTRODUCTION_MAGIC


def decode_introduction(frames: Sequence[Any]) -> Introduction:
    """Parse an introduction.

    Raises:
        NixlWordsError: it is none, or of another version.
    """
    words = _decoded(frames, Introduction)
    if words.version not in (VERSION, RANKS_VERSION):
        known = f"{VERSION} and {RANKS_VERSION} are known"
        raise NixlWordsError(f"version {words.version} of an introduction, {known}")
    if (words.version == RANKS_VERSION) != (len(words.parts) > 1):
        n_parts = len(words.parts)
        raise NixlWordsError(f"{n_parts} parts in an introduction of version {words.version}")
    ends = [part.address + part.n_bytes for part in words.parts]
    if max(*ends, words.lease_address + words.lease_bytes) > 1 << 62:
        raise NixlWordsError("its memory ends where no memory is")
    return words


def encode_welcome(words: Welcome) -> list[bytes]:
    """Return the frames of an answer to an introduction."""
    return [WELCOME_MAGIC, msgspec.msgpack.encode(words)]


def is_welcome(frames: Sequence[Any]) -> bool:
    """Whether a message that decode sent is one."""
    return bool(frames) and bytes(frames[0]) == WELCOME_MAGIC


def decode_welcome(frames: Sequence[Any]) -> Welcome:
    """Parse an answer to an introduction.

    Raises:
        NixlWordsError: it is none.
    """
    return _decoded(frames, Welcome)


def _decoded(frames: Sequence[Any], kind: type[_T]) -> _T:
    if len(frames) != 2:
        raise NixlWordsError(f"{len(frames)} frames are no {kind.__name__}")
    try:
        return msgspec.msgpack.decode(frames[1], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NixlWordsError(f"no {kind.__name__}: {error}") from error
