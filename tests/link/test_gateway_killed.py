"""The gateway process dies without a word, again and again, or is frozen."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton_cluster.ports import reserve_port
from baton_testing.processes import stand_still
from baton_worker.link.api import GatewayLost, GatewayUp, Pressure, RowsRefused
from baton_worker.records.columns import Finish

PROGRAM = Path(__file__).with_name("program_journal_gateway.py")


class GatewayProcess:
    """`program_journal_gateway` on a fixed address."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"tcp://127.0.0.1:{reserve_port()}"
        self.journal = folder / "journal"
        self._process: subprocess.Popen[str] | None = None

    def start(self, incarnation: int = 77) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), self.endpoint, str(incarnation), str(self.journal)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout.readline() == "ready\n"

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def freeze(self) -> None:
        stand_still(self._process.pid)

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def end(self, n_lines: int) -> list[str]:
        """Let it finish once it said so many lines; returns them and what it said behind them."""
        said = "".join(self._process.stdout.readline() for _ in range(n_lines))
        rest, _ = self._process.communicate()
        self._process = None
        return (said + rest).splitlines()

    def lines(self) -> list[list[int]]:
        if not self.journal.exists():
            return []
        text = self.journal.read_bytes()
        whole = text[: text.rfind(b"\n") + 1].splitlines()
        return [[int(word) for word in line.split()] for line in whole]

    def rows(self) -> list[int]:
        return [row for line in self.lines() for row in line[2:]]

    def wait_for_rows(self, claim: Callable[[list[int]], bool], seconds: float = 300.0) -> None:
        ticker = threading.Event()
        for _ in range(int(seconds / 0.02)):
            if claim(self.rows()):
                return
            ticker.wait(0.02)
        pytest.fail(f"not within {seconds} s; the journal ends in {self.rows()[-5:]}")


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(process.kill)
        yield process


class Publisher(threading.Thread):
    """Publishes rows 0, 1, 2, ... to gateway 77 as fast as the ladder allows, until stopped."""

    def __init__(self, worker, columns) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self._worker = worker
        self._columns = columns
        self._stopping = threading.Event()

    def run(self) -> None:
        for step in itertools.count():
            if self._stopping.is_set():
                return
            while self._worker.link.pressure(77) >= Pressure.STOP_ADMITTING:
                if self._stopping.wait(0.005):
                    return
            self._worker.link.publish(77, self._columns(77, [2 * step, 2 * step + 1]), step)
            self.count = 2 * step + 2
            self._stopping.wait(0.0005)

    def stop(self) -> int:
        self._stopping.set()
        self.join()
        return self.count


@pytest.mark.slow
def test_a_gateway_killed_again_and_again_journals_every_row_once_and_in_order(
    gateway: GatewayProcess, start_worker, columns, read_metric
) -> None:
    gateway.start()
    worker = start_worker(gateway.endpoint, ring_frames=512)
    worker.log.wait_for(GatewayUp)
    publisher = Publisher(worker, columns)
    publisher.start()
    for _ in range(12):
        so_far = len(gateway.rows())
        gateway.wait_for_rows(lambda rows, n=so_far: len(rows) > n + 500)
        gateway.kill()
        gateway.start()
    n_rows = publisher.stop()
    gateway.wait_for_rows(lambda rows: len(rows) >= n_rows)
    assert gateway.rows() == list(range(n_rows))
    assert len({line[0] for line in gateway.lines()}) == 1, "one epoch throughout"
    assert read_metric(worker.factory, "baton_link_resent_frames_total") > 0
    assert worker.log.of(GatewayLost) == []


def test_a_new_gateway_process_at_the_address_is_told_and_served(
    gateway: GatewayProcess, start_worker, columns
) -> None:
    gateway.start(incarnation=77)
    worker = start_worker(gateway.endpoint)
    worker.log.wait_for(GatewayUp)
    worker.link.publish(77, columns(77, [0]), 0)
    gateway.wait_for_rows(lambda rows: rows == [0])
    gateway.kill()
    for row in range(1, 50):
        worker.link.publish(77, columns(77, [row]), row)
    gateway.start(incarnation=78)
    worker.log.wait_for(GatewayUp, 2)
    kinds = [type(event) for event in worker.log.events]
    assert kinds == [GatewayUp, GatewayLost, GatewayUp]
    assert worker.log.of(GatewayLost) == [GatewayLost(77, "restarted")]
    for row in range(100, 150):
        worker.link.publish(78, columns(78, [row]), row)
    gateway.wait_for_rows(lambda rows: len(rows) >= 51)
    assert gateway.rows() == [0, *range(100, 150)], "rows of 77 are not given to 78"


@pytest.mark.slow
def test_a_frozen_gateway_costs_no_row_and_no_waiting(
    gateway: GatewayProcess, start_worker, columns, read_metric
) -> None:
    gateway.start()
    worker = start_worker(gateway.endpoint, ring_bytes=1 << 20)
    worker.log.wait_for(GatewayUp)
    worker.link.publish(77, columns(77, [0]), 0)
    gateway.wait_for_rows(lambda rows: rows == [0])
    gateway.freeze()
    published, rungs = [0], []
    for row in range(1, 100_000):
        rung = worker.link.pressure(77)
        rungs.append(rung)
        if rung is Pressure.PAUSE:
            break
        worker.link.publish(77, columns(77, [row]), row)
        published.append(row)
    # It may step down in between: frames weigh less from when the link's thread has encoded them.
    climbed = [Pressure.OPEN, Pressure.STOP_ADMITTING, Pressure.PAUSE]
    assert list(dict.fromkeys(rungs)) == climbed, "the ladder is climbed rung by rung"
    gateway.signal(signal.SIGCONT)
    gateway.wait_for_rows(lambda rows: len(rows) >= len(published))
    assert gateway.rows() == published
    assert worker.log.of(RowsRefused) == []
    assert read_metric(worker.factory, "baton_link_coalesced_steps_total") > 0


@pytest.mark.slow
def test_a_gateway_that_was_frozen_does_not_blame_its_workers(
    gateway: GatewayProcess, start_worker, columns, read_metric
) -> None:
    gateway.start()
    worker = start_worker(gateway.endpoint)
    worker.log.wait_for(GatewayUp)
    gateway.freeze()
    clock = threading.Event()
    for _ in range(6000):
        if read_metric(worker.factory, "baton_link_disconnects_total"):
            break
        clock.wait(0.01)
    assert read_metric(worker.factory, "baton_link_disconnects_total"), "not within 60 s"
    assert worker.link.linked_gateways() == 0
    gateway.signal(signal.SIGCONT)
    worker.link.publish(77, columns(77, [5]), 1)
    gateway.wait_for_rows(lambda rows: rows == [5])
    worker.link.close(60.0)
    assert gateway.end(1) == ["down bye"]


def refused_rows(log) -> set[int]:
    """Return the row numbers that the link refused by name; told by its own thread, so later."""
    return {key.handle & 0xFFFFFFFFFF for event in log.of(RowsRefused) for key in event.keys}


def test_rows_beyond_a_full_ring_are_refused_by_name_and_terminal_rows_still_fit(
    gateway: GatewayProcess, start_worker, columns
) -> None:
    gateway.start()
    worker = start_worker(gateway.endpoint, ring_bytes=1 << 16)
    worker.log.wait_for(GatewayUp)
    gateway.freeze()
    row = 0
    while not refused_rows(worker.log):
        for _ in range(100):
            worker.link.publish(77, columns(77, [row], n_tokens=64), row)
            row += 1
    worker.link.publish(77, columns(77, [1_000_000], finish=Finish.ERROR), row)
    gateway.signal(signal.SIGCONT)
    gateway.wait_for_rows(lambda rows: 1_000_000 in rows)
    arrived = gateway.rows()
    assert arrived == sorted(arrived)
    missing = {*range(row), 1_000_000} - set(arrived)
    worker.log.wait(lambda log: refused_rows(log) >= missing)
    assert refused_rows(worker.log) == missing
