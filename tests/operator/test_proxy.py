"""The proxy of the API server's connections: looked up once, as the environment says."""

from __future__ import annotations

import pytest

from baton_operator.cluster.kube import environment_proxy

SERVER = "https://api.example:6443"


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in ("https_proxy", "http_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_without_the_variables_there_is_none():
    assert environment_proxy(SERVER) is None


def test_the_scheme_chooses(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    assert environment_proxy(SERVER) == "http://proxy.example:3128"
    assert environment_proxy("http://api.example:8080") is None


def test_exceptions_are_kept(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "10.96.0.1,.example")
    assert environment_proxy(SERVER) is None
    assert environment_proxy("https://10.96.0.1:443") is None
    assert environment_proxy("https://elsewhere.test") is not None
