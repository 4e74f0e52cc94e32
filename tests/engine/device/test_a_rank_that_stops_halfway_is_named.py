"""A rank may stop anywhere, in the middle of what it says too, and is named all the same."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from typing import cast

import pytest

from baton_worker.engine.api import DeviceError, RankDiedError
from baton_worker.engine.backends import members
from baton_worker.engine.backends.device import orders
from baton_worker.engine.backends.device.follower import Answering, Follower
from baton_worker.engine.backends.members import Members
from baton_worker.engine.backends.ranked import follower

pytestmark = pytest.mark.e2e

PATIENCE_SECONDS = 600.0
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


@pytest.mark.parametrize(
    ("program", "most_seconds", "told"),
    [
        ("pass", 600, "tensor-parallel rank 1 .* ended with code 0"),
        ("import time; time.sleep(3600)", 1, "rank 1 went silent in the middle of a message"),
    ],
    ids=["gone", "silent"],
)
def test_a_descriptor_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch, program: str, most_seconds: int, told: str
) -> None:
    """Behind the message that announces it."""
    monkeypatch.setattr(members, "_HALF_SECONDS", most_seconds)
    with (
        closing(Members((sys.executable, "-c", program), 2, lambda error: None)) as ranks,
        pytest.raises(RankDiedError, match=told),
    ):
        ranks.receive_descriptor(1)


@pytest.mark.parametrize(
    "say",
    [lambda ranks: ranks.send(1, bytes(1 << 16)), lambda ranks: ranks.send_descriptor(1, 0)],
    ids=["a message", "a descriptor"],
)
def test_a_rank_that_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, say: Callable[[Members], None]
) -> None:
    """It stands still, and its pipe is full."""
    monkeypatch.setattr(members, "_SEND_SECONDS", 1)
    monkeypatch.setattr(members, "_END_SECONDS", 0.1)
    program = "import time; time.sleep(3600)"
    told = "rank 1 has taken nothing for 1 s"
    with closing(Members((sys.executable, "-c", program), 2, lambda error: None)) as ranks:
        with (
            contextlib.suppress(BlockingIOError),
            socket.fromfd(ranks.pipe(1).fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as way,
        ):
            while True:
                way.send(bytes(1 << 16), socket.MSG_DONTWAIT)
        with pytest.raises(RankDiedError, match=told):
            say(ranks)


def test_why_a_rank_cannot_finish_what_is_waited_for_is_told() -> None:
    """An answer is waited for behind its order: a device may fail in between."""

    class Failing:
        def obey(self, order: orders.Order) -> Answering:
            return self.fail

        def fail(self) -> orders.Answer:
            raise DeviceError("an illegal memory access was encountered")

    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    ours.send_bytes(orders.encode(orders.Measure()))
    assert follower._serve(theirs, cast("Follower", Failing())) == 1
    answer = orders.decode_answer(ours.recv_bytes())
    assert answer == orders.Failed("an illegal memory access was encountered")
