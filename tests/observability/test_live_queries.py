"""Every query of every panel and rule returns data from a real deployment, by a real Prometheus.

The deployment works under a steady load while Prometheus scrapes it each second. What was read is
printed as a table at the end. The operator's dashboard is asked in test_operator_live.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from baton_testing.prometheus import (
    RULES,
    Job,
    draw,
    empty_panels,
    run_prometheus,
    table_line,
)

pytestmark = pytest.mark.e2e

WORKLOAD = ("serving.json", "mtp-logprobs.json")
LOAD_THREADS = 3
TOO_SLOW = "context deadline exceeded"
"""What a scrape says that was not answered within the second between two."""


@pytest.fixture(scope="module")
def prometheus(
    local: Any, prometheus_program: Path, tmp_path_factory: Any, pick_port: Any
) -> Iterator[Any]:
    addresses = [re.sub(r"^http://|/metrics$", "", url) for url in local.metrics_urls.values()]
    job = Job("local/tiny-mtp", "local", addresses)
    folder = tmp_path_factory.mktemp("prometheus")
    with run_prometheus(prometheus_program, folder, pick_port(), job) as server:
        yield server


def one_request(url: str, number: int, patience: float) -> None:
    """Ask for a short answer; alternatives, temperature and endpoint vary with the number."""
    body: dict[str, Any] = {"model": "tiny-mtp", "max_tokens": 24, "seed": number, "stream": True}
    body["temperature"] = (0.0, 0.7)[number % 2]
    if number % 4:
        path, extra = "chat/completions", {"logprobs": True, "top_logprobs": (0, 5, 20)[number % 3]}
        body |= extra | {"messages": [{"role": "user", "content": "Who may copy this?"}]}
    else:
        path = "completions"
        body |= {"prompt": "You may copy", "logprobs": 3}
    reply = httpx.post(f"{url}/v1/{path}", json=body, timeout=patience)
    assert reply.status_code == 200, reply.text
    assert reply.text.endswith("data: [DONE]\n\n")


@pytest.fixture(scope="module")
def loaded(local: Any, prometheus: Any, patience: float) -> Iterator[Any]:
    """Prometheus with a rate interval's worth of samples, the load still going on."""
    done = threading.Event()

    def work(first: int) -> int:
        for answered in itertools.count():
            if done.is_set():
                return answered
            one_request(local.url, first + answered * LOAD_THREADS, patience)
        raise AssertionError("counting has no end")

    with ThreadPoolExecutor(LOAD_THREADS) as pool:
        futures = [pool.submit(work, i) for i in range(LOAD_THREADS)]
        try:
            # Counted from the beginning: a busy machine may scrape seldom for as long as it likes.
            prometheus.wait("min(count_over_time(up[1h])) >= 12")
            prometheus.wait("job:baton_draft_acceptance:ratio_rate10m")
            yield prometheus
        finally:
            done.set()
        assert sum(future.result() for future in futures) > LOAD_THREADS


@pytest.mark.parametrize("name", WORKLOAD)
def test_every_panel_has_data(loaded: Any, table: list[str], name: str) -> None:
    assert empty_panels(loaded, name, table) == []


def test_every_recording_has_data(loaded: Any, table: list[str], patience: float) -> None:
    empty, deadline = [], time.monotonic() + patience
    table += ["", f"{'recording rules':<77} series  values"]
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                if "record" in rule:
                    found = loaded.values(rule["record"], deadline)
                    table.append(table_line(rule["record"], "", found, ""))
                    empty += [] if found else [rule["record"]]
    assert not empty


def test_every_alert_reads_series_that_exist(
    loaded: Any, table: list[str], patience: float
) -> None:
    deadline = time.monotonic() + patience
    groups = loaded.get("rules", type="alert")["groups"]
    table += ["", f"{'alerts':<52} state"]
    missing = []
    for rule in [rule for group in groups for rule in group["rules"]]:
        assert rule["health"] == "ok", rule
        table.append(f"{rule['name']:<52} {rule['state']}")
        selectors = re.findall(r"(?:\w+:)?baton_\w+(?::\w+)?(?:\{[^}]*\})?", rule["query"])
        # An operator's are asked of one at work, in test_operator_live.
        selectors = [s for s in selectors if not s.startswith("baton_operator_")]
        missing += [(rule["name"], s) for s in selectors if not loaded.values(s, deadline)]
    assert not missing


def test_a_healthy_deployment_fires_nothing(loaded: Any) -> None:
    firing = loaded.query('ALERTS{alertstate="firing",alertname!~"BatonOperator.*"}')
    assert firing == []


def test_scrapes_hold_no_duplicate_and_no_error(loaded: Any, patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        targets = loaded.get("targets")["activeTargets"]
        said = {target["scrapeUrl"]: (target["health"], target["lastError"]) for target in targets}
        if not any(TOO_SLOW in error for _, error in said.values()):
            break
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
    assert list(said.values()) == [("up", "")] * 3, said


@pytest.mark.parametrize("name", WORKLOAD)
def test_a_picture_of_each_dashboard_has_no_empty_panel(
    loaded: Any, browser: Any, tmp_path: Path, name: str
) -> None:
    n_panels = draw(loaded, browser, name, tmp_path, 20)
    assert browser.find_elements("css selector", ".none") == []
    assert len(browser.find_elements("css selector", "section")) == n_panels
