"""What the processes of the GPU suite leave: each test's outcome, last words, digests of workloads.

Owns how reports are read, also those of a process that died or was being written, and the files by
which processes keep what their workloads said. Knows nothing of GPUs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from gpu_jobs import Ended


def cases_of(report: Path) -> list[tuple[str, str]]:
    """Return each test's id and its outcome of a JUnit report: passed, failed or skipped.

    One that was skipped and whose fixtures failed has failed.

    Raises:
        ElementTree.ParseError: it is no whole report.
    """
    found = []
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - we wrote it
        if not case.get("name"):  # a session that ended early, which its status tells
            continue
        kinds = {child.tag for child in case}
        outcome = "skipped" if "skipped" in kinds else "passed"
        outcome = "failed" if kinds & {"failure", "error"} else outcome
        place = case.get("classname", "").replace(".", "/")
        found.append((f"{place}.py::{case.get('name', '')}", outcome))
    return found


def cases_of_job(ended: Ended) -> list[tuple[str, str]]:
    """Return a job's cases; a test that it does not tell of has failed, under the job's name.

    So has a process that ended with a status that none of its tests explains. A report that is not
    there, or was being written when the process died, tells of none.
    """
    try:
        found = cases_of(ended.report) if ended.report.exists() else []
    except ElementTree.ParseError:
        found = []
    missing = len(ended.job.tests) - len(dict(found))
    if missing > 0:
        what = f"status {ended.code}, {missing} of {len(ended.job.tests)} tests not told of"
        return [*found, (f"{ended.job.name}::{what}", "failed")]
    return [*found, *unexplained(ended.job.name, ended.code, found)]


def unexplained(name: str, code: int, found: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return a failure in that name for a status of pytest's that no test's outcome explains."""
    is_explained = code == 0 or (code == 1 and "failed" in dict(found).values())
    return [] if is_explained else [(f"{name}::status {code}", "failed")]


def last_words(ended: Ended, lines: int = 40) -> str:
    """Return what a job's process said last: one line where all went well, else more."""
    said = ended.log.read_text(errors="replace").rstrip().splitlines() or ["it said nothing"]
    return said[-1].strip("= ") if ended.code == 0 else "\n".join(said[-lines:])


def kept(name: str, digest: str, folder: Path) -> None:
    """Keep what a workload said, in a file of this process: others may write at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{os.getpid()}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {name: digest}))


def digests_of(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return what every process kept, and the workloads that two of them were told otherwise."""
    found: dict[str, str] = {}
    torn = set()
    for path in sorted(folder.glob("*.json")):
        for name, digest in json.loads(path.read_text()).items():
            if found.setdefault(name, digest) != digest:
                torn.add(name)
    return found, sorted(torn)
