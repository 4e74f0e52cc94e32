"""A soak too short to break anything does not pass, and its page names what it left out."""

from __future__ import annotations

import pytest

from baton_faults.soak import FUZZERS, GATEWAY, WEATHERS, WORKERS, Report, too_short, written


def report_of(done: list[str], fuzzed: list[str]) -> Report:
    report = Report(fuzzed=[{"name": name, "inputs": 1} for name in fuzzed])
    for name in done:
        report.of(name).injected += 1
    return report


@pytest.mark.parametrize("has_links", [True, False])
def test_a_soak_without_a_killed_process_has_failed(has_links: bool) -> None:
    problems = too_short(report_of(list(WEATHERS), list(FUZZERS)), has_links=has_links)
    assert ["no process was killed" in problem for problem in problems] == [True]


def test_a_soak_without_a_bad_link_has_failed_where_links_can_be_bad() -> None:
    report = report_of([WORKERS], list(FUZZERS))
    assert ["no link was bad" in each for each in too_short(report, has_links=True)] == [True]
    assert too_short(report, has_links=False) == []
    assert too_short(report_of([WORKERS, "resets"], []), has_links=True) == []


def test_the_page_names_what_was_not_done_once() -> None:
    whole = report_of([WORKERS, GATEWAY, *WEATHERS], list(FUZZERS))
    assert "Not tested" not in written(whole, 3600)
    report = report_of([WORKERS, *WEATHERS], list(FUZZERS)[1:])
    report.of(GATEWAY)  # begun, and not done
    told = f"**Not tested**: {GATEWAY}, fuzzing {next(iter(FUZZERS))}."
    assert written(report, 600).rstrip().endswith(told)
