"""Drafts that the device looks up in its histories are those of the host's index."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from baton_ops import cuda, sampling
from baton_testing import draws
from baton_worker.engine.ngram import NgramIndex, NgramSizes

MOST, STRIDE = 3, 8


class Fed(NamedTuple):
    """A step of some sequences, and what they hold behind it."""

    n_accepted: list[int]
    token: list[list[int]]


def ints(torch: ModuleType, values: Any) -> Any:
    return torch.as_tensor(np.asarray(values, np.int32), device="cuda")


def emitted(rng: np.random.Generator, n_letters: int, batch: int) -> Fed:
    """Return tokens that verification may have written: -1 behind the last."""
    counts = rng.integers(0, MOST + 1, size=batch).tolist()
    tokens = rng.integers(0, n_letters, size=(batch, MOST + 1))
    rows = [[*row[: n + 1], *[-1] * (MOST - n)] for row, n in zip(tokens, counts, strict=True)]
    return Fed(counts, rows)


@pytest.mark.parametrize("n_before", [0, 2])
@pytest.mark.parametrize(("sizes", "n_letters"), [((1, 1), 3), ((2, 4), 2), ((2, 16), 2)])
def test_steps_extend_histories_and_find_what_stood_behind_their_endings(
    torch: ModuleType, n_before: int, sizes: tuple[int, int], n_letters: int
) -> None:
    rng, batch, n_slots, length = draws.new_rng(), 5, 7, 700
    lengths = [1, 2, 17, 255, 600]
    texts = [rng.integers(0, n_letters, size=n).tolist() for n in lengths]
    indices = [NgramIndex(NgramSizes(*sizes)) for _ in texts]
    slots = rng.permutation(n_slots)[:batch].tolist()
    kept = np.full((n_slots, length), -777, np.int32)
    for text, slot in zip(texts, slots, strict=True):
        kept[slot, : len(text)] = text
    history = ints(torch, kept)
    for _ in range(8):
        fed = emitted(rng, n_letters, batch)
        before = rng.integers(0, n_letters, size=(n_before, STRIDE))
        drafts = ints(torch, np.concatenate([before, np.full((MOST, STRIDE), -777)]))
        first = [len(text) - 1 for text in texts]
        places = sampling.Histories(*(ints(torch, a) for a in ([0] * batch, first, slots)), history)
        out = cuda.Accepted(ints(torch, fed.n_accepted), ints(torch, fed.token))
        sampling.look_up_into(out, places, drafts, n_before, sampling.Ngrams(*sizes))
        got = drafts.cpu().numpy()
        np.testing.assert_array_equal(got[:n_before], before)
        assert (got[n_before:, batch:] == -777).all()
        for s, (text, n, row) in enumerate(zip(texts, *fed, strict=True)):
            text += row[: n + 1]
            kept[slots[s], : len(text)] = text
            wanted = indices[s].propose(text, before[:, s].tolist(), MOST) or (-1,) * MOST
            assert got[n_before:, s].tolist() == list(wanted), (s, text)
    np.testing.assert_array_equal(history.cpu().numpy(), kept)


def test_of_equal_endings_the_latest_counts_and_a_longer_one_before_it(torch: ModuleType) -> None:
    """Far apart, so that other threads find them."""
    text = [9] * 600
    text[100:105], text[300:305], text[500:504] = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7, 3, 4, 8]
    text += [1, 2, 3]
    history = ints(torch, [[*text, *[0] * 5]])
    places = sampling.Histories(ints(torch, [0]), ints(torch, [602]), ints(torch, [0]), history)
    out = cuda.Accepted(ints(torch, [0]), ints(torch, [[4]]))
    drafts = ints(torch, [[-777]] * 2)
    sampling.look_up_into(out, places, drafts, 0, sampling.Ngrams(2, 4))
    assert drafts.flatten().tolist() == [6, 9], "of four tokens the later one"
    sampling.look_up_into(out, places, drafts, 0, sampling.Ngrams(1, 2))
    assert drafts.flatten().tolist() == [8, 9], "of two the latest"


def test_who_is_not_there_has_no_place_or_no_room_finds_nothing_and_writes_nothing(
    torch: ModuleType,
) -> None:
    history = ints(torch, [[1, 2, 1, 2, 1, 2, 0, 0]] * 4)
    starts, first, slot = [-1, 0, 0, 0, 0], [5, 5, 5, 6, 5], [0, -1, 4, 1, 2]
    places = sampling.Histories(*(ints(torch, a) for a in (starts, first, slot)), history)
    out = cuda.Accepted(ints(torch, [1, 1, 1, 1, 1]), ints(torch, [[1, 2]] * 5))
    drafts = ints(torch, [[-777] * STRIDE] * 2)
    sampling.look_up_into(out, places, drafts, 0, sampling.Ngrams(1, 2))
    assert drafts.cpu().numpy()[:, :5].tolist() == [[-1, -1, -1, -1, 1], [-1, -1, -1, -1, 2]]
    assert history.tolist() == [[1, 2, 1, 2, 1, 2, 0, 0]] * 2 + [[1, 2] * 4] + [
        [1, 2, 1, 2, 1, 2, 0, 0]
    ]


@pytest.mark.parametrize("n_found", [0, 1, 2])
def test_the_next_step_feeds_as_many_drafts_as_there_are(torch: ModuleType, n_found: int) -> None:
    """Behind them zeros, at their places; of who is not there nothing counts."""
    out = cuda.Accepted(ints(torch, [0, 1]), ints(torch, [[4, -1], [5, 6]]))
    found = [40, 41][:n_found] + [-1] * (2 - n_found)
    drafts = ints(torch, [[one, one] for one in found])
    words = [ints(torch, np.full(size, -777)) for size in (6, 6, 2, 2, 2)]
    words[3] = ints(torch, [10, 20])
    step = sampling.NextStep(*words, torch.tensor([1, 2], device="cuda"),
                             ints(torch, np.full((2, 2), -777)))  # fmt: skip
    sampling.advance_into(out, ints(torch, [0, -1]), drafts, step, step)
    fed = [40, 41][:n_found] + [0] * (2 - n_found)
    wanted = [[4, *fed, 0, 0, 0], [11, 12, 13, 0, 0, 0], [14, 0], [11, 0], [n_found, 0], [2, 0]]
    assert [column.tolist() for column in step[:-1]] == wanted
    assert step.draft.tolist() == [found, [-1, -1]]
