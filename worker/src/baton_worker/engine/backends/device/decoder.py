"""The decoder as launches: flat tokens in, hidden states out, in the workspace's memory.

Owns the order of kernels in a layer, in the main model and in the MTP layer. Each layer's addition
to the stream is made by the norm behind it. Knows no request and no sampling.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from baton_worker.engine.backends.device.collective import Collective
from baton_worker.engine.backends.device.seam import Device, Kernels, Places, Rotation, Tensor
from baton_worker.engine.backends.device.weights import DeviceLayer, DeviceMtp, DeviceWeights
from baton_worker.engine.backends.device.workspace import TokenSpace
from baton_worker.engine.model.shape import ModelShape


class Group(NamedTuple):
    """Flat tokens `start : stop` of sequences that feed equally many; tables, contexts theirs."""

    start: int
    stop: int
    tables: Tensor
    contexts: Tensor


class Fed(NamedTuple):
    """What a pass feeds: token ids i32[N], where they stand, and how they attend."""

    tokens: Tensor
    places: Places
    groups: tuple[Group, ...]


class Decoder:
    """A model over its KV pool.

    Args:
        kv: E[blocks, layers, 2, Hkv, block_size, D], the MTP layer's last.
        scratch: attention's.
        n_positions: rotation angles are tabulated for positions below this.
        collective: of a rank whose weights are a part of the model's; then `model_shape` is too.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        model_shape: ModelShape,
        weights: DeviceWeights,
        kv: Tensor,
        scratch: Tensor,
        n_positions: int,
        collective: Collective | None = None,
    ) -> None:
        self.collective = collective
        self._device = device
        self._kernels = kernels
        self._model_shape = model_shape
        self._weights = weights
        self._kv = kv
        self._scratch = scratch
        self._angles = _rope_tables(device, model_shape, n_positions)

    def run(self, fed: Fed, space: TokenSpace) -> None:
        """Feed the main model: `space.residual` is its output, `space.final` that normed."""
        kernels, weights, eps = self._kernels, self._weights, self._model_shape.rms_norm_eps
        kernels.embed(weights.embed, fed.tokens, space.residual)
        added = None
        for index, layer in enumerate(weights.layers):
            added = self._layer(layer, index, added, fed, space)
        kernels.add_norm(added, space.residual, weights.final_norm, eps, space.final)

    def run_mtp(self, fed: Fed, hidden: Tensor, out: Tensor, space: TokenSpace) -> None:
        """Feed the MTP layer pairs of `hidden` (`mtp_input`) and the token behind it.

        `space.residual` becomes its output, which `hidden` may be; `out` E[N, H] that normed.
        """
        kernels, mtp, eps = self._kernels, self.mtp, self._model_shape.rms_norm_eps
        width = self._model_shape.hidden_size
        kernels.embed(self._weights.embed, fed.tokens, space.normed)
        halves = [self._device.columns(space.pair, at, at + width) for at in (0, width)]
        kernels.add_norm(None, space.normed, mtp.emb_norm, eps, halves[0])
        kernels.add_norm(None, hidden, mtp.hidden_norm, eps, halves[1])
        kernels.matmul(space.pair, mtp.proj, space.residual)
        added = self._layer(mtp.layer, len(self._weights.layers), None, fed, space)
        kernels.add_norm(added, space.residual, mtp.final_norm, eps, out)

    def mtp_input(self, hidden: Tensor, normed: Tensor) -> Tensor:
        """Return what the MTP layer is fed of a pass: its output, or that normed."""
        return hidden if self._model_shape.mtp_hidden == "pre_norm" else normed

    def logits(self, normed: Tensor, out: Tensor) -> None:
        """out f32[R, V] of normed states E[R, H]."""
        if self.collective is None:
            self._kernels.matmul(normed, self._weights.lm_head, out)
        else:
            self.collective.logits(normed, self._weights.lm_head, out)

    def end_unit(self) -> None:
        """End the launches of a step, or of logits beside one; see `Collective.even`."""
        if self.collective is not None:
            self.collective.even()

    @property
    def mtp(self) -> DeviceMtp:
        """The MTP layer that is used: the first."""
        return self._weights.mtp[0]

    def _layer(
        self, layer: DeviceLayer, index: int, added: Tensor | None, fed: Fed, space: TokenSpace
    ) -> Tensor:
        """Run a layer behind `added`, the addition of the one before; return this one's."""
        kernels, eps = self._kernels, self._model_shape.rms_norm_eps
        kernels.add_norm(added, space.residual, layer.input_norm, eps, space.normed)
        kernels.matmul(space.normed, layer.qkv, space.qkv)
        rotation = Rotation(layer.qk_norm, eps, *self._angles, self._model_shape.rope_style)
        kernels.rope_store(space.qkv, rotation, fed.places, self._kv, index, space.query)
        for group in fed.groups:
            self._attend(group, index, space)
        self._project(space.attended_rows, layer.o, space.added)
        kernels.add_norm(space.added, space.residual, layer.post_norm, eps, space.normed)
        kernels.gate_up_silu(space.normed, layer.gate_up, space.activated)
        self._project(space.activated, layer.down, space.added)
        return space.added

    def _project(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """out E[N, H] = x @ weight^T, over all ranks' columns of both."""
        if self.collective is None:
            self._kernels.matmul(x, weight, out)
            return
        n_rows, width = out.shape
        part = self.collective.part(n_rows, width, self._weights.dtype)
        self._kernels.matmul(x, weight, part)
        self.collective.sum(part, out)

    def _attend(self, group: Group, index: int, space: TokenSpace) -> None:
        self._kernels.attend(
            self._device.rows(space.query, group.start, group.stop),
            self._kv,
            index,
            group.tables,
            group.contexts,
            self._model_shape.head_dim**-0.5,
            self._device.rows(space.attended, group.start, group.stop),
            self._scratch,
        )


def _rope_tables(
    device: Device, model_shape: ModelShape, n_positions: int
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, f32[n_positions, head_dim / 2]."""
    half = model_shape.head_dim // 2
    inverse = model_shape.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    angle = np.arange(n_positions, dtype=np.float64)[:, None] * inverse
    tables = []
    for values in (np.cos(angle), np.sin(angle)):
        tensor = device.empty(values.shape, "float32")
        device.upload(values.astype(np.float32), tensor)
        device.synchronise()
        tables.append(tensor)
    return tables[0], tables[1]
