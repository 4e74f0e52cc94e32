"""What two workers of one host say to each other about a KV pool, byte by byte.

Over a Unix socket that keeps messages apart: prefill says `Introduction`, with the descriptors of
its pool and its leases beside it, and decode `Welcome`. After that nobody says anything, and the
end of the connection is the end of prefill. Pure: no socket.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from baton_worker.engine.kv.payload import COMPRESSED, KvKind, KvShape

VERSION = 1
MOST_BYTES = 4096
POOL_ID_BYTES = 16
MOST_RANKS = 64

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
_Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]
_T = TypeVar("_T", "Introduction", "Welcome")


class PoolWordsError(ValueError):
    """A message is not what it must be; the text says how."""


class KvShapeWords(msgspec.Struct, frozen=True):
    """A pool's `KvShape`, field by field, as whoever introduces one says it.

    `dtype` says whether it is compressed too, so that who knows of no such pool refuses it.
    """

    n_layers: _Count
    kv_heads: _Count
    block_size: _Count
    head_dim: _Count
    n_blocks: _Count
    dtype: KvKind
    is_by_block: bool

    @property
    def shape(self) -> KvShape:
        """The pool's."""
        return KvShape(
            n_layers=self.n_layers,
            kv_heads=self.kv_heads,
            block_size=self.block_size,
            head_dim=self.head_dim,
            n_blocks=self.n_blocks,
            dtype="bfloat16" if self.dtype.startswith("bfloat16") else "float32",
            is_by_block=self.is_by_block,
            is_compressed=self.dtype.endswith(COMPRESSED),
        )


def words_of(shape: KvShape) -> dict[str, Any]:
    """Return the fields of `KvShapeWords` that say a shape."""
    return {
        "n_layers": shape.n_layers,
        "kv_heads": shape.kv_heads,
        "block_size": shape.block_size,
        "head_dim": shape.head_dim,
        "n_blocks": shape.n_blocks,
        "dtype": shape.kind,
        "is_by_block": shape.is_by_block,
    }


class Introduction(KvShapeWords, frozen=True):
    """Prefill's pool.

    Attributes:
        pool_id: names the pool in offers; nobody can guess it.
        worker_id: whose it is, for the log.
        transport: how its bytes can be read, `KvSharing.transport`.
        n_bytes: what each of the first descriptors stands for.
        lease_bytes: what the last stands for: the pool's `Leases`.
        ranks: how many have a part of the pool, each of which has a descriptor; not said of one.
    """

    pool_id: Annotated[bytes, msgspec.Meta(min_length=POOL_ID_BYTES, max_length=POOL_ID_BYTES)]
    worker_id: _Name
    transport: _Name
    n_bytes: _Bytes
    lease_bytes: _Bytes
    version: int = VERSION
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] | msgspec.UnsetType = msgspec.UNSET

    @property
    def n_ranks(self) -> int:
        """How many have a part of the pool."""
        return 1 if isinstance(self.ranks, msgspec.UnsetType) else self.ranks


class Welcome(msgspec.Struct, frozen=True):
    """Decode has mapped the pool, or says why it has not."""

    why_not: Annotated[str, msgspec.Meta(max_length=1024)] = ""


def introduction_of(
    shape: KvShape,
    pool_id: bytes,
    worker_id: str,
    transport: str,
    n_bytes: int,
    lease_bytes: int,
    ranks: int = 1,
) -> Introduction:
    """Return what a pool's owner says."""
    return Introduction(
        pool_id=pool_id,
        worker_id=worker_id,
        transport=transport,
        n_bytes=n_bytes,
        lease_bytes=lease_bytes,
        ranks=ranks if ranks > 1 else msgspec.UNSET,
        **words_of(shape),
    )


def encode(words: Introduction | Welcome) -> bytes:
    """Return a message."""
    return msgspec.msgpack.encode(words)


def decode(message: bytes, kind: type[_T]) -> _T:
    """Parse a message.

    Raises:
        PoolWordsError: it is no such message, or of another version.
    """
    try:
        words = msgspec.msgpack.decode(message, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PoolWordsError(f"no {kind.__name__}: {error}") from error
    version = words.version if isinstance(words, Introduction) else VERSION
    if version != VERSION:
        raise PoolWordsError(f"version {version} of a pool's introduction, {VERSION} is known")
    return words
