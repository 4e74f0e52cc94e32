"""A pod may answer anything: the operator reads little of it, goes nowhere, and believes little."""

from __future__ import annotations

import asyncio
import gzip

import aiohttp
import pytest
from aiohttp import web

from baton_operator.pods.probe import MAX_ANSWER_BYTES, HttpPodProbe
from baton_operator.pods.samples import Sample, read_sample

PATIENCE_SECONDS = 60.0
WIRE = 'baton_wire_info{wire="2",accepts_min="1",accepts_max="2",config_hash="ab12"} 1.0\n'


async def asked(*handlers):
    """Let a pod answer each path so; return what the probe made of `/drain` and `/metrics`."""
    app = web.Application()
    for path, handler in handlers:
        app.router.add_get(path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with asyncio.timeout(PATIENCE_SECONDS), aiohttp.ClientSession() as session:
            probe = HttpPodProbe(session, PATIENCE_SECONDS)
            at = ("127.0.0.1", port)
            return await probe.remaining(*at), await probe.metrics(*at)
    finally:
        await runner.cleanup()


def saying(**answer):
    async def handler(_):
        return web.Response(**answer)

    return handler


async def test_what_a_worker_says_is_read():
    drain = saying(text='{"draining": false, "remaining": 3}')
    assert await asked(("/drain", drain), ("/metrics", saying(text=WIRE))) == (3, WIRE)


async def test_an_answer_without_end_is_left_after_its_first_part():
    sent = []

    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        block = b'{"remaining": 1' + b" " * 65536
        try:
            while len(sent) < 16_384:
                await response.write(block)
                sent.append(len(block))
        except ConnectionError:
            return response
        return response

    assert await asked(("/drain", endless), ("/metrics", endless)) == (None, None)
    assert sum(sent) < 1 << 30, "all of it was read"


async def test_an_answer_as_long_as_the_bound_is_read_and_a_longer_one_is_not():
    whole = "#" * MAX_ANSWER_BYTES
    assert (await asked(("/metrics", saying(text=whole))))[1] == whole
    assert (await asked(("/metrics", saying(text=whole + "#"))))[1] is None


async def test_nobody_is_sent_elsewhere():
    reached = []

    async def elsewhere(_):
        reached.append(1)
        return web.Response(text='{"remaining": 1}')

    async def redirect(_):
        raise web.HTTPFound("/elsewhere")

    found = await asked(("/drain", redirect), ("/metrics", redirect), ("/elsewhere", elsewhere))
    assert (found, reached) == ((None, None), [])


@pytest.mark.parametrize(
    "answer",
    [
        {"body": gzip.compress(b" " * (64 << 20)), "headers": {"Content-Encoding": "gzip"}},
        {"text": "[" * 200_000},
        {"body": b"{}", "headers": {"Content-Type": "text/plain; charset=nowhere"}},
        {"text": '{"remaining": 1}', "status": 500},
    ],
    ids=["packed", "deep", "of no charset", "an error"],
)
async def test_odd_answers_are_silence(answer):
    remaining, text = await asked(("/drain", saying(**answer)), ("/metrics", saying(**answer)))
    assert remaining is None
    assert read_sample(text or "") == Sample()


@pytest.mark.parametrize(
    "text",
    [
        WIRE.replace('"2",config', f'"{"2" * 4000}",config'),
        WIRE.replace("ab12", "a" * 4000),
        WIRE.replace("ab12", "ab\\n12"),
        WIRE.replace('accepts_min="1",', ""),
        "baton_wire_info{",
        "baton_wire_info}{ 1",
        'baton_draft_proposed_tokens_total{position="1"} NaN\n',
        'baton_draft_proposed_tokens_total{position="1"} +Inf\n',
        'baton_draft_proposed_tokens_total{position="1"} 1\n'
        'baton_draft_accepted_tokens_total{position="1"} 7\n',
        'baton_draft_proposed_tokens_total{position="1"} 1\n'
        'baton_draft_accepted_tokens_total{position="1"} -1\n',
    ],
)
def test_what_no_worker_says_gets_into_no_status(text):
    assert read_sample(text) == Sample()


def test_of_a_page_full_of_other_metrics_only_ours_are_looked_at():
    others = "".join(f'other_{n}{{a="{n}"}} 1.0\n' for n in range(5000))
    assert read_sample(others + WIRE + others) == Sample("1-2", "ab12", None)
    assert read_sample(WIRE * 5000) == Sample()
