"""A gateway process that writes every row to a journal before it acknowledges. Meant to be killed.

Usage: program_journal_gateway.py BIND INCARNATION JOURNAL. A line is `epoch seq row row ...`.
Records that an earlier life journaled but did not acknowledge come again; the journal knows them by
seq.
Says `ready` when bound and `down REASON` for each worker lost, and ends when its standard input
does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from baton_worker.config import CurveConfig, LinkConfig
from baton_worker.identity import GatewayIdentity
from baton_worker.link.api import StepReceived, WorkerDown
from baton_worker.link.gateway import ZmqGatewayLink
from baton_worker.metrics import MetricFactory


class Journal:
    def __init__(self, path: Path) -> None:
        self.last: dict[int, int] = {}
        content = path.read_bytes() if path.exists() else b""
        whole = content.rfind(b"\n") + 1
        for line in content[:whole].splitlines():
            epoch, seq = line.split()[:2]
            self.last[int(epoch)] = int(seq)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(self._file, whole)
        os.lseek(self._file, whole, os.SEEK_SET)

    def write(self, event: StepReceived) -> None:
        epoch, seq = event.meta.epoch, event.meta.seq
        if seq <= self.last.get(epoch, 0):
            return
        rows = [handle & 0xFFFFFFFFFF for handle in event.columns.handle.tolist()]
        os.write(self._file, (" ".join(map(str, [epoch, seq, *rows])) + "\n").encode())
        self.last[epoch] = seq


def main(bind: str, incarnation: int, journal: Journal) -> None:
    config = LinkConfig(bind=bind, curve=CurveConfig(enabled=False))
    identity = GatewayIdentity(incarnation)
    identity.instance = f"{incarnation:032x}"  # its lives are one gateway's, as its journal is
    link = ZmqGatewayLink(config, identity, MetricFactory(CollectorRegistry(), "m", "gateway"))

    def take(events: Sequence[object]) -> None:
        for event in events:
            if isinstance(event, StepReceived):
                journal.write(event)
                link.applied(event.worker_id, event.meta.epoch, event.meta.seq)
            elif isinstance(event, WorkerDown):
                sys.stdout.write(f"down {event.reason}\n")
                sys.stdout.flush()

    link.start(take)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    link.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Journal(Path(sys.argv[3])))
