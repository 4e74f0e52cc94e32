"""Prefix caching: which full KV blocks a new request may share instead of computing them again.

Owns the names of block contents and the rule which blocks get one. The name of a block is a hash
chain over the engine's identity, the request's salt (who does not have it cannot learn from speed
or `usage` what others asked), every token up to the block's end, and those behind it, one for each
draft layer: the first one's KV at a position depends on the token that follows, the next one's on
one more. Equal names mean equal bits, because
a row's result depends on nothing but the row (`layout.ROW_MULTIPLE`). The last token of a request
is never taken from the cache, so that there is always a row to choose from. Who holds a block and
when it is reused is the allocator's matter.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from baton_worker.engine.kv.pool import BlockAllocator
from baton_worker.engine.options import EngineOptions
from baton_worker.engine.scheduling.requests import RequestState

_NAME_BYTES = 16


class PrefixHits(NamedTuple):
    """Tokens of admitted requests: those looked up in the prefix cache, and those found."""

    queried_tokens: int
    hit_tokens: int


NO_HITS = PrefixHits(0, 0)


def hits_of(admitted: Sequence[RequestState]) -> PrefixHits:
    """Return what requests that have just been admitted found; handoffs do not look."""
    asked = [r for r in admitted if r.may_reuse_kv and not r.has_foreign_kv]
    hit_tokens = sum(request.n_computed for request in asked)
    return PrefixHits(sum(len(request.tokens) for request in asked), hit_tokens)


class BlockNames:
    """Names of block contents under one engine identity: model, KV layout, block size.

    Args:
        block_size: tokens per block.
        identity: what besides the tokens decides the KV's bits.
        n_behind: tokens behind a block's end that its KV depends on.
    """

    def __init__(self, block_size: int, identity: str, n_behind: int = 1) -> None:
        self._n_behind = n_behind
        self._block_size = block_size
        seed = f"{identity}\x1f{block_size}".encode()
        self._root = hashlib.blake2b(seed, digest_size=_NAME_BYTES).digest()

    def extend(self, names: list[bytes], tokens: Sequence[int], salt: bytes = b"") -> None:
        """Append to `names` those of the further blocks that `tokens` fill and continue behind.

        Under each `salt` contents have names of their own.
        """
        size = self._block_size
        for index in range(len(names), (len(tokens) - self._n_behind) // size):
            parent = names[-1] if names else self._salted_root(salt)
            # With the tokens behind it, which MTP's KV of the last positions is computed from.
            stop = (index + 1) * size + self._n_behind
            content = array("i", tokens[index * size : stop]).tobytes()
            names.append(hashlib.blake2b(parent + content, digest_size=_NAME_BYTES).digest())

    def _salted_root(self, salt: bytes) -> bytes:
        if not salt:
            return self._root
        return hashlib.blake2b(salt, digest_size=_NAME_BYTES, key=self._root).digest()


class PrefixCache:
    """Finds and leaves shareable blocks in an allocator's pool; see `BlockNames`."""

    def __init__(
        self, allocator: BlockAllocator, block_size: int, identity: str, n_behind: int = 1
    ) -> None:
        self._allocator = allocator
        self._names = BlockNames(block_size, identity, n_behind)
        self._n_behind = n_behind
        self._block_size = block_size

    def match(self, request: RequestState) -> list[int]:
        """Return the blocks that hold the longest known prefix of the request's tokens."""
        if not request.may_reuse_kv or request.incoming is not None:
            return []
        self._names.extend(request.block_names, request.tokens, request.params.cache_salt)
        blocks: list[int] = []
        for name in request.block_names:
            block = self._allocator.find(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def remember(self, request: RequestState) -> None:
        """Name the request's blocks whose KV is final, so that others may share them.

        KV that another worker computed is not named: were it damaged, it would harm more than its
        own request.
        """
        if request.has_foreign_kv or not request.n_blocks:
            return
        # A block is final when the tokens behind it are known, for its name has those, too.
        n_known = len(request.tokens) - self._n_behind
        n_final = min(request.n_computed, n_known) // self._block_size
        if n_final <= request.n_named:
            return
        self._names.extend(request.block_names, request.tokens, request.params.cache_salt)
        for index in range(request.n_named, n_final):
            self._allocator.name(int(request.table[index]), request.block_names[index])
        request.n_named = n_final


def prefix_cache(
    allocator: BlockAllocator, options: EngineOptions, fingerprint: str
) -> PrefixCache | None:
    """Return the cache that `options` ask for, for the model of this fingerprint."""
    if not options.prefix_caching:
        return None
    identity = f"{fingerprint}\x1f{options.n_mtp}"
    return PrefixCache(allocator, options.block_size, identity, options.n_open_tokens)
