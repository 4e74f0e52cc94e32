"""A server that has too much to do is asked less, and never for more than it was asked before."""

from __future__ import annotations

import contextlib

import pytest
from aiohttp import web
from kubernetes.aio import client
from prometheus_client import CollectorRegistry

from baton_operator.cluster.api import SERVICE, ApiError, Throttled
from baton_operator.cluster.kube import HttpKube
from baton_operator.cluster.leader import Leadership, LeaseTimes
from baton_operator.cluster.reflector import Pace, Reflector
from baton_operator.cluster.store import ChildStore
from baton_operator.metrics import OperatorMetrics
from baton_operator.models import ObjectKey
from baton_operator.reconciling.controller import Controller, run_one
from baton_operator.reconciling.work_queue import WorkQueue
from baton_operator.settings import Settings
from baton_testing.clocks import LoopClock, Pauses, Tired
from baton_testing.fake_kube import FakeKube

KEY = ObjectKey("ns", "chat")


async def watched(error, most):
    """Run a reflector whose watches fail so; return the server and the pauses."""
    kube, pauses = FakeKube(), Pauses(most)

    async def refusing(*args, **kwargs):
        raise error
        yield

    kube.watch = refusing
    reflector = Reflector(
        kube,
        SERVICE,
        ChildStore(),
        lambda *_: None,
        is_metadata_only=True,
        pace=Pace(pauses.clock, pauses.sleep, lambda low, high: 1.0),
    )
    with pytest.raises(Tired):
        await reflector.run()
    return kube, pauses


async def test_a_watch_that_is_throttled_keeps_its_place_and_waits_as_long_as_it_is_asked_to():
    kube, pauses = await watched(Throttled(429, "later", 7.0), 8)
    assert kube.reads["list", "Service"] == 1, "a list costs the server most of all"
    assert pauses.taken[:2] == [7.0, 7.0]
    assert pauses.taken[-1] > 7.0, "and ever longer, as for any failure"


async def test_a_watch_that_is_refused_lists_again():
    kube, _ = await watched(ApiError(403, "Forbidden", "no"), 4)
    assert kube.reads["list", "Service"] == 4


class Passes:
    async def reconcile(self, key):
        raise Throttled(429, "later", 1.0)


async def test_a_pass_that_is_throttled_again_and_again_comes_ever_more_seldom():
    clock = LoopClock()
    queue = WorkQueue(clock)
    controller = Controller(queue, Passes(), (), OperatorMetrics(CollectorRegistry()), Settings())
    waits = []

    queue.add(KEY)
    for _ in range(12):
        await queue.get()
        await run_one(controller, KEY)
        queue.done(KEY)
        when, release, _ = clock.calls[-1]
        waits.append(when - clock.now)
        clock.now = when
        release()
    assert waits[:5] == [pytest.approx(1.0)] * 5
    assert waits[-1] == pytest.approx(60.0)


@contextlib.asynccontextmanager
async def server(answer):
    """A client of a server on loopback that answers everything so."""
    app = web.Application()
    app.router.add_get("/{anything:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    configuration = client.Configuration()
    port = runner.addresses[0][1]
    configuration.host = f"http://127.0.0.1:{port}"
    kube = HttpKube(client.ApiClient(configuration), lambda *_: None)
    try:
        yield kube
    finally:
        await kube.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("asked", "waited"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("86400", 60.0),
        ("9" * 400, 60.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 1.0),
        ("²", 1.0),
        ("", 1.0),
    ],
)
async def test_nobody_is_waited_for_longer_than_a_minute_whatever_he_asks_for(asked, waited):
    async def busy(_):
        return web.Response(status=429, headers={"Retry-After": asked}, text="{}")

    async with server(busy) as kube:
        with pytest.raises(Throttled) as error:
            await kube.get(SERVICE, "ns", "x")
    assert error.value.retry_after_seconds == waited


@pytest.mark.parametrize(
    "body",
    ["<html>sign in</html>", "", "[]", '{"metadata": 7}', b'{"metadata": {"continue": "\xe9"}}'],
)
async def test_an_answer_that_is_none_of_kubernetes_is_a_failure_like_any_other(body):
    async def page(_):
        return web.Response(body=body)

    async with server(page) as kube:
        with pytest.raises(ApiError, match="Unreadable"):
            await kube.list_page(SERVICE, "ns", "", is_metadata_only=True, token="")
        if body != '{"metadata": 7}':
            with pytest.raises(ApiError, match="Unreadable"):
                await kube.has_api(SERVICE)


async def test_a_watch_that_ends_within_a_line_goes_on_from_its_place():
    cut = b'{"type": "MODIFIED", "object": {"metad'
    kube, pauses, streams = FakeKube(), Pauses(1), []

    class Stream:
        """A watch that knows whether it was closed."""

        def __init__(self):
            self.lines, self.is_closed = iter([cut]), False

        def __aiter__(self):
            return self

        async def __anext__(self):
            try:
                return next(self.lines)
            except StopIteration:
                raise StopAsyncIteration from None

        async def aclose(self):
            self.is_closed = True

    def watch(*args, **kwargs):
        streams.append((args[3], Stream()))
        return streams[-1][1]

    async def resting(seconds):
        assert streams[-1][1].is_closed, "a stream that broke stays open while its reader rests"
        pauses.taken.append(seconds)
        if len(pauses.taken) == 3:
            raise Tired

    kube.watch = watch
    reflector = Reflector(
        kube,
        SERVICE,
        ChildStore(),
        lambda *_: None,
        is_metadata_only=True,
        pace=Pace(pauses.clock, resting, lambda low, high: 1.0),
    )
    with pytest.raises(Tired):
        await reflector.run()
    assert pauses.taken == [0.2, 0.4, 0.8]
    assert len({version for version, _ in streams}) == 1
    assert kube.reads["list", "Service"] == 1


async def first_of_watch(answer):
    """Return the first line that a watch of such a server yields."""
    async with server(answer) as kube:
        stream = kube.watch(SERVICE, "ns", "", "1", is_metadata_only=True)
        async with contextlib.aclosing(stream):
            return await anext(stream)


async def test_an_event_of_the_largest_object_that_the_server_takes_is_read():
    """Annotations alone may have 256 KiB, and whoever may write a pod writes them."""
    event = b'{"type": "MODIFIED", "object": "' + b"x" * (3 << 20) + b'"}\n'

    async def streaming(_):
        return web.Response(body=event)

    assert await first_of_watch(streaming) == event


@pytest.mark.parametrize("body", [b'{"reason": "Caf\xe9", "message": ""}', b""])
async def test_a_watch_that_is_refused_by_a_page_nobody_can_read_is_refused_all_the_same(body):
    async def refusing(_):
        return web.Response(status=403, body=body)

    with pytest.raises(ApiError) as error:
        await first_of_watch(refusing)
    assert error.value.status == 403


async def test_a_watch_whose_refusal_is_cut_is_refused_all_the_same():
    async def cutting(request):
        response = web.StreamResponse(status=429, headers={"Retry-After": "7"})
        response.content_length = 1000
        await response.prepare(request)
        await response.write(b'{"kind": "Sta')
        request.transport.close()
        return response

    with pytest.raises(Throttled) as error:
        await first_of_watch(cutting)
    assert error.value.retry_after_seconds == 7.0


async def test_a_lease_that_says_what_is_no_text_is_a_failed_attempt():
    """Of a proxy that answers in its own words; a leader tries again until its time is up."""
    kube = FakeKube()

    async def garbled(*args, **kwargs):
        return b'{"metadata": {"resourceVersion": "\xe9"}}'

    kube.create = garbled
    times = LeaseTimes(duration=15.0, renew=10.0, retry=2.0)
    tried = []

    async def resting(seconds):
        tried.append(seconds)
        if len(tried) == 3:
            raise Tired

    leadership = Leadership(kube, ("ns", "baton"), "a", times, clock=lambda: 0.0, sleep=resting)
    with pytest.raises(Tired):
        await leadership.acquire()
