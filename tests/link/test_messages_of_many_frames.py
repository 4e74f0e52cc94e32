"""A message of more frames than anybody has to say costs its sender the connection, and no one
else their time: it is never made a list of, and other work goes on while it is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.link.api import GatewayUp, RowsRefused, WorkerDown
from baton_worker.link.multipart import Multipart

MOST = 4


@pytest.fixture(scope="module")
def pipe() -> Iterator[tuple[zmq.Socket, zmq.Socket]]:
    context = zmq.Context()
    with context.socket(zmq.PAIR) as theirs, context.socket(zmq.PAIR) as ours:
        ours.bind("inproc://pipe")
        theirs.connect("inproc://pipe")
        yield theirs, ours
    context.term()


def taken(messages: Multipart) -> list[list[bytes]]:
    """Return all that is given out, the pauses left out."""
    given_out = []
    while True:
        try:
            frames = messages.take()
        except zmq.Again:
            return given_out
        if frames:
            given_out.append([frame.bytes for frame in frames])


@given(st.lists(st.integers(1, 300), max_size=8))
def test_short_ones_are_given_out_whole_and_long_ones_begun_in_order(
    pipe: tuple[zmq.Socket, zmq.Socket], sizes: list[int]
) -> None:
    theirs, ours = pipe
    sent = [[b"%d.%d" % (number, n) for n in range(size)] for number, size in enumerate(sizes)]
    for message in sent:
        theirs.send_multipart(message)
    assert taken(Multipart(ours, MOST)) == [message[: MOST + 1] for message in sent]


def test_other_work_goes_on_while_a_long_one_is_thrown_away(
    pipe: tuple[zmq.Socket, zmq.Socket],
) -> None:
    theirs, ours = pipe
    messages = Multipart(ours, MOST)
    theirs.send_multipart([b""] * 10_000)
    assert len(messages.take()) == MOST + 1
    n_pauses = 0
    while ours.poll(0):
        assert messages.take() == []
        n_pauses += 1
    assert n_pauses > 100


def test_who_sends_one_to_a_gateway_is_hung_up_on_and_its_neighbour_is_heard(
    start_gateway, start_worker, columns, read_metric
) -> None:
    gateway = start_gateway()
    worker = start_worker(gateway.link.endpoint)
    worker.log.wait_for(GatewayUp)
    context = zmq.Context()
    with context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        monitoring = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.connect(gateway.link.endpoint)
        stranger.send_multipart([b""] * 100_000)
        assert monitoring.poll(60_000), "the connection was not ended"
        stranger.disable_monitor()
        monitoring.close(linger=0)
    context.term()
    worker.link.publish(77, columns(77, [4242]), 1)
    gateway.log.wait(lambda log: 4242 in gateway.rows())
    assert worker.log.of(RowsRefused) == gateway.log.of(WorkerDown) == []
    name = "baton_link_malformed_messages_total"
    assert read_metric(gateway.factory, name, reason="frames") == 1
