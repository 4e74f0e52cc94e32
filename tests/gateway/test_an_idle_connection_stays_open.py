"""A kept-alive connection outlives the client's own limit, so that no request meets its end."""

import http.client
import select

import pytest

CLIENTS_KEEP_SECONDS = 6
"""A second longer than httpx, and so the openai client, keeps an idle connection."""


@pytest.mark.slow
def test_the_server_does_not_end_an_idle_connection_before_its_client(start_gateway):
    host, port = start_gateway().url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("GET", "/healthz")
    assert connection.getresponse().read()
    ended, _, _ = select.select([connection.sock], [], [], CLIENTS_KEEP_SECONDS)
    assert ended == [], "the server closed a connection that its client still held for usable"
    connection.request("GET", "/healthz")
    response = connection.getresponse()
    assert response.status == 200
    assert response.read(), "an unread response keeps the socket open behind `close`"
    connection.close()
