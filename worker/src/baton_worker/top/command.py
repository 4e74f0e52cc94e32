"""The loop of `baton-worker top`: read every endpoint, show what changed, again.

Owns sockets, the clock and the screen. An endpoint that cannot be read is shown as such and asked
again the next time.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table

from baton_worker.config import ConfigError
from baton_worker.top.snapshot import Snapshot, activity, parse
from baton_worker.top.view import Outcome, table

_FILE_WIDTH = 160
"""Characters of a line that no person's screen limits."""
_TIMEOUT_SECONDS = 3.0
_MAX_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class TopOptions:
    """What `baton-worker top` was asked for."""

    urls: tuple[str, ...]
    interval_seconds: float
    is_once: bool


def metrics_url(given: str) -> str:
    """Return the metrics address for what a person typed: `host:port` is enough.

    Raises:
        ConfigError: it is no HTTP address.
    """
    url = given if "://" in given else f"http://{given}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{given!r} is no HTTP address of a process's metrics")
    return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/metrics"


def run_top(options: TopOptions, console: Console | None = None) -> int:
    """Show the deployment until Ctrl-C, or once; return 1 if once and nothing could be read."""
    screen = console or Console()
    if console is None and not screen.is_terminal:
        screen = Console(width=_FILE_WIDTH)
    urls = tuple(dict.fromkeys(metrics_url(url) for url in options.urls))
    watch = _Watch(urls, options.interval_seconds, screen)
    watch.step()
    time.sleep(options.interval_seconds)
    if options.is_once:
        screen.print(watch.step())
        return 0 if watch.has_read_any else 1
    try:
        with Live(watch.step(), console=screen, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(options.interval_seconds)
                live.update(watch.step(), refresh=True)
    except KeyboardInterrupt:
        return 0


class _Watch:
    def __init__(self, urls: Sequence[str], interval_seconds: float, screen: Console) -> None:
        self._urls = urls
        self._interval_seconds = interval_seconds
        self._screen = screen
        self._before: dict[str, Snapshot] = {}
        self.has_read_any = False

    def step(self) -> Table:
        """Read every endpoint at once and return the table."""
        with ThreadPoolExecutor(len(self._urls)) as pool:
            read = dict(zip(self._urls, pool.map(_read, self._urls), strict=True))
        outcomes = {urlsplit(url).netloc: self._outcome(url, now) for url, now in read.items()}
        self._before = {url: now for url, now in read.items() if isinstance(now, Snapshot)}
        self.has_read_any = bool(self._before)
        return table(outcomes, self._interval_seconds, self._fits)

    def _fits(self, made: Table) -> bool:
        unbounded = self._screen.options.update(max_width=_FILE_WIDTH * 10)
        return Measurement.get(self._screen, unbounded, made).maximum <= self._screen.width

    def _outcome(self, url: str, now: Snapshot | str) -> Outcome:
        if isinstance(now, str):
            return now
        before = self._before.get(url)
        return activity(before, now) if before is not None else "first reading"


def _read(url: str) -> Snapshot | str:
    """Return the endpoint's snapshot, or why there is none."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as reply:  # noqa: S310 - checked
            text = reply.read(_MAX_BYTES).decode()
        return parse(text, time.monotonic())
    except OSError as error:
        return str(getattr(error, "reason", None) or error)
    except ValueError as error:
        return f"no metrics page: {error}"
