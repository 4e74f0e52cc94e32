"""A client's priority arrives at the worker as it was given, 0 when it was not."""

import pytest

from baton_worker.messages import Submit

TEXT = {"model": "tiny", "prompt": "a stop here"}


@pytest.mark.parametrize(
    ("body", "expected"), [({}, 0), ({"priority": None}, 0), ({"priority": -3}, -3)]
)
def test_a_submit_carries_it(start_gateway, body, expected):
    gateway = start_gateway()
    with gateway.http() as client:
        assert client.post("/v1/completions", json=TEXT | body).status_code == 200
    ((_, submit),) = gateway.link.sent(Submit)
    assert submit.priority == expected
