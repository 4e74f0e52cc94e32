"""The subjects by name: which model, on which device, tried how hard.

Owns how each is loaded, once, and what a machine must have for it; frameworks are imported only
for a subject that needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton_testing.engine_bench import Clock
from baton_testing.exactness.subjects import Sizes, Subject
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import load_weights

SMOKE = Sizes(
    asks=22,
    tokens=24,
    longest=90,
    batches=(2, 7, 24),
    chunks=(16, 33),
    drafts=(1, 5),
    scored=(8, 20),
    scored_chunks=(16, 500),
)

SUBJECTS = {"cpu-tiny": False}
"""Names, and whether each needs a GPU."""


@contextmanager
def subject(name: str) -> Iterator[Subject]:
    """Give the subject of this name, or skip the test with what the machine lacks."""
    pytest.importorskip("paddle", reason="Paddle, which computes on the CPU, is absent")
    from baton_worker.engine.backends.paddle.engine import PaddleEngine

    shape = load_shape(TINY_MODEL)
    weights = load_weights(TINY_MODEL, shape)
    yield Subject(
        name,
        shape.vocab_size,
        bool(shape.n_mtp_layers),
        shape.max_position_embeddings,
        SMOKE,
        lambda options: PaddleEngine(shape, weights, options, Clock()),
    )
