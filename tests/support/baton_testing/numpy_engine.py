"""The device's engine over NumPy: what runs on a GPU, where there is none.

Owns how its parts are put together for a model whose weights the host holds. Knows no test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_worker.engine.backends.device.runner import DeviceModel, DeviceRunner
from baton_worker.engine.backends.device.seam import Device, Tensor
from baton_worker.engine.backends.device.weights import DeviceLayer, DeviceMtp, DeviceWeights
from baton_worker.engine.engine import EngineParts, StepEngine
from baton_worker.engine.kv.pool import BlockAllocator, KvShape
from baton_worker.engine.model.shape import ModelShape, fingerprint
from baton_worker.engine.model.weights import LayerWeights, MtpWeights, Weights
from baton_worker.engine.options import EngineOptions
from baton_worker.engine.scheduling.prefix_cache import prefix_cache
from baton_worker.engine.scheduling.scheduler import Scheduler, SchedulerLimits


class NumpyPool:
    """`KvStore` over the device's pool: blocks go in and out as whole layers' arrays."""

    def __init__(self, device: NumpyDevice, shape: KvShape) -> None:
        self._device = device
        self.shape = shape
        self._block = (shape.n_layers, 2, shape.kv_heads, shape.block_size, shape.head_dim)
        self.tensor = device.zeros((shape.n_blocks + 2, *self._block), "float32")

    def export_blocks(
        self, blocks: Sequence[int], n_positions: int
    ) -> tuple[npt.NDArray[np.float32], ...]:
        """See `KvPool.export_blocks`."""
        count = -(-n_positions // self.shape.block_size)
        found = np.empty((count, *self._block), np.float32)
        for index, block in enumerate(blocks[:count]):
            self._device.download(self._rows(block), found[index : index + 1]).wait()
        found[-1, ..., n_positions - (count - 1) * self.shape.block_size :, :] = 0.0
        layers = range(self.shape.n_layers)
        return tuple(np.array(found[:, layer, side]) for layer in layers for side in (0, 1))

    def import_blocks(self, blocks: Sequence[int], arrays: Sequence[npt.NDArray[Any]]) -> None:
        """See `KvPool.import_blocks`."""
        given = np.stack(arrays, axis=1).reshape(len(arrays[0]), *self._block)
        for block, content in zip(blocks, given, strict=False):
            self._device.upload(content[None], self._rows(block))
        self._device.synchronise()

    def _rows(self, block: int) -> Tensor:
        return self._device.rows(self.tensor, block, block + 1)


def uploaded(device: Device, weights: Weights, use_mtp: bool) -> DeviceWeights:
    """Return a host's weights as the device has them: float32, `[out, in]`."""

    def put(array: npt.NDArray[np.float32]) -> Tensor:
        tensor = device.empty(array.shape, "float32")
        device.upload(np.ascontiguousarray(array), tensor)
        device.synchronise()
        return tensor

    def layer(source: LayerWeights) -> DeviceLayer:
        norms = source.qk_norm
        return DeviceLayer(
            input_norm=put(source.input_norm),
            qkv=put(source.qkv.T),
            o=put(source.o.T),
            post_norm=put(source.post_norm),
            gate_up=put(source.gate_up.T),
            down=put(source.down.T),
            qk_norm=None if norms is None else (put(norms[0]), put(norms[1])),
        )

    def mtp(source: MtpWeights) -> DeviceMtp:
        return DeviceMtp(
            emb_norm=put(source.emb_norm),
            hidden_norm=put(source.hidden_norm),
            proj=put(source.proj.T),
            layer=layer(source.layer),
            final_norm=put(source.final_norm),
        )

    return DeviceWeights(
        dtype="float32",
        embed=put(weights.embed),
        layers=tuple(map(layer, weights.layers)),
        mtp=tuple(map(mtp, weights.mtp[:1])) if use_mtp else (),
        final_norm=put(weights.final_norm),
        lm_head=put(weights.lm_head.T),
        identity=weights.identity,
    )


class NumpyEngine(StepEngine):
    """`Engine` whose steps run on a `NumpyDevice`."""

    def __init__(
        self,
        spec: ModelShape,
        weights: Weights,
        options: EngineOptions,
        clock: Callable[[], float],
    ) -> None:
        self.device = NumpyDevice()
        super().__init__(_parts(self.device, spec, weights, options), options, clock)


def _parts(
    device: NumpyDevice, spec: ModelShape, weights: Weights, options: EngineOptions
) -> EngineParts:
    pool = NumpyPool(
        device,
        KvShape(
            n_layers=spec.n_layers + int(options.use_mtp),
            kv_heads=spec.n_kv_heads,
            block_size=options.block_size,
            head_dim=spec.head_dim,
            n_blocks=options.n_blocks,
        ),
    )
    allocator, name = BlockAllocator(options.n_blocks), fingerprint(spec, weights.identity)
    on_device = uploaded(device, weights, options.use_mtp)
    model = DeviceModel(device, NumpyKernels(device), spec, on_device, pool.tensor)
    return EngineParts(
        spec=spec,
        fingerprint=name,
        allocator=allocator,
        pool=pool,
        scheduler=Scheduler(
            SchedulerLimits.of(options), allocator, prefix_cache(allocator, options, name)
        ),
        runner=DeviceRunner(model, options),
    )
