"""What a test directs of a scripted link has reached the gateway when the test goes on."""

import time

import pytest

from baton_testing.scripted_link import RowSpec, ScriptedLink
from baton_worker.identity import Role
from baton_worker.link.api import StepReceived, WorkerDown, WorkerUp


@pytest.fixture
def events():
    return []


@pytest.fixture
def link(events):
    """A link whose gateway takes its time."""

    def take(batch):
        time.sleep(0.05)
        events.extend(batch)

    link = ScriptedLink(lambda submit: [70])
    link.start(take)
    yield link
    link.close()


def test_the_gateway_has_an_event_once_it_is_directed(link, events):
    for kind, direct in (
        (WorkerUp, lambda: link.up("m", Role.MIXED)),
        (StepReceived, lambda: link.publish("m", RowSpec(1, 0, [70]))),
        (WorkerDown, lambda: link.down("m")),
    ):
        direct()
        assert [type(event) for event in events] == [kind]
        events.clear()


def test_what_breaks_on_the_links_thread_is_raised_where_it_was_directed(link, events):
    with pytest.raises(KeyError, match="nobody"):
        link.down("nobody")
    link.up("m", Role.MIXED)
    assert [type(event) for event in events] == [WorkerUp], "the thread goes on"
