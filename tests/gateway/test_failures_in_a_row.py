"""How many failures in a row eject a worker, for how long, and what restores it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton_worker.gateway.serving.ejection import (
    BACKOFF_SECONDS,
    EJECT_AFTER,
    MAX_BACKOFF_SECONDS,
    MAX_EXCUSED,
    Circuit,
)


def ejected(now=100.0):
    circuit = Circuit()
    for _ in range(EJECT_AFTER):
        circuit.failed(now, now, "broken")
    return circuit


def test_failures_in_a_row_eject_and_one_less_does_not():
    circuit = Circuit()
    outcomes = [circuit.failed(n, n, "broken") for n in range(EJECT_AFTER)]
    assert outcomes == [False] * (EJECT_AFTER - 1) + [True]
    assert not circuit.admits(EJECT_AFTER - 1)


def test_a_success_between_starts_the_count_anew():
    circuit = Circuit()
    for n in range(EJECT_AFTER - 1):
        circuit.failed(n, n, "broken")
    circuit.worked(EJECT_AFTER)
    for n in range(EJECT_AFTER - 1):
        assert not circuit.failed(10 + n, 10 + n, "broken")
    assert circuit.admits(99)


def test_a_success_begun_before_the_failures_says_nothing():
    circuit = Circuit()
    for _ in range(EJECT_AFTER - 1):
        circuit.failed(50, 51, "broken")
        circuit.worked(49)
    assert circuit.failed(50, 51, "broken")


def test_an_ejected_worker_is_tried_by_one_request_per_back_off():
    circuit = ejected(100)
    assert not circuit.admits(100 + BACKOFF_SECONDS * 0.99)
    assert circuit.admits(100 + BACKOFF_SECONDS)
    circuit.given(100 + BACKOFF_SECONDS)
    assert not circuit.admits(100 + BACKOFF_SECONDS * 1.99)
    assert circuit.admits(100 + BACKOFF_SECONDS * 2), "the one that tried may never be heard of"


def test_each_failed_trial_doubles_the_back_off_up_to_the_most():
    circuit, now, waits = ejected(0), 0.0, []
    for _ in range(10):
        start = now
        while not circuit.admits(now):
            now += BACKOFF_SECONDS / 4
        waits.append(now - start)
        circuit.given(now)
        circuit.failed(now, now, "still broken")
    assert waits[:4] == [BACKOFF_SECONDS * 2**n for n in range(4)]
    assert waits[-1] == MAX_BACKOFF_SECONDS


def test_a_full_worker_is_tried_again_after_the_same_time():
    circuit = ejected(0)
    for n in range(1, 5):
        circuit.failed(n, n, "full", is_full=True)
        assert circuit.admits(n + BACKOFF_SECONDS)


def test_only_what_began_after_the_ejection_restores():
    circuit = ejected(100)
    assert not circuit.worked(99.9)
    assert circuit.is_ejected
    assert circuit.worked(100.5)
    assert circuit == Circuit()


def test_what_begins_well_and_fails_is_a_failure_all_the_same():
    circuit = Circuit()
    outcomes = []
    for n in range(EJECT_AFTER):
        for row in (1, 2, 3):
            circuit.worked(n, row)
        outcomes.append(circuit.failed(n, n + 0.5, "broken", n_rows=3))
    assert outcomes == [False] * (EJECT_AFTER - 1) + [True]
    assert not circuit.worked(99, 3), "a trial that got as far as those that failed tells nothing"
    assert circuit.worked(99, 4)
    assert circuit == Circuit()


def test_what_goes_well_beyond_the_failures_or_to_its_end_starts_the_count_anew():
    circuit = Circuit()
    for n in range(50):
        assert not circuit.failed(n, n, "broken", n_rows=n % 7)
        circuit.worked(n, *((7,) if n % 2 else ()))


def test_failures_of_what_began_before_the_ejection_do_not_prolong_it():
    circuit = ejected(100)
    for _ in range(50):
        circuit.failed(99, 100.5, "late")
    assert circuit.admits(100 + BACKOFF_SECONDS)


@given(st.lists(st.tuples(st.sampled_from("efgw"), st.floats(0, 30)), max_size=60))
def test_no_history_ejects_for_longer_than_the_longest_back_off(history):
    circuit, now = Circuit(), 0.0
    for kind, seconds in history:
        begun, now = now, now + seconds
        if kind == "f":
            circuit.failed(begun, now, "broken")
        elif kind == "w":
            circuit.worked(begun)
        elif kind == "e":
            circuit.excuse()
        else:
            circuit.given(now)
        assert circuit.is_ejected <= (circuit.failures >= EJECT_AFTER)
        assert circuit.admits(now + MAX_BACKOFF_SECONDS)


def test_what_goes_well_lets_failures_be_excused_anew():
    circuit = Circuit()
    for n in range(10 * MAX_EXCUSED):
        circuit.failed(n, n, "broken")
        circuit.excuse()
        if n % MAX_EXCUSED == MAX_EXCUSED - 1:
            circuit.worked(n)
        assert (circuit.failures, circuit.is_ejected) == (0, False)


def test_a_worker_ejected_by_requests_that_others_fail_too_is_restored_at_once():
    """They came together, so that all failed before any was tried again."""
    circuit = ejected(100)
    assert circuit.excuse()
    assert circuit.admits(100)
    assert (circuit.failures, circuit.is_ejected) == (EJECT_AFTER - 1, False)
    assert circuit.failed(100, 100, "broken")


def test_five_failures_eject_for_a_second_a_minute_at_most_and_sixteen_are_excused():
    assert (EJECT_AFTER, BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, MAX_EXCUSED) == (5, 1.0, 60.0, 16)


def test_one_good_row_is_more_than_those_told_that_told_nothing():
    assert not ejected(100).worked(101, 0)
    assert ejected(100).worked(101, 1)


def test_what_began_at_the_very_moment_counts():
    """The clock is coarse: an attempt of the same instant may well have come after."""
    circuit = ejected(100)
    circuit.failed(100, 100.5, "still broken")
    assert not circuit.admits(100.5 + 2 * BACKOFF_SECONDS - 0.1), "it was told of, and doubled"
    assert circuit.worked(100.5)


def test_no_more_failures_in_a_row_are_excused_than_some():
    circuit = Circuit()
    for n in range(MAX_EXCUSED):
        circuit.failed(n, n, "broken")
        assert not circuit.excuse()
        assert (circuit.failures, circuit.excused) == (0, n + 1)
    circuit.failed(99, 99, "broken")
    assert not circuit.excuse()
    assert circuit.failures == 1


def test_nothing_is_excused_where_nothing_failed():
    circuit = Circuit()
    assert not circuit.excuse()
    assert circuit == Circuit()


def test_an_excused_failure_of_a_worker_that_stays_ejected_changes_no_more_than_their_number():
    circuit = ejected(100)
    circuit.failed(100, 101, "still broken")
    assert not circuit.excuse()
    assert (circuit.failures, circuit.is_ejected, circuit.reason) == (5, True, "still broken")
    assert circuit.excuse()
    assert (circuit.failures, circuit.is_ejected) == (4, False)
    assert circuit.admits(101)


def test_a_trial_that_is_not_given_after_all_is_as_due_as_before():
    circuit = ejected(100)
    circuit.given(100 + BACKOFF_SECONDS)
    circuit.not_given()
    assert circuit.admits(100 + BACKOFF_SECONDS)
    circuit.given(100 + 3 * BACKOFF_SECONDS)
    assert not circuit.admits(100 + 4 * BACKOFF_SECONDS - 0.1)
    circuit.not_given()
    assert circuit.admits(100 + BACKOFF_SECONDS)


def test_trust_that_is_not_given_after_all_changes_nothing():
    circuit = Circuit()
    circuit.given(5.0)
    circuit.not_given()
    assert circuit == Circuit()
