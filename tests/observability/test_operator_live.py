"""Every query of the operator's dashboard returns data from a real operator at work.

The operator runs on a real API server with the chart's rights, pods are kwok's, and PDDeployments
come, roll out and go while a real Prometheus scrapes it each second. Needs the programs that `make
integration` builds; without them these tests are skipped and say so.
"""

from __future__ import annotations

import itertools
import re
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton_cluster.control_plane import ControlPlane, Layout
from baton_cluster.fake_nodes import fake_node
from baton_cluster.installation import install_chart
from baton_cluster.operators import OperatorProcess
from baton_cluster.ports import reserve_port
from baton_cluster.programs import CHART, CONTROL_PLANE, FAKE_PODS, programs, ready_program
from baton_cluster.waiting import wait_until
from baton_testing.prometheus import Job, draw, empty_panels, run_prometheus

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "baton-system"
NEEDED = (*CONTROL_PLANE, *CHART, *FAKE_PODS)
NAME = "operator.json"
DRAWN_SECONDS = 40.0
N_OBJECTS = 3


def pddeployment(name: str, image: str) -> dict[str, Any]:
    return {
        "apiVersion": "baton.dev/v1alpha1",
        "kind": "PDDeployment",
        "metadata": {"name": name},
        "spec": {
            "image": image,
            "model": {"servedName": "m", "path": "/m"},
            "roles": [{"name": "prefill"}, {"name": "decode"}],
        },
    }


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    missing = [name for name in NEEDED if ready_program(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: run `make integration` once")
    found = programs(NEEDED)
    plane = ControlPlane(found, Layout(Path(tempfile.mkdtemp(prefix="baton-observability-"))))
    try:
        plane.start()
        plane.start_kwok()
        plane.kubectl.apply(fake_node("fake-0"))
        install_chart(found["helm"], plane.kubectl, ROOT / "charts" / "baton", SYSTEM, "replicas=0")
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="module")
def operator(plane: ControlPlane) -> Iterator[tuple[OperatorProcess, int]]:
    port = reserve_port()
    token = plane.kubectl.token("baton-operator", SYSTEM)
    environment = {
        "KUBECONFIG": str(plane.write_kubeconfig(plane.folder / "operator.kubeconfig", token)),
        "BATON_IDENTITY": "observed",
        "BATON_LEASE_NAMESPACE": SYSTEM,
        "BATON_HTTP_HOST": "127.0.0.1",
        "BATON_HTTP_PORT": str(port),
        "BATON_LOG_FORMAT": "text",
    }
    program = ROOT / ".venv" / "bin" / "baton-operator"
    process = OperatorProcess(plane.processes, "observed", program, environment)
    process.start()
    process.wait_leading()
    yield process, port
    process.stop()


def work(plane: ControlPlane, done: threading.Event, has_made_round: threading.Event) -> None:
    """Create, roll out and delete PDDeployments until told to stop, and leave one suspended."""
    suspended = pddeployment("at-rest", "demo:1")
    suspended["spec"]["suspend"] = True
    plane.kubectl.apply(suspended)
    for round_number in itertools.count():
        names = [f"chat-{round_number}-{n}" for n in range(N_OBJECTS)]
        for image in ("demo:1", "demo:2"):
            for name in names:
                plane.kubectl.apply(pddeployment(name, image))
                if done.wait(1.0):
                    return
        plane.kubectl.run("delete", "pdd", *names, "--wait=false")
        has_made_round.set()


@pytest.fixture(scope="module")
def observed(
    plane: ControlPlane,
    operator: tuple[OperatorProcess, int],
    prometheus_program: Path,
    tmp_path_factory: Any,
    pick_port: Any,
) -> Iterator[Any]:
    """Prometheus with what a chart has to show, the work still going on."""
    job = Job("baton-operator", SYSTEM, [f"127.0.0.1:{operator[1]}"])
    folder = tmp_path_factory.mktemp("prometheus")
    done, has_made_round = threading.Event(), threading.Event()
    with (
        run_prometheus(prometheus_program, folder, pick_port(), job) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        future = pool.submit(work, plane, done, has_made_round)
        try:
            applied = 'baton_operator_apply_total{kind="Deployment",result="applied"}'
            server.wait(f"min(count_over_time(up[1h])) >= {DRAWN_SECONDS:.0f}", 1500)
            server.wait(f"{applied} > 0")
            wait_until("a round was made", lambda: has_made_round.is_set() or future.done(), 300)
            yield server
        finally:
            done.set()
        future.result()
        assert has_made_round.is_set()


def test_every_panel_of_the_operator_has_data(observed: Any, table: list[str]) -> None:
    assert empty_panels(observed, NAME, table) == []


def test_every_series_of_the_operator_that_an_alert_reads_exists(observed: Any) -> None:
    groups = observed.get("rules", type="alert")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert all(rule["health"] == "ok" for rule in rules), rules
    assert sum(rule["name"].startswith("BatonOperator") for rule in rules) >= 4
    read = {
        (rule["name"], selector)
        for rule in rules
        for selector in re.findall(r"\bbaton_operator_\w+", rule["query"])
    }
    assert ("BatonNoUsablePair", "baton_operator_suspended") in read
    assert not [each for each in sorted(read) if not observed.query(each[1])]


def test_an_operator_at_work_fires_nothing(observed: Any) -> None:
    assert observed.query('ALERTS{alertstate="firing",alertname=~"BatonOperator.*"}') == []


def test_a_picture_of_the_operators_dashboard_has_no_empty_panel(
    observed: Any, browser: Any, tmp_path: Path
) -> None:
    n_panels = draw(observed, browser, NAME, tmp_path, DRAWN_SECONDS)
    assert browser.find_elements("css selector", ".none") == []
    assert len(browser.find_elements("css selector", "section")) == n_panels
