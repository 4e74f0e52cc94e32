"""The decoder as launches: flat tokens in, hidden states out, in the workspace's memory.

Owns the order of kernels in a layer, in the main model and in the MTP layers. Each layer's addition
to the stream is made by the norm behind it. Knows no request and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from baton_worker.engine.backends.device.collective import Collective
from baton_worker.engine.backends.device.expert_kernels import ExpertSum, Router
from baton_worker.engine.backends.device.operands import Norm
from baton_worker.engine.backends.device.products import Products, is_single
from baton_worker.engine.backends.device.scaled_kernels import Beside, Scaled, Weight
from baton_worker.engine.backends.device.seam import Device, Kernels, Places, Rotation, Tensor
from baton_worker.engine.backends.device.weights import (
    DeviceLatent,
    DeviceLayer,
    DeviceMixture,
    DeviceWeights,
)
from baton_worker.engine.backends.device.workspace import TokenSpace
from baton_worker.engine.kv.layers import marked_layers
from baton_worker.engine.model.rope import rope_tables
from baton_worker.engine.model.shape import ModelShape

_MOST_BESIDE = 64
"""Of how many tokens at most what all share is multiplied beside their experts: of more it is
quicker by tiles of its own.
"""


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


class RankPart(NamedTuple):
    """What this rank has of a sum over all: E[N, H], where the others read it."""

    part: Tensor


Added = Tensor | ExpertSum | RankPart | None
"""What the norm behind it adds: E[N, H], or what makes it."""


class Decoder:
    """A model over its KV pool.

    Args:
        kv: E[blocks, layers, 2, Hkv, block_size, D], the MTP layers' last; with MLA
            E[blocks, layers, 1, 1, block_size, D].
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
        self._products = Products(device, kernels)
        self._model_shape = model_shape
        self._weights = weights
        self._kv = kv
        self._scratch = scratch
        self._angles = _rope_tables(device, model_shape, n_positions)

    def run(self, fed: Fed, space: TokenSpace, mark: Callable[[int], None] | None = None) -> None:
        """Feed the main model: `space.residual` is its output, `space.final` that normed.

        Args:
            mark: told how many layers were launched, at each of `kv.layers.marked_layers`. What
                goes behind that goes behind their KV, also behind other ranks': each layer has a
                sum over all of them behind it.
        """
        kernels, weights, eps = self._kernels, self._weights, self._model_shape.rms_norm_eps
        kernels.embed(weights.embed, fed.tokens, space.residual)
        marked = marked_layers(len(weights.layers), int(fed.tokens.shape[0]))
        added: Added = None
        for index, layer in enumerate(weights.layers):
            added = self._layer(layer, index, added, fed, space)
            if mark is not None and index + 1 in marked:
                mark(index + 1)
        self._add_norm(added, space, Norm(weights.final_norm, eps), space.final)

    def run_mtp(
        self, fed: Fed, hidden: Tensor, out: Tensor, space: TokenSpace, number: int = 0
    ) -> None:
        """Feed an MTP layer pairs of `hidden` (`mtp_input`) and the token `number` + 1 behind it.

        `space.residual` becomes its output, which `hidden` may be; `out` E[N, H] that normed, which
        `hidden` may be if it is not `space.normed`.
        """
        kernels, eps = self._kernels, self._model_shape.rms_norm_eps
        mtp, index = self._weights.mtp[number], len(self._weights.layers) + number
        width = self._model_shape.hidden_size
        kernels.embed(self._weights.embed, fed.tokens, space.normed)
        halves = [self._device.columns(space.pair, at, at + width) for at in (0, width)]
        if self._model_shape.mtp_order == "hidden_embedding":
            halves.reverse()
        kernels.add_norm(None, space.normed, mtp.emb_norm, eps, halves[0])
        kernels.add_norm(None, hidden, mtp.hidden_norm, eps, halves[1])
        self._products.matmul(space.pair, mtp.proj, space.residual, space.scaled)
        added = self._layer(mtp.layer, index, None, fed, space)
        self._add_norm(added, space, Norm(mtp.final_norm, eps), out)

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

    def _add_norm(self, added: Added, space: TokenSpace, norm: Norm, out: Tensor) -> None:
        """Add what a layer left to the stream, and norm that."""
        if isinstance(added, ExpertSum):
            self._kernels.combine_norm(added, space.residual, norm, out)
        elif isinstance(added, RankPart):
            assert self.collective is not None, "a part is one of several ranks'"
            room, residual = space.added, space.residual
            self.collective.sum_norm(added.part, room, residual, norm, out)
        else:
            self._kernels.add_norm(added, space.residual, *norm, out)

    def _layer(
        self, layer: DeviceLayer, index: int, added: Added, fed: Fed, space: TokenSpace
    ) -> Added:
        """Run a layer behind `added`, the addition of the one before; return this one's."""
        eps = self._model_shape.rms_norm_eps
        self._add_norm(added, space, Norm(layer.input_norm, eps), space.normed)
        self._products.matmul(space.normed, layer.qkv, space.qkv, space.scaled)
        if layer.latent is not None:
            self._attend_rows(layer.latent, index, fed, space)
        else:
            self._attend_heads(layer, index, fed, space)
        attended = self._project(space.attended_rows, layer.o, space)
        norm = Norm(layer.post_norm, eps)
        if layer.mixture is not None:
            self._sum(attended, space)
            return self._mix(layer, layer.mixture, norm, space)
        self._add_norm(attended, space, norm, space.normed)
        self._gate_up_silu(layer, space, space.activated)
        return self._project(space.activated, layer.down, space)

    def _attend_heads(self, layer: DeviceLayer, index: int, fed: Fed, space: TokenSpace) -> None:
        model_shape = self._model_shape
        rotation = Rotation(
            layer.qk_norm,
            model_shape.rms_norm_eps,
            *self._angles,
            model_shape.rope_style,
            layer.qkv_bias,
        )
        self._kernels.rope_store(space.qkv, rotation, fed.places, self._kv, index, space.query)
        for group in fed.groups:
            self._attend(group, index, space)

    def _attend_rows(self, own: DeviceLatent, index: int, fed: Fed, space: TokenSpace) -> None:
        """Attend to compressed rows: queries folded, what comes of it unfolded."""
        device, kernels, room = self._device, self._kernels, space.latent
        mla, latent = self._model_shape.mla, kernels.latent
        assert mla is not None, "the shape tells of no compressed rows"
        assert room is not None, "memory was made for another shape"
        width, row_size = mla.input_sizes(self._model_shape.n_heads)
        queries = device.columns(space.qkv, 0, width)
        if own.q_up is not None:
            latent.norm(queries, own.q_norm, mla.norm_eps, room.normed)
            self._products.matmul(room.normed, own.q_up, room.queries, space.scaled)
            queries = room.queries
        row = device.columns(space.qkv, width, width + row_size)
        style = self._model_shape.rope_style
        rotation = Rotation(None, mla.norm_eps, *self._angles, style)
        latent.store(row, own.kv_norm, rotation, fed.places, self._kv, index)
        latent.fold(queries, own.kv_up, mla, space.query)
        latent.rotate(queries, rotation, fed.places, mla, space.query)
        for group in fed.groups:
            latent.attend(
                device.rows(space.query, group.start, group.stop),
                self._kv,
                index,
                group.tables,
                group.contexts,
                mla.score_scale,
                device.rows(room.attended, group.start, group.stop),
                self._scratch,
            )
        latent.unfold(room.attended, own.kv_up, mla, space.attended_rows)

    def _mix(
        self, layer: DeviceLayer, mixture: DeviceMixture, norm: Norm, space: TokenSpace
    ) -> Added:
        """Norm `space.added`, and feed each token's own experts and those that all share."""
        kernels, experts, own = self._kernels, self._model_shape.experts, space.experts
        products, x = self._products, space.normed
        assert experts is not None, "the shape tells of no experts"
        assert own is not None, "memory was made for another shape"
        routes = own.routes
        router = Router(mixture.router, mixture.choice_bias, experts)
        kernels.norm_route(space.added, space.residual, norm, x, router, routes)
        # First what all share: it is known which weights that reads while experts are chosen. But
        # its second product is quantised where the rows of x are, if more than one, which experts
        # read. Of few tokens both are made in the experts' launches.
        first, second = self._beside(layer, mixture, space)
        scale = products.quantised if first is None else products.room_of
        scaled = scale(x, space.scaled, mixture.gate_up, layer.gate_up)
        shares_first = scaled is None or (is_single(x) and first is None)
        known = shares_first and layer.gate_up is not None
        if shares_first:
            self._share(layer, scaled, space)
        up, out = mixture.gate_up, own.activated
        products.expert_gate_up_silu(x, scaled, routes, up, own.spread, out, known, first)
        products.expert_matmul(out, routes, mixture.down, own.made, space.scaled, second)
        if not shares_first and first is None:
            self._share(layer, scaled, space)
        beside = None if layer.gate_up is None else own.beside
        if self.collective is None:
            return ExpertSum(own.made, routes, beside)
        return self._over_ranks(lambda out: kernels.combine(own.made, routes, beside, out), space)

    def _beside(
        self, layer: DeviceLayer, mixture: DeviceMixture, space: TokenSpace
    ) -> tuple[Beside, Beside] | tuple[None, None]:
        """Return what all tokens share as both products of it beside the experts', if it fits."""
        own, x, up, down = space.experts, space.normed, layer.gate_up, layer.down
        if own is None or own.shared is None or own.beside is None or x.shape[0] > _MOST_BESIDE:
            return None, None
        is_scaled = isinstance(mixture.gate_up, Scaled) and isinstance(mixture.down, Scaled)
        if not (isinstance(up, Scaled) and isinstance(down, Scaled) and is_scaled):
            return None, None
        room = self._products.room_of(x, space.scaled, up)
        if room is None or own.shared.shape[1] != own.activated.shape[1]:
            return None, None
        behind = self._products.room_behind(own.activated, own.shared, space.scaled, down)
        return Beside(x, room, up, own.shared), Beside(own.shared, behind, down, own.beside)

    def _share(self, layer: DeviceLayer, scaled: Scaled | None, space: TokenSpace) -> None:
        """Feed the experts that all tokens share, if there are any."""
        own = space.experts
        if layer.gate_up is None or own is None:
            return
        self._products.gate_up_silu(space.normed, scaled, layer.gate_up, own.shared)
        self._products.matmul(own.shared, layer.down, own.beside, space.scaled)

    def _gate_up_silu(self, layer: DeviceLayer, space: TokenSpace, out: Tensor) -> None:
        scaled = self._products.quantised(space.normed, space.scaled, layer.gate_up)
        self._products.gate_up_silu(space.normed, scaled, layer.gate_up, out)

    def _project(self, x: Tensor, weight: Weight, space: TokenSpace) -> Tensor | RankPart:
        """Compute E[N, H] = x @ weight^T, over all ranks' columns of both."""
        return self._over_ranks(
            lambda out: self._products.matmul(x, weight, out, space.scaled), space
        )

    def _over_ranks(
        self, compute: Callable[[Tensor], None], space: TokenSpace
    ) -> Tensor | RankPart:
        """Compute E[N, H] to `space.added`, or this rank's part of what is their sum.

        The sum is the next call over ranks that is made.
        """
        if self.collective is None:
            compute(space.added)
            return space.added
        n_rows, width = space.added.shape
        part = self.collective.part(n_rows, width, self._weights.dtype)
        compute(part)
        return RankPart(part)

    def _sum(self, added: Tensor | RankPart, space: TokenSpace) -> None:
        """Have in `space.added` what is to be added."""
        if isinstance(added, RankPart):
            assert self.collective is not None, "a part is one of several ranks'"
            self.collective.sum(added.part, space.added)

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
    """Return cos and sin, f32[n_positions, rope_head_size / 2]."""
    host = rope_tables(
        model_shape.rope_head_size,
        model_shape.rope_theta,
        model_shape.rope_scaling,
        n_positions,
        model_shape.rotated_size,
    )
    tables = []
    for values in host:
        tensor = device.empty(values.shape, "float32")
        device.upload(values, tensor)
        device.synchronise()
        tables.append(tensor)
    return tables[0], tables[1]
