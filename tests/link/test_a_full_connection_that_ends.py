"""A peer that sends more than is read and then goes must not end the process that did not read.

libzmq (4.3.5) asserts that a connection which broke while its queue was full has nothing more to
write, and answering a ping writes, as our own heartbeat does. A gateway that stood still for some
seconds under load met that, and so does everybody whose peer floods it and hangs up.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("program_unread_peer.py")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", ["router", "kv_router"])
def test_a_port_whose_messages_nobody_read_lives_and_reads_what_came(kind: str) -> None:
    done = unread(kind)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 5000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dealer", "kv_dealer"])
def test_a_connection_of_ours_whose_answers_nobody_read_ends_nothing(kind: str) -> None:
    done = unread(kind)
    assert done.returncode == 0, done.stderr


def unread(kind: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), kind]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
