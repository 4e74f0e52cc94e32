"""The judge of recorded rows: what the link may not do is caught, what retries do is not."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from baton_faults.history import Fault
from baton_faults.records import Recorded, RecordedRow, check, read

TEXTS = [tuple(random.Random(n).sample(range(500), 24)) for n in range(4)]
LENGTH_FINISH = 2


def row(text: int, position: int, n: int, attempt: int = 0, finish: int = 0) -> RecordedRow:
    said = TEXTS[text][position : position + n]
    return RecordedRow(0xABC000 + text, attempt, position, said, finish)


def decoded(worker: str = "d0", text: int = 0, first: int = 0, attempt: int = 0) -> list[Recorded]:
    """Return the records of one request from `first` to its end, three tokens each."""
    places = range(first, len(TEXTS[text]), 3)
    last = places[-1]
    return [
        Recorded(worker, 7, 1 + number, (row(text, p, 3, attempt, LENGTH_FINISH * (p == last)),))
        for number, p in enumerate(places)
    ]


def prefilled(text: int = 0) -> list[Recorded]:
    return [Recorded("p0", 5, 1, (row(text, 0, 1),))]


def faults(records: list[Recorded]) -> set[Fault]:
    return {violation.fault for violation in check(records, TEXTS)}


def changed(records: list[Recorded], number: int, row: RecordedRow) -> list[Recorded]:
    whole = list(records)
    whole[number] = msgspec.structs.replace(whole[number], rows=(row,))
    return whole


def test_prefill_decode_and_a_retry_elsewhere_are_right() -> None:
    lost = [*prefilled(), *decoded()[:4]]
    assert check([*lost, *decoded("d1", first=12, attempt=1)], TEXTS) == []


def test_a_worker_that_was_lost_and_is_back_may_tell_its_old_attempt_on() -> None:
    whole = decoded()
    again = decoded("d1", first=12, attempt=1)
    assert check([*prefilled(), *whole[:4], *again, *whole[4:]], TEXTS) == []


BAD: dict[str, tuple[list[Recorded], Fault]] = {
    "a record is missing": ([*decoded()[:3], *decoded()[4:]], Fault.LOST),
    "a record came twice": ([*decoded()[:4], *decoded()[3:]], Fault.DOUBLED),
    "records out of order": ([decoded()[0], decoded()[2], decoded()[1]], Fault.REORDERED),
    "rows twice under new numbers": (
        [*decoded()[:4], *(msgspec.structs.replace(r, seq=r.seq + 1) for r in decoded()[3:])],
        Fault.DOUBLED,
    ),
    "a row lost from its record": (
        [*decoded()[:3], msgspec.structs.replace(decoded()[3], rows=()), *decoded()[4:]],
        Fault.LOST,
    ),
    "another's tokens under this handle": (
        changed(decoded(), 4, RecordedRow(0xABC000, 0, 12, TEXTS[1][12:15], 0)),
        Fault.MISATTRIBUTED,
    ),
    "tokens of nobody": (
        changed(decoded(), 4, RecordedRow(0xABC000, 0, 12, (901, 902, 903), 0)),
        Fault.CORRUPTED,
    ),
    "two ends": (
        [*decoded(), Recorded("d0", 7, 9, (RecordedRow(0xABC000, 0, 24, (), 2),))],
        Fault.ENDED_TWICE,
    ),
    "tokens behind the end": (
        changed(decoded(), 3, row(0, 9, 3, finish=LENGTH_FINISH)),
        Fault.AFTER_THE_END,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_history_is_caught_by_its_name(name: str) -> None:
    records, fault = BAD[name]
    assert fault in faults(records)
    assert fault in faults([*decoded("d3", text=2), *records]), "beside another worker too"


def test_a_journal_that_was_cut_off_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in decoded())
    journal.write_bytes(lines[:-20])
    assert read(journal) == decoded()[:-1]
