"""Run a core's tests once for each mutant, each time in a fork of one process that is warm.

    python tools/mutant_judge.py serve MODULE TEST ...    (started by tools/mutants.py)
    python tools/mutant_judge.py ask                      (cosmic-ray's test command)

Starting Python, pytest and the libraries takes two seconds and a core's tests often a tenth of one.
So `serve` imports once what the tests import, but nothing of MODULE nor what imports it: those each
fork reads from their sources, of which no compiled file is left. Both meet at a Unix socket in the
current folder. `serve` ends with its standard input, and a fork with the one that asked for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

SOCKET = "judge.sock"
TIMES_SLOWER, SECONDS_MORE = 5.0, 10.0
"""A mutant hangs when its tests take so many times longer than without it, and these seconds."""
FAILED_TO_END = 124


class FirstFailureEnds:
    """Keep hypothesis from making a failure smaller, which nobody reads here."""

    def pytest_sessionstart(self) -> None:
        """Take the profile of the tests' own conftest without the phases behind a failure."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings(phases=phases, report_multiple_bugs=False))
        settings.load_profile("mutants")


def run_tests(names: list[str], *, verbose: bool) -> int:
    """Run the fast ones of the tests up to the first failure and return pytest's status."""
    import pytest

    words = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "-m", "not slow and not e2e"]
    if not verbose:
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
    return int(pytest.main([*words, *names], plugins=[FirstFailureEnds()]))


def finish(child: int, seconds: float, asker: socket.socket | None = None) -> int:
    """Return a fork's status; kill it and all it started when it hangs or nobody asks any more."""
    ended = os.pidfd_open(child)
    awaited = [ended] if asker is None else [ended, asker]
    ready, _, _ = select.select(awaited, [], [], seconds)
    if ended not in ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(ended)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status) if ended in ready else FAILED_TO_END


def unchanged(names: list[str]) -> tuple[int, list[str], float]:
    """Run the tests in a fork; return their status, what they imported, and their seconds."""
    reader, writer = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.dup2(2, 1)
        sys.dont_write_bytecode = False
        status = run_tests(names, verbose=True)
        loaded = [n for n in sys.modules if not n.startswith(("tests", "__", "conftest"))]
        os.write(writer, "\n".join(loaded).encode())
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as told:
        loaded = told.read().split()
    return finish(child, 60.0), loaded, time.monotonic() - started


def warm(loaded: list[str], core: list[str]) -> None:
    """Import what the tests need and what gets on without the core's modules."""
    sys.modules.update(dict.fromkeys(core))
    for name in loaded:
        with contextlib.suppress(ImportError):
            __import__(name)
    for name in core:
        del sys.modules[name]


def modules_of(path: Path) -> dict[str, Path]:
    """Return the names and files of the modules at a path such as worker/src/a/b.py."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    parts = {file: file.with_suffix("").parts for file in files}
    dotted = {file: ".".join(p[p.index("src") + 1 :]) for file, p in parts.items()}
    return {name.removesuffix(".__init__"): file for file, name in dotted.items()}


def fork_and_test(names: list[str], seconds: float, asker: socket.socket | None = None) -> int:
    """Run the tests on the sources as they now are; return their status."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os._exit(run_tests(names, verbose=False))
    return finish(child, seconds, asker)


def judge(listener: socket.socket, names: list[str], seconds: float) -> None:
    """Answer each that asks with the status of the tests as the sources now are."""
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        asker, _ = listener.accept()
        status = fork_and_test(names, seconds, asker)
        with asker, contextlib.suppress(BrokenPipeError):
            asker.send(bytes([status & 0xFF]))


def serve(module: str, names: list[str]) -> int:
    """Warm up, say the seconds that the tests may take, and judge."""
    status, loaded, seconds = unchanged(names)
    if status:
        return status
    core = modules_of(Path(module))
    for file in core.values():
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()
    warm(loaded, list(core))
    limit = TIMES_SLOWER * seconds + SECONDS_MORE
    if status := fork_and_test(names, limit):  # or each mutant would count as killed
        sys.stderr.write(f"the tests pass in a fresh process and fail in a warm one: {status}\n")
        return status
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SOCKET)
        listener.listen()
        sys.stdout.write(f"{limit:.0f}\n")
        sys.stdout.flush()
        judge(listener, names, limit)
    return 0


def ask() -> int:
    """Return the status of the tests as the sources now are."""
    with socket.socket(socket.AF_UNIX) as judge_socket:
        judge_socket.connect(SOCKET)
        answer = judge_socket.recv(1)
    return answer[0] if answer else FAILED_TO_END


def main(words: list[str]) -> Any:
    """Do what the first word says."""
    return ask() if words[0] == "ask" else serve(words[1], words[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
