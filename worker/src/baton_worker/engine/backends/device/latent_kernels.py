"""What kernels do for multi-head latent attention: fold queries, keep rows, attend, unfold.

Owns the protocol. Letters are `seam`'s; the sizes are those of `model.mla.Mla`: R = kv_rank,
T = rope_size, P = nope_size, V = value_size, and Hq the heads. A token keeps one row of R + T
values that all heads share, in a pool E[blocks, layers, 1, 1, block_size, R + T]. A head's matrix
is E[P + V, R]: what makes its key of a compressed row, then its value; all heads' stand one behind
the other, as in a checkpoint. Knows no layer and not where the memory comes from.
"""

from __future__ import annotations

from typing import Protocol

from baton_worker.engine.backends.device.operands import Places, Rotation, Tensor
from baton_worker.engine.model.mla import Mla


class LatentKernels(Protocol):
    """A token's bits depend on the token and its context alone, as with `Kernels`."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out E[N, I] = rms_norm(x E[N, I]) * weight E[I], in fp32, rounded once; `x`'s rows may be
        strided.
        """

    def fold(self, queries: Tensor, kv_up: Tensor, mla: Mla, out: Tensor) -> None:
        """The first R of each head of out E[N, Hq, R + T] = the first P of its query in
        E[N, Hq * (P + T)] @ the first P rows of its matrix in kv_up E[Hq * (P + V), R], summed in
        fp32. `queries`' rows may be strided.
        """

    def rotate(
        self, queries: Tensor, rotation: Rotation, places: Places, mla: Mla, query: Tensor
    ) -> None:
        """The last T of each head of query E[N, Hq, R + T] = the last T of its query in
        E[N, Hq * (P + T)], rotated in fp32, rounded once; padding is left alone.

        `rotation` norms and biases nothing, and its angles are T / 2 wide. Rows may be strided.
        """

    def store(
        self, row: Tensor, norm: Tensor, rotation: Rotation, places: Places, kv: Tensor, layer: int
    ) -> None:
        """Keep each token's row E[N, R + T]: its first R normed by norm E[R] and `rotation`'s eps,
        its last T rotated; in fp32, rounded once.

        Rows may be strided. A token without a block of its own writes to the trash block, padding
        nowhere, as with `Kernels.rope_store`.
        """

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        layer: int,
        tables: Tensor,
        contexts: Tensor,
        scale: float,
        out: Tensor,
        scratch: Tensor,
    ) -> None:
        """`Kernels.attend` of query E[N, Hq, R + T] over the kept rows, whose first R are the value
        too: out E[N, Hq, R].
        """

    def unfold(self, attended: Tensor, kv_up: Tensor, mla: Mla, out: Tensor) -> None:
        """out E[N, Hq * V] = of each head E[N, Hq, R] @ the last V rows of its matrix, transposed,
        summed in fp32.
        """
