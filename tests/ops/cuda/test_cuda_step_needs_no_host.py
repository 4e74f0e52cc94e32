"""Verify, plan, logprobs and pack run from device-side counts as one replayed CUDA graph."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

import baton_ops
from baton_ops import cuda
from baton_testing import draws

BATCH, MOST, VOCAB, WIDTH = 33, 3, 12_345, 8
ROWS = BATCH * (MOST + 1)


class Step:
    """All buffers of a step with full drafts, allocated once."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        ints = {"dtype": torch.int32, "device": "cuda"}
        self.logits = torch.empty(ROWS, VOCAB, dtype=torch.bfloat16, device="cuda")
        self.target = torch.empty(ROWS, **ints)
        self.drafts = cuda.Drafts(
            torch.empty(BATCH, MOST, **ints),
            torch.full((BATCH,), MOST, **ints),
            torch.arange(0, ROWS + 1, MOST + 1, **ints),
        )
        self.k = torch.empty(BATCH, **ints)
        self.temperature = torch.empty(BATCH, device="cuda")
        self.accepted = cuda.Accepted(
            torch.empty(BATCH, **ints), torch.empty(BATCH, MOST + 1, **ints)
        )
        self.plan = cuda.StepPlan(
            *(torch.empty(ROWS, **ints) for _ in range(3)),
            torch.empty(ROWS, device="cuda"),
            *(torch.empty(ROWS + 1, **ints) for _ in range(2)),
            torch.empty(1, **ints),
        )
        entries = ROWS * WIDTH
        self.columns = cuda.Columns(
            torch.empty(ROWS, device="cuda"),
            torch.empty(ROWS, **ints),
            torch.empty(entries, **ints),
            torch.empty(entries, device="cuda"),
        )
        self.packed = torch.empty(cuda.packed_words(BATCH, ROWS, entries), **ints)
        size = baton_ops.workspace_bytes(self.logits, ROWS)
        self.workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")

    def run(self) -> None:
        cuda.verify_greedy_into(self.target, self.drafts, self.accepted)
        cuda.plan_into(
            self.accepted, self.drafts.cu_rows, self.k, self.plan, temperature=self.temperature
        )
        baton_ops.logprobs_into(
            self.logits,
            self.plan.token,
            self.plan.k,
            self.columns,
            offsets=(self.plan.row_offset, self.plan.topk_offset),
            row_index=self.plan.row_index,
            inv_temp=self.plan.inv_temp,
            num_rows=self.plan.num_rows,
            workspace=self.workspace,
        )
        cuda.pack_into(self.accepted.n_accepted, self.plan, self.columns, self.packed)

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Fill the inputs and return them on the host."""
        torch = self.torch
        host = {
            "target": rng.integers(4, size=ROWS).astype(np.int32),
            "draft": rng.integers(4, size=(BATCH, MOST)).astype(np.int32),
            "k": rng.integers(-1, WIDTH + 1, size=BATCH).astype(np.int32),
            "temperature": rng.choice([0.0, 0.5, 1.0, 1.7], size=BATCH).astype(np.float32),
        }
        self.logits.copy_(torch.randn(ROWS, VOCAB, device="cuda"))
        self.target.copy_(torch.as_tensor(host["target"]))
        self.drafts.draft.copy_(torch.as_tensor(host["draft"]))
        self.k.copy_(torch.as_tensor(host["k"]))
        self.temperature.copy_(torch.as_tensor(host["temperature"]))
        return {**host, "logits": self.logits.float().cpu().numpy()}


def expected(host: dict[str, Any]) -> tuple[baton_ops.Verification, list[Any]]:
    """Return what the CPU path makes of the same step."""
    count = np.full(BATCH, MOST, np.int32)
    cu_rows = np.arange(0, ROWS + 1, MOST + 1, dtype=np.int32)
    verified = baton_ops.verify_greedy(host["target"], host["draft"], count, cu_rows)
    emitted = verified.n_accepted + 1
    rows = np.concatenate([cu_rows[b] + np.arange(emitted[b]) for b in range(BATCH)])
    token = np.concatenate([verified.token[b, : emitted[b]] for b in range(BATCH)])
    temperature = np.where(host["temperature"] < 1e-5, 1, host["temperature"])
    inv_temp = np.repeat((1 / temperature).astype(np.float32), emitted)
    columns = baton_ops.logprobs(
        host["logits"],
        token,
        np.repeat(host["k"], emitted),
        row_index=rows.astype(np.int32),
        inv_temp=inv_temp,
    )
    return verified, [token, *columns]


def test_a_replayed_graph_follows_new_accept_counts(torch: ModuleType) -> None:
    rng = draws.new_rng()
    step = Step(torch)
    step.draw(rng)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step.run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step.run()
    for _ in range(3):
        host = step.draw(rng)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        packed = cuda.unpack(step.packed.cpu().numpy())
        verified, columns = expected(host)
        np.testing.assert_array_equal(packed.n_accepted, verified.n_accepted)
        np.testing.assert_array_equal(packed.token, columns[0])
        np.testing.assert_array_equal(packed.rank, columns[2])
        np.testing.assert_array_equal(packed.topk_token, columns[3])
        np.testing.assert_allclose(packed.logprob, columns[1], rtol=2e-7, atol=2e-6)
        np.testing.assert_allclose(packed.topk_logprob, columns[4], rtol=2e-7, atol=2e-6)
