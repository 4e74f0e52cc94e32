"""K is changed over the worker's control socket while requests run, and no output changes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from baton_worker.identity import make_handle
from baton_worker.messages import Submit
from baton_worker.records.columns import Finish
from baton_worker.roles.control import Orders, build_app
from baton_worker.roles.event_queue import DraftCountRequested
from baton_worker.roles.health import HealthSources
from baton_worker.sampling import SamplingParams

GATEWAY = 77
Call = Callable[..., httpx.Response]


def sources(loop: Any) -> HealthSources:
    return HealthSources(
        engine_silence_seconds=lambda: 0.0,
        linked_gateways=lambda: 1,
        is_linked=lambda: True,
        open_requests=loop.n_open,
        is_draining=lambda: False,
        num_speculative_tokens=lambda: loop.parts.engine.num_speculative_tokens,
        max_speculative_tokens=loop.parts.engine.max_speculative_tokens,
    )


def orders(loop: Any) -> Orders:
    return Orders(
        set_draining=lambda flag: None,
        set_num_speculative_tokens=lambda count: loop.inbox.put(DraftCountRequested(count)),
    )


@pytest.fixture
def call() -> Callable[[Any], Call]:
    """`call(worker)(method, **request)` sends to the worker's /speculative, in memory."""

    def bind(worker: Any) -> Call:
        app = build_app(lambda: sources(worker.loop), orders(worker.loop))

        async def once(method: str, request: dict[str, Any]) -> httpx.Response:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                return await client.request(method, "/speculative", **request)

        return lambda method, **request: asyncio.run(once(method, request))

    return bind


def submit(n: int, prompt: tuple[int, ...]) -> Submit:
    sampling = SamplingParams(temperature=0.7 * (n % 2), seed=n, max_tokens=24, ignore_eos=True)
    return Submit(
        make_handle(GATEWAY, n), 0, prompt_token_ids=prompt, sampling=sampling, logprobs_k=2
    )


PROMPTS = [tuple(range(20 + n, 60 + 3 * n)) * 2 for n in range(6)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("method", ["ngram", "mtp", "mtp_ngram"])
def test_running_requests_do_not_notice(make_worker: Any, call: Any, method: str) -> None:
    plain, worker = make_worker("plain", k=0), make_worker("drafting", k=2, method=method)
    for n, prompt in enumerate(PROMPTS):
        plain.command(submit(n, prompt))
        worker.command(submit(n, prompt))
    plain.run()
    counts = itertools.cycle((5, 0, 3, 1, 0, 0, 4))
    seen = set()
    while worker.loop.parts.engine.has_work() or len(worker.loop.inbox):
        wanted = next(counts)
        reply = call(worker)("POST", json={"num_speculative_tokens": wanted})
        assert reply.status_code == 202
        worker.turn()
        assert call(worker)("GET").json() == {
            "num_speculative_tokens": wanted,
            "max_speculative_tokens": 5,
        }
        assert worker.loop.parts.engine.load().num_speculative_tokens == wanted
        seen.add(wanted)
    assert seen == {0, 1, 3, 4, 5}
    for n in range(len(PROMPTS)):
        handle = make_handle(GATEWAY, n)
        assert worker.tokens(handle) == plain.tokens(handle)
        assert worker.finish(handle) is Finish.LENGTH


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"num_speculative_tokens": 6}', "num_speculative_tokens is 6, this worker allows 0..5"),
        (b'{"num_speculative_tokens": -1}', "num_speculative_tokens is -1"),
        (b'{"num_speculative_tokens": true}', "num_speculative_tokens"),
        (b'{"k": 1}', "unknown field `k`"),
        (b"{}", "missing required field `num_speculative_tokens`"),
        (b"K=3", "malformed"),
    ],
)
def test_a_wrong_count_is_refused_and_changes_nothing(
    make_worker: Any, call: Any, body: bytes, message: str
) -> None:
    worker = make_worker("drafting", k=2)
    reply = call(worker)("POST", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert message in reply.json()["error"]
    worker.turn()
    assert call(worker)("GET").json()["num_speculative_tokens"] == 2


def test_a_worker_without_a_method_allows_only_zero(make_worker: Any, call: Any) -> None:
    worker = make_worker("plain", k=0)
    assert call(worker)("POST", json={"num_speculative_tokens": 0}).status_code == 202
    reply = call(worker)("POST", json={"num_speculative_tokens": 1})
    assert reply.status_code == 400
    assert "allows 0..0, because speculative.method is none" in reply.json()["error"]
