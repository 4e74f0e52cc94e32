"""`LookUpKernels` over NumPy: what `NgramIndex` proposes, of histories that each step extends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from baton_testing.numpy_device import NumpyTensor
from baton_worker.engine.backends.device.lookup_kernels import Histories
from baton_worker.engine.backends.device.operands import Accepted
from baton_worker.engine.ngram import NgramIndex, NgramSizes

Array = npt.NDArray[Any]


class NumpyLookUpKernels:
    """See `LookUpKernels`."""

    _launch: Callable[..., None]

    def look_up(
        self,
        accepted: Accepted,
        histories: Histories,
        drafts: NumpyTensor,
        n_before: int,
        sizes: NgramSizes,
    ) -> None:
        """See `LookUpKernels.look_up`."""
        self._launch(_look_up, accepted, histories, drafts, n_before, sizes)


def _look_up(
    accepted: Accepted, histories: Histories, drafts: Array, n_before: int, sizes: NgramSizes
) -> None:
    slots, length = histories.tokens.shape
    for s, (start, slot) in enumerate(zip(histories.starts, histories.slot, strict=True)):
        behind, n_new = int(histories.first[s]) + 1, int(accepted.n_accepted[s]) + 1
        drafts[n_before:, s] = -1
        if start < 0 or not 0 <= slot < slots or behind + n_new > length:
            continue
        history = histories.tokens[slot]
        history[behind : behind + n_new] = accepted.token[s, :n_new]
        known, before = history[: behind + n_new].tolist(), drafts[:n_before, s].tolist()
        found = NgramIndex(sizes).propose(known, before, len(drafts) - n_before)
        drafts[n_before : n_before + len(found), s] = found
