"""Kernels that are not exact, which the suite must find: the sums of a row depend on its batch."""

from __future__ import annotations

from typing import Any

import numpy as np


class _Over:
    """Other kernels, all but one."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


class BatchedProducts(_Over):
    """On NumPy: the shared dimension is summed in two parts, in more than one row."""

    def __init__(self, device: Any, kernels: Any) -> None:
        super().__init__(kernels)
        self._launch = device.launch

    def matmul(self, x: Any, weight: Any, out: Any) -> None:
        """See `Kernels.matmul`, but for the promise."""

        def product(x: Any, weight: Any, out: Any) -> None:
            half = x.shape[1] // 2 if len(x) > 1 else 0
            for row, values in enumerate(np.ascontiguousarray(x)):
                out[row] = weight[:, :half] @ values[:half] + weight[:, half:] @ values[half:]

        self._launch(product, x, weight, out)


class Cublas(_Over):
    """On a GPU: cuBLAS, which chooses by the number of rows how it splits the shared dimension."""

    def __init__(self, device: Any, kernels: Any) -> None:
        super().__init__(kernels)

    def matmul(self, x: Any, weight: Any, out: Any) -> None:
        """See `Kernels.matmul`, but for the promise."""
        import torch.nn.functional as functional

        out.copy_(functional.linear(x, weight))


WRONG = {"numpy": BatchedProducts, "gpu": Cublas}
"""By the device that each is for."""
