"""The API key option guards the API and leaves probes open; a bad key file stops the start."""

import socket

import httpx
import openai
import pytest

from baton_worker.config import ConfigError
from baton_worker.gateway.server.api_key import client_of, read_api_keys


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("first\n\n  second \n")
    return str(path)


@pytest.mark.parametrize("key", ["first", "second"])
def test_a_known_key_is_let_in(start_gateway, key_file, key):
    gateway = start_gateway(api_keys_file=key_file)
    with gateway.openai(api_key=key) as client:
        assert client.models.list().data[0].id == "tiny"


@pytest.mark.parametrize("key", ["ключ", "clé", "voilà", "密钥"])
def test_a_key_beyond_ascii_is_let_in_by_its_utf8_bytes(start_gateway, tmp_path, key):
    """The last byte of "à" is a space to those who take a header for Latin-1."""
    path = tmp_path / "keys"
    path.write_text(f"{key}\nother\n", encoding="utf-8-sig")
    gateway = start_gateway(api_keys_file=str(path))
    with gateway.http() as client:
        for given, status in ((key, 200), (f"{key}x", 401), (key[:-1], 401), ("other", 200)):
            bearer = {b"authorization": b"Bearer " + given.encode()}
            assert client.get("/v1/models", headers=bearer).status_code == status


@pytest.mark.parametrize("header", [None, "first", "Bearer third", "Bearer", "Basic first"])
def test_any_other_key_is_401_before_anything_else(start_gateway, key_file, header):
    gateway = start_gateway(api_keys_file=key_file)
    headers = {"authorization": header} if header else {}
    with gateway.http(headers=headers) as client:
        for answer in (
            client.post("/v1/completions", content=b"{"),
            client.post("/tokenize", json={"prompt": "x"}),
            client.get("/v1/models"),
        ):
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "Authorization: Bearer" in answer.json()["error"]["message"]
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/healthz", "/readyz", "/metrics"):
            assert client.get(path).status_code == 200


def test_a_missing_key_is_told_before_the_body_is_read(start_gateway, key_file):
    gateway = start_gateway(api_keys_file=key_file)
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as peer:
        peer.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\n{"
        )
        answer = b""
        while not answer.endswith(b"}}"):
            answer += peer.recv(65536)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert gateway.metric("baton_gateway_refusals_total", reason="invalid_api_key") == 1


def test_the_official_client_raises_its_authentication_error(start_gateway, key_file):
    gateway = start_gateway(api_keys_file=key_file)
    with gateway.openai(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_key_file_that_is_missing_or_empty_is_a_configuration_error(tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "comment").write_text("# of the evaluation team\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    for name in ("missing", "empty", "comment", "binary"):
        with pytest.raises(ConfigError, match=r"gateway\.api_keys_file"):
            read_api_keys(str(tmp_path / name))
    assert read_api_keys("") == ()


def test_a_comment_in_the_key_file_is_nobodys_key(tmp_path):
    (tmp_path / "keys").write_text("# of the evaluation team\nsk-one\n\n  # older\n sk-two \n")
    assert read_api_keys(str(tmp_path / "keys")) == ("sk-one", "sk-two")


def test_metrics_are_served_with_their_labels(start_gateway):
    gateway = start_gateway()
    with gateway.http() as client:
        client.post("/v1/completions", json={"prompt": "the fox"})
        text = client.get("/metrics").text
    assert 'baton_gateway_requests_total{endpoint="completion",model="tiny",outcome="ok"' in text
    assert 'baton_gateway_workers{model="tiny",role="gateway",worker_role="decode"} 1.0' in text
    assert httpx.Response(200, text=text).text.count("baton_gateway_loop_lag_seconds_count") == 1


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:aaaa::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:bbbb::9", "2001:db8:1:2::/64"),
    ],
)
def test_no_client_is_many_by_addresses_that_it_may_choose(address, client):
    assert client_of({"type": "http", "client": (address, 1)}) == client
