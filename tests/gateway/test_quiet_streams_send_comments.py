"""While a long prompt is computed a stream says so, lest a proxy between gives it up."""

import asyncio
import gc
import json
import weakref

import httpx
import pytest

from baton_testing.scripted_link import RowSpec
from baton_worker.gateway.answers.event_stream import COMMENT as COMMENT_BYTES
from baton_worker.gateway.answers.event_stream import EventStream
from baton_worker.messages import Submit
from baton_worker.records.columns import ErrorCode, Finish

BODY = {"model": "tiny", "prompt": "the quick fox", "stream": True}
COMMENT = ": nothing new yet"


def stream(gateway):
    return httpx.stream("POST", f"{gateway.url}/v1/completions", json=BODY, timeout=60.0)


def test_comments_come_until_the_first_token_and_change_nothing_of_the_answer(start_gateway):
    gateway = start_gateway(sse_comment_seconds=0.02)
    with stream(gateway) as plain:
        want = [json.loads(line[6:]) for line in plain.iter_lines() if line.startswith("data: {")]
    gateway.link.pause()
    with stream(gateway) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(5)] == [COMMENT, "", COMMENT, "", COMMENT]
        gateway.link.resume()
        rest = [line for line in lines if line.startswith("data: ")]
    got = [json.loads(line[6:]) for line in rest[:-1]]
    assert rest[-1] == "data: [DONE]"
    assert text_of(got) == text_of(want)


def text_of(chunks):
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_the_official_client_does_not_see_them(start_gateway):
    gateway = start_gateway(sse_comment_seconds=0.01)
    gateway.link.pause()
    with gateway.openai() as client:
        chunks = client.completions.create(model="tiny", prompt="the quick fox", stream=True)
        gateway.link.resume()
        assert (
            "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "the quick fox"
        )


def test_an_error_behind_comments_is_an_event(start_gateway):
    gateway = start_gateway(workers="m", sse_comment_seconds=0.02)
    link = gateway.link
    link.pause()
    with stream(gateway) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines) == COMMENT
        link.wait_until(lambda: bool(link.sent(Submit)))
        ((worker, submit),) = link.sent(Submit)
        error = (ErrorCode.INVALID_REQUEST, "not this")
        link.publish(worker, RowSpec(submit.handle, 0, finish=Finish.ERROR, error=error))
        rest = [line for line in lines if line]
    assert "error" in json.loads(rest[-1].removeprefix("data: "))


@pytest.mark.parametrize("seconds", [0.0, 600.0])
def test_an_early_error_has_its_status_where_nothing_was_sent_before(start_gateway, seconds):
    gateway = start_gateway(sse_comment_seconds=seconds, request_timeout_seconds=0.5)
    gateway.link.pause()
    with stream(gateway) as answer:
        assert answer.status_code == 504
        assert COMMENT not in answer.read().decode()


async def test_a_comment_never_stands_within_an_event_that_is_sent_in_pieces():
    sent, commented = [], None

    async def send(message):
        sent.append(message.get("body", b"start"))
        if sent[-1] == COMMENT_BYTES:
            commented.set()

    commented = asyncio.Event()
    async with EventStream(send, [], 0.001) as stream:
        await stream.begin()
        for piece in (b"data: ", b"{", b"}", b"\n\n"):
            await stream.send(body(piece))
            await asyncio.sleep(0.05)
        commented.clear()
        await commented.wait()
        await stream.send(body(b"data: [DONE]\n\n", more=False))
        await asyncio.sleep(0.05)
    assert sent[0] == b"start"
    assert sent[-1] == b"data: [DONE]\n\n", "nothing comes behind the end"
    at = sent.index(b"data: ")
    assert sent[at : at + 4] == [b"data: ", b"{", b"}", b"\n\n"]


async def test_a_stream_that_has_ended_is_forgotten_at_once():
    """Thousands of short ones come between two looks of the collector."""

    async def send(message):
        pass

    gc.disable()
    try:
        async with EventStream(send, [], 600.0) as stream:
            await asyncio.sleep(0)  # the comments' task begins
            await stream.send(body(b"data: [DONE]\n\n", more=False))
            known = weakref.ref(stream)
            del stream
        for _ in range(3):  # it ends
            await asyncio.sleep(0)
        assert known() is None
    finally:
        gc.enable()


async def test_the_end_waits_for_the_status_line_that_a_comment_is_sending():
    """A connection that is full, as behind an answer that was asked for before, takes it late."""
    sent = []

    began, is_free = asyncio.Event(), asyncio.Event()

    async def send(message):
        began.set()
        await is_free.wait()
        sent.append(message["type"])

    async with EventStream(send, [], 0.001) as stream:
        await began.wait()
        assert stream.has_begun
        end = asyncio.create_task(stream.send(body(b"data: error\n\n", more=False)))
        await asyncio.sleep(0)
        is_free.set()
        await end
    assert sent[0] == "http.response.start"
    assert sent.count("http.response.start") == 1


def body(data, *, more=True):
    return {"type": "http.response.body", "body": data, "more_body": more}
