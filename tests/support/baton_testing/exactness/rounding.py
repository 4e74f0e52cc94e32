"""bfloat16 on the NumPy device: float32 kernels, each tensor that they leave rounded as E would be.

Owns where a GPU's kernels round: between any two of them, sums inside being float32. It says how
far bfloat16 is from float64, not which bits a GPU has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from baton_testing import numpy_experts
from baton_testing.numpy_kernels import gate_up_silu, matmul

Array = npt.NDArray[Any]


def nearest(values: Array) -> npt.NDArray[np.float32]:
    """Return float32 values as bfloat16 has them: to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def _round(*tensors: Array) -> None:
    for tensor in tensors:
        tensor[...] = nearest(tensor).reshape(tensor.shape)


def _add(x: Array, residual: Array) -> None:
    residual += x


def _rounded_product(x: Array, weight: Array, out: Array) -> None:
    matmul(x, weight, out)
    _round(out)


class RoundingKernels:
    """`NumpyKernels` of a model whose vocabulary is of `vocab_size`: logits stay float32."""

    def __init__(self, device: Any, kernels: Any, vocab_size: int) -> None:
        self._kernels = kernels
        self._launch = device.launch
        self._vocab_size = vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def matmul(self, x: Any, weight: Any, out: Any) -> None:
        """See `Kernels.matmul`."""
        self._kernels.matmul(x, weight, out)
        if out.shape[1] != self._vocab_size:
            self._launch(_round, out)

    def add_norm(self, x: Any, residual: Any, weight: Any, eps: float, out: Any) -> None:
        """See `Kernels.add_norm`."""
        if x is not None:
            self._launch(_add, x, residual)
            self._launch(_round, residual)
        self._kernels.add_norm(None, residual, weight, eps, out)
        self._launch(_round, out)

    def norm_route(
        self, x: Any, residual: Any, norm: Any, normed: Any, router: Any, out: Any
    ) -> None:
        """See `ExpertKernels.norm_route`."""
        self.add_norm(x, residual, *norm, normed)
        self._launch(numpy_experts.route, normed, *router, out, matmul)

    def combine_norm(self, sum_: Any, residual: Any, norm: Any, out: Any) -> None:
        """See `ExpertKernels.combine_norm`."""
        self._kernels.combine(*sum_, out)
        self.add_norm(out, residual, *norm, out)

    def rank_sum_norm(
        self, part: Any, exchange: Any, room: Any, residual: Any, norm: Any, out: Any
    ) -> None:
        """See `RankKernels.rank_sum_norm`."""
        self._kernels.rank_sum(part, exchange, room)
        self.add_norm(room, residual, *norm, out)

    def rope_store(
        self, qkv: Any, rotation: Any, places: Any, kv: Any, layer: int, query: Any
    ) -> None:
        """See `Kernels.rope_store`."""
        self._kernels.rope_store(qkv, rotation, places, kv, layer, query)
        self._launch(_round, query, kv)

    def attend(self, query: Any, kv: Any, layer: int, *rest: Any) -> None:
        """See `Kernels.attend`."""
        self._kernels.attend(query, kv, layer, *rest)
        self._launch(_round, rest[3])

    def gate_up_silu(self, x: Any, weight: Any, out: Any) -> None:
        """See `Kernels.gate_up_silu`: the product is rounded before it is gated."""
        self._launch(gate_up_silu, x, weight, out, _rounded_product)
        self._launch(_round, out)
