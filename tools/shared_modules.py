"""A pytest plugin: processes that run one list of test modules take them in turn.

Owns which process has which module, by files in a folder that all of them are given. Loaded with
`-p` by tools/unit.py alone. pytest-xdist has each process collect all modules before the first
test runs, and tells a process that only counts of each phase of each test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = "BATON_SHARED_MODULES"
"""The environment's name of the folder."""


def take(folder: Path, name: str) -> bool:
    """Return whether this process is the first to take the module of this name."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    try:
        file = os.open(folder / name.replace("/", "%"), flags, 0o600)
    except FileExistsError:
        return False
    os.close(file)
    return True


def last_of(folder: Path, pid: int) -> str:
    """Return the name of the module with which a process was busy last, "" for none."""
    try:
        return (folder / str(pid)).read_text()
    except FileNotFoundError:
        return ""


def has_ended(folder: Path, pid: int) -> bool:
    """Return whether a process ran all tests of the modules that it took."""
    return (folder / f"{pid}.ended").exists()


class SharedModules:
    """Collects a module when its turn comes, and if no other process has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: list[pytest.File] = []
        self._is_looking = True
        self._said = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> pytest.CollectReport | None:
        """While pytest looks for tests, note each module, and have it find none there yet."""
        if not self._is_looking or not isinstance(collector, pytest.File):
            return None
        self._modules.append(collector)
        return pytest.CollectReport(collector.nodeid, "passed", None, [])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """From now on modules are collected."""
        self._is_looking = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run what pytest's own loop would, each test knowing which one follows: by that, what
        a session or a folder shares is ended after the last.
        """
        n_found = 0
        waiting: pytest.Item | None = None
        for item in self._items(session):
            n_found += 1
            if waiting is not None:
                self._run(session, waiting, item)
            waiting = item
        if waiting is not None:
            self._run(session, waiting, None)
        session.testscollected = n_found
        (self._folder / f"{os.getpid()}.ended").touch()
        return True

    def _items(self, session: pytest.Session) -> Iterator[pytest.Item]:
        """Yield the chosen tests of one module after another, each collected when it is asked for.

        At the first module of a folder garbage is looked for, and what stays is frozen: conftest
        tells why.
        """
        hook, folder = session.config.hook, None
        for module in self._modules:
            if not take(self._folder, module.nodeid):
                continue
            self._say(module.nodeid)
            items = list(session.genitems(module))
            hook.pytest_collection_modifyitems(session=session, config=session.config, items=items)
            if items and module.parent is not folder:
                folder = module.parent
                hook.pytest_collection_finish(session=session)
            yield from items

    def _say(self, name: str) -> None:
        if name != self._said:
            (self._folder / str(os.getpid())).write_text(name)
            self._said = name

    def _run(
        self, session: pytest.Session, item: pytest.Item, following: pytest.Item | None
    ) -> None:
        self._say(item.nodeid.partition("::")[0])
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


def pytest_configure(config: pytest.Config) -> None:
    """Take modules in turn by the folder that the environment names."""
    config.pluginmanager.register(SharedModules(Path(os.environ[FOLDER])))
