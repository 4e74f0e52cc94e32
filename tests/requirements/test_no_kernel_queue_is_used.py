"""No queue or shared memory of the kernel: its limits cannot forbid what is not used (R9)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("worker/src", "ops/src", "ops/csrc", "ops/include", "operator/src")
CALLS = re.compile(
    r"\b(msgsnd|msgrcv|msgget|semget|shmget|shmat|shm_open|mq_open|mq_send|ftok"
    r"|sysv_ipc|posix_ipc|shared_memory|mlock|mlockall)\b|ipc://"
)


@pytest.mark.parametrize("folder", SOURCES)
def test_no_source_asks_the_kernel_for_queues_or_shared_memory(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = {p: p.read_text() for p in files if p.suffix in (".py", ".cc", ".cu", ".cuh", ".h")}
    assert texts
    found = {path: CALLS.findall(text) for path, text in texts.items() if CALLS.search(text)}
    assert found == {}


def test_the_pattern_finds_what_it_looks_for() -> None:
    for line in ("msgsnd(id, &m, n, 0)", "import sysv_ipc", 'socket.bind("ipc:///tmp/x")'):
        assert CALLS.search(line)
