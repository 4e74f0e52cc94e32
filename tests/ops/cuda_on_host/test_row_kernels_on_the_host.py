"""Argmax, probabilities and verification on the host keep the CPU's tokens, threads in any order.

Vocabularies are short: a row of eight blocks is thousands of fibers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import baton_ops
from baton_ops import cuda, sampling
from baton_testing import draws, hard_logits
from baton_testing.host_cuda import HostLibrary, HostTorch, load_gpu_tests
from baton_testing.host_orders import Order, each_last

gpu = load_gpu_tests("test_sampling_probabilities_keep_the_cpus_tokens")
test_ten_equal_tokens = gpu.test_ten_equal_tokens_lose_none_or_five_of_them
verified = load_gpu_tests("test_cuda_verification_matches_the_cpu")
test_boundaries = verified.test_a_draw_on_a_boundary_is_the_next_token
test_rounded_sums = verified.test_rounding_moves_a_draw_by_no_more_than_itself
test_no_mass = verified.test_a_row_with_something_that_is_no_mass_is_no_distribution
ROWS = [(1, 9), (3, 9), (1_000, 9), (4_099, 9), (4_100, 9), (4_099, 8)]
"""Vocabularies, and devices without clusters."""


@pytest.mark.parametrize(("vocab", "capability"), ROWS)
@pytest.mark.parametrize("kind", hard_logits.KINDS)
def test_argmax_is_numpys(
    host: HostLibrary, torch: HostTorch, kind: str, vocab: int, capability: int
) -> None:
    host.set(vocab, capability)
    logits = hard_logits.rows(kind, 5, vocab)
    token = torch.full((5,), -777, dtype=torch.int32)
    broken = torch.zeros(5, dtype=torch.uint8)
    sampling.argmax_into(torch.as_tensor(logits, device=""), token, broken)
    wanted = logits.argmax(axis=1)
    np.testing.assert_array_equal(token, wanted)
    np.testing.assert_array_equal(broken, ~np.isfinite(logits[np.arange(5), wanted]))


@pytest.mark.parametrize(("vocab", "capability"), ROWS)
@pytest.mark.parametrize("kind", ["bulk", "tied", "constant"])
def test_truncation_is_the_cpus_bit_for_bit(
    host: HostLibrary, torch: HostTorch, kind: str, vocab: int, capability: int
) -> None:
    rng = draws.new_rng()
    host.set(int(rng.integers(2**63)), capability)
    rows = gpu.Rows(torch, hard_logits.rows(kind, 3, vocab))
    rows.top_k[:] = rng.choice([0, 1, 2, 50, vocab - 1, vocab + 5], size=3)
    rows.top_p[:] = rng.choice([1e-12, 0.1, 0.5, 0.9, 0.999, 1 - 1e-6, 1.0], size=3)
    rows.min_p[1] = 0.02
    rows.temperature[:2] = 0.6, 1e6
    probs, broken = rows.run()
    assert probs.tobytes() == rows.wanted().tobytes(), (rows.top_k, rows.top_p)
    assert not broken.any()


@pytest.mark.slow
@pytest.mark.parametrize("shared_bytes", [40 << 10, 36 << 10, 16 << 10])
def test_truncation_needs_no_more_shared_memory_than_the_device_has(
    host: HostLibrary, torch: HostTorch, shared_bytes: int
) -> None:
    """A row's share, its sums and what is static take more than 36 KiB, and less than 40."""
    rng = draws.new_rng()
    host.set(int(rng.integers(2**63)), shared_bytes=shared_bytes)
    rows = gpu.Rows(torch, hard_logits.rows("bulk", 3, 4_099))
    rows.top_k[:], rows.top_p[:] = [0, 50, 4_000], [0.5, 1.0, 0.9]
    probs, broken = rows.run()
    assert probs.tobytes() == rows.wanted().tobytes(), (rows.top_k, rows.top_p)
    assert not broken.any()


@pytest.mark.parametrize("with_proposals", [False, True])
@pytest.mark.parametrize(("vocab", "capability"), ROWS[1:])
def test_verification_decides_what_the_cpu_decides(
    host: HostLibrary, torch: HostTorch, vocab: int, capability: int, with_proposals: bool
) -> None:
    rng = draws.new_rng()
    host.set(int(rng.integers(2**63)), capability)
    count = np.array([2, 0, 1], np.int32)
    draft = rng.integers(vocab, size=(3, 2)).astype(np.int32)
    cu_rows = np.array([0, 3, 4, 6], np.int32)
    probs = rng.exponential(size=(6, vocab)).astype(np.float32) ** 4
    probs[0, draft[0, 0]] = probs[0].sum()
    uniform, extra = rng.random(6), {}
    if with_proposals:
        proposals = rng.exponential(size=(3, 2, vocab)).astype(np.float32)
        extra = {"draft_probs": proposals, "residual_uniform": rng.random(6)}
    out = cuda.Accepted(*(torch.full(s, -777, dtype=torch.int32) for s in ((3,), (3, 3))))
    given = cuda.Drafts(*(torch.as_tensor(a, device="") for a in (draft, count, cu_rows)))
    cuda.verify_sampled_into(probs, uniform, given, out, **extra)
    wanted = baton_ops.verify_sampled(probs, uniform, draft, count, cu_rows, **extra)
    np.testing.assert_array_equal(out.n_accepted, wanted.n_accepted)
    np.testing.assert_array_equal(out.token, wanted.token)


TIED = np.random.default_rng(1).standard_normal((2, 4_099)).round(1).astype(np.float32)


def truncated(torch: HostTorch) -> bytes:
    rows = gpu.Rows(torch, TIED)
    rows.top_k[:], rows.top_p[:] = [300, 50], [0.5, 0.9]
    return bytes(rows.run()[0].tobytes())


def largest(torch: HostTorch) -> bytes:
    token = torch.full((2,), -777, dtype=torch.int32)
    broken = torch.zeros(2, dtype=torch.uint8)
    sampling.argmax_into(torch.as_tensor(TIED, device=""), token, broken)
    return bytes(token.tobytes() + broken.tobytes())


def verified_tokens(torch: HostTorch) -> bytes:
    rng = np.random.default_rng(1)
    draft, cu_rows = rng.integers(4_099, size=(2, 2)).astype(np.int32), [0, 3, 6]
    drafts = (draft, np.array([2, 2], np.int32), np.array(cu_rows, np.int32))
    given = cuda.Drafts(*(torch.as_tensor(a, device="") for a in drafts))
    probs = rng.exponential(size=(6, 4_099)).astype(np.float32) ** 4
    probs[0, draft[0, 0]] = probs[0].sum()
    proposals = rng.exponential(size=(2, 2, 4_099)).astype(np.float32)
    out = cuda.Accepted(*(torch.full(s, -777, dtype=torch.int32) for s in ((2,), (2, 3))))
    extra = {"draft_probs": proposals, "residual_uniform": rng.random(6)}
    cuda.verify_sampled_into(probs, rng.random(6), given, out, **extra)
    return bytes(out.n_accepted.tobytes() + out.token.tobytes())


@pytest.mark.slow
@pytest.mark.parametrize("run", [largest, verified_tokens, truncated])
def test_whoever_comes_last_changes_no_bit(
    host: HostLibrary, torch: HostTorch, run: Callable[[HostTorch], bytes]
) -> None:
    """A block of a row's, or in all of them a thread, a warp or a group of warps."""
    host.set(seed=1)
    wanted = run(torch)
    blocks = [Order(range(1024), block) for block in range(8)]
    for seed, order in enumerate((*blocks, *each_last(512, seed=1, most=6))):
        host.set(seed)
        with host.ordered(order):
            assert run(torch) == wanted, order
