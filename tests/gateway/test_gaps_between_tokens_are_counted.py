"""How long clients waited between tokens: each gap once, whatever else its step brought.

The clock is the test's, so that a gap is what the test says.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton_testing.scripted_link import RowSpec
from baton_worker.gateway.serving import apply
from baton_worker.messages import Submit
from baton_worker.records.columns import Finish

OUTPUT = [100 + n for n in range(6)]
NAME = "baton_gateway_inter_token_latency_seconds"


class Timed:
    """Two requests of one worker, whose rows come when the test says."""

    def __init__(self, gateway: Any) -> None:
        self.gateway, self.now = gateway, 1000.0
        gateway.link.pause()
        gateway.service.applier._clock = lambda: self.now
        body = {"model": "tiny", "max_tokens": len(OUTPUT), "return_token_ids": True}
        self.asked = [gateway.ask(body | {"prompt": [70 + n]}) for n in range(2)]
        gateway.link.wait_until(lambda: len(gateway.link.sent(Submit)) == 2)
        self.handles = [submit.handle for _, submit in gateway.link.sent(Submit)]

    def step(
        self,
        after: float,
        *rows: tuple[int, int, list[int]],
        ends: bool = False,
        is_read: bool = True,
    ) -> None:
        """Bring rows `(request, position, tokens)` in one step, so many seconds later."""
        self.now += after
        finish = Finish.LENGTH if ends else Finish.NONE
        told = [RowSpec(self.handles[n], at, tokens, finish) for n, at, tokens in rows]
        self.gateway.link.publish("mixed-0", *told)
        if is_read:  # by the time that was then
            worker = self.gateway.link.workers["mixed-0"]
            self.gateway.link.wait_until(lambda: worker.applied == worker.delivered)

    def wait_gaps(self, count: int, seconds: float) -> None:
        """Wait for so many gaps, of so many seconds together."""
        self.gateway.wait_metric(f"{NAME}_count", count)
        assert self.gateway.metric(f"{NAME}_sum") == seconds


@pytest.fixture
def timed(start_gateway: Any) -> Timed:
    return Timed(start_gateway(lambda submit: OUTPUT, workers="m"))


def test_each_token_behind_the_first_has_its_part_of_the_step(timed: Timed) -> None:
    """A request's first token ends no gap, and rows of one step count for each of their tokens."""
    timed.step(5.0, (0, 0, OUTPUT[:1]), (1, 0, OUTPUT[:1]))
    timed.step(2.0, (0, 1, OUTPUT[1:3]), (1, 1, OUTPUT[1:3]))
    timed.wait_gaps(4, 4 * 1.0)
    timed.step(6.0, (0, 3, OUTPUT[3:5]))
    timed.wait_gaps(6, 4 * 1.0 + 2 * 3.0)
    timed.step(1.0, (0, 5, OUTPUT[5:]), (1, 3, OUTPUT[3:]), ends=True)
    timed.wait_gaps(10, 4 * 1.0 + 2 * 3.0 + 1.0 + 7.0)
    assert [asked.choices() for asked in timed.asked] == [[OUTPUT]] * 2


def test_gaps_before_a_row_that_raises_are_told_with_its_step(
    timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that cannot be read to its end is its worker's loss; its gaps were waited for."""
    timed.step(1.0, (0, 0, OUTPUT[:1]), (1, 0, OUTPUT[:1]))
    timed.step(1.0, (0, 1, OUTPUT[1:2]), (1, 1, OUTPUT[1:2]))
    timed.wait_gaps(2, 2.0)
    read = apply.rows

    def broken_behind_one(columns: Any) -> Any:
        yield next(iter(read(columns)))
        raise RuntimeError("a row of a defect")

    monkeypatch.setattr(apply, "rows", broken_behind_one)
    timed.step(4.0, (0, 2, OUTPUT[2:3]), (1, 2, OUTPUT[2:3]), is_read=False)
    assert {asked.result().status_code for asked in timed.asked} == {503}
    timed.wait_gaps(3, 6.0)
