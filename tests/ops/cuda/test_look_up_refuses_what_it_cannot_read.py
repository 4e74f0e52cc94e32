"""What the host can see of a bad lookup is refused by name."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from baton_ops import cuda, sampling


def ints(torch: ModuleType, values: Any) -> Any:
    return torch.as_tensor(np.asarray(values, np.int32), device="cuda")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_before": 3}, "n_before"),
        ({"n_before": -1}, "n_before"),
        ({"sizes": (0, 2)}, "shortest"),
        ({"sizes": (3, 2)}, "shortest"),
        ({"sizes": (1, 17)}, "longest"),
        ({"slot": [0]}, "slot"),
        ({"drafts": [[0], [0]]}, "drafts"),
        ({"history": [0, 0]}, "history"),
    ],
    ids=str,
)
def test_what_the_host_can_see_to_be_wrong_is_refused(
    torch: ModuleType, wrong: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {
        "n_before": 0, "sizes": (1, 2), "slot": [0, 1], "drafts": [[0, 0]] * 2,
        "history": [[0] * 8] * 2,
    }  # fmt: skip
    given |= wrong
    places = sampling.Histories(
        ints(torch, [0, 0]), ints(torch, [3, 3]), ints(torch, given["slot"]),
        ints(torch, given["history"]))  # fmt: skip
    out = cuda.Accepted(ints(torch, [0, 0]), ints(torch, [[1], [1]]))
    sizes, drafts = sampling.Ngrams(*given["sizes"]), ints(torch, given["drafts"])
    with pytest.raises((ValueError, TypeError), match=message):
        sampling.look_up_into(out, places, drafts, given["n_before"], sizes)
