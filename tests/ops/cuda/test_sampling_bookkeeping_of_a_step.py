"""Uniforms, counts, seeds of drafts and padded rows: what a step needs besides arithmetic."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import baton_ops
from baton_ops import cuda, sampling
from baton_testing import draws
from baton_worker.engine.sampling.noise import uniforms


def ints(torch: ModuleType, values: Any) -> Any:
    return torch.as_tensor(np.asarray(values, np.int32), device="cuda")


def accepted(torch: ModuleType, n_accepted: Any, token: Any) -> cuda.Accepted:
    return cuda.Accepted(ints(torch, n_accepted), ints(torch, token))


def test_uniforms_are_the_cpus_bits(torch: ModuleType) -> None:
    rng = draws.new_rng()
    count, each = 301, 3
    seeds = rng.integers(-(2**63), 2**63 - 1, size=count)
    seeds[:3] = [0, -1, -(2**63)]
    positions = rng.integers(0, 2**40, size=count)
    positions[:2] = 0
    cu_rows = np.arange(0, each * count + 1, each, dtype=np.int32)
    out = torch.full((each * count + 5,), -777.0, dtype=torch.float64, device="cuda")
    on_device = [torch.as_tensor(a, device="cuda") for a in (seeds, positions, cu_rows)]
    sampling.uniforms_into(*on_device, out)
    wanted = uniforms(
        np.repeat(seeds, each).view(np.uint64),
        (positions[:, None] + np.arange(each)).reshape(-1).astype(np.uint64),
    )
    got = out.cpu().numpy()
    assert got[:-5].tobytes() == wanted.tobytes()
    assert (got[-5:] == -777).all()


def test_tokens_are_counted_up_to_the_last_that_was_emitted(torch: ModuleType) -> None:
    out = accepted(torch, [0, 2, 1, 3, 1], [[4, 4, 4, 4], [5, 6, 5, 7], [1, -1, -1, -1],
                                            [2, 2, 2, 2], [9, 99, 9, 9]])  # fmt: skip
    counts = torch.zeros(4, 10, dtype=torch.int32, device="cuda")
    seen = torch.zeros(4, 10, dtype=torch.uint8, device="cuda")
    seen[2, 5] = 1
    sampling.count_tokens_into(out, ints(torch, [3, 2, 0, -1, 1]), counts, seen)
    wanted = np.zeros((4, 10), np.int32)
    wanted[3, 4], wanted[2, 5], wanted[2, 6], wanted[0, 1], wanted[1, 9] = 1, 2, 1, 1, 1
    np.testing.assert_array_equal(counts.cpu().numpy(), wanted)
    np.testing.assert_array_equal(seen.cpu().numpy(), wanted > 0)


def test_tokens_are_scattered_with_zeros_for_rejected_drafts(torch: ModuleType) -> None:
    out = accepted(torch, [0, 2, 1, 1], [[4, -1, -1], [5, 6, 7], [8, 9, -1], [3, 3, -1]])
    tokens = torch.full((12,), -777, dtype=torch.int32, device="cuda")
    sampling.scatter_tokens_into(out, ints(torch, [2, 2, 1, 2]), ints(torch, [0, 3, 7, -1]), tokens)
    assert tokens.tolist() == [4, 0, 0, 5, 6, 7, -777, 8, 9, -777, -777, -777]


def test_drafting_begins_at_the_last_accepted_token(torch: ModuleType) -> None:
    out = accepted(torch, [0, 2, 1], [[1, -1, -1], [1, 2, 3], [1, 2, -1]])
    rows, positions = (ints(torch, [-777] * 3) for _ in range(2))
    seeds = sampling.Seeds(ints(torch, [0, 3, -1]), ints(torch, [10, 20, 30]), rows, positions)
    sampling.seed_drafts_into(out, seeds)
    assert rows.tolist() == [0, 5, -1]
    assert positions.tolist() == [10, 22, -1]


def test_later_drafts_stand_further_on_and_see_what_is_before_them(torch: ModuleType) -> None:
    out = accepted(torch, [0, 2, 1], [[1, -1, -1], [1, 2, 3], [1, 2, -1]])
    written = [ints(torch, [-777] * 3) for _ in range(3)]
    seeds = sampling.Seeds(ints(torch, [0, 3, -1]), ints(torch, [10, 20, 30]), *written)
    sampling.seed_drafts_into(out, seeds, 2)
    assert [column.tolist() for column in written] == [[0, 5, -1], [12, 24, -1], [13, 25, 0]]


def flat(rows: list[list[int]]) -> list[int]:
    return [value for row in rows for value in row]


@pytest.mark.parametrize("n_drafts", [0, 2])
def test_the_next_step_feeds_the_newest_token_and_its_drafts(
    torch: ModuleType, n_drafts: int
) -> None:
    out = accepted(torch, [0, 2, 1], [[4, -1, -1], [5, 6, 7], [8, 9, -1]])
    drafts = ints(torch, np.array([[40, 50, 60, -777], [41, 51, 61, -777]])[:n_drafts])
    q_len, columns = n_drafts + 1, max(n_drafts, 1)
    words = [ints(torch, np.full(shape, -777)) for shape in (3 * q_len, 3 * q_len, 3, 3, 3)]
    words[3] = ints(torch, [10, 20, 30])
    draws = torch.tensor([1, 1 << 40, 3], device="cuda")
    step = sampling.NextStep(*words, draws, ints(torch, np.full((3, columns), -777)))
    sampling.advance_into(out, ints(torch, [0, q_len, -1]), drafts, step, step)
    fed = [[4, 40, 41][:q_len], [7, 50, 51][:q_len], [0] * q_len]
    places = [list(range(first, first + q_len)) for first in (11, 23)] + [[0] * q_len]
    wanted = [flat(fed), flat(places), [11 + q_len, 23 + q_len, 0], [11, 23, 0]]
    wanted += [[n_drafts, n_drafts, 0], [2, (1 << 40) + 3, 0]]
    assert [column.tolist() for column in step[:-1]] == wanted
    assert step.draft.tolist() == [(row[1:] or [-1]) for row in fed[:2]] + [[-1] * columns]


def padded(torch: ModuleType, most: int, batch: int) -> tuple[Any, cuda.Drafts, cuda.Accepted]:
    """Return random draft counts, with q_len rows a sequence on the device whatever they are."""
    rng = draws.new_rng()
    count = rng.integers(0, most + 1, size=batch).astype(np.int32)
    draft = rng.integers(3, size=(batch, most)).astype(np.int32)
    cu_rows = np.arange(0, batch * (most + 1) + 1, most + 1, dtype=np.int32)
    out = accepted(torch, np.full(batch, -777), np.full((batch, most + 1), -777))
    return (draft, count), cuda.Drafts(*(ints(torch, a) for a in (draft, count, cu_rows))), out


def dense(count: Any, most: int) -> tuple[Any, Any]:
    """Return the rows that are no padding, and their cu_rows."""
    rows = [s * (most + 1) + j for s, n in enumerate(count) for j in range(n + 1)]
    return np.array(rows), np.concatenate([[0], np.cumsum(count + 1)]).astype(np.int32)


def test_rows_behind_the_drafts_are_padding_for_greedy_verification(torch: ModuleType) -> None:
    (draft, count), drafts, out = padded(torch, 4, 200)
    target = draws.new_rng().integers(3, size=1_000).astype(np.int32)
    cuda.verify_greedy_into(ints(torch, target), drafts, out)
    rows, cu_rows = dense(count, 4)
    wanted = baton_ops.verify_greedy(target[rows], draft, count, cu_rows)
    np.testing.assert_array_equal(out.n_accepted.cpu().numpy(), wanted.n_accepted)
    np.testing.assert_array_equal(out.token.cpu().numpy(), wanted.token)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("vocab", [3, 32_003])
def test_rows_behind_the_drafts_are_padding_for_sampled_verification(
    torch: ModuleType, vocab: int
) -> None:
    (draft, count), drafts, out = padded(torch, 4, 40)
    rng = draws.new_rng()
    probs = rng.random((200, vocab)).astype(np.float32) ** 8
    probs[:, 0] = probs.sum(axis=1)
    probs[:, -1] += np.float32(1e-3)
    uniform = rng.random(200)
    rows, cu_rows = dense(count, 4)
    is_padding = np.ones(200, np.bool_)
    is_padding[rows] = False
    probs[is_padding] = np.nan
    on_device = [torch.as_tensor(a, device="cuda") for a in (probs, uniform)]
    cuda.verify_sampled_into(*on_device, drafts, out)
    wanted = baton_ops.verify_sampled(probs[rows], uniform[rows], draft, count, cu_rows)
    np.testing.assert_array_equal(out.n_accepted.cpu().numpy(), wanted.n_accepted)
    np.testing.assert_array_equal(out.token.cpu().numpy(), wanted.token)


def test_a_plan_finds_rows_behind_padding_and_behind_the_raw_logits(torch: ModuleType) -> None:
    out = accepted(torch, [1, 0, 2], [[5, 6, -1], [7, -1, -1], [8, 9, 10]])
    plan = cuda.StepPlan(
        *(ints(torch, [-777] * 9) for _ in range(3)),
        torch.zeros(9, device="cuda"),
        *(ints(torch, [-777] * 10) for _ in range(2)),
        ints(torch, [-777]),
        torch.zeros(9, device="cuda"),
    )
    cuda.plan_into(
        out,
        ints(torch, [0, 3, 6, 9]),
        ints(torch, [0, -1, 2]),
        plan,
        first_row=ints(torch, [0, 0, 100]),
        top_p=torch.tensor([0.5, 1.0, 0.25], device="cuda"),
    )
    assert plan.top_p is not None
    assert plan.top_p.tolist()[:6] == [0.5, 0.5, 1.0, 0.25, 0.25, 0.25]
    assert plan.num_rows.tolist() == [6]
    assert plan.row_index.tolist()[:6] == [0, 1, 3, 106, 107, 108]
    assert plan.token.tolist()[:6] == [5, 6, 7, 8, 9, 10]
    assert plan.k.tolist()[:6] == [0, 0, -1, 2, 2, 2]
    assert plan.topk_offset.tolist()[:7] == [0, 0, 0, 0, 2, 4, 6]
