"""The receiving position: what is accepted, when it is acknowledged, how much is let in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.config import LinkConfig
from baton_worker.link.inbox import Credit, Inbox, InboxPolicy, Verdict
from baton_worker.link.outbox import Gap
from baton_worker.records.control import Ack

POLICY = InboxPolicy(credit_frames=100, credit_bytes=1000, ack_frames=3)


def accept(inbox: Inbox, n: int, now: float = 0.0) -> None:
    for _ in range(n):
        inbox.accept(now)


def test_only_the_expected_number_is_accepted() -> None:
    inbox = Inbox(POLICY)
    accept(inbox, 2)
    verdicts = [inbox.offer(seq, 0.0) for seq in (2, 3, 4)]
    assert verdicts == [Verdict.DUPLICATE, Verdict.ACCEPT, Verdict.GAP]


def test_a_duplicate_is_acknowledged_again() -> None:
    inbox = Inbox(POLICY)
    accept(inbox, 1)
    inbox.apply(1, 0.0)
    inbox.acknowledge(epoch=7, next_seq=1)
    inbox.offer(1, 1.0)
    assert inbox.is_ack_due(1.0 + POLICY.ack_seconds)


def test_a_frame_too_early_asks_for_no_acknowledgement() -> None:
    inbox = Inbox(POLICY)
    assert inbox.offer(2, 1.0) is Verdict.GAP
    assert inbox.offer(1, 1.0) is Verdict.ACCEPT
    assert inbox.ack_due_at is None


def test_unless_told_otherwise_it_acknowledges_32_frames_or_after_20_ms() -> None:
    link = LinkConfig()
    policy = InboxPolicy()
    assert policy == InboxPolicy(link.credit_frames, link.credit_bytes)
    inbox = Inbox(policy)
    accept(inbox, 32, now=5.0)
    assert inbox.ack_due_at == 5.020
    inbox.apply(31, 5.0)
    assert not inbox.is_ack_due(5.019)
    inbox.apply(32, 5.0)
    assert inbox.is_ack_due(5.0)


def test_acknowledgement_waits_for_some_frames_or_some_time() -> None:
    inbox = Inbox(POLICY)
    accept(inbox, 3, now=5.0)
    inbox.apply(2, 5.0)
    assert not inbox.is_ack_due(5.0)
    assert inbox.is_ack_due(5.0 + POLICY.ack_seconds)
    inbox.apply(3, 5.0)
    assert inbox.is_ack_due(5.0)
    inbox.acknowledge(epoch=7, next_seq=1)
    assert not inbox.is_ack_due(1e9)
    assert inbox.ack_due_at is None


def test_an_acknowledgement_tells_what_was_applied_and_what_a_slow_consumer_may_be_sent() -> None:
    inbox = Inbox(POLICY)
    accept(inbox, 3)
    inbox.apply(2, 0.0)
    for lag_seconds in (0.0, 8 * POLICY.full_credit_lag_seconds):
        told, credit = inbox.acknowledge(7, 9, lag_seconds), inbox.credit(lag_seconds)
        assert told == Ack(7, 9, 2, credit.seq, credit.n_bytes)
    assert inbox.credit(lag_seconds) < inbox.credit(0.0)


def test_only_received_frames_can_be_applied() -> None:
    inbox = Inbox(POLICY)
    accept(inbox, 1)
    with pytest.raises(ValueError, match="applied 2"):
        inbox.apply(2, 0.0)


def test_late_reports_of_application_do_not_go_back() -> None:
    inbox = Inbox(POLICY)
    accept(inbox, 3)
    inbox.apply(3, 0.0)
    inbox.apply(1, 0.0)
    assert inbox.applied == 3


def test_a_repeated_report_of_application_gives_nothing_to_acknowledge() -> None:
    inbox = Inbox(POLICY)
    accept(inbox, 3)
    inbox.apply(3, 0.0)
    inbox.acknowledge(epoch=7, next_seq=1)
    inbox.apply(3, 0.0)
    assert inbox.ack_due_at is None


def test_skipped_frames_count_as_applied_once_all_before_them_are() -> None:
    inbox = Inbox(POLICY)
    accept(inbox, 1)
    inbox.skip(0.0)
    inbox.skip(0.0)
    accept(inbox, 1)
    inbox.skip(0.0)
    assert inbox.applied == 0
    inbox.apply(1, 0.0)
    assert inbox.applied == 3
    inbox.apply(4, 0.0)
    assert inbox.applied == 5


def test_a_jump_names_what_is_lost_and_goes_on() -> None:
    inbox = Inbox(POLICY)
    accept(inbox, 2)
    assert inbox.jump(3, 0.0) is None
    assert inbox.jump(7, 0.0) == Gap(3, 6)
    assert inbox.offer(7, 0.0) is Verdict.ACCEPT
    inbox.apply(2, 0.0)
    assert inbox.applied == 6


def test_a_replay_is_asked_for_once_and_again_only_after_a_while() -> None:
    inbox = Inbox(POLICY)
    assert inbox.should_resume(0.0)
    assert not inbox.should_resume(0.299)
    assert inbox.should_resume(0.3)
    inbox.accept(0.4)
    assert inbox.should_resume(0.4), "another frame is missing now"


def test_credit_is_absolute_above_what_is_applied() -> None:
    inbox = Inbox(POLICY)
    accept(inbox, 10)
    inbox.apply(4, 0.0)
    assert inbox.credit() == Credit(104, 1000)


@pytest.mark.parametrize(
    ("lag_seconds", "credit"),
    [
        (0.05, Credit(100, 1000)),
        (0.1, Credit(50, 500)),
        (0.5, Credit(10, 100)),
        (1e6, Credit(1, 1)),
    ],
)
def test_credit_shrinks_as_the_consumer_lags_but_never_to_nothing(
    lag_seconds: float, credit: Credit
) -> None:
    assert Inbox(POLICY).credit(lag_seconds) == credit


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["accept", "apply", "skip", "jump"]), st.integers(0, 300)),
        max_size=60,
    ),
    lags=st.lists(st.floats(0.0, 10.0), min_size=60, max_size=60),
)
def test_no_credit_ever_let_out_more_than_the_furthest(
    steps: list[tuple[str, int]], lags: list[float]
) -> None:
    inbox, let_out = Inbox(POLICY), 0
    for (what, by), lag in zip(steps, lags, strict=False):
        match what:
            case "accept" if inbox.expected <= inbox.furthest:
                inbox.accept(0.0)
            case "skip":
                inbox.skip(0.0)
            case "jump":
                inbox.jump(inbox.expected + by, 0.0)
            case "apply":
                inbox.apply(min(inbox.applied + by, inbox.expected - 1), 0.0)
        let_out = max(let_out, inbox.credit(lag).seq, inbox.expected)
        assert let_out <= inbox.furthest
        assert inbox.furthest <= max(inbox.expected, inbox.applied + POLICY.credit_frames)
