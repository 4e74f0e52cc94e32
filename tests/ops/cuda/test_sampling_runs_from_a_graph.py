"""A whole sampler replays as one CUDA graph; what the host can see of a bad call is refused."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from baton_ops import cuda, sampling

BATCH, MOST, VOCAB = 9, 2, 32_003
ROWS = BATCH * (MOST + 1)


class Step:
    """Every buffer of a step that penalises, samples and counts."""

    def __init__(self, torch: ModuleType) -> None:
        def full(shape: Any, value: float, dtype: Any = torch.int32) -> Any:
            return torch.full(shape, value, dtype=dtype, device="cuda")

        self.torch = torch
        self.model = torch.randn(ROWS, VOCAB, device="cuda") * 3
        self.logits = torch.empty_like(self.model)
        self.probs = torch.empty_like(self.model)
        self.cu_rows = torch.arange(0, ROWS + 1, MOST + 1, dtype=torch.int32, device="cuda")
        self.drafts = cuda.Drafts(full((BATCH, MOST), 7), full((BATCH,), MOST), self.cu_rows)
        self.state = sampling.Penalised(
            torch.arange(BATCH, dtype=torch.int32, device="cuda"),
            full((BATCH, VOCAB), 0),
            full((BATCH, VOCAB), 0, torch.uint8),
            self.drafts.draft,
        )
        ones = full((BATCH,), 1, torch.float32)
        self.rules = sampling.Rules(
            ones * 1.1, ones * 0.2, ones * 0.1, full((BATCH + 1,), 0), full((1,), 0),
            ones[:1].clone(), full((ROWS + 1,), 0), full((1,), 0))  # fmt: skip
        self.params = sampling.RowParams(
            ones * 0.8, full((BATCH,), 0.9, torch.float64), ones * 0, full((BATCH,), 100),
            self.cu_rows)  # fmt: skip
        self.broken = full((ROWS,), 0, torch.uint8)
        self.seeds = torch.arange(BATCH, dtype=torch.int64, device="cuda")
        self.positions = torch.zeros(BATCH, dtype=torch.int64, device="cuda")
        self.uniform = full((ROWS,), 0, torch.float64)
        self.accepted = cuda.Accepted(full((BATCH,), 0), full((BATCH, MOST + 1), 0))
        self.greedy = full((ROWS,), 0)
        self.tokens = full((ROWS,), 0)
        self.places = sampling.Seeds(self.cu_rows[:-1].clone(), full((BATCH,), 0),
                                     full((BATCH,), 0), full((BATCH,), 0))  # fmt: skip

    def run(self) -> None:
        sampling.argmax_into(self.model, self.greedy, self.broken)
        sampling.process_into(
            self.model, self.cu_rows, self.state, self.rules, self.logits, self.broken
        )
        sampling.probabilities_into(self.logits, self.params, self.probs, self.broken)
        sampling.uniforms_into(self.seeds, self.positions, self.cu_rows, self.uniform)
        cuda.verify_sampled_into(self.probs, self.uniform, self.drafts, self.accepted)
        sampling.count_tokens_into(self.accepted, *self.state[:3])
        sampling.scatter_tokens_into(
            self.accepted, self.drafts.draft_count, self.places.starts, self.tokens
        )
        sampling.seed_drafts_into(self.accepted, self.places)
        self.positions.add_(self.accepted.n_accepted + 1)

    def columns(self) -> list[Any]:
        """Return all that a step leaves."""
        left = (self.probs, self.uniform, *self.accepted, *self.state[1:3], self.tokens,
                self.greedy, self.broken, *self.places, self.positions)  # fmt: skip
        return [tensor.cpu().numpy().copy() for tensor in left if tensor is not None]


def test_replays_give_the_bits_of_eager_calls(torch: ModuleType) -> None:
    step = Step(torch)
    eager = []
    for _ in range(4):
        step.run()
        eager.append(step.columns())
    assert len({column[2].tobytes() + column[3].tobytes() for column in eager}) > 1
    for tensor in (step.state.counts, step.state.seen, step.positions):
        tensor.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for wanted in eager:
        graph.replay()
        for column, other in zip(step.columns(), wanted, strict=True):
            assert column.tobytes() == other.tobytes()


def replaced(group: Any, name: str, value: Any) -> Any:
    return group._replace(**{name: value})


@pytest.mark.parametrize("name", ["slot", "counts", "seen", "draft", "repetition", "masked"])
def test_what_is_on_the_host_is_refused_by_name(torch: ModuleType, name: str) -> None:
    step = Step(torch)
    state, rules = step.state, step.rules
    if name in state._fields:
        state = replaced(state, name, getattr(state, name).cpu())
    else:
        rules = replaced(rules, name, getattr(rules, name).cpu())
    with pytest.raises(ValueError, match=name):
        sampling.process_into(step.model, step.cu_rows, state, rules, step.logits, step.broken)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "top_k", "cu_rows"])
def test_row_params_of_another_type_are_refused_by_name(torch: ModuleType, name: str) -> None:
    step = Step(torch)
    params = replaced(step.params, name, getattr(step.params, name).to(torch.int16))
    with pytest.raises(TypeError, match=name):
        sampling.probabilities_into(step.logits, params, step.probs, step.broken)


@pytest.mark.parametrize("name", ["n_accepted", "token"])
def test_columns_of_another_batch_are_refused_by_name(torch: ModuleType, name: str) -> None:
    step = Step(torch)
    short = replaced(step.accepted, name, getattr(step.accepted, name)[1:].clone())
    with pytest.raises(ValueError, match=r"token|slot"):
        sampling.count_tokens_into(short, *step.state[:3])
    with pytest.raises(ValueError, match=r"token|count"):
        sampling.scatter_tokens_into(
            short, step.drafts.draft_count, step.places.starts, step.tokens
        )


def test_other_shapes_and_types_are_refused_by_name(torch: ModuleType) -> None:
    step = Step(torch)
    with pytest.raises(ValueError, match="token"):
        sampling.argmax_into(step.logits, step.greedy[:-1].clone(), step.broken)
    with pytest.raises(TypeError, match="broken"):
        sampling.argmax_into(step.logits, step.greedy, step.broken.int())
    with pytest.raises(TypeError, match="logits"):
        sampling.argmax_into(step.logits.bfloat16(), step.greedy, step.broken)
    with pytest.raises(ValueError, match="probs"):
        sampling.probabilities_into(step.logits, step.params, step.probs[1:], step.broken)
    with pytest.raises(TypeError, match="out"):
        sampling.uniforms_into(step.seeds, step.positions, step.cu_rows, step.uniform.float())
    with pytest.raises(ValueError, match="seeds"):
        sampling.uniforms_into(step.seeds[1:].clone(), step.positions, step.cu_rows, step.uniform)
    many = torch.zeros(BATCH, 65, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="draft"):
        sampling.process_into(step.model, step.cu_rows, replaced(step.state, "draft", many),
                              step.rules, step.logits, step.broken)  # fmt: skip
    with pytest.raises(ValueError, match="processed"):
        sampling.process_into(step.model, step.cu_rows, step.state, step.rules,
                              step.logits[1:], step.broken)  # fmt: skip
    with pytest.raises(TypeError, match="broken"):
        sampling.process_into(step.model, step.cu_rows, step.state, step.rules,
                              step.logits, step.broken.int())  # fmt: skip
    with pytest.raises(ValueError, match="positions"):
        sampling.seed_drafts_into(step.accepted, replaced(step.places, "positions", many[:, 0]))
    assert np.isfinite(step.logits.cpu().numpy()).size
