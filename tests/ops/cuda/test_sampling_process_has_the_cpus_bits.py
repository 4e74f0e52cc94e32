"""Bias, penalties and masks on the device give the CPU's bits, drafts assumed row by row."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton_ops import sampling
from baton_testing import draws
from baton_worker.engine.sampling.logits_processing import process

SEQUENCES, SLOTS, MOST = 6, 9, 3
LEFT = 77.0


class Step:
    """Sequences of every sort: some have penalties, some biases, some masks, one has nothing."""

    def __init__(self, vocab: int, rows_each: int) -> None:
        rng = draws.new_rng()
        self.vocab, self.rows_each = vocab, rows_each
        self.rows = SEQUENCES * rows_each
        self.logits = (rng.standard_normal((self.rows + 2, vocab)) * 5).astype(np.float32)
        self.cu_rows = np.arange(0, self.rows + 1, rows_each, dtype=np.int32)
        self.slot = rng.permutation(SLOTS)[:SEQUENCES].astype(np.int32)
        self.slot[[2, 5]] = -1
        counts = rng.integers(0, 4, size=(SLOTS, vocab)) * (rng.random((SLOTS, vocab)) < 0.2)
        self.counts = counts.astype(np.int32)
        self.seen = (self.counts > 0) | (rng.random((SLOTS, vocab)) < 0.1)
        self.draft = rng.integers(vocab, size=(SEQUENCES, MOST)).astype(np.int32)
        self.draft[1] = self.draft[1, 0]  # the same token again and again
        self.draft[3, 1:] = -1
        self.repetition = np.array([1.3, 1, 1.1, 0.7, 1.2, 1], np.float32)
        self.frequency = np.array([0.3, -0.7, 1, 0, 0, 0], np.float32)
        self.presence = np.array([-0.2, 0.9, 1, 0, 0.4, 0], np.float32)
        n_biases = np.array([0, min(vocab, 300), min(vocab, 7), 1, 0, 0])
        self.bias_starts = np.concatenate([[0], np.cumsum(n_biases)]).astype(np.int32)
        ids = [rng.permutation(vocab)[:n] for n in n_biases]
        self.bias_ids = np.concatenate(ids).astype(np.int32)
        self.bias = (rng.standard_normal(len(self.bias_ids)) * 10).astype(np.float32)
        n_masks = rng.integers(0, 9, size=self.rows + 2) * (np.arange(self.rows + 2) % 3 != 0)
        self.mask_starts = np.concatenate([[0], np.cumsum(n_masks)]).astype(np.int32)
        self.masked = rng.integers(vocab, size=self.mask_starts[-1]).astype(np.int32)

    def sequence(self, s: int) -> Any:
        """Return the sequence as the CPU's rules see one."""
        drafts = tuple(int(d) for d in self.draft[s, : self.rows_each - 1] if d >= 0)
        padded = drafts + (0,) * (self.rows_each - 1 - len(drafts))
        penalties = None
        if self.slot[s] >= 0:
            slot = int(self.slot[s])
            penalties = SimpleNamespace(counts=self.counts[slot], seen=self.seen[slot])
        chosen = slice(self.bias_starts[s], self.bias_starts[s + 1])
        bias = SimpleNamespace(
            bias_ids=self.bias_ids[chosen],
            bias=self.bias[chosen],
            reach=0,
            forbidden=lambda _, assumed: self.mask_of(s * self.rows_each + len(assumed)),
        )
        settings = SimpleNamespace(
            repetition_penalty=float(self.repetition[s]),
            frequency_penalty=float(self.frequency[s]),
            presence_penalty=float(self.presence[s]),
            min_tokens=0,
        )
        request = SimpleNamespace(
            params=SimpleNamespace(sampling=settings),
            penalties=penalties,
            logit_bias=bias,
            n_output=0,
            stop_ids=frozenset(),
            output_tail=lambda _: (),
        )
        return SimpleNamespace(request=request, drafts=padded), len(drafts) + 1

    def mask_of(self, row: int) -> list[int]:
        return [int(i) for i in self.masked[self.mask_starts[row] : self.mask_starts[row + 1]]]

    def on_device(self, torch: ModuleType) -> tuple[Any, ...]:
        """Return the op's arguments; what takes its results has been written to before."""
        names = ("repetition", "frequency", "presence", "bias_starts", "bias_ids", "bias")

        def tensor(name: str) -> Any:
            return torch.as_tensor(getattr(self, name), device="cuda")

        state = sampling.Penalised(
            tensor("slot"), tensor("counts"), tensor("seen").to(torch.uint8), tensor("draft")
        )
        rules = sampling.Rules(*(tensor(n) for n in (*names, "mask_starts", "masked")))
        logits = tensor("logits")
        broken = torch.zeros(len(self.logits), dtype=torch.uint8, device="cuda")
        return logits, tensor("cu_rows"), state, rules, torch.full_like(logits, LEFT), broken


@pytest.mark.parametrize("rows_each", [1, 4])
@pytest.mark.parametrize("vocab", [1, 50, 4_096, 16_385, 151_936])
def test_every_row_has_the_cpus_bits(torch: ModuleType, vocab: int, rows_each: int) -> None:
    step = Step(vocab, rows_each)
    arguments = step.on_device(torch)
    sampling.process_into(*arguments)
    assert arguments[0].cpu().numpy().tobytes() == step.logits.tobytes(), "raw as they were"
    assert not arguments[5].cpu().numpy().any()
    got = arguments[4].cpu().numpy()
    for s in range(SEQUENCES):
        fed, n_rows = step.sequence(s)
        wanted = step.logits[s * rows_each : (s + 1) * rows_each].copy()
        process(wanted, [fed])
        first = s * rows_each
        for row in range(n_rows):  # rows behind the drafts are padding
            assert got[first + row].tobytes() == wanted[row].tobytes(), (s, row)
    assert (got[step.rows :] == LEFT).all(), "rows of nobody"


@pytest.mark.parametrize("vocab", [50, 4_096, 16_385])
def test_it_may_be_done_in_place(torch: ModuleType, vocab: int) -> None:
    step = Step(vocab, 4)
    logits, cu_rows, state, rules, processed, broken = step.on_device(torch)
    sampling.process_into(logits, cu_rows, state, rules, processed, broken)
    sampling.process_into(logits, cu_rows, state, rules, logits, broken)
    assert torch.equal(logits[: step.rows], processed[: step.rows])


@pytest.mark.parametrize("vocab", [1, 50, 4_096, 16_385, 151_936])
def test_what_a_mask_hides_is_told(torch: ModuleType, vocab: int) -> None:
    step = Step(vocab, 2)
    step.slot[:], step.mask_starts[:] = -1, 0
    rng = draws.new_rng()
    wild = {0: np.nan, 3: np.inf, 4: -np.nan, 11: np.inf}
    for row, value in wild.items():
        step.logits[row, rng.integers(vocab)] = value
    step.logits[6] = -np.inf  # found where it is drawn from
    if vocab > 1:
        step.logits[7, 0] = -np.inf  # a token that the model rules out
    step.logits[step.rows :] = np.nan  # nobody's
    arguments = step.on_device(torch)
    step.masked = np.concatenate([np.arange(vocab)] * step.rows).astype(np.int32)
    step.mask_starts[: step.rows + 1] = np.arange(step.rows + 1) * vocab
    masked = step.on_device(torch)
    for given in (arguments, masked):
        given[5][:] = 2  # what others have noted stays
        sampling.process_into(*given)
        told = given[5].cpu().numpy()
        assert np.flatnonzero(told & 1).tolist() == [*wild]
        assert (told & 2 == 2).all()
    assert (masked[4].cpu().numpy()[: step.rows] == -np.inf).all()


def test_a_rows_bits_do_not_depend_on_company(torch: ModuleType) -> None:
    step = Step(32_003, 4)
    logits, cu_rows, state, rules, processed, broken = step.on_device(torch)
    alone = logits[:4].clone()
    sampling.process_into(logits, cu_rows, state, rules, processed, broken)
    ends = rules._replace(mask_starts=rules.mask_starts[:5].clone())
    sampling.process_into(
        alone,
        cu_rows[:2].clone(),
        state._replace(slot=state.slot[:1].clone(), draft=state.draft[:1].clone()),
        sampling.Rules(*(t[:1].clone() for t in ends[:3]), ends[3][:2].clone(), *ends[4:]),
        alone,
        broken[:4].clone(),
    )
    assert torch.equal(alone, processed[:4])


@pytest.mark.parametrize("moved", [("logits",), ("processed",), ("logits", "processed")])
def test_rows_may_begin_anywhere(torch: ModuleType, moved: tuple[str, ...]) -> None:
    logits, cu_rows, state, rules, processed, broken = Step(4_096, 2).on_device(torch)
    sampling.process_into(logits, cu_rows, state, rules, processed, broken)

    def behind_one(tensor: Any) -> Any:
        flat = torch.full((len(tensor) * 4_096 + 1,), LEFT, dtype=torch.float32, device="cuda")
        apart = flat[1:].reshape(len(tensor), 4_096)
        apart[:] = tensor
        return apart

    given = behind_one(logits) if "logits" in moved else logits
    again = torch.full_like(processed, LEFT)
    again = behind_one(again) if "processed" in moved else again
    sampling.process_into(given, cu_rows, state, rules, again, broken)
    assert torch.equal(again, processed)


def test_more_rows_than_a_grid_has_are_all_processed(torch: ModuleType) -> None:
    if not hasattr(torch, "cuda"):
        pytest.skip("too many threads for a host")
    rows = 65_540
    logits = torch.arange(rows, dtype=torch.float32, device="cuda").reshape(rows, 1)
    none = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
    state = sampling.Penalised(
        torch.full_like(none[:rows], -1), none[:1].reshape(1, 1).clone(),
        torch.zeros(1, 1, dtype=torch.uint8, device="cuda"), none[:0].reshape(rows, 0),
    )  # fmt: skip
    ones = torch.ones(rows, device="cuda")
    rules = sampling.Rules(ones, ones, ones, none, none[:0], ones[:0], none, none[:0])
    processed = torch.full_like(logits, LEFT)
    broken = torch.zeros(rows, dtype=torch.uint8, device="cuda")
    cu_rows = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    sampling.process_into(logits, cu_rows, state, rules, processed, broken)
    assert torch.equal(processed, logits)


def test_ids_outside_the_vocabulary_are_nobodys(torch: ModuleType) -> None:
    step = Step(50, 4)
    step.bias_ids[::2] = 50
    step.bias_ids[1::2] = -1
    step.masked[:] = 2**31 - 1
    step.draft[:] = 50
    step.slot[:] = [-1, 9, 2**31 - 1, -(2**31), 100, -1]
    arguments = step.on_device(torch)
    sampling.process_into(*arguments)
    got = arguments[4].cpu().numpy()
    assert got[: step.rows].tobytes() == step.logits[: step.rows].tobytes()
