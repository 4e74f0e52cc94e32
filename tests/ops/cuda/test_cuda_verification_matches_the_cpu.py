"""CUDA verification accepts what the CPU path accepts and emits the same tokens."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

import baton_ops
from baton_ops import cuda
from baton_testing import draws


class Case(NamedTuple):
    """Requests with random draft counts."""

    draft: npt.NDArray[np.int32]
    draft_count: npt.NDArray[np.int32]
    cu_rows: npt.NDArray[np.int32]

    @property
    def rows(self) -> int:
        """R."""
        return int(self.cu_rows[-1])


def requests(batch: int, most: int, vocab: int) -> Case:
    rng = draws.new_rng()
    count = rng.integers(0, most + 1, size=batch).astype(np.int32)
    cu_rows = np.concatenate([[0], np.cumsum(count + 1)]).astype(np.int32)
    return Case(rng.integers(vocab, size=(batch, most)).astype(np.int32), count, cu_rows)


def on_device(torch: ModuleType, case: Case) -> tuple[cuda.Drafts, cuda.Accepted]:
    """Return the drafts on the device and poisoned outputs."""
    batch, most = case.draft.shape
    drafts = cuda.Drafts(*(torch.as_tensor(a, device="cuda") for a in case))
    kind = {"dtype": torch.int32, "device": "cuda"}
    return drafts, cuda.Accepted(
        torch.full((batch,), -777, **kind), torch.full((batch, most + 1), -777, **kind)
    )


def assert_same(out: cuda.Accepted, wanted: baton_ops.Verification) -> None:
    got: list[Any] = [column.cpu().numpy() for column in out]
    np.testing.assert_array_equal(got[0], wanted.n_accepted)
    np.testing.assert_array_equal(got[1], wanted.token)


@pytest.mark.parametrize("batch", [1, 7, 300])
def test_greedy(torch: ModuleType, batch: int) -> None:
    case = requests(batch, 4, 3)
    target = draws.new_rng().integers(3, size=case.rows).astype(np.int32)
    drafts, out = on_device(torch, case)
    wanted = baton_ops.verify_greedy(target, *case)
    on_cuda = torch.as_tensor(target, device="cuda")
    cuda.verify_greedy_into(on_cuda, drafts, out)
    assert_same(out, wanted)
    # The public function does the same for CUDA tensors.
    again = on_device(torch, case)[1]
    assert baton_ops.verify_greedy(on_cuda, *drafts, out=again) is again
    assert_same(again, wanted)


@pytest.mark.parametrize("with_proposals", [False, True])
@pytest.mark.parametrize("vocab", [3, 1_000, 32_003])
def test_sampled(torch: ModuleType, vocab: int, with_proposals: bool) -> None:
    rng = draws.new_rng()
    case = requests(40, 3, vocab)
    probs = rng.exponential(size=(case.rows, vocab)).astype(np.float32) ** 4
    probs[:, ::3] = 0.0
    # Every third request's drafts are impossible and the others' are likely.
    likely = np.float32(probs.sum(axis=1).mean())
    for b in range(40):
        for i in range(int(case.draft_count[b])):
            probs[case.cu_rows[b] + i, case.draft[b, i]] = 0 if b % 3 == 0 else likely
    probs[:, -1] += np.float32(1e-3)
    uniform = rng.random(case.rows)
    extra: dict[str, Any] = {}
    if with_proposals:
        q = rng.exponential(size=(40, 3, vocab)).astype(np.float32)
        extra = {"draft_probs": q, "residual_uniform": rng.random(case.rows)}
    drafts, out = on_device(torch, case)
    inputs = [torch.as_tensor(a, device="cuda") for a in (probs, uniform)]
    extra_inputs = {name: torch.as_tensor(a, device="cuda") for name, a in extra.items()}
    cuda.verify_sampled_into(*inputs, drafts, out, **extra_inputs)
    wanted = baton_ops.verify_sampled(probs, uniform, *case, **extra)
    assert 0 < wanted.n_accepted.sum() < case.draft_count.sum()
    assert_same(out, wanted)
    again = on_device(torch, case)[1]
    assert baton_ops.verify_sampled(*inputs, *drafts, **extra_inputs, out=again) is again
    assert_same(again, wanted)


ROWS_BY_VOCAB = [(2, 60), (33, 60), (300, 60), (548, 60), (2_113, 30), (4_099, 12), (12_289, 8)]
"""Some of eight blocks; of most the last warps' intervals are cut off or empty."""
LAST = 1 - 2.0**-53


def drawn(torch: ModuleType, probs: Any, uniform: Any) -> list[int]:
    """Return the tokens of rows without drafts."""
    rows = len(probs)
    case = Case(
        np.zeros((rows, 0), np.int32), np.zeros(rows, np.int32), np.arange(rows + 1, dtype=np.int32)
    )
    drafts, out = on_device(torch, case)
    inputs = [torch.as_tensor(a, device="cuda") for a in (probs, uniform)]
    cuda.verify_sampled_into(*inputs, drafts, out)
    assert not np.asarray(out.n_accepted.cpu()).any()
    return [int(token) for token in out.token[:, 0].tolist()]


def weights_of_a_power_of_two(rng: Any, vocab: int) -> Any:
    """Return integers whose sums are exact in any order, few of them or many, some at the end."""
    few = int(rng.integers(1, min(vocab, 6) + 1))
    ids = [rng.permutation(vocab), rng.permutation(vocab)[:few], np.arange(vocab - few, vocab)]
    chosen = ids[int(rng.integers(len(ids)))]
    weights = np.zeros(vocab, np.int64)
    weights[chosen] = rng.integers(1, 50, size=len(chosen))
    total = int(weights.sum())
    weights[rng.choice(chosen)] += (1 << (total - 1).bit_length()) - total
    return weights


@pytest.mark.parametrize(("vocab", "rows"), ROWS_BY_VOCAB)
def test_a_draw_on_a_boundary_is_the_next_token(torch: ModuleType, vocab: int, rows: int) -> None:
    rng = draws.new_rng()
    weights = np.stack([weights_of_a_power_of_two(rng, vocab) for _ in range(rows)])
    through = np.cumsum(weights, axis=1)
    total = through[:, -1]
    # Half of the targets are sums that a row reaches, which belong to the token behind.
    reached = through[np.arange(rows), rng.integers(vocab, size=rows)] % total
    target = np.where(rng.random(rows) < 0.5, reached, rng.integers(total))
    target[: rows // 6] = 0
    tokens = drawn(torch, weights.astype(np.float32), target / total)
    assert tokens == [
        int(np.searchsorted(*one, "right")) for one in zip(through, target, strict=True)
    ]
    ends = drawn(torch, weights.astype(np.float32), np.full(rows, LAST))
    assert ends == [int(np.flatnonzero(row)[-1]) for row in weights]


@pytest.mark.parametrize("vocab", [33, 300, 548, 2_113, 4_099])
def test_rounding_moves_a_draw_by_no_more_than_itself(torch: ModuleType, vocab: int) -> None:
    """Of masses whose sums are rounded, each order otherwise: near the end none may be reached."""
    rng = draws.new_rng()
    rows = 30 if vocab > 4_000 else 300
    probs = np.exp(rng.uniform(-60, 60, size=(rows, vocab))).astype(np.float32)
    probs[np.arange(vocab) > rng.integers(vocab, size=(rows, 1))] = 0
    uniform = np.where(rng.random(rows) < 0.8, LAST, rng.random(rows))
    tokens = np.array(drawn(torch, probs, uniform))
    through = np.cumsum(probs.astype(np.longdouble), axis=1)
    at, share = np.arange(rows), uniform * through[:, -1]
    mass = probs[at, tokens]
    assert (mass > 0).all()
    assert (through[at, tokens] >= share * (1 - 1e-12)).all()
    assert (through[at, tokens] - mass <= share * (1 + 1e-12)).all()


@pytest.mark.parametrize("vocab", [3, 700, 4_099])
@pytest.mark.parametrize("wild", [-1.0, np.nan, np.inf])
def test_a_row_with_something_that_is_no_mass_is_no_distribution(
    torch: ModuleType, vocab: int, wild: float
) -> None:
    case = Case(np.array([[1, 1]], np.int32), np.array([2], np.int32), np.array([0, 3], np.int32))
    probs = np.full((3, vocab), 2.0, np.float32)
    probs[0], probs[0, 1] = 0, 1
    probs[1, draws.new_rng().integers(vocab)] = wild
    drafts, out = on_device(torch, case)
    uniform = torch.as_tensor(np.full(3, 0.5), device="cuda")
    cuda.verify_sampled_into(torch.as_tensor(probs, device="cuda"), uniform, drafts, out)
    assert out.n_accepted.tolist() == [1]
    assert out.token.tolist() == [[1, -1, -1]]


def test_a_row_that_is_no_distribution_ends_its_request(torch: ModuleType) -> None:
    case = Case(np.array([[1, 1]], np.int32), np.array([2], np.int32), np.array([0, 3], np.int32))
    probs = np.array([[0, 1, 0], [0, -1, 0], [1, 1, 1]], np.float32)
    drafts, out = on_device(torch, case)
    cuda.verify_sampled_into(
        torch.as_tensor(probs, device="cuda"), torch.full((3,), 0.5).double().cuda(), drafts, out
    )
    assert out.n_accepted.tolist() == [1]
    assert out.token.tolist() == [[1, -1, -1]]
