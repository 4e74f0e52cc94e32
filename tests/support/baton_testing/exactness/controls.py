"""Kernels that are not exact, which the suite must find: the sums of a row depend on its batch, or
on memory that is not its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from baton_ops.decoder import silu_mul_into
from baton_testing.numpy_kernels import gate_up_silu
from baton_testing.numpy_scaled import NUMBERS, of_rows


class _Over:
    """Other kernels, all but one."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


def _in_two_parts(x: Any, weight: Any, out: Any) -> None:
    half = x.shape[1] // 2 if len(x) > 1 else 0
    for row, values in enumerate(np.ascontiguousarray(x)):
        out[row] = weight[:, :half] @ values[:half] + weight[:, half:] @ values[half:]


def _scaled_in_two_parts(x: Any, weight: Any, out: Any) -> None:
    """Of rows that are one group."""
    _in_two_parts(NUMBERS[x.values] * x.scales, NUMBERS[weight.values] * of_rows(weight), out)


class BatchedProducts(_Over):
    """On NumPy: the shared dimension is summed in two parts, in more than one row."""

    def __init__(self, device: Any, kernels: Any) -> None:
        super().__init__(kernels)
        self._launch = device.launch

    def matmul(self, x: Any, weight: Any, out: Any) -> None:
        """See `Kernels.matmul`, but for the promise."""
        self._launch(_in_two_parts, x, weight, out)

    def gate_up_silu(self, x: Any, weight: Any, out: Any) -> None:
        """See `Kernels.gate_up_silu`, but for the promise."""
        self._launch(gate_up_silu, x, weight, out, _in_two_parts)

    def scaled_matmul(self, x: Any, weight: Any, out: Any) -> None:
        """See `ScaledKernels.scaled_matmul`, but for the promise."""
        self._launch(_scaled_in_two_parts, x, weight, out)


class LeakingAttention(_Over):
    """On NumPy: attention takes a request's whole last block and weighs what lies behind the
    context by 0, which is right until that is no number.
    """

    def __init__(self, device: Any, kernels: Any) -> None:
        super().__init__(kernels)
        self._launch = device.launch

    def attend(
        self, query: Any, kv: Any, layer: int, tables: Any, contexts: Any, scale: float, out: Any,
        scratch: Any,
    ) -> None:  # fmt: skip
        """See `Kernels.attend`, but for what it reads."""
        self._kernels.attend(query, kv, layer, tables, contexts, scale, out, scratch)

        def leak(kv: Any, tables: Any, contexts: Any, out: Any) -> None:
            q_len, block_size = len(out) // len(tables), kv.shape[4]
            for sequence, context in enumerate(contexts.tolist()):
                if context > 0:
                    last = tables[sequence, (context - 1) // block_size]
                    rows = slice(sequence * q_len, (sequence + 1) * q_len)
                    out[rows] += np.float32(0.0) * kv[last, layer].sum()

        self._launch(leak, kv, tables, contexts, out)


class Cublas(_Over):
    """On a GPU: cuBLAS, which chooses by the number of rows how it splits the shared dimension."""

    def __init__(self, device: Any, kernels: Any) -> None:
        super().__init__(kernels)

    def matmul(self, x: Any, weight: Any, out: Any) -> None:
        """See `Kernels.matmul`, but for the promise."""
        import torch.nn.functional as functional

        out.copy_(functional.linear(x, weight))

    def gate_up_silu(self, x: Any, weight: Any, out: Any) -> None:
        """See `Kernels.gate_up_silu`, but for the promise."""
        import torch.nn.functional as functional

        silu_mul_into(functional.linear(x, weight), out)


WRONG = {"numpy": BatchedProducts, "gpu": Cublas}
"""By the device that each is for."""
