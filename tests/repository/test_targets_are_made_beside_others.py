"""`tools/beside.py`: nothing that either side says or fails at is lost, nor where time goes."""

from __future__ import annotations

import array
import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from baton_testing.processes import wait_until

PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "beside.py"
MAKEFILE = """\
good: ; @echo good was made
bad: ; @echo bad was begun; exit 3
long: ; @head -c 1000000 /dev/zero | tr '\\0' x; echo; echo the end of it
seen-bad: ; @echo bad was begun; touch seen; exit 3
meets: ; @touch met; while [ ! -e seen ]; do sleep 0.01; done
sees: ; @while [ ! -e met ]; do sleep 0.01; done; touch seen
waits: ; @echo $$$$ > $@.pid; while true; do sleep 1; done
waits-too: ; @echo $$$$ > $@.pid; while true; do sleep 1; done
"""


def begin(folder: Path, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    (folder / "Makefile").write_text(MAKEFILE)
    return subprocess.Popen(
        [sys.executable, PROGRAM, *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("beside", "target", "is_good"),
    [("good", "good", True), ("bad", "good", False), ("good", "bad", False), ("bad", "bad", False)],
)
def test_both_sides_are_shown_and_either_failure_is_one(tmp_path, beside, target, is_good):
    program = begin(tmp_path, "--beside", beside, "--", target)
    said, _ = program.communicate()
    assert (program.returncode == 0) == is_good
    assert said.count("good was made") == (beside, target).count("good")
    assert said.count("bad was begun") == (beside, target).count("bad")


@pytest.mark.parametrize("beside", [[], ["--beside", "good", "--"]])
def test_targets_are_made_in_turn_up_to_one_that_fails(tmp_path, beside):
    program = begin(tmp_path, *beside, "good", "bad", "good")
    said, _ = program.communicate()
    assert program.returncode
    assert said.count("good was made") == 1 + bool(beside)
    assert re.findall(r"^\[stage\] (bad .*)", said, re.MULTILINE)[0].endswith("failed with 2")


def test_how_long_a_target_took_is_said_while_others_are_made(tmp_path):
    """Who is ended by a limit of time cannot say so afterwards."""
    program = begin(tmp_path, "--beside", "good", "waits", "--", "good", "waits-too")
    assert program.stdout is not None
    begun = [tmp_path / "waits.pid", tmp_path / "waits-too.pid"]
    wait_until("the others are made", lambda: [place.exists() for place in begun], all)
    said = ""
    while said.count("[stage] good ") < 2:
        line = program.stdout.readline()
        assert line, said
        said += line
    program.send_signal(signal.SIGTERM)
    rest, _ = program.communicate()
    assert re.search(r"\[stage\] good \d+ s; waits-too \d+ s, failed with .*; together", rest)


def test_both_sides_are_made_at_once(tmp_path):
    program = begin(tmp_path, "--beside", "meets", "--", "sees")
    program.communicate()
    assert program.returncode == 0


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("inherited", [signal.default_int_handler, signal.SIG_IGN])
def test_who_is_ended_ends_both_sides(tmp_path, asked, inherited):
    """Begun in the background, SIGINT is ignored by all that is begun."""
    before = signal.signal(signal.SIGINT, inherited)
    try:
        program = begin(tmp_path, "--beside", "waits", "--", "waits-too")
    finally:
        signal.signal(signal.SIGINT, before)
    places = [tmp_path / "waits.pid", tmp_path / "waits-too.pid"]
    wait_until(
        "both sides have begun",
        lambda: [place.exists() and place.read_text().endswith("\n") for place in places],
        all,
    )
    for _ in range(3):  # who is asked again leaves none behind either
        program.send_signal(asked)
    said, _ = program.communicate()
    assert program.returncode != 0
    assert "[beside] waits: failed" in said
    for place in places:
        with pytest.raises(ProcessLookupError):
            os.kill(int(place.read_text()), 0)


def test_what_a_side_said_that_has_just_failed_is_shown_when_the_other_is_interrupted(tmp_path):
    program = begin(tmp_path, "--beside", "seen-bad", "--", "waits")
    wait_until("it has failed", lambda: (tmp_path / "seen").exists(), bool)
    program.send_signal(signal.SIGTERM)
    said, _ = program.communicate()
    assert program.returncode != 0
    assert said.count("bad was begun") == 1


def test_all_is_shown_where_the_output_refuses_what_it_has_no_room_for(tmp_path):
    """Whatever shares a pipe or a terminal may have made it so, also a program that is made."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    program = begin(tmp_path, "--beside", "long", "--", "good", stdout=writer)
    os.close(writer)
    waiting = array.array("i", [0])

    def come() -> int:
        fcntl.ioctl(reader, termios.FIONREAD, waiting)
        return waiting[0]

    wait_until("some of it is there, and not read", come, lambda n: n > 4000)
    with os.fdopen(reader, encoding="utf-8") as output:
        said = output.read()
    assert program.wait() == 0
    assert said.count("x") >= 1_000_000
    assert "the end of it" in said
    assert re.search(r"together \d+ s$", said.rstrip())
