"""Whether another process's pool is of one's own form. Pure."""

from __future__ import annotations

from baton_worker.engine.kv.memory import CannotAttachError
from baton_worker.engine.kv.payload import KvShape


def check_blocks_alike(
    own: KvShape, other: KvShape, n_bytes: int, n_reserved: int, ranks: int = 1
) -> None:
    """Refuse a pool whose blocks are not this one's, or that is smaller than its shape says.

    Args:
        ranks: how many have a part of `n_bytes` each.

    Raises:
        CannotAttachError: naming what differs.
    """
    for name in ("form", "n_layers", "kv_heads", "block_size", "head_dim"):
        theirs, ours = getattr(other, name), getattr(own, name)
        if theirs != ours:
            raise CannotAttachError(f"its {name} is {theirs!r}, this worker's is {ours!r}")
    if other.kv_heads % ranks and ranks % other.kv_heads:
        raise CannotAttachError(f"{ranks} ranks cannot have parts of its {other.kv_heads} KV heads")
    needed = (other.n_blocks + n_reserved) * other.part(ranks).block_bytes
    if n_bytes < needed:
        raise CannotAttachError(f"it has {n_bytes} bytes, {needed} for its {other.n_blocks} blocks")
