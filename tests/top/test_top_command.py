"""`baton-worker top`: addresses as people type them, endpoints that are down, one table."""

import http.server
import io
import threading

import pytest
from rich.console import Console

from baton_worker.config import ConfigError
from baton_worker.main import main
from baton_worker.top.command import TopOptions, metrics_url, run_top
from baton_worker.top.view import table

PAGE = (
    b'baton_tokens_total{model="m",role="decode"} %d\n'
    b'baton_engine_kv_blocks_used{model="m",role="decode"} 99\n'
    b'baton_engine_kv_blocks{model="m",role="decode"} 100\n'
)


@pytest.fixture
def endpoint():
    """A process whose counter grows by 10 with each reading."""
    readings = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            readings.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE % (10 * len(readings)))

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()
    assert set(readings) <= {"/metrics"}


def shown(*urls, width=180):
    console = Console(file=io.StringIO(), width=width)
    code = run_top(TopOptions(urls, 0.1, is_once=True), console)
    return code, console.file.getvalue()


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/metrics"),
        ("http://pod:9/", "http://pod:9/metrics"),
        ("https://pod/stats/metrics", "https://pod/stats/metrics"),
    ],
)
def test_host_and_port_are_enough(given, url):
    assert metrics_url(given) == url


@pytest.mark.parametrize("given", ["file:///etc/passwd", "ftp://pod/metrics", "http://"])
def test_other_addresses_are_refused(given):
    with pytest.raises(ConfigError, match="is no HTTP address"):
        metrics_url(given)


def test_a_table_shows_what_changed(endpoint):
    code, text = shown(endpoint)
    assert code == 0
    row = next(line for line in text.splitlines() if endpoint in line)
    assert "decode" in row
    assert "99.0 %" in row
    tokens = float(row.split("│")[3].replace(",", ""))
    assert 0 < tokens <= 100


def test_an_endpoint_that_is_down_does_not_hide_the_others(endpoint):
    code, text = shown(endpoint, "127.0.0.1:1")
    assert code == 0
    assert "Connection refused" in text
    assert "decode" in text


def test_nothing_readable_is_a_failure():
    code, text = shown("127.0.0.1:1")
    assert code == 1
    assert "Connection refused" in text


def test_a_wrong_interval_is_named(capsys):
    assert main(["top", "127.0.0.1:1", "--interval", "0"]) == 78
    assert "--interval is 0" in capsys.readouterr().err


def test_a_narrow_screen_keeps_whole_columns_and_names_those_it_leaves_out(endpoint):
    code, text = shown(endpoint, width=80)
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert endpoint in text
    for title in ("tokens/s", "accepted", "running", "waiting", "KV", "peers"):
        assert title in text
    assert "for a wider screen: of step, oldest, prompt/s" in " ".join(text.split())


@pytest.mark.parametrize("address", ["[fd00::1]:8080", "[::1]:8000", "[bold]:1"])
def test_an_address_in_brackets_is_shown_and_no_markup(address):
    console = Console(file=io.StringIO(), width=180)
    console.print(table({address: "connection refused"}, 1.0))
    assert address in console.file.getvalue()


def test_a_process_cannot_command_the_terminal():
    console = Console(file=io.StringIO(), width=180, force_terminal=False)
    console.print(table({"a:1": "\x1b[2Jgone\n[red]forged[/]"}, 1.0))
    shown_text = console.file.getvalue()
    assert "\x1b" not in shown_text
    assert r"\x1b[2Jgone\n[red]forged[/]" in shown_text
