"""A start waits for what it needs, and gives up only when it is refused."""

from __future__ import annotations

import pytest

from baton_operator.cluster.api import PD_DEPLOYMENT, ApiError, Throttled
from baton_operator.process import until_served


class Discovery:
    """An API server that gives its answers in turn."""

    def __init__(self, *answers):
        self.answers = list(answers)

    async def has_api(self, kind):
        assert kind is PD_DEPLOYMENT
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def pauses_until_served(*answers):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    await until_served(Discovery(*answers), PD_DEPLOYMENT, sleep)
    return pauses


async def test_a_server_that_knows_the_kind_is_not_waited_for():
    assert await pauses_until_served(True) == []


@pytest.mark.parametrize(
    "answer",
    [
        False,
        ApiError(0, "Unreachable", "refused"),
        ApiError(503, "ServiceUnavailable", "etcd"),
        Throttled(429, "later", 1.0),
    ],
    ids=["no definition", "no server", "no storage", "too busy"],
)
async def test_what_may_pass_is_waited_for(answer):
    assert await pauses_until_served(answer, answer, True) == [2.0, 2.0]


async def test_a_refusal_ends_the_start():
    with pytest.raises(ApiError, match="403"):
        await pauses_until_served(ApiError(403, "Forbidden", "no"))
