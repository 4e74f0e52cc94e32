"""A local deployment and a headless browser, started and ended by the tests that use them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from baton_cluster.ports import reserve_port
from baton_cluster.retry import apt_get
from baton_testing.local_deployment import Deployment, start
from baton_testing.processes import PATIENCE_SECONDS


@contextlib.contextmanager
def run_local(*flags: str) -> Iterator[Deployment]:
    """Run a deployment, wait until a pair is usable, end it."""
    with start("-k", "2", *flags) as deployment:
        deployment.wait_lines(3)
        yield deployment


@pytest.fixture(scope="module")
def local() -> Iterator[Deployment]:
    with run_local() as deployment:
        yield deployment


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Debian's Chromium, headless; its profile and downloads are the test's own."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    folder = tmp_path_factory.mktemp("chromium")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={folder / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    chrome = webdriver.Chrome(options=options, service=Service(driver, port=reserve_port()))
    chrome.downloads = folder
    try:
        yield chrome
    finally:
        chrome.quit()


def debian_program(name: str) -> Path:
    """Return `prometheus` or `promtool`: the system's, else Debian's package unpacked in the cache.

    Unpacked and not installed: the package would start its daemon.
    """
    found = shutil.which(name)
    if found:
        return Path(found)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "baton-observability"
    program = folder / "usr" / "bin" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # other runs and test processes share the folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.is_file():
            _unpack("prometheus", folder)
    return program


def _unpack(package: str, folder: Path) -> None:
    if shutil.which("apt-get") is None:
        pytest.skip(f"needs Debian's package {package}, and there is no apt-get")
    sandbox = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
    download = [*sandbox, "download", package]
    if apt_get(*download, folder=folder).returncode:
        apt_get("update")
        done = apt_get(*download, folder=folder)
        if done.returncode:
            pytest.skip(f"Debian's package {package} cannot be had: {done.stderr.strip()}")
    for archive in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True, capture_output=True)
        archive.unlink()


@pytest.fixture(scope="session")
def promtool() -> Path:
    return debian_program("promtool")


@pytest.fixture(scope="session")
def prometheus_program() -> Path:
    return debian_program("prometheus")


TABLE = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> list[str]:
    """Lines that are printed when the tests have ended."""
    return pytestconfig.stash.setdefault(TABLE, [])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    lines = config.stash.get(TABLE, [])
    if lines:
        terminalreporter.section("panels, rules and their values")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def patience() -> float:
    """Seconds that a condition may take."""
    return PATIENCE_SECONDS


@pytest.fixture(scope="session")
def pick_port() -> Any:
    return reserve_port


@pytest.fixture(scope="session")
def start_local() -> Any:
    """`run_local`, for tests whose deployment has flags of its own."""
    return run_local
