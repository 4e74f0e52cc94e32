"""A rank may stop anywhere, in the middle of what it says too, and is named all the same."""

from __future__ import annotations

import sys
import threading
from contextlib import closing

import pytest

from baton_worker.engine.api import RankDiedError
from baton_worker.engine.backends import members
from baton_worker.engine.backends.members import Members

pytestmark = pytest.mark.e2e

PATIENCE_SECONDS = 60.0
HALF = """
import os, sys, time
pipe = int(sys.argv[1])
os.write(pipe, (1 << 20).to_bytes(4, "big") + bytes(1000))
os.read(pipe, 1)
"""


def test_half_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_HALF_SECONDS", 1)
    told: list[RankDiedError] = []

    def ask() -> None:
        try:
            ranks.receive(1, PATIENCE_SECONDS)
        except RankDiedError as error:
            told.append(error)

    with closing(Members((sys.executable, "-c", HALF), 2, lambda error: None)) as ranks:
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(PATIENCE_SECONDS)
        assert [str(error) for error in told] == [
            "tensor-parallel rank 1 went silent in the middle of a message"
        ]
