"""The device's engine over NumPy: what runs on a GPU, where there is none.

Owns how its parts are put together for a model whose weights the host holds. Knows no test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_testing.e4m3_numbers import nearest_bits
from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_worker.engine.backends.device.pool import DevicePool
from baton_worker.engine.backends.device.runner import DeviceRunner
from baton_worker.engine.backends.device.scaled_kernels import Scaled, Weight
from baton_worker.engine.backends.device.seam import Device, Tensor
from baton_worker.engine.backends.device.steps import DeviceModel, Steps
from baton_worker.engine.backends.device.weights import (
    DeviceLatent,
    DeviceLayer,
    DeviceMixture,
    DeviceMtp,
    DeviceWeights,
)
from baton_worker.engine.engine import StepEngine
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import BlockAllocator
from baton_worker.engine.model.matrices import Matrix, ScaledMatrix, joined
from baton_worker.engine.model.rope import stretches
from baton_worker.engine.model.shape import ModelShape, fingerprint
from baton_worker.engine.model.weights import (
    ExpertWeights,
    LatentWeights,
    LayerWeights,
    MtpWeights,
    Weights,
)
from baton_worker.engine.options import EngineOptions
from baton_worker.engine.parts import EngineParts
from baton_worker.engine.scheduling.prefix_cache import prefix_cache
from baton_worker.engine.scheduling.scheduler import Scheduler, SchedulerLimits


def heads_in_order(
    rows: npt.NDArray[np.float32], model_shape: ModelShape
) -> npt.NDArray[np.float32]:
    """Return a projection's rows, or a head's values, in the order in which a device rotates them.

    Rows are of query, key and value heads; the last are not rotated. With MLA they stay.
    """
    if model_shape.mla is not None:
        return rows
    rotated = model_shape.rotated_size if model_shape.rope_style == "half" else 0
    order = np.concatenate(
        [np.arange(model_shape.head_dim)[s] for s in stretches(model_shape.head_dim, rotated)]
    )
    if len(rows) == model_shape.head_dim:
        return rows[order]
    n_rotated = model_shape.q_size + model_shape.kv_size
    heads = rows[:n_rotated].reshape(-1, model_shape.head_dim, *rows.shape[1:])[:, order]
    return np.concatenate([heads.reshape(n_rotated, *rows.shape[1:]), rows[n_rotated:]])


def uploaded(
    device: Device, weights: Weights, n_mtp: int, model_shape: ModelShape
) -> DeviceWeights:
    """Return a host's weights as the device has them: float32 or FP8, `[out, in]`."""

    def put(array: npt.NDArray[Any]) -> Tensor:
        return _put(device, array)

    def matrix(source: Matrix, has_heads: bool = False) -> Weight:
        return _matrix(device, source, model_shape if has_heads else None)

    def layer(source: LayerWeights) -> DeviceLayer:
        norms, bias = source.qk_norm, source.qkv_bias
        mlp, mixed = source.mlp, source.mixture
        return DeviceLayer(
            input_norm=put(source.input_norm),
            qkv=matrix(source.qkv, has_heads=True),
            o=matrix(source.o),
            post_norm=put(source.post_norm),
            gate_up=None if mlp is None else matrix(mlp.gate_up),
            down=None if mlp is None else matrix(mlp.down),
            qk_norm=None
            if norms is None
            else (
                put(heads_in_order(norms[0], model_shape)),
                put(heads_in_order(norms[1], model_shape)),
            ),
            qkv_bias=None if bias is None else put(heads_in_order(bias, model_shape)),
            mixture=None if mixed is None else mixture(mixed),
            latent=_latent(device, source.latent),
        )

    def mixture(source: ExpertWeights) -> DeviceMixture:
        bias = source.choice_bias
        return DeviceMixture(
            router=put(source.router.T),
            choice_bias=None if bias is None else put(bias),
            gate_up=matrix(joined([each.gate_up for each in source.experts])),
            down=matrix(joined([each.down for each in source.experts])),
        )

    def mtp(source: MtpWeights) -> DeviceMtp:
        return DeviceMtp(
            emb_norm=put(source.emb_norm),
            hidden_norm=put(source.hidden_norm),
            proj=matrix(source.proj),
            layer=layer(source.layer),
            final_norm=put(source.final_norm),
        )

    return DeviceWeights(
        dtype="float32",
        embed=put(weights.embed),
        layers=tuple(map(layer, weights.layers)),
        mtp=tuple(map(mtp, weights.mtp[:n_mtp])),
        final_norm=put(weights.final_norm),
        lm_head=put(weights.lm_head.T),
        identity=weights.identity,
    )


def _put(device: Device, array: npt.NDArray[Any]) -> Tensor:
    tensor = device.empty(array.shape, "uint8" if array.dtype == np.uint8 else "float32")
    device.upload(np.ascontiguousarray(array), tensor)
    device.synchronise()
    return tensor


def _matrix(device: Device, source: Matrix, heads_of: ModelShape | None) -> Weight:
    """Return a matrix; its outputs are heads of this shape if one is given."""

    def rows(array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return array.T if heads_of is None else heads_in_order(array.T, heads_of)

    if isinstance(source, ScaledMatrix):
        values = _put(device, nearest_bits(rows(source.values)))
        return Scaled(values, _put(device, rows(source.scales)))
    return _put(device, rows(source))


def _latent(device: Device, source: LatentWeights | None) -> DeviceLatent | None:
    if source is None:
        return None
    return DeviceLatent(
        q_norm=None if source.q_norm is None else _put(device, source.q_norm),
        q_up=None if source.q_up is None else _matrix(device, source.q_up, None),
        kv_norm=_put(device, source.kv_norm),
        kv_up=_put(device, source.kv_up.reshape(-1, source.kv_up.shape[2])),
    )


class NumpyEngine(StepEngine):
    """`Engine` whose steps run on a `NumpyDevice`."""

    def __init__(
        self,
        model_shape: ModelShape,
        weights: Weights,
        options: EngineOptions,
        clock: Callable[[], float],
    ) -> None:
        self.device = NumpyDevice()
        super().__init__(_parts(self.device, model_shape, weights, options), options, clock)


def _parts(
    device: NumpyDevice, model_shape: ModelShape, weights: Weights, options: EngineOptions
) -> EngineParts:
    shape = KvShape(
        n_layers=model_shape.n_layers + options.n_mtp,
        kv_heads=model_shape.n_kv_heads,
        block_size=options.block_size,
        head_dim=model_shape.head_dim,
        n_blocks=options.n_blocks,
        is_by_block=True,
        is_compressed=model_shape.mla is not None,
    )
    pool = DevicePool(device, shape, options.kv_bytes_per_step, options.share_kv)
    allocator, name = BlockAllocator(options.n_blocks), fingerprint(model_shape, weights.identity)
    on_device = uploaded(device, weights, options.n_mtp, model_shape)
    model = DeviceModel(device, NumpyKernels(device), model_shape, on_device, pool.tensor)
    return EngineParts(
        shape=model_shape,
        fingerprint=name,
        allocator=allocator,
        pool=pool,
        scheduler=Scheduler(
            SchedulerLimits.of(options), allocator, prefix_cache(allocator, options, name)
        ),
        runner=DeviceRunner(Steps(model, options), options),
    )
