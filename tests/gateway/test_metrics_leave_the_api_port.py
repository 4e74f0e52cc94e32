"""A gateway with a health port tells clients of the API nothing about workers and requests."""

import socket

import httpx
import pytest

from baton_worker.config import ConfigError, HttpConfig
from baton_worker.gateway.server.server import listen

INNER = ("/readyz", "/metrics")


def test_without_one_they_are_beside_the_api(start_gateway):
    gateway = start_gateway()
    assert gateway.health_url == gateway.url
    for path in ("/healthz", *INNER):
        assert httpx.get(gateway.url + path).status_code == 200


def test_with_one_they_are_there_alone(start_gateway):
    gateway = start_gateway(health=HttpConfig())
    for path in INNER:
        assert httpx.get(gateway.url + path).status_code == 404
        assert httpx.get(gateway.health_url + path).status_code == 200
    assert "baton_gateway_requests_total" in httpx.get(gateway.health_url + "/metrics").text
    for url in (gateway.url, gateway.health_url):
        assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/tokenize"])
def test_the_health_port_serves_no_request(start_gateway, path):
    gateway = start_gateway(health=HttpConfig())
    assert httpx.get(gateway.health_url + path).status_code == 404
    assert httpx.post(gateway.health_url + path, json={}).status_code == 404


def test_a_health_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = HttpConfig(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"gateway\.health: cannot listen on 127"):
            listen(address, "gateway.health")
