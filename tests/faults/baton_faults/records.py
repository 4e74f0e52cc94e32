"""Every record that a gateway process takes, written down before the gateway sees it.

    python -m baton_faults.records JOURNAL gateway --config FILE

runs `baton-worker` with a recorder between the link and the gateway. A line of the journal is one
record: who sent it, its number, and its rows. `check` holds what was written against what records
promise: each number once and in order, each row's tokens at their place in one text, at most one
end for each attempt on a worker.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from baton_faults.history import WHOLE, Asked, Ended, Event, Fault, Judge, Tokens, Violation

END_ERROR = "error"
"""Stands for an attempt whose worker did not report an end: another one's word counts then."""


class RecordedRow(msgspec.Struct, frozen=True, array_like=True):
    """One row: whose it is, what it says, and the finish that it carries (0: none)."""

    handle: int
    attempt: int
    position: int
    tokens: tuple[int, ...]
    finish: int


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """One record as it came."""

    worker: str
    epoch: int
    seq: int
    rows: tuple[RecordedRow, ...]


def read(journal: Path) -> list[Recorded]:
    """Return the records of a journal; the last line of a killed process may be cut off."""
    content = journal.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    return [msgspec.json.decode(line, type=Recorded) for line in whole.splitlines()]


def check(records: Iterable[Recorded], texts: Sequence[tuple[int, ...]]) -> list[Violation]:
    """Return what may not be so in the records of one gateway process.

    Args:
        records: in the order in which they came.
        texts: everything that anybody asked for; each handle must carry one of them.
    """
    records = list(records)
    found = list(_of_numbers(records))
    wanted, events = _by_text(records, texts)
    judge = Judge(wanted)
    for event in events:
        judge.take(event)
    return found + judge.verdict()


def _of_numbers(records: Iterable[Recorded]) -> Iterable[Violation]:
    """Each worker's records are numbered without a hole or a repetition."""
    newest: dict[tuple[str, int], int] = {}
    for record in records:
        key = (record.worker, record.epoch)
        expected = newest.get(key, record.seq - 1) + 1
        if record.seq != expected:
            fault = Fault.LOST if record.seq > expected else Fault.DOUBLED
            yield Violation(f"{record.worker}/{record.epoch}", fault, f"{record.seq}: {expected}?")
        newest[key] = max(record.seq, newest.get(key, 0))


def _by_text(
    records: Sequence[Recorded], texts: Sequence[tuple[int, ...]]
) -> tuple[Mapping[str, Sequence[int]], list[Event]]:
    """Return each stream's text, and the rows as events of streams: an attempt on a worker each.

    A handle's text is the one that its rows agree with best: with anything but all of them, the
    rest of its rows is told as foreign.
    """
    places: dict[tuple[int, int], set[int]] = defaultdict(set)
    for number, text in enumerate(texts):
        for place, token in enumerate(text):
            places[place, token].add(number)
    votes: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    rows = [(record, row) for record in records for row in record.rows]
    for _, row in rows:
        for place, token in enumerate(row.tokens, row.position):
            for number in places[place, token]:
                votes[row.handle][number] += 1
    text_of = {handle: max(count, key=lambda n: count[n]) for handle, count in votes.items()}
    wanted: dict[str, Sequence[int]] = {f"text {n}": text for n, text in enumerate(texts)}
    events: list[Event] = []
    open_streams: dict[str, int] = {}
    for record, row in rows:
        name = f"{record.worker}/{record.epoch}/{row.handle:x}/{row.attempt}"
        if name not in wanted:
            wanted[name] = texts[text_of[row.handle]] if row.handle in text_of else ()
            events.append(Asked(name, row.position))
            open_streams[name] = row.position
        if row.tokens:
            events.append(Tokens(name, row.position, row.tokens))
            open_streams[name] = row.position + len(row.tokens)
        if row.finish:
            whole = open_streams[name] == len(wanted[name])
            events.append(Ended(name, WHOLE if whole else END_ERROR))
    ended = {event.stream for event in events if isinstance(event, Ended)}
    events += [Ended(name, END_ERROR) for name in open_streams if name not in ended]
    return wanted, events


def main(journal: Path, arguments: list[str]) -> int:
    """Run `baton-worker` with a recorder in its gateway's link."""
    from baton_worker.link.api import GatewayLinkEvent, StepReceived
    from baton_worker.link.gateway import ZmqGatewayLink
    from baton_worker.main import main as baton_worker
    from baton_worker.records.rows import rows

    start = ZmqGatewayLink.start
    out = journal.open("ab", buffering=0)

    def recorded(event: StepReceived) -> bytes:
        of_step = tuple(
            RecordedRow(row.handle, row.attempt, row.position, tuple(row.tokens), int(row.finish))
            for row in rows(event.columns)
        )
        meta = event.meta
        line = Recorded(event.worker_id, meta.epoch, meta.seq, of_step)
        return msgspec.json.encode(line) + b"\n"

    def started(link: ZmqGatewayLink, on_events: object) -> None:
        def take(events: Sequence[GatewayLinkEvent]) -> None:
            lines = [recorded(event) for event in events if isinstance(event, StepReceived)]
            if lines:
                out.write(b"".join(lines))
            on_events(events)  # type: ignore[operator]

        start(link, take)

    ZmqGatewayLink.start = started  # type: ignore[method-assign]
    return baton_worker(arguments)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
