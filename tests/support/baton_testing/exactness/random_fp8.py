"""Weights on a device in FP8, of weights that are there: each row's groups of 128 by themselves.

Blocks of 128 x 128, which checkpoints have, are a case of that: there 128 rows share their scales.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton_worker.engine.backends.device.scaled_kernels import Scaled
from baton_worker.engine.backends.device.seam import Device, Kernels
from baton_worker.engine.backends.device.weights import (
    DeviceLayer,
    DeviceMixture,
    DeviceMtp,
    DeviceWeights,
)
from baton_worker.engine.model.quantisation import Fp8

IN_GROUPS = Fp8(128, 1, "weight_scale")
"""What a model's shape says of such weights."""


def quantised_matrix(device: Device, kernels: Kernels, of: Any) -> Any:
    """Return a matrix in FP8; None for none."""
    if of is None:
        return None
    rows, columns = of.shape
    scales = device.empty((rows, -(-columns // IN_GROUPS.group)), "float32")
    made = Scaled(device.empty((rows, columns), "uint8"), scales)
    kernels.quantise(of, made)
    return made


def quantised_layer(device: Device, kernels: Kernels, of: DeviceLayer) -> DeviceLayer:
    """Return a layer whose matrices are FP8."""

    def matrix(each: Any) -> Any:
        return quantised_matrix(device, kernels, each)

    def mixture(each: DeviceMixture) -> DeviceMixture:
        return replace(each, gate_up=matrix(each.gate_up), down=matrix(each.down))

    mixed = None if of.mixture is None else mixture(of.mixture)
    sides = {name: matrix(getattr(of, name)) for name in ("qkv", "o", "gate_up", "down")}
    latent = of.latent and replace(of.latent, q_up=matrix(of.latent.q_up))
    return replace(of, mixture=mixed, latent=latent, **sides)


def quantised(device: Device, kernels: Kernels, weights: DeviceWeights) -> DeviceWeights:
    """Return weights whose decoder layers' matrices are FP8, draft layers' too, on the device."""

    def layer(of: DeviceLayer) -> DeviceLayer:
        return quantised_layer(device, kernels, of)

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
