"""The best composition of a library: our own scan for the sum and the rank, CUB for the top k.

CUB's batched top-k does not order its result and picks any of equal logits, so the k entries are
sorted afterwards and their ids may differ from ours among ties. Owns the call of `cub_topk.cu`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from op import Op

SEGMENTS = 16
K = 20


class CubTopK:
    """The op with k = 0, then the top 20 of [T, 103,424] bf16 rows in two stages of CUB."""

    def __init__(self, library: Path) -> None:
        """Load the library that `cub_topk.cu` was compiled to."""
        self.call = ctypes.CDLL(str(library.resolve())).cub_topk
        self.buffers: dict[int, Any] = {}

    def _buffers(self, x: torch.Tensor, token: torch.Tensor) -> Any:
        rows = len(x)
        if rows not in self.buffers:
            ints: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
            keys: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
            place = [
                torch.empty(rows * SEGMENTS * K, **keys),
                torch.empty(rows * SEGMENTS * K, **ints),
                torch.empty(rows, K, **keys),
                torch.empty(rows, K, **ints),
            ]
            size = ctypes.c_size_t(0)
            self._run(None, size, x, place)
            scratch = torch.empty(max(size.value, 1), dtype=torch.uint8, device="cuda")
            op = Op(x, token, torch.zeros(rows, **ints))
            self.buffers[rows] = (scratch, size, place, op)
        return self.buffers[rows]

    def _run(
        self, scratch: torch.Tensor | None, size: Any, x: torch.Tensor, place: list[torch.Tensor]
    ) -> None:
        pointers = [ctypes.c_void_p(buffer.data_ptr()) for buffer in place]
        error = self.call(
            ctypes.c_void_p(scratch.data_ptr() if scratch is not None else None),
            ctypes.byref(size),
            ctypes.c_void_p(x.data_ptr()),
            len(x),
            *pointers,
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        if error:
            raise RuntimeError(f"cub_topk failed with CUDA error {error}")

    def __call__(self, x: torch.Tensor, token: torch.Tensor, k: int) -> Any:
        """Return the columns; k must be 20."""
        assert k == K
        scratch, size, place, op = self._buffers(x, token)
        op.run(x, token=token)
        self._run(scratch, size, x, place)
        values, at = place[2].float().sort(dim=1, descending=True)
        ids = place[3].gather(1, at)
        # The normaliser out of the sampled token's logprob.
        sampled = x.gather(1, token.long()[:, None])[:, 0].float()
        lse = sampled - op.columns.logprob
        return op.columns.logprob, op.columns.rank, ids, values - lse[:, None]
