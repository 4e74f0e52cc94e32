"""A peer that sends more than is read and then goes must not end the process that did not read.

libzmq (4.3.5) asserts that a connection which broke while its queue was full has nothing more to
write, and its own heartbeat writes. A gateway that stood still for some seconds under load met
that, and so does everybody whose peer floods it and hangs up.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("program_unread_peer.py")


def unread(kind: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), kind]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_gateway_that_did_not_read_lives_and_reads_what_came() -> None:
    done = unread("router")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_a_worker_that_did_not_read_lives() -> None:
    done = unread("dealer")
    assert done.returncode == 0, done.stderr


def test_a_prefill_worker_that_did_not_read_its_answers_lives() -> None:
    done = unread("kv")
    assert done.returncode == 0, done.stderr
