"""The ring: numbering, credit, replay, coalescing, bounds and the ladder."""

from __future__ import annotations

import pytest

from baton_worker.link.api import Pressure
from baton_worker.link.outbox import Gap, Outbox, OutboxLimits, Push, Weight

TAIL = Weight(100, 10, 100, 100, 100)


def new_outbox(**changes: object) -> Outbox[str]:
    limits = {"ring_bytes": 1000, "ring_frames": 10, "tail": TAIL, "reserve_bytes": 200}
    return Outbox(OutboxLimits(**(limits | changes)), now=0.0)


def send_all(box: Outbox[str]) -> list[int]:
    sent = []
    while (entry := box.claim()) is not None:
        if entry.frame is None:
            box.seal(entry, "".join(entry.parts).encode(), tuple(entry.parts))
        box.sent(entry)
        sent.append(entry.seq)
    return sent


def fill(box: Outbox[str], n: int, n_bytes: int = 10) -> None:
    for index in range(n):
        box.push(f"{index:0{n_bytes}}", Weight(n_bytes, 1), now=0.0, group=index)


def test_nothing_is_sendable_without_credit() -> None:
    box = new_outbox()
    fill(box, 3)
    assert box.claim() is None
    box.grant(2, 1000)
    assert send_all(box) == [1, 2]


def test_byte_credit_bounds_what_is_unacknowledged() -> None:
    box = new_outbox()
    fill(box, 5)
    box.grant(100, 25)
    assert send_all(box) == [1, 2]
    box.ack(1, now=0.0)
    assert send_all(box) == [3]


def test_one_frame_may_always_fly_however_small_the_byte_credit() -> None:
    box = new_outbox()
    fill(box, 2)
    box.grant(100, 1)
    assert send_all(box) == [1]
    box.ack(1, now=0.0)
    assert send_all(box) == [2]


def test_a_repeated_grant_lets_nothing_more_out() -> None:
    box = new_outbox()
    fill(box, 4)
    for _ in range(3):
        box.grant(2, 1000)
    assert send_all(box) == [1, 2]


def test_acknowledgement_is_cumulative_and_frees_bytes() -> None:
    box = new_outbox()
    fill(box, 4)
    box.grant(4, 1000)
    send_all(box)
    assert box.ack(3, now=0.0) == 3
    assert (len(box), box.n_bytes, box.oldest) == (1, 10, 4)
    assert box.ack(2, now=0.0) == 0


def test_acknowledgement_of_unsent_frames_frees_nothing() -> None:
    box = new_outbox()
    fill(box, 4)
    box.grant(2, 1000)
    send_all(box)
    assert box.ack(3, now=0.0) == 0
    assert len(box) == 4


def test_rewind_sends_again_from_the_expected_frame() -> None:
    box = new_outbox()
    fill(box, 4)
    box.grant(4, 1000)
    send_all(box)
    assert box.rewind(3) is None
    entry = box.claim()
    assert entry is not None
    assert box.sent(entry), "the frame had gone out before"
    assert send_all(box) == [4]


def test_rewind_below_the_ring_names_what_is_gone() -> None:
    box = new_outbox()
    fill(box, 4)
    box.grant(4, 1000)
    send_all(box)
    box.ack(2, now=0.0)
    assert box.rewind(1) == Gap(1, 2)
    assert send_all(box) == [3, 4]


def test_steps_merge_into_the_unsent_tail_when_credit_is_short() -> None:
    box = new_outbox()
    assert box.push("a", Weight(10, 1), 0.0) is Push.QUEUED
    assert box.push("b", Weight(10, 1), 0.0) is Push.COALESCED
    box.grant(9, 1000)
    entry = box.claim()
    assert entry is not None
    assert (entry.parts, entry.weight) == (["a", "b"], Weight(20, 2))


def test_steps_do_not_merge_while_credit_lasts() -> None:
    box = new_outbox()
    box.grant(9, 1000)
    assert [box.push(part, Weight(10, 1), 0.0) for part in "ab"] == [Push.QUEUED, Push.QUEUED]


@pytest.mark.parametrize(
    ("weight", "group"),
    [(Weight(91, 1), 0), (Weight(10, 10), 0), (Weight(10, 1), 1)],
    ids=["bytes", "rows", "another-gateway-process"],
)
def test_the_tail_does_not_outgrow_a_frame_or_mix_owners(weight: Weight, group: int) -> None:
    box = new_outbox()
    box.push("a", Weight(10, 1), 0.0, group=0)
    assert box.push("b", weight, 0.0, group=group) is Push.QUEUED


def test_a_frame_that_went_out_takes_no_more_steps() -> None:
    box = new_outbox()
    box.grant(1, 1000)
    box.push("a", Weight(10, 1), 0.0)
    send_all(box)
    box.revoke()
    assert box.push("b", Weight(10, 1), 0.0) is Push.QUEUED


def test_a_full_ring_refuses_but_keeps_a_reserve_for_terminal_parts() -> None:
    box = new_outbox(tail=None, ring_frames=100)
    fill(box, 10, n_bytes=100)
    assert box.push("x", Weight(100), 0.0) is Push.REFUSED
    assert box.push("x", Weight(100), 0.0, terminal=True) is Push.QUEUED
    assert box.push("x", Weight(100), 0.0, terminal=True) is Push.QUEUED
    assert box.push("x", Weight(100), 0.0, terminal=True) is Push.REFUSED
    assert box.n_bytes == 1200


def test_frames_are_bounded_as_bytes_are() -> None:
    box = new_outbox(tail=None, reserve_frames=1)
    fill(box, 10)
    assert box.push("x", Weight(1), 0.0) is Push.REFUSED
    assert box.push("x", Weight(1), 0.0, terminal=True) is Push.QUEUED
    assert box.push("x", Weight(1), 0.0, terminal=True) is Push.REFUSED


@pytest.mark.parametrize(
    ("n_bytes", "rung"),
    [
        (500, Pressure.OPEN),
        (501, Pressure.STOP_ADMITTING),
        (800, Pressure.STOP_ADMITTING),
        (801, Pressure.PAUSE),
        (1000, Pressure.PAUSE),
    ],
)
def test_the_ladder_follows_the_fill(n_bytes: int, rung: Pressure) -> None:
    box = new_outbox(tail=None)
    box.push("x", Weight(n_bytes), 0.0)
    assert box.pressure(0.0) is rung


def test_the_ladder_counts_frames_too() -> None:
    box = new_outbox(tail=None)
    fill(box, 9, n_bytes=1)
    assert box.pressure(0.0) is Pressure.PAUSE


def test_no_progress_with_data_outstanding_is_a_stall() -> None:
    box = new_outbox()
    assert box.pressure(1000.0) is Pressure.OPEN, "an empty ring owes nothing"
    box.push("a", Weight(10), now=1000.0)
    box.push("b", Weight(10), now=1005.0, group=1)
    box.grant(9, 1000)
    send_all(box)
    assert box.pressure(1029.9) is Pressure.OPEN
    assert box.pressure(1030.0) is Pressure.STALLED
    box.ack(1, now=1030.0)
    assert box.pressure(1030.0) is Pressure.OPEN
    assert box.oldest_age_seconds(1030.0) == 25.0


def test_a_refused_frame_is_replaced_and_its_successors_follow() -> None:
    box = new_outbox()
    fill(box, 4)
    box.grant(4, 1000)
    send_all(box)
    refused = box.replace(2, b"blank")
    assert refused is not None
    assert refused.tag == ("0000000001",)
    assert box.n_bytes == 35
    assert box.claim().frame == b"blank"
    assert send_all(box) == [2, 3, 4]


def test_only_frames_that_went_out_can_be_refused() -> None:
    box = new_outbox()
    fill(box, 2)
    box.grant(1, 1000)
    send_all(box)
    assert box.replace(2, b"blank") is None
    assert box.replace(9, b"blank") is None


def test_discarding_keeps_the_numbers_going() -> None:
    box = new_outbox()
    fill(box, 3)
    assert len(box.discard()) == 3
    assert (len(box), box.n_bytes, box.oldest) == (0, 0, 4)
    box.push("x", Weight(1), 0.0)
    box.grant(4, 1000)
    assert send_all(box) == [4]
