"""What the CPU's engine says of its tokens, a device's says too: a column that only one of them has
would be missing from answers of the other, and no client would be told why.
"""

from __future__ import annotations

import numpy as np
import pytest

from baton_worker.engine.backends.device.results import Results
from baton_worker.engine.backends.device.scores import DeviceScores
from baton_worker.engine.sampling.logprobs import EmittedTokens, HostScores
from baton_worker.engine.sampling.scoring import Scoring


@pytest.mark.parametrize("k", [-1, 0, 2])
def test_names_types_and_lengths_are_the_same(k: int) -> None:
    emitted = EmittedTokens(np.array([[3, 1]], np.int32), [2], np.zeros(1, np.int32), [k])
    host = HostScores(Scoring(np.zeros((2, 5), np.float32)))
    n_rows, n_top = (2, 2 * k) if k >= 0 else (0, 0)
    values = {name: np.empty(0) for name in Results._fields} | {
        "n_accepted": np.array([1], np.int32),
        "row_offset": np.arange(3, dtype=np.int32),
        "topk_offset": np.arange(3, dtype=np.int32) * max(k, 0),
        "logprob": np.zeros(n_rows, np.float32),
        "rank": np.ones(n_rows, np.int32),
        "topk_token": np.zeros(n_top, np.int32),
        "topk_logprob": np.zeros(n_top, np.float32),
    }
    device = DeviceScores.of(Results(**values), np.arange(1))
    said = [
        {
            name: (column.dtype, len(column))
            for name, column in scores.columns(emitted, float).columns.items()
        }
        for scores in (host, device)
    ]
    assert said[0] == said[1]
