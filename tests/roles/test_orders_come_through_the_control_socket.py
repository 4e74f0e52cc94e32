"""Only this machine's owner of the worker gives it orders: no port, no browser, no other user."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton_testing.plain_http import NO_AUTHORITIES
from baton_worker.config import ConfigError, ControlConfig, HttpConfig
from baton_worker.control import run_control
from baton_worker.http_edge.metrics import HttpMetrics
from baton_worker.metrics import MetricFactory
from baton_worker.roles.control import MAX_PATH_BYTES, ControlServer, Orders
from baton_worker.roles.health import HealthServer, HealthSources

JSON = {"content-type": "application/json"}
REGISTRY = CollectorRegistry()
HTTP = HttpMetrics(MetricFactory(REGISTRY, "tiny", "test"))


class Worker:
    """What orders change, behind both servers: as in a worker, at its next turn and not before."""

    def __init__(self, folder: Path) -> None:
        self.given: list[object] = []
        self.is_draining = False
        self.draft_count = 2
        self.sources = HealthSources(
            engine_silence_seconds=lambda: 0.0,
            linked_gateways=lambda: 1,
            is_linked=lambda: True,
            open_requests=lambda: 3,
            is_draining=lambda: self.is_draining,
            num_speculative_tokens=lambda: self.draft_count,
            max_speculative_tokens=5,
        )
        self.orders = Orders(self._drain, self.given.append)
        self.path = str(folder / "control")
        self.control = ControlServer(ControlConfig(self.path), HTTP)
        self.health = HealthServer(HttpConfig(), REGISTRY, HTTP)
        self.control.start(self.sources, self.orders)
        self.health.start(self.sources)

    def _drain(self, is_wanted: bool) -> None:
        self.given.append("drain" if is_wanted else "undrain")

    def turn(self) -> None:
        for order in self.given:
            if isinstance(order, int):
                self.draft_count = order
            else:
                self.is_draining = order == "drain"

    def ask(self, method: str, path: str, **request: object) -> httpx.Response:
        transport = httpx.HTTPTransport(uds=self.path, verify=NO_AUTHORITIES)
        with httpx.Client(transport=transport) as client:
            return client.request(method, f"http://localhost{path}", **request)  # type: ignore[arg-type]

    def close(self) -> None:
        self.control.close()
        self.health.close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/drain", "/speculative"])
def test_the_port_of_probes_takes_no_order_from_anybody(
    worker: Worker, method: str, path: str
) -> None:
    body = b'{"num_speculative_tokens": 3}'
    for headers in ({}, JSON, {"content-type": "text/plain"}):
        reply = httpx.request(
            method, worker.health.url + path, verify=NO_AUTHORITIES, content=body, headers=headers
        )
        assert reply.status_code == 405
        assert "control.socket" in reply.json()["error"]
    assert worker.given == []


def test_what_the_port_of_probes_tells_is_the_same_as_ever(worker: Worker) -> None:
    url = worker.health.url
    assert httpx.get(f"{url}/drain").json() == {"draining": False, "remaining": 3}
    assert httpx.get(f"{url}/speculative").json()["max_speculative_tokens"] == 5
    assert httpx.get(f"{url}/readyz").json()["ready"] is True


def test_a_drain_can_be_taken_back(worker: Worker) -> None:
    assert worker.ask("POST", "/drain").json() == {"draining": True, "remaining": 3}
    worker.turn()
    assert httpx.get(f"{worker.health.url}/readyz").status_code == 503
    assert worker.ask("GET", "/drain").json()["draining"] is True
    assert worker.ask("DELETE", "/drain").json()["draining"] is False
    worker.turn()
    assert httpx.get(f"{worker.health.url}/readyz").status_code == 200
    assert worker.given == ["drain", "undrain"]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "same-origin"},
        {"referer": "http://evil.example/"},
        {"host": "rebound.example"},
        {"host": "rebound.example:8080"},
        {"host": "localhost.evil.example"},
    ],
)
def test_a_page_in_a_browser_gives_no_order_even_through_a_bridge(
    worker: Worker, headers: dict[str, str]
) -> None:
    for path in ("/drain", "/speculative"):
        reply = worker.ask("POST", path, content=b"{}", headers={**JSON, **headers})
        assert reply.status_code == 403
    assert worker.given == []


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1:9", "[::1]", "[::1]:80"])
def test_names_of_this_machine_are_taken(worker: Worker, host: str) -> None:
    assert worker.ask("POST", "/drain", headers={"host": host}).status_code == 202


def test_a_draft_count_as_text_is_no_order(worker: Worker) -> None:
    body = b'{"num_speculative_tokens": 3}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"content-type": kind}
        assert worker.ask("POST", "/speculative", content=body, headers=headers).status_code == 415
    headers = {"content-type": "application/json; charset=utf-8"}
    assert worker.ask("POST", "/speculative", content=body, headers=headers).status_code == 202
    assert worker.given == [3]


def test_the_socket_is_this_users_alone_and_goes_with_the_worker(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    mode = Path(worker.path).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    worker.close()
    assert not Path(worker.path).exists()


def test_a_dead_workers_socket_is_replaced_and_a_living_ones_is_not(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "control"))
    worker = Worker(tmp_path)
    with pytest.raises(ConfigError, match=r"control\.socket: .*Address already.* \(`ss -lxp`"):
        ControlServer(ControlConfig(worker.path), HTTP)
    assert worker.ask("GET", "/drain").status_code == 200
    worker.close()


def test_a_path_that_cannot_be_a_socket_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"control\.socket: .* longer than 107 bytes"):
        ControlServer(ControlConfig("/" + "x" * MAX_PATH_BYTES), HTTP)
    with pytest.raises(ConfigError, match=r"control\.socket: .*No such file.*; make its folder"):
        ControlServer(ControlConfig(str(tmp_path / "no" / "folder")), HTTP)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=r"control\.socket: cannot listen on .* is no socket"):
        ControlServer(ControlConfig(str(tmp_path / "file")), HTTP)
    assert (tmp_path / "file").read_text() == "kept"


def test_without_a_socket_nobody_gives_orders() -> None:
    server = ControlServer(ControlConfig(), HTTP)
    server.close()
    assert server.path == ""


def test_the_command_gives_each_order(
    worker: Worker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for order, is_draining in (("drain", "true"), ("status", "true"), ("undrain", "false")):
        assert run_control(worker.path, order, None) == 0
        told = f'{{"draining":{is_draining},"remaining":3}}\n'
        assert capsys.readouterr().out == told, "an order is answered by what it asks for"
        worker.turn()
    assert run_control(worker.path, "speculative", 4) == 0
    assert '"num_speculative_tokens":4' in capsys.readouterr().out
    assert worker.ask("GET", "/speculative").json()["num_speculative_tokens"] == 2
    worker.turn()
    assert worker.ask("GET", "/speculative").json()["num_speculative_tokens"] == 4
    assert worker.given == ["drain", "undrain", 4]
    assert run_control(worker.path, "speculative", 6) == 1
    assert "allows 0..5" in capsys.readouterr().err
    for order, number in (("speculative", None), ("drain", 1)):
        with pytest.raises(ConfigError, match="takes a number"):
            run_control(worker.path, order, number)
    with pytest.raises(ConfigError, match="no worker takes orders there"):
        run_control(str(tmp_path / "nobody"), "drain", None)
