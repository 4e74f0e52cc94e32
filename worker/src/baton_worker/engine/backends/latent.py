"""`LatentKernels` over `baton_ops`, as `kernels` has the rest: arguments go through as they are.

Knows no framework and no step.
"""

from __future__ import annotations

from baton_ops import decoder, latent
from baton_worker.engine.backends.device.seam import Places, Rotation, Tensor
from baton_worker.engine.model.mla import Mla


class OpsLatentKernels:
    """See `latent_kernels.LatentKernels`."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `LatentKernels.norm`."""
        decoder.add_norm_into(None, x, weight, eps, out)  # without an addition, x stays as it is

    def fold(self, queries: Tensor, kv_up: Tensor, mla: Mla, out: Tensor) -> None:
        """See `LatentKernels.fold`."""
        latent.fold_into(queries, kv_up, mla.nope_size, out)

    def rotate(
        self, queries: Tensor, rotation: Rotation, places: Places, mla: Mla, query: Tensor
    ) -> None:
        """See `LatentKernels.rotate`."""
        latent.rotate_into(queries, rotation, places, mla.rope_size, query)

    def store(
        self, row: Tensor, norm: Tensor, rotation: Rotation, places: Places, kv: Tensor, layer: int
    ) -> None:
        """See `LatentKernels.store`."""
        latent.store_into(row, norm, rotation, places, kv, layer)

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
        """See `LatentKernels.attend`."""
        latent.attend_into(query, kv, layer, tables, contexts, scale, out, scratch)

    def unfold(self, attended: Tensor, kv_up: Tensor, mla: Mla, out: Tensor) -> None:
        """See `LatentKernels.unfold`."""
        latent.unfold_into(attended, kv_up, mla.nope_size, out)
