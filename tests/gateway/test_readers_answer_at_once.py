"""What comes with every step is answered in one turn of the loop, without waking a reader's task;
what such an answer cannot do, wakes it, and nothing is lost or out of order.
"""

import asyncio
import gc
import json
import socket
import weakref
from http.client import HTTPResponse

import pytest

from baton_testing.scripted_link import EOS
from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.output.client_queue import MAX_TAKEN, ClientQueue, Round
from baton_worker.gateway.output.sequence import Delta
from baton_worker.http_edge.direct_body import direct_body, offer_direct_body


def delta(text):
    return Delta(0, text, [1], [], [], [], [], None)


class Reader:
    """Takes all there is, at once as long as it `can`."""

    def __init__(self, queue):
        self.queue, self.can, self.at_once, self.woken = queue, True, [], []
        self.task = asyncio.ensure_future(self.read())

    async def read(self):
        while taken := await self.queue.take(self.answer):
            self.woken += [one.text for one in taken]

    def answer(self, deltas):
        if self.can:
            self.at_once += [one.text for one in deltas]
        return self.can


async def some_turns():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_all_queues_of_a_round_are_read_in_its_turn():
    shared = Round()
    queues = [ClientQueue(100, shared) for _ in range(3)]
    readers = [Reader(queue) for queue in queues]
    await some_turns()
    for text in "ab":
        for queue in queues:
            assert queue.put(delta(text))
    assert [reader.at_once for reader in readers] == [[], [], []]
    await asyncio.sleep(0)
    assert [reader.at_once for reader in readers] == [["a", "b"]] * 3
    for queue in queues:
        queue.close()
    await asyncio.gather(*(reader.task for reader in readers))
    assert [reader.woken for reader in readers] == [[], [], []]


async def test_what_cannot_be_answered_at_once_wakes_the_reader():
    queue = ClientQueue(1000)
    reader = Reader(queue)
    await some_turns()
    reader.can = False
    queue.put(delta("a"))
    await some_turns()
    reader.can = True
    queue.put(delta("b"))
    await some_turns()
    for _ in range(MAX_TAKEN + 1):
        queue.put(delta("c"))
    await some_turns()
    assert reader.at_once == ["b"]
    assert reader.woken == ["a", *"c" * (MAX_TAKEN + 1)]
    queue.close()
    await reader.task


async def test_the_end_finds_what_came_before_it_still_there():
    queue = ClientQueue(100)
    reader = Reader(queue)
    await some_turns()
    queue.put(delta("a"))
    queue.close()
    await reader.task
    assert reader.at_once + reader.woken == ["a"]


async def test_an_error_is_raised_behind_what_came_before_it():
    queue = ClientQueue(100)
    reader = Reader(queue)
    await some_turns()
    queue.put(delta("a"))
    queue.fail(ApiError(500, "broken"))
    with pytest.raises(ApiError, match="broken"):
        await reader.task
    assert reader.at_once + reader.woken == ["a"]


async def test_an_answer_that_breaks_breaks_its_reader_alone():
    shared = Round()
    queues = [ClientQueue(100, shared) for _ in range(2)]

    def breaks(deltas):
        raise ValueError("no JSON")

    broken = asyncio.ensure_future(queues[0].take(breaks))
    other = Reader(queues[1])
    await some_turns()
    for queue in queues:
        queue.put(delta("a"))
    with pytest.raises(ValueError, match="no JSON"):
        await broken
    assert other.at_once == ["a"]
    queues[1].close()
    await other.task


@pytest.mark.parametrize(
    "error", [StopIteration(7), StopAsyncIteration(), GeneratorExit(), asyncio.CancelledError()]
)
async def test_an_error_that_no_future_takes_breaks_its_reader_alone_too(error):
    """A future refuses a StopIteration: raised here, it would end the turn of all streams."""
    shared = Round()
    queues = [ClientQueue(100, shared) for _ in range(3)]

    def breaks(deltas):
        raise error

    broken = asyncio.ensure_future(queues[1].take(breaks))
    others = [Reader(queue) for queue in (queues[0], queues[2])]
    await some_turns()
    for text in "ab":
        for queue in queues:
            queue.put(delta(text))
        await some_turns()
    assert [other.at_once for other in others] == [["a", "b"]] * 2
    assert broken.done()
    assert not broken.cancelled(), "nobody cancelled the reader"
    told = broken.exception()
    assert told is error or (isinstance(told, RuntimeError) and told.__cause__ is error)
    for queue in (queues[0], queues[2]):
        queue.close()
    await asyncio.gather(*(other.task for other in others))


async def test_what_ends_the_process_within_a_turn_takes_no_other_stream_out_of_it():
    shared = Round()
    queues = [ClientQueue(100, shared) for _ in range(4)]

    def ends(deltas):
        raise SystemExit(1)

    ending = asyncio.ensure_future(queues[1].take(ends))
    others = [Reader(queue) for queue in (queues[0], *queues[2:])]
    await some_turns()
    for queue in queues:
        queue.put(delta("a"))
    with pytest.raises(SystemExit):
        shared._go()
    await some_turns()
    assert [other.at_once for other in others] == [["a"]] * 3
    ending.cancel()
    for queue in (queues[0], *queues[2:]):
        queue.close()
    await asyncio.gather(*(other.task for other in others))


async def test_an_answer_that_broke_is_forgotten_without_the_collector():
    """Which comes rarely. Its traceback knows the stream, so nothing may know the error."""

    class Broken(Exception):
        pass

    def breaks(deltas):
        raise Broken

    queue = ClientQueue(100)
    taking = asyncio.ensure_future(queue.take(breaks))
    await some_turns()
    gc.disable()
    try:
        queue.put(delta("a"))
        await asyncio.wait([taking])
        error = weakref.ref(taking.exception())
        del taking
        await some_turns()
        assert error() is None
    finally:
        gc.enable()


async def test_a_reader_that_was_cancelled_is_not_read_for():
    queue = ClientQueue(100)
    reader = Reader(queue)
    await some_turns()
    queue.put(delta("a"))
    reader.task.cancel()
    await asyncio.wait([reader.task])
    await some_turns()
    assert reader.at_once == reader.woken == []


# Where a piece is written to its connection.


class Cycle:
    """What uvicorn knows of an answer under way."""

    def __init__(self):
        self.written = []
        self.scope, self.flow, self.transport = {"type": "http"}, self, self
        self.response_started = self.chunked_encoding = True
        self.response_complete = self.disconnected = self.write_paused = False

    def write(self, data):
        self.written.append(data)


def test_a_piece_is_a_chunk():
    cycle = Cycle()
    offer_direct_body(cycle)
    body = direct_body(cycle.scope)
    assert body.is_open
    body.write(b"x" * 26)
    assert cycle.written == [b"1a\r\n" + b"x" * 26 + b"\r\n"]
    assert direct_body({"type": "http"}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_started", False),
        ("chunked_encoding", None),
        ("chunked_encoding", False),
        ("response_complete", True),
        ("disconnected", True),
        ("write_paused", True),
    ],
)
def test_nothing_is_written_before_in_place_of_or_behind_what_goes_the_usual_way(name, value):
    cycle = Cycle()
    offer_direct_body(cycle)
    setattr(cycle, name, value)
    assert not direct_body(cycle.scope).is_open


def test_an_answer_that_is_over_is_forgotten_at_once():
    class Over:
        def __init__(self):
            self.scope, self.flow, self.transport = {}, None, Cycle()

    gc.disable()
    try:
        cycle = Over()
        offer_direct_body(cycle)
        body, known = direct_body(cycle.scope), weakref.ref(cycle)
        del cycle
        assert known() is None
        assert not body.is_open
    finally:
        gc.enable()


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_streams_of_either_version_are_whole(start_gateway, version):
    gateway = start_gateway(lambda submit: [70 + i % 25 for i in range(200)] + [EOS])
    wanted = {"model": "tiny", "prompt": [70], "stream": True, "max_tokens": 300, "logprobs": 20}
    body = json.dumps(wanted).encode()
    head = b"POST /v1/completions %b\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head % (version, len(body)) + body)
        answer = HTTPResponse(connection)
        answer.begin()
        events = answer.read().split(b"\n\n")
        answer.close()
    assert events[-2:] == [b"data: [DONE]", b""]
    told = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    tokens = [token for one in told for token in one["choices"][0]["logprobs"]["tokens"]]
    assert len(tokens) == 201
    assert "".join(one["choices"][0]["text"] for one in told) == "".join(tokens[:-1])
