"""The decoder's arithmetic on CUDA: what stands between a token and its logits.

Row-wise work, matrix products and paged attention, in bfloat16 or float32 (E below, one for all
tensors of a call). A row's bits depend on that row alone: every sum's order is fixed by the shape
and type of the weight or the head. Nothing here allocates or waits, so any sequence of calls can be
a CUDA graph. Owns the Python form of these ops. Knows no model and no request.

Shapes: N flat tokens, S sequences, R rows, H hidden size, V vocabulary, D head dimension, W blocks
in a table. Every function raises TypeError or ValueError where a dtype, shape or device is wrong;
the message names the argument.
"""

from __future__ import annotations

from typing import Any, Protocol

from baton_ops._library import Tensor, launch, library


class Rotation(Protocol):
    """What happens to a head before it is used."""

    @property
    def bias(self) -> Tensor | None:
        """E[(Hq + 2 Hkv) * D], what is added to the projection first."""

    @property
    def norms(self) -> tuple[Tensor, Tensor] | None:
        """Weights E[D] of the queries' and of the keys' RMS norm."""

    @property
    def eps(self) -> float:
        """The norms' epsilon."""

    @property
    def cos(self) -> Tensor:
        """f32[positions, D / 2]; positions beyond them rotate as the last."""

    @property
    def sin(self) -> Tensor:
        """As `cos`."""

    @property
    def style(self) -> str:
        """Which elements rotate: "half", i with i + D / 2, or "interleaved", 2i with 2i + 1."""


class Places(Protocol):
    """Where N flat tokens stand."""

    @property
    def sequence(self) -> Tensor:
        """i32[N], -1 for padding."""

    @property
    def position(self) -> Tensor:
        """i32[N]."""

    @property
    def tables(self) -> Tensor:
        """i32[S, W] of blocks; 0: none."""


def embed_into(table: Tensor, tokens: Tensor, out: Tensor) -> None:
    """Write out E[N, H] = rows i32[N] of E[V, H]; a token outside 0..V-1 gives zeros."""
    launch("cuda_embed")(table, tokens, out)


def gather_into(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """Write out E[R, H] = rows i32[R] of x E[N, H]; a row outside 0..N-1 gives zeros."""
    launch("cuda_gather")(x, rows, out)


def add_norm_into(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, out: Tensor
) -> None:
    """Add x to the residual, rounded to E, and write rms_norm(residual) * weight.

    All E[N, H], `weight` E[H]; rows may be strided. The norm is of the rounded residual, in fp32,
    rounded once. `out` may be `x`. `weight` is read while earlier launches may still run: none of
    them may write it.
    """
    launch("cuda_add_norm")(x, residual, weight, eps, out)


def rope_store_into(
    qkv: Tensor, rotation: Rotation, places: Places, kv: Tensor, layer: int, query: Tensor
) -> None:
    """Add a bias and norm (each if asked for), rotate, and append keys and values to the pool.

    A token without a block of its own (null, or beyond the table) writes to block 1, the trash;
    padding writes nothing. In fp32, rounded once. Bias, norms, angles and places are read while
    earlier launches may still run, not the last one alone: between what writes them and the launch
    before this one there must be another that is no matmul, no attention, no norm and no call of
    ranks.

    Args:
        qkv: E[N, (Hq + 2 Hkv) * D]; rows may be strided.
        rotation: bias, norms and angles.
        places: of each token.
        kv: E[blocks, layers, 2, Hkv, block_size, D], at least two blocks.
        layer: which of the pool's.
        query: E[N, Hq, D], written.
    """
    query_norm, key_norm = rotation.norms or (None, None)
    launch("cuda_rope_store")(
        qkv,
        kv,
        layer,
        query,
        rotation.bias,
        query_norm,
        key_norm,
        rotation.eps,
        rotation.cos,
        rotation.sin,
        is_interleaved(rotation.style),
        places.sequence,
        places.position,
        places.tables,
    )


def silu_mul_into(gate_up: Tensor, out: Tensor) -> None:
    """Write out E[N, I] = silu(gate_up[:, :I]) * gate_up[:, I:], in fp32, rounded once."""
    launch("cuda_silu_mul")(gate_up, out)


def broken_rows_into(x: Tensor, out: Tensor) -> None:
    """Set bit 0 of out u8[N] where x E[N, H] holds NaN or infinity; leave the others alone."""
    launch("cuda_broken_rows")(x, out)


def matmul_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write out E or f32[N, O] = x E[N, I] @ weight E[O, I]^T, summed in fp32 along I.

    Rows of `x` and `out` may be strided. `weight` is read while earlier launches may still run:
    none of them may write it.

    Raises:
        RuntimeError: on a Hopper GPU, in bf16, with I and O multiples of 8: rows of `x` or `out`,
            or `weight`, do not begin at multiples of 16 bytes.
    """
    launch("cuda_matmul")(x, weight, out)


def gate_up_silu_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write out E[N, I] = silu(gate) * up, where [gate, up] = x E[N, H] @ weight E[2 I, H]^T.

    The bits are those of `matmul_into` and `silu_mul_into` one after the other: gate and up are
    rounded to E. Nothing of them is written. Rows of `x` and `out` may be strided. `weight` is read
    while earlier launches may still run: none of them may write it.

    Raises:
        RuntimeError: on a Hopper GPU, in bf16, with 2 I and H multiples of 8: rows of `x`, or
            `weight`, do not begin at multiples of 16 bytes.
    """
    launch("cuda_gate_up_silu")(x, weight, out)


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
    """Attend causally from each sequence's last N / S tokens over its paged context.

    Tables, contexts, and what the pool has before the queries' own positions may be read before
    `rope_store_into` right before this is over, but not before what came before that is.

    Args:
        query: E[N, Hq, D], sequence by sequence, equally many tokens each.
        kv: E[blocks, layers, 2, Hkv, block_size, D], Hkv dividing Hq.
        layer: which of the pool's.
        tables: i32[S, W].
        contexts: i32[S], positions up to and with the sequence's last query; 0 or less: not there,
            its output is left alone.
        scale: of the products of queries and keys.
        out: E[N, Hq, D].
        scratch: u8[`attention_scratch_bytes`], zeros at first, left fit for the next call. With
            less, decode may be slower; the bits are the same.
    """
    launch("cuda_attend")(query, kv, layer, tables, contexts, scale, out, scratch)


def attention_scratch_bytes(
    n_heads: int, n_kv_heads: int, head_dim: int, sequences: int, tokens: int, width: int
) -> int:
    """Return what `attend_into` needs for up to so many sequences, flat tokens of all of them, and
    positions in a table.
    """
    count: Any = library().cuda_attention_scratch_bytes(
        n_heads, n_kv_heads, head_dim, sequences, tokens, width
    )
    return int(count)


def is_interleaved(style: str) -> int:
    """Return a rotation's style as ops are told of it.

    Raises:
        ValueError: there is no such style.
    """
    if style not in ("half", "interleaved"):
        raise ValueError(f'style must be "half" or "interleaved", got {style!r}')
    return int(style == "interleaved")
