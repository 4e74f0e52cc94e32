"""Engines over one NumPy device or over several ranks of them, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from baton_testing.engine_bench import Bench, Clock, Reader
from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_testing.numpy_team import team_of
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.engine.backends.device.engine import DeviceEngine, LoadedModel
from baton_worker.engine.backends.device.loading import load_device_weights
from baton_worker.engine.model.checkpoint import open_checkpoint
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.options import NO_DRAFTS, DraftSources, EngineOptions


@contextmanager
def over(
    ranks: int, folder: Any = TINY_MODEL, runs_by_itself: bool = False
) -> Iterator[LoadedModel]:
    """Lend rank 0's model, or the one of a single device.

    Args:
        runs_by_itself: what rank 0's device is given is done without being waited for.
    """
    if ranks > 1:
        model = team_of(folder, ranks, runs_by_itself=runs_by_itself)
        with contextlib.closing(model.team.followers):  # type: ignore[union-attr,type-var]
            yield model
        return
    shape, device = load_shape(folder), NumpyDevice(runs_by_itself=runs_by_itself)
    weights = load_device_weights(device, open_checkpoint(folder), shape, "float32", 1)
    with contextlib.closing(device):
        yield LoadedModel(device, NumpyKernels(device), shape, weights)


def options(**given: Any) -> EngineOptions:
    """Return limits of a small engine."""
    n_draft = given.setdefault("n_draft", 0)
    given.setdefault("use_mtp", n_draft > 0)
    given.setdefault("drafts", DraftSources() if n_draft else NO_DRAFTS)
    most = {"block_size": 16, "n_blocks": 64, "max_running": 4, "max_waiting": 16}
    sizes = {"max_model_len": 256, "prefill_tokens": 256, "max_top_k": 20, "overlap": True}
    return EngineOptions(**(most | sizes | given))


def benches(*models: LoadedModel) -> Callable[..., Bench]:
    """Return what makes an engine over each model in turn, the last one's from then on."""
    left = list(models)

    def make(reader: Reader | None = None, **given: Any) -> Bench:
        model = left.pop(0) if len(left) > 1 else left[0]
        return Bench(DeviceEngine(model, options(**given), Clock()), reader or Reader())

    return make
