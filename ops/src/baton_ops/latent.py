"""Multi-head latent attention on CUDA: fold queries, keep rows, attend to them, unfold.

As with `decoder`'s ops, E is bfloat16 or float32, a token's bits depend on it and its context
alone, and any sequence of calls can be a CUDA graph. A compressed row is normed by
`decoder.add_norm_into` without `x`. Owns the Python form of these ops. Knows no model.

Shapes: N tokens, Hq heads, R the rank of compressed rows, T what of a query and key rotates, P what
does not, V a value. A head's matrix E[P + V, R] makes its key of a compressed row, then its value;
kv_up E[Hq * (P + V), R] is all heads', one behind the other. Rows are kept in a pool
E[blocks, layers, 1, 1, block_size, R + T]. Every function raises TypeError or ValueError where a
dtype, shape or device is wrong; the message names the argument.
"""

from __future__ import annotations

from baton_ops._library import Tensor, launch
from baton_ops.decoder import Places, Rotation, is_interleaved


def fold_into(queries: Tensor, kv_up: Tensor, nope_size: int, out: Tensor) -> None:
    """Write the first R of each head of out E[N, Hq, R + T].

    The first P (`nope_size`) of the head's query in E[N, Hq * (P + T)], whose rows may be strided,
    @ the first P rows of its matrix; summed in fp32 in ascending order: in bf16, all sizes
    multiples of 8, by tensor cores, else in ranges of 128. Reads `kv_up` before what is launched
    before it is over.

    Raises:
        RuntimeError: on tensor cores, a row of `queries`, `kv_up` or `out` does not begin at a
            multiple of 16 bytes.
    """
    launch("cuda_fold_queries")(queries, kv_up, nope_size, out)


def rotate_into(
    queries: Tensor, rotation: Rotation, places: Places, rope_size: int, query: Tensor
) -> None:
    """Write the last T (`rope_size`) of each head of query E[N, Hq, R + T].

    They are the last T of its query in E[N, Hq * (P + T)], whose rows may be strided, rotated in
    fp32 and rounded once; padding is left alone. Angles are f32[positions, T / 2]; no norms and no
    bias are looked at.
    """
    launch("cuda_rotate_queries")(
        queries,
        query,
        rope_size,
        rotation.cos,
        rotation.sin,
        is_interleaved(rotation.style),
        places.sequence,
        places.position,
        places.tables,
    )


def store_into(
    row: Tensor, norm: Tensor, rotation: Rotation, places: Places, kv: Tensor, layer: int
) -> None:
    """Append each token's row E[N, R + T], which may be strided, to the pool `kv`.

    Its first R are normed by norm E[R] and `rotation.eps`, its last T rotated, in fp32, rounded
    once. A token without a block of its own (null, or beyond the table) writes to block 1, the
    trash; padding writes nothing.
    """
    launch("cuda_store_rows")(
        row,
        kv,
        layer,
        norm,
        rotation.eps,
        rotation.cos,
        rotation.sin,
        is_interleaved(rotation.style),
        places.sequence,
        places.position,
        places.tables,
    )


def attend_into(
    query: Tensor,
    kv: Tensor,
    layer: int,
    tables: Tensor,
    contexts: Tensor,
    scale: float,
    out: Tensor,
    scratch: Tensor,
) -> None:
    """Attend as `decoder.attend_into` does, of query E[N, Hq, R + T] over the kept rows.

    All heads share them, and their first R are the values too: out E[N, Hq, R]. In bf16, with R of
    512, T of 64 and heads in sixteens, tensor cores do it, where a block may have 155 KiB of shared
    memory; with fp32 sums, but probabilities in bf16. On Hopper GPUs with blocks of 16, 32, 64 or
    128 they need `scratch`, of one KV head and R + T (`decoder.attention_scratch_bytes`).

    Raises:
        RuntimeError: there, `query`, `kv`, `out` or `scratch` do not begin at multiples of 16
            bytes, or `scratch` is too small.
    """
    launch("cuda_attend_rows")(query, kv, layer, tables, contexts, scale, out, scratch)


def unfold_into(attended: Tensor, kv_up: Tensor, nope_size: int, out: Tensor) -> None:
    """Write out E[N, Hq * V], whose rows may be strided.

    Of each head of E[N, Hq, R] @ the last V rows of its matrix, transposed; summed in fp32 as
    `fold_into` does.

    Raises:
        RuntimeError: as `fold_into`.
    """
    launch("cuda_unfold_values")(attended, kv_up, nope_size, out)
