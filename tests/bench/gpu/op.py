"""The op under test with its buffers, through the library's public functions."""

from __future__ import annotations

from typing import Any

import torch

import baton_ops
from baton_ops import cuda


class Op:
    """T rows of the op: outputs, workspace and a packed buffer, allocated once."""

    def __init__(self, logits: torch.Tensor, token: torch.Tensor, k: torch.Tensor) -> None:
        """Allocate for `logits` like these; `token` and `k` are i32[T] on the device."""
        rows = len(token)
        self.token, self.k = token, k
        places = baton_ops.offsets(k.cpu().numpy())
        self.n_rows, self.n_topk = int(places.row[-1]), int(places.topk[-1])
        self.offsets = tuple(torch.as_tensor(o, device="cuda") for o in places)
        ints: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
        self.columns = cuda.Columns(
            torch.empty(self.n_rows, device="cuda"),
            torch.empty(self.n_rows, **ints),
            torch.empty(self.n_topk, **ints),
            torch.empty(self.n_topk, device="cuda"),
        )
        size = baton_ops.workspace_bytes(logits, rows)
        self.workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        words = cuda.packed_words(rows, rows, self.n_topk)
        self.packed = torch.empty(words, **ints)
        self.pinned = torch.empty(words, dtype=torch.int32, pin_memory=True)
        self.n_accepted = torch.zeros(rows, **ints)
        self.num_rows = torch.tensor([rows], **ints)
        self.plan = cuda.StepPlan(
            torch.arange(rows, **ints), token, k, torch.ones(rows, device="cuda"), *self.offsets,
            self.num_rows,
        )  # fmt: skip

    def poison(self) -> None:
        """Make an entry that nobody writes visible."""
        for column in self.columns:
            column.fill_(-777)

    def run(self, logits: torch.Tensor, token: torch.Tensor | None = None, **options: Any) -> None:
        """Launch the op, on other tokens if given."""
        baton_ops.logprobs_into(
            logits,
            self.token if token is None else token,
            self.k,
            self.columns,
            offsets=self.offsets,
            workspace=self.workspace,
            **options,
        )

    def run_to_host(self, logits: torch.Tensor, token: torch.Tensor | None = None) -> None:
        """Launch the op, pack its columns and copy them; returns when the bytes are there."""
        self.run(logits, token)
        self.copy_to_host()
        torch.cuda.current_stream().synchronize()

    def copy_to_host(self) -> None:
        """Launch the packing and the one copy."""
        cuda.pack_into(self.n_accepted, self.plan, self.columns, self.packed)
        self.pinned.copy_(self.packed, non_blocking=True)
