"""The ring exactly at each bound: the last byte, frame, credit and second that still count."""

from __future__ import annotations

from baton_worker.link.outbox import Outbox, OutboxLimits, Push, Weight

TAIL = Weight(100, 10, 100, 100, 100)


def outbox(**changes: object) -> Outbox[str]:
    limits = {
        "ring_bytes": 100, "ring_frames": 4, "reserve_bytes": 20, "reserve_frames": 2, "tail": None,
    }  # fmt: skip
    return Outbox(OutboxLimits(**(limits | changes)), now=0.0)


def push(box: Outbox[str], n_bytes: int = 10, group: int = 0, terminal: bool = False) -> Push:
    return box.push("x" * n_bytes, Weight(n_bytes, 1), now=1.0, group=group, terminal=terminal)


def send(box: Outbox[str]) -> list[bool]:
    """Send what credit lets out; return for each frame whether it had gone out before."""
    again = []
    while (entry := box.claim()) is not None:
        if entry.frame is None:
            box.seal(entry, b"x" * entry.weight.n_bytes, None)
        again.append(box.sent(entry))
    return again


def test_the_ring_takes_its_last_byte_and_not_one_more() -> None:
    assert push(outbox(), 100) is Push.QUEUED
    assert push(outbox(), 101) is Push.REFUSED
    assert push(outbox(), 120, terminal=True) is Push.QUEUED
    assert push(outbox(), 121, terminal=True) is Push.REFUSED


def test_the_ring_takes_its_last_frame_and_not_one_more() -> None:
    box = outbox()
    assert [push(box, 1) for _ in range(5)] == [Push.QUEUED] * 4 + [Push.REFUSED]
    assert [push(box, 1, terminal=True) for _ in range(3)] == [Push.QUEUED] * 2 + [Push.REFUSED]


def test_a_part_that_joins_the_tail_needs_no_frame() -> None:
    box = outbox(tail=TAIL)
    assert [push(box, 1, group) for group in range(4)] == [Push.QUEUED] * 4
    assert push(box, 1, group=3) is Push.COALESCED


def test_the_reserve_is_a_mebibyte_and_256_frames_unless_told_otherwise() -> None:
    limits = OutboxLimits(ring_bytes=1, ring_frames=1)
    assert (limits.reserve_bytes, limits.reserve_frames) == (1 << 20, 256)


def test_a_tail_grows_to_its_limit_in_each_weight_and_no_further() -> None:
    assert Weight(1, 2, 3, 4, 5).within(Weight(1, 2, 3, 4, 5))
    for place in range(5):
        heavier = [1, 2, 3, 4, 5]
        heavier[place] += 1
        assert not Weight(*heavier).within(Weight(1, 2, 3, 4, 5))


def test_the_frame_that_goes_out_next_is_no_tail_once_credit_covers_it() -> None:
    box = outbox(tail=TAIL)
    push(box)
    box.grant(1, 10)
    assert push(box) is Push.QUEUED, "frame 1 is about to be sent as it is"
    assert push(box) is Push.COALESCED, "frame 2 has no credit yet"
    box.grant(2, 10)
    assert push(box) is Push.QUEUED, "frame 2 has credit, though it is not its turn"


def test_credit_lets_out_its_last_byte() -> None:
    box = outbox()
    push(box), push(box), push(box)
    box.grant(3, 20)
    assert send(box) == [False, False]


def test_a_frame_is_told_to_have_gone_out_before_from_the_second_time_on() -> None:
    box = outbox()
    push(box), push(box)
    box.grant(2, 100)
    assert send(box) == [False, False]
    assert box.rewind(1) is None, "nothing that was wished for is gone"
    assert send(box) == [True, True]
    assert send(box) == []


def test_credit_frames_counts_down_to_nothing_and_not_below() -> None:
    box = outbox()
    push(box), push(box)
    assert box.credit_frames() == 0
    box.grant(2, 100)
    assert box.credit_frames() == 2
    send(box)
    assert box.credit_frames() == 0
    box.revoke()
    assert box.credit_frames() == 0, "a level below what went out is no debt"


def test_an_acknowledgement_of_all_that_flies_leaves_no_bytes_in_flight() -> None:
    box = outbox()
    push(box), push(box), push(box), push(box)
    box.grant(2, 20)
    assert send(box) == [False, False]
    box.ack(2, now=2.0)
    box.grant(4, 20)
    assert send(box) == [False, False]


def test_an_acknowledgement_behind_a_rewind_moves_the_cursor_on() -> None:
    box = outbox()
    push(box), push(box), push(box)
    box.grant(3, 100)
    send(box)
    box.rewind(1)
    assert box.ack(2, now=2.0) == 2
    assert (box.oldest, box.cursor) == (3, 3)
    assert send(box) == [True]


def test_frames_are_overdue_at_the_second_and_only_while_they_are_out() -> None:
    box = outbox()
    assert not box.is_overdue(100.0, 1.0)
    push(box)
    assert not box.is_overdue(100.0, 1.0), "it has not gone out"
    box.grant(1, 100)
    send(box)
    assert not box.is_overdue(2.9, 2.0)
    assert box.is_overdue(3.0, 2.0)
    box.ack(1, now=4.0)
    assert not box.is_overdue(100.0, 1.0)


def test_the_oldest_age_is_that_of_the_frame_and_nothing_in_an_empty_ring() -> None:
    box = outbox()
    assert box.oldest_age_seconds(5.0) == 0.0
    push(box)
    assert box.oldest_age_seconds(5.0) == 4.0


def test_nothing_is_outstanding_once_the_last_frame_is_acknowledged() -> None:
    box = outbox()
    push(box)
    box.grant(1, 10)
    send(box)
    assert box.has_outstanding()
    box.ack(1, now=2.0)
    assert not box.has_outstanding()


def test_an_acknowledged_frame_that_was_to_be_sent_again_is_passed_over() -> None:
    box = outbox()
    push(box), push(box)
    box.grant(2, 20)
    send(box)
    box.rewind(1)
    assert box.ack(1, now=2.0) == 1
    entry = box.claim()
    assert entry is not None
    assert entry.seq == 2


def test_a_receiver_that_has_all_takes_back_what_it_asked_for_again() -> None:
    box = outbox()
    push(box), push(box)
    box.grant(2, 20)
    send(box)
    box.rewind(1)
    assert box.rewind(3) is None
    assert box.claim() is None


def test_without_credit_not_even_the_first_frame_goes_out() -> None:
    box = outbox()
    push(box)
    assert box.claim() is None
    box.grant(1, 10)
    box.revoke()
    assert box.claim() is None


def test_a_part_joins_no_tail_of_a_ring_that_is_into_its_reserve() -> None:
    box = outbox(tail=TAIL)
    for group in range(4):
        push(box, 1, group)
    assert push(box, 1, group=4, terminal=True) is Push.QUEUED
    assert push(box, 1, group=4) is Push.REFUSED
    assert push(box, 1, group=4, terminal=True) is Push.COALESCED


def test_the_frame_whose_turn_it_is_grows_while_its_bytes_have_no_credit() -> None:
    box = outbox(tail=TAIL)
    push(box)
    box.grant(5, 10)
    assert send(box) == [False]
    assert push(box) is Push.QUEUED
    assert push(box) is Push.COALESCED


def test_what_is_not_said_of_a_part_is_nothing() -> None:
    assert Weight(5) == Weight(5, 0, 0, 0, 0)
    box = outbox(tail=TAIL)
    box.push("x", Weight(1), now=1.0)
    assert push(box, 1, group=0) is Push.COALESCED
