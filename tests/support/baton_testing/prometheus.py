"""A real Prometheus over our rules, and what dashboards ask of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from baton_mixin.preview import Series, page

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "baton"
RULES = sorted((CHART / "rules").glob("*.yaml"))
INTERVAL = "15s"
PATIENCE_SECONDS = 600.0
"""How long a value may take to be there on a busy machine: the scrape that tells it may fail."""


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        reply = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=PATIENCE_SECONDS)
        body = reply.json()
        assert body["status"] == "success", (parameters, body)
        return body["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        result = self.get("query", query=expression)["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def course(self, expression: str, legend: str, seconds: float) -> list[Series]:
        """Return the last seconds of an expression, one series per label set."""
        now = time.time()
        found = self.get(
            "query_range", query=expression, start=str(now - seconds), end=str(now), step="1"
        )["result"]
        return [
            Series(
                re.sub(r"\{\{(\w+)\}\}", lambda m, s=s: s["metric"].get(m[1], ""), legend),
                [(float(t), float(v)) for t, v in s["values"]],
            )
            for s in found
        ]

    def wait(self, expression: str, seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not self.query(expression):
            assert time.monotonic() < deadline, f"nothing for {expression} after {seconds} s"
            time.sleep(0.5)

    def values(self, expression: str, deadline_seconds: float) -> list[float]:
        """Return an expression's finite values once it has some; none when that time is over."""
        while True:
            found = [value for _, value in self.query(expression) if math.isfinite(value)]
            if found or time.monotonic() > deadline_seconds:
                return found
            time.sleep(0.5)


@dataclass(frozen=True)
class Job:
    """What is scraped as one job, in a namespace."""

    name: str
    namespace: str
    addresses: Sequence[str]

    def configuration(self) -> dict[str, Any]:
        labels = {"namespace": self.namespace}
        static = [{"targets": list(self.addresses), "labels": labels}]
        return {"job_name": self.name, "static_configs": static}


@contextlib.contextmanager
def run_prometheus(program: Path, folder: Path, port: int, job: Job) -> Iterator[Prometheus]:
    """Run a server that scrapes the job each second and evaluates the chart's rules."""
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in RULES],
        "scrape_configs": [job.configuration()],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    address = f"127.0.0.1:{port}"
    flags = [f"--config.file={folder / 'prometheus.yaml'}", f"--web.listen-address={address}"]
    flags += [f"--storage.tsdb.path={folder / 'data'}", "--log.level=error"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, *flags], stderr=log)
        server = Prometheus(f"http://{address}")
        try:
            wait_listening(server, process, folder / "log")
            yield server
        finally:
            process.terminate()
            process.wait(timeout=PATIENCE_SECONDS)


def wait_listening(server: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/-/ready", timeout=PATIENCE_SECONDS).status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"Prometheus does not listen: {log.read_text()}")


def targets(name: str) -> list[tuple[str, str, str, str]]:
    """Return (panel, legend, unit, expression) of every query, its variables filled in."""
    tree = json.loads((CHART / "dashboards" / name).read_text())
    return [
        (
            panel["title"],
            target["legendFormat"],
            panel["fieldConfig"]["defaults"]["unit"],
            filled(target["expr"]),
        )
        for panel in tree["panels"]
        for target in panel.get("targets", [])
    ]


def filled(expression: str) -> str:
    text = expression.replace("$__rate_interval", INTERVAL)
    return re.sub(r'=~"\$\w+"', '=~".*"', text)


def table_line(where: str, legend: str, found: list[float], unit: str) -> str:
    shown = ", ".join(f"{value:.4g}" for value in found[:4]) + (" …" if len(found) > 4 else "")
    return f"{where:<52} {legend:<24} {len(found):>3}  {shown} {unit}"


def empty_panels(server: Prometheus, name: str, table: list[str]) -> list[tuple[str, str]]:
    """Ask every query of a dashboard; note the values, return the queries that stay without any."""
    empty, deadline = [], time.monotonic() + PATIENCE_SECONDS
    table += ["", f"{name:<52} {'query':<24} series  values"]
    for title, legend, unit, expression in targets(name):
        found = server.values(expression, deadline)
        table.append(table_line(title, legend, found, unit))
        if not found:
            empty.append((title, expression))
    return empty


def draw(server: Prometheus, browser: Any, name: str, folder: Path, seconds: float) -> int:
    """Show a dashboard's last seconds in the browser; return how many panels it has.

    Panels without data are given time to get some. The picture is kept in the folder
    BATON_SCREENSHOTS, if that is set.
    """
    tree = json.loads((CHART / "dashboards" / name).read_text())
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        _show(server, browser, tree, folder, seconds)
        if not browser.find_elements("css selector", ".none") or time.monotonic() > deadline:
            break
        time.sleep(1.0)
    height = browser.execute_script("return document.documentElement.scrollHeight")
    size = {"width": 1216, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    kept = os.environ.get("BATON_SCREENSHOTS")
    if kept:
        browser.save_screenshot(str(Path(kept) / f"dashboard-{Path(name).stem}.png"))
    return len(tree["panels"])


def _show(server: Prometheus, browser: Any, tree: Any, folder: Path, seconds: float) -> None:
    series = {
        panel["id"]: [
            one
            for target in panel.get("targets", [])
            for one in server.course(filled(target["expr"]), target["legendFormat"], seconds)
        ]
        for panel in tree["panels"]
    }
    (folder / "page.html").write_text(page(tree, series))
    browser.get((folder / "page.html").as_uri())
