"""What `http_edge` knows of uvicorn's inside is there and means what we take it to mean.

It is no promise of uvicorn's, so pyproject.toml bounds the version; who moves a bound runs
all of `tests/http_edge` with it.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import weakref
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from baton_worker.http_edge import direct_body, protocol, unchunked
from baton_worker.http_edge.direct_body import DirectBody
from baton_worker.http_edge.protocol import BoundedProtocol

ROOT = Path(__file__).resolve().parents[2]
OF_CYCLE = {
    "chunked_encoding",
    "disconnected",
    "expected_content_length",
    "flow",
    "keep_alive",
    "message_event",
    "response_complete",
    "response_started",
    "scope",
    "transport",
}
OF_PROTOCOL = {
    "client",
    "cycle",
    "expect_100_continue",
    "flow",
    "headers",
    "logger",
    "loop",
    "parser",
    "pipeline",
    "timeout_keep_alive_handler",
    "timeout_keep_alive_task",
    "transport",
    "url",
    "_unset_keepalive_if_required",
}
OVERRIDDEN = {
    "_start_asgi_task": ["cycle", "app"],
    "connection_lost": ["exc"],
    "connection_made": ["transport"],
    "data_received": ["data"],
    "on_body": ["body"],
    "on_header": ["name", "value"],
    "on_headers_complete": [],
    "on_message_begin": [],
    "on_message_complete": [],
    "on_response_complete": [],
    "on_url": ["url"],
}
"""Methods of uvicorn's that are ours, with what they are called with."""

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Connection:
    """uvicorn's own protocol over a transport that keeps what is written, serving `app`."""

    def __init__(self, app):
        config = uvicorn.Config(app, http="httptools", lifespan="off", log_config=None)
        self.written = []
        self.transport = Mock()
        self.transport.write.side_effect = self.written.append
        self.transport.is_closing.return_value = False
        self.transport.get_extra_info.return_value = None
        self.protocol = HttpToolsProtocol(config, ServerState(), {})
        self.protocol.connection_made(self.transport)

    async def get(self):
        """Send a request and let its application run as far as it goes; return its cycle."""
        self.protocol.data_received(GET)
        await turns()
        return self.protocol.cycle


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


def steps(*messages):
    """Return an application that sends a message each time that it is told to, and its teller."""
    told = asyncio.Queue()

    async def app(scope, receive, send):
        for message in messages:
            await told.get()
            await send(message)

    return app, lambda: told.put_nowait(None)


START = {"type": "http.response.start", "status": 200, "headers": []}
PIECE = {"type": "http.response.body", "body": b"x" * 26, "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}


def used(module, is_owner):
    """Return the attributes that a module's code uses of what `is_owner` says is theirs."""
    tree = ast.parse(inspect.getsource(module))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in nodes if is_owner(ast.unparse(node.value))}


def test_these_are_all_that_is_used():
    cycles = ("cycle", "running", "self._running", "self.cycle")
    modules = (direct_body, protocol, unchunked)
    found = set().union(*(used(module, lambda text: text in cycles) for module in modules))
    assert found == OF_CYCLE
    ours = set(vars(BoundedProtocol)) | {"gate"}
    ours |= {name for name in used(protocol, lambda text: text == "self") if is_made_by_us(name)}
    assert used(protocol, lambda text: text == "self") - ours == OF_PROTOCOL
    called = used(protocol, lambda text: text == "super()")
    assert called - {"__init__"} == set(OVERRIDDEN) - {"data_received"}


def is_made_by_us(name):
    return re.search(
        rf"self\.{name}\b(: [^=]+)? = ", inspect.getsource(BoundedProtocol.__init__)
    ) and (name != "logger")


async def test_a_cycle_and_its_protocol_have_them():
    app, go_on = steps(START)
    connection = Connection(app)
    cycle = await connection.get()
    assert {name for name in OF_CYCLE if not hasattr(cycle, name)} == set()
    assert {name for name in OF_PROTOCOL if not hasattr(connection.protocol, name)} == set()
    assert weakref.ref(cycle)() is cycle
    assert cycle.scope["http_version"] == "1.1"
    assert cycle.flow is connection.protocol.flow
    assert not cycle.flow.write_paused
    assert not cycle.flow.read_paused
    connection.protocol.connection_lost(None)
    go_on()
    await turns()


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_what_we_override_is_called_as_we_override_it(name):
    for kind in (HttpToolsProtocol, BoundedProtocol):
        parameters = list(inspect.signature(getattr(kind, name)).parameters)
        assert parameters[1:] == OVERRIDDEN[name], kind


async def test_an_answers_marks_are_set_when_we_take_them_to_be():
    app, go_on = steps(START, PIECE, END)
    connection = Connection(app)
    cycle = await connection.get()

    def marks():
        return cycle.response_started, bool(cycle.chunked_encoding), cycle.response_complete

    assert marks() == (False, False, False)
    go_on()
    await turns()
    assert marks() == (True, True, False)
    body = DirectBody(cycle)
    assert body.is_open
    go_on()
    await turns()
    by_uvicorn = connection.written[-1]
    body.write(PIECE["body"])
    assert connection.written[-1] == by_uvicorn, "a piece as uvicorn's own `send` writes it"
    go_on()
    await turns()
    assert marks() == (True, True, True)
    assert not body.is_open
    connection.protocol.timeout_keep_alive_task.cancel()


async def test_a_client_that_went_is_marked_and_wakes_who_waits_for_it():
    app, go_on = steps(START)
    connection = Connection(app)
    cycle = await connection.get()
    cycle.message_event.clear()  # it told of the request's end
    connection.protocol.connection_lost(ConnectionResetError())
    assert cycle.disconnected
    assert cycle.message_event.is_set()
    go_on()
    await turns()


def test_the_bound_is_above_what_is_tested_and_below_the_next():
    text = (ROOT / "worker" / "pyproject.toml").read_text()
    (low, high) = re.search(r'"uvicorn>=0\.(\d+),<0\.(\d+)"', text).groups()
    tested = int(version("uvicorn").split(".")[1])
    assert int(low) <= tested == int(high) - 1
