"""A run's seconds and its JSON, which is written each time that something was measured.

Owns what every program of the battery tells of where it ran. Knows no measurement.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gpu

MOST_SAID = 600
BEGAN = time.monotonic()


class OutOfTime(RuntimeError):
    """What is left of the run's seconds is less than a measurement takes."""


class Limit:
    """The run's seconds."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Of them."""
        return self._until - time.monotonic()

    def need(self, seconds: float, what: str) -> None:
        """Begin nothing that takes more than is left.

        Raises:
            OutOfTime: it does.
        """
        if self.left < seconds:
            raise OutOfTime(f"{what} takes {seconds:.0f} s, {self.left:.0f} are left")


class Report:
    """The JSON: it outlives what fails later, and whoever is killed.

    Args:
        path: where it goes; None for nowhere.
        engine: what ran: on a GPU the cards are told.
    """

    def __init__(self, path: Path | None, engine: str, told: Mapping[str, Any]) -> None:
        self._path = path
        self._lock = threading.Lock()  # deployments start side by side, and each tells so
        self.told: dict[str, Any] = {
            "machine": machine(engine),
            "commit": gpu.commit(),
            "engine": engine,
            **told,
            "unmeasured": [],
        }

    def add(self, part: str, record: dict[str, Any]) -> None:
        """Add a part's record."""
        self.told.setdefault(part, []).append(record)
        self.write()

    def write(self) -> None:
        """Write what there is so far, whole or not at all."""
        if self._path is not None:
            with self._lock:
                write_json(self._path, self.told)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Tell what goes wrong in a part, and go on behind it."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the others are still worth having
            self.told["unmeasured"].append(f"{name}: {type(error).__name__}: {error}"[:MOST_SAID])
            say(f"{name} FAILED: {error!r}"[:MOST_SAID])
        self.told.setdefault("seconds", {})[name] = time.monotonic() - began
        self.write()
        say(f"{name}: {time.monotonic() - began:.0f} s")


def write_json(path: Path, told: Mapping[str, Any]) -> None:
    """Write a file that is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(told, allow_nan=False) + "\n")
    beside.replace(path)


def machine(engine: str) -> dict[str, Any]:
    """Return what it ran on; on GPUs the cards by name and memory, and how two are linked."""
    if engine != "gpu":
        return {"cores": str(os.cpu_count())}
    return gpu.machine() | {"cores": str(os.cpu_count()), "cards": cards(), "linked": linked()}


def cards() -> list[str]:
    """Return each card's name and memory, as nvidia-smi tells them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    return [line.strip() for line in _said(query).splitlines() if line.strip()]


def linked() -> str:
    """Return how the first card is linked to the second ("NV18"), "" where that is not told."""
    for line in _said(["nvidia-smi", "topo", "-m"]).splitlines():
        words = line.split()
        if words[:1] == ["GPU0"] and len(words) > 2 and words[1] == "X":
            return words[2]
    return ""


def memory_used_mib() -> list[int]:
    """Return what is in use on each card, whoever has it."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in _said(query).splitlines() if line.strip()]


def _said(command: list[str]) -> str:
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def say(text: str) -> None:
    """Print at once, with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)
