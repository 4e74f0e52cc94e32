"""Weights on a device in FP8, of weights that are there: each row's groups of 128 by themselves.

Matrices have scales of blocks of 128 x 128 where the loader would leave them so: the first row's.
Their numbers are then other weights than those that were there, as random as they.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton_testing.fp8_parts import input_part
from baton_worker.engine.backends.device.scaled_kernels import Scaled
from baton_worker.engine.backends.device.seam import Device, Kernels
from baton_worker.engine.backends.device.weights import (
    DeviceLayer,
    DeviceMixture,
    DeviceMtp,
    DeviceWeights,
)
from baton_worker.engine.model.quantisation import Fp8
from baton_worker.engine.model.shape import ModelShape

IN_GROUPS = Fp8(128, 128, "weight_scale_inv")
"""What a model's shape says of such weights."""


def quantised_matrix(device: Device, kernels: Kernels, of: Any, part: int = 0) -> Any:
    """Return a matrix in FP8; None for none.

    Args:
        part: outputs that are a matrix of their own; 0: scales are of rows.
    """
    if of is None:
        return None
    rows, columns = of.shape
    scales = device.empty((rows, -(-columns // IN_GROUPS.group)), "float32")
    made = Scaled(device.empty((rows, columns), "uint8"), scales)
    kernels.quantise(of, made)
    if part and IN_GROUPS.has_blocks(part):
        return made._replace(scales=scales[:: IN_GROUPS.rows].contiguous())
    return made


def quantised_layer(
    device: Device, kernels: Kernels, shape: ModelShape, of: DeviceLayer
) -> DeviceLayer:
    """Return a layer whose matrices are FP8."""

    def matrix(each: Any, part: int = 0) -> Any:
        return quantised_matrix(device, kernels, each, part)

    def mlp(each: DeviceLayer | DeviceMixture) -> dict[str, Any]:
        gate_up, down = each.gate_up, each.down
        if gate_up is None or down is None:
            return {}
        hidden, width = gate_up.shape[1], down.shape[1]
        return {"gate_up": matrix(gate_up, width), "down": matrix(down, hidden)}

    mixed = None if of.mixture is None else replace(of.mixture, **mlp(of.mixture))
    qkv, o = matrix(of.qkv, input_part(shape)), matrix(of.o, shape.hidden_size)
    latent = of.latent
    if latent is not None and latent.q_up is not None:
        latent = replace(latent, q_up=matrix(latent.q_up, latent.q_up.shape[0]))
    return replace(of, qkv=qkv, o=o, mixture=mixed, latent=latent, **mlp(of))


def quantised(
    device: Device, kernels: Kernels, shape: ModelShape, weights: DeviceWeights
) -> DeviceWeights:
    """Return weights whose decoder layers' matrices are FP8, draft layers' too, on the device."""

    def layer(of: DeviceLayer) -> DeviceLayer:
        return quantised_layer(device, kernels, shape, of)

    def draft(of: DeviceMtp) -> DeviceMtp:
        return replace(of, layer=layer(of.layer), proj=quantised_matrix(device, kernels, of.proj))

    made = replace(
        weights,
        layers=tuple(map(layer, weights.layers)),
        mtp=tuple(map(draft, weights.mtp)),
        identity=f"{weights.identity} fp8",
    )
    device.synchronise()
    return made
