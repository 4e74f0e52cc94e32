"""A prefill worker stands still while requests come: they keep their places in decode's line."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import pytest

from baton_faults.fleet import MODEL, Fleet, Start, fleet, wait_until
from baton_faults.load import Ask
from baton_faults.steady import ENGINE, clients_of
from baton_worker.config import SimConfig

pytestmark = pytest.mark.e2e

N_REQUESTS = 12
WAITING = "baton_handoff_waiting_asks"
LONG = 900
"""Tokens that nobody waits for: whoever has its first token leaves, and so the next comes."""


def one_place(name: str, start: Start) -> Start:
    """Let decode have one place, and nobody take a worker that stands still for dead."""
    config = start.config
    link = msgspec.structs.replace(config.link, dead_after_seconds=600.0)
    handoff = msgspec.structs.replace(config.handoff, ahead_requests=0)
    return replace(start, config=msgspec.structs.replace(config, link=link, handoff=handoff))


async def first_token(
    session: aiohttp.ClientSession, url: str, number: int, told: list[int], may_leave: asyncio.Event
) -> None:
    """Ask, note when the first token came, and leave."""
    body = Ask((9, 10 + number, 11), LONG).body(MODEL.name)
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if line.startswith(b"data: {"):
                assert json.loads(line[6:])["choices"][0]["token_ids"]
                told.append(number)
                await may_leave.wait()
                return


async def order_of_first_tokens(running: Fleet) -> list[int]:
    """Return who was told in which order, of requests that came one behind the other."""
    gateway, decode, told = running["gateway"], running["decode-0"], list[int]()
    may_leave = asyncio.Event()
    async with clients_of(running).session() as session, asyncio.TaskGroup() as group:
        for number in range(N_REQUESTS):
            if number == 1:
                running.freeze("prefill-0")
            group.create_task(first_token(session, running.url, number, told, may_leave))
            live = "baton_gateway_live_requests"
            await asyncio.to_thread(gateway.wait_metric, live, number + 1)
            if not number:
                await asyncio.to_thread(decode.wait_metric, "baton_engine_running_requests", 1)
        n_asked = await asyncio.to_thread(
            wait_until, "the other has asked", lambda: decode.metric(WAITING), lambda n: n >= 5
        )
        assert n_asked < N_REQUESTS - 1, "some of them are held up"
        running.thaw("prefill-0")
        await asyncio.to_thread(decode.wait_metric, WAITING, N_REQUESTS - 1)
        may_leave.set()
    return told


async def test_requests_held_up_at_a_prefill_worker_are_told_in_the_order_of_arrival(
    tmp_path: Path,
) -> None:
    pace = SimConfig(decode_step_seconds=0.2)
    engine = msgspec.structs.replace(ENGINE, sim=pace, max_running=1)
    with fleet(tmp_path, one_place, engine=engine, prefill=2) as running:
        assert await order_of_first_tokens(running) == list(range(N_REQUESTS))
        running.wait_empty()
