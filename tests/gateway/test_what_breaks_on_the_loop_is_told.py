"""An exception in any task or callback of a process is counted and logged, and then it goes on
without that piece of work, or ends: nothing is over for good behind probes that say ok.
"""

from __future__ import annotations

import ast
import asyncio
import threading
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

import baton_worker
from baton_testing.scripted_link import RowSpec
from baton_worker.gateway.answers.answer import GenerationAnswer
from baton_worker.gateway.answers.event_stream import EventStream
from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.output.client_queue import ClientQueue
from baton_worker.gateway.request import Endpoint, GenerationRequest
from baton_worker.gateway.serving.admission_queue import unless_gone
from baton_worker.gateway.serving.live_requests import Generation, LiveRequests
from baton_worker.gateway.serving.retry import Retrier
from baton_worker.identity import Role
from baton_worker.logs import LOG_SECONDS
from baton_worker.messages import Abort, Submit
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import ErrorCode
from baton_worker.sampling import RequestParams, SamplingParams
from baton_worker.supervision import CALLBACK, LoopFaults, begin, going_on

BODY = {"model": "tiny", "prompt": [70, 71], "max_tokens": 4}


def breaks(*args, **kwargs):
    raise RuntimeError("a defect")


def faults(gateway, where):
    return gateway.metric("baton_loop_faults_total", where=where)


def wait_for(condition):
    """Wait for what other threads bring about; a hang ends at the test's time-out."""
    while not condition():
        pass


def complete(gateway, **changes):
    with gateway.http() as client:
        return client.post("/v1/completions", json=BODY | changes)


class Later(threading.Thread):
    """Posts a completion and keeps the answer."""

    def __init__(self, gateway, **changes):
        super().__init__()
        self.gateway, self.changes = gateway, changes
        self.start()

    def run(self):
        self.answer = complete(self.gateway, **self.changes)

    def error(self):
        self.join(60)
        assert not self.is_alive()
        return self.answer.status_code, self.answer.json().get("error", {}).get("code")


class Watched:
    """The running loop, which is watched, with a clock that stands."""

    def __init__(self):
        self.registry, self.now, self.ended = CollectorRegistry(), 0.0, []
        factory = MetricFactory(self.registry, "tiny", "gateway")
        self.faults = LoopFaults(factory, lambda: self.now)
        self.faults.watch(lambda: self.ended.append(self.faults.fatal))

    def count(self, where):
        labels = {"model": "tiny", "role": "gateway", "where": where}
        return self.registry.get_sample_value("baton_loop_faults_total", labels)


async def some_turns():
    for _ in range(5):
        await asyncio.sleep(0)


# The hand.


async def test_a_task_that_breaks_is_told_at_once_and_not_when_it_is_forgotten(caplog):
    watched, kept = Watched(), []

    async def work():
        breaks()

    kept.append(begin("work", work()))
    await some_turns()
    assert watched.count("work") == 1
    assert "a defect" in caplog.text, "its traceback"
    assert watched.ended == []


async def test_a_task_that_is_cancelled_is_no_fault():
    watched = Watched()

    task = begin("work", asyncio.sleep(3600))
    await some_turns()
    task.cancel()
    await some_turns()
    assert watched.count("work") is None


async def test_an_essential_task_that_breaks_ends_the_process_once():
    watched = Watched()

    async def work():
        breaks()

    for name in ("first", "second"):
        begin(name, work(), is_essential=True)
    await some_turns()
    assert (watched.ended, watched.faults.fatal) == (["first"], "first")


async def test_what_breaks_each_time_is_counted_each_time_and_logged_now_and_then(caplog):
    watched = Watched()

    for _ in range(100):
        with going_on("round"):
            breaks()
    watched.now = LOG_SECONDS
    with going_on("round"):
        breaks()
    with going_on("another"):
        breaks()
    assert (watched.count("round"), watched.count("another")) == (101, 1)
    assert len(caplog.records) == 3


async def test_a_callback_that_breaks_is_counted():
    watched = Watched()

    asyncio.get_running_loop().call_soon(breaks)
    await some_turns()
    assert watched.count(CALLBACK) == 1


@pytest.mark.slow
def test_every_task_of_ours_is_begun_by_the_one_hand():
    """But those whose result somebody waits for, each of which is named here."""
    awaited = {
        ("gateway/serving/admission_queue.py", "starting"),
        ("gateway/server/server.py", "end.wait()"),
        ("gateway/server/server.py", "service.usable.wait()"),
    }
    found = set()
    root = Path(baton_worker.__file__).parent
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_method and node.func.attr in ("create_task", "ensure_future"):
                found.add((name, ast.unparse(node.args[0])))
    assert found == awaited | {("supervision.py", "work")}


# Housekeeping.

ROUND = {
    "report_lag": lambda service: (service._link, "set_lag"),
    "expire_gaps": lambda service: (service.applier, "expire_gaps"),
    "expire_retries": lambda service: (service.retrier, "expire"),
    "look_at_workers": lambda service: (service.workers, "look"),
}


@pytest.mark.parametrize("where", ROUND)
def test_a_round_of_housekeeping_goes_on_behind_a_part_that_breaks(
    start_gateway, monkeypatch, where
):
    gateway = start_gateway()
    done = dict.fromkeys(ROUND, 0)

    def counting(name, work):
        def counted(*args):
            done[name] += 1
            return work(*args)

        return counted

    for name, part in ROUND.items():
        owner, method = part(gateway.service)
        work = breaks if name == where else getattr(owner, method)
        monkeypatch.setattr(owner, method, counting(name, work))
    wait_for(lambda: min(done.values()) >= 3)
    wait_for(lambda: faults(gateway, where) >= 3)
    assert complete(gateway).status_code == 200
    with gateway.http() as client:
        assert client.get("/readyz").status_code == 200


def test_housekeeping_that_breaks_altogether_ends_the_gateway_not_ready(start_gateway, monkeypatch):
    """Its streams hear of the end, and `serve` tells what broke: see `process`."""
    gateway = start_gateway(drain_seconds=3600, settle_seconds=3600)
    service, ready = gateway.service, []
    end = service.refuse_and_end

    def ending():
        async def ask():
            app = httpx.ASGITransport(service.health_app)
            async with httpx.AsyncClient(transport=app, base_url="http://gateway") as client:
                ready.append(await client.get("/readyz"))

        asked = asyncio.ensure_future(ask())
        asked.add_done_callback(lambda _: end())

    monkeypatch.setattr(service, "refuse_and_end", ending)
    gateway.link.pause()
    waiting = Later(gateway)
    gateway.link.wait_until(lambda: len(gateway.link.commands) == 2)
    monkeypatch.setattr(LiveRequests, "__len__", breaks)
    assert waiting.error() == (503, "shutting_down")
    assert service.faults.fatal == "housekeeping"
    assert ready[0].status_code == 503
    assert ready[0].json()["reasons"][0] == "housekeeping broke: the gateway ends"


# What the link brings.


def test_an_event_that_breaks_costs_neither_the_others_nor_their_acknowledgement(
    start_gateway, monkeypatch
):
    """A record that cannot be read as rows: its worker's requests go on at the other one."""
    gateway = start_gateway(lambda submit: [80, 81, 82, 1], workers="m")
    link, applier = gateway.link, gateway.service.applier
    link.pause()
    request = Later(gateway)
    link.wait_until(lambda: len(link.commands) == 1)
    link.up("mixed-1", Role.MIXED)
    step, worker = applier._step, link.workers["mixed-0"]

    def breaks_once(event):  # the worker tells of the abort in a record of its own
        monkeypatch.setattr(applier, "_step", step)
        breaks()

    monkeypatch.setattr(applier, "_step", breaks_once)
    link.publish("mixed-0", RowSpec(123, 0, [70]))
    link.wait_until(lambda: worker.applied >= 0)
    link.wait_until(lambda: len(link.sent(Submit)) == 2)
    link.resume()
    assert request.error() == (200, None)
    assert link.sent(Submit)[1][0] == "mixed-1"
    assert faults(gateway, "link_event") == 1


@pytest.mark.parametrize("method", ["up", "down"])
def test_a_worker_whose_coming_or_going_breaks_is_given_nothing_and_harms_nobody(
    start_gateway, monkeypatch, method
):
    gateway = start_gateway(workers="m")
    link, table = gateway.link, gateway.service.workers
    link.up("mixed-1", Role.MIXED)
    wait_for(lambda: len(table.loads()) == 2)
    work = getattr(table, method)

    def breaks_once(*args):
        monkeypatch.setattr(table, method, work)
        breaks()

    monkeypatch.setattr(table, method, breaks_once)
    if method == "up":
        link.announce("mixed-1", link.workers["mixed-1"].info)
    else:
        link.down("mixed-1")
    wait_for(lambda: faults(gateway, "link_event") == 1)
    wait_for(lambda: table.epoch("mixed-1") is None)
    assert [complete(gateway).status_code for _ in range(4)] == [200] * 4
    link.up("mixed-1", Role.MIXED)
    wait_for(lambda: len(table.loads()) == 2)


def test_a_lost_worker_s_requests_are_moved_one_by_one(start_gateway, monkeypatch):
    """One of them is what the gateway has a defect with; the others are served elsewhere."""
    gateway = start_gateway(lambda submit: [80, 1], workers="m")
    link = gateway.link
    recover = Retrier.recover

    def breaks_for_one(self, live, *args):
        if live.choice.params.prompt_token_ids == (99,):
            breaks()
        return recover(self, live, *args)

    monkeypatch.setattr(Retrier, "recover", breaks_for_one)
    link.pause()
    requests = []
    for prompt in ([70], [99], [71]):
        requests.append(Later(gateway, prompt=prompt))
        link.wait_until(lambda: len(link.commands) == len(requests))
    link.up("mixed-1", Role.MIXED)
    link.down("mixed-0")
    link.resume()
    assert [r.error() for r in requests] == [(200, None), (500, "internal"), (200, None)]
    assert faults(gateway, "worker_lost") == 1


def test_a_worker_that_cannot_be_told_of_an_end_costs_no_slot_and_no_answer(
    start_gateway, monkeypatch
):
    """`send` breaks for aborts: the client hears of the end, and its slot is free again."""
    gateway = start_gateway(max_outstanding_requests=1, max_wait_seconds=0)
    link = gateway.link
    send = link.send

    def breaks_for_aborts(worker_id, command):
        if isinstance(command, Abort):
            breaks()
        return send(worker_id, command)

    monkeypatch.setattr(link, "send", breaks_for_aborts)
    link.refusals["prefill-0"] = ErrorCode.INVALID_REQUEST
    for _ in range(3):
        assert complete(gateway).status_code in (400, 500)
    link.refusals.clear()
    monkeypatch.setattr(link, "send", send)
    assert complete(gateway).status_code == 200


# Those who wait.


def test_a_request_in_line_that_breaks_ends_alone(start_gateway, monkeypatch):
    gateway = start_gateway(max_outstanding_requests=1, max_wait_seconds=3600)
    dispatcher, link = gateway.service.dispatcher, gateway.link
    link.pause()
    first = Later(gateway)
    link.wait_until(lambda: len(link.commands) == 2)
    waiting = []
    for prompt in ([99], [71]):
        waiting.append(Later(gateway, prompt=prompt))
        wait_for(lambda: dispatcher.n_waiting == len(waiting))
    plan = dispatcher._plan

    def breaks_for_one(asked, *args):
        if asked.generation.request.prompts == ((99,),):
            breaks()
        return plan(asked, *args)

    monkeypatch.setattr(dispatcher, "_plan", breaks_for_one)
    link.resume()
    assert first.error() == (200, None)
    assert [each.error() for each in waiting] == [(500, "internal"), (200, None)]
    assert faults(gateway, "line") == 1


def test_a_retry_in_line_that_breaks_ends_alone(start_gateway, monkeypatch):
    gateway = start_gateway(
        lambda submit: [80, 1],
        workers="m",
        info={"max_running": 2, "max_waiting": 0},
        max_wait_seconds=3600,
    )
    link, retrier = gateway.link, gateway.service.retrier
    link.up("mixed-1", Role.MIXED, max_running=2, max_waiting=0)
    link.pause()
    requests = []
    for prompt in ([70], [71], [72], [73]):
        requests.append(Later(gateway, prompt=prompt))
        link.wait_until(lambda: len(link.commands) == len(requests))
    go_on, broken = retrier._go_on, []

    def breaks_for_the_first(one):
        if not broken or one.live is broken[0]:
            broken.append(one.live)
            breaks()
        return go_on(one)

    monkeypatch.setattr(retrier, "_go_on", breaks_for_the_first)
    link.down("mixed-0")
    link.resume()
    answers = sorted(str(request.error()) for request in requests)
    assert answers == ["(200, None)"] * 3 + ["(500, 'internal')"]
    assert faults(gateway, "waiting_retries") == 1


def test_a_request_that_cannot_be_sent_for_a_defect_keeps_no_slot(start_gateway, monkeypatch):
    gateway = start_gateway(max_outstanding_requests=1, max_wait_seconds=0)
    link = gateway.link
    send, told = link.send, []

    def breaks_once(worker_id, command):
        if not told:
            told.append(command)
            breaks()
        return send(worker_id, command)

    monkeypatch.setattr(link, "send", breaks_once)
    assert complete(gateway).status_code == 500
    assert complete(gateway).status_code == 200
    assert told


# What stands beside an answer.


def generation():
    request = GenerationRequest(
        Endpoint.CHAT, ((1,),), n=1, params=RequestParams(sampling=SamplingParams()), stops=(),
        stream=True, include_usage=False, return_token_ids=False,
    )  # fmt: skip
    return Generation(request, ClientQueue(9), 0.0)


async def test_comments_that_break_are_told_and_the_stream_goes_on():
    watched, sent = Watched(), []

    broken = asyncio.Event()

    async def send(message):
        if not broken.is_set():
            broken.set()
            breaks()
        sent.append(message)

    async with EventStream(send, [], 0.001) as stream:
        await broken.wait()
        await some_turns()
        await stream.send({"body": b"x\n\n", "more_body": False})
    assert watched.count("sse_comments") == 1
    assert sent == [{"body": b"x\n\n", "more_body": False}]


async def test_a_watch_that_breaks_ends_its_request_as_its_client_s_end_would():
    """Nobody would notice any more that the client leaves."""
    watched, cancelled = Watched(), []
    asked = generation()

    async def receive():
        breaks()

    async def send(message):
        pass

    def cancel(which, reason):
        cancelled.append((which, reason))
        which.queue.fail(ApiError(499, "gone"))

    answer = GenerationAnswer(asked, None, cancel)
    await answer({}, receive, send)
    await some_turns()
    assert cancelled[0] == (asked, "client_gone")
    assert watched.count("client_watch") == 1


async def test_a_watch_that_breaks_beside_the_line_gives_the_place_up():
    watched, gone = Watched(), []

    async def receive():
        breaks()

    async def starting():
        try:
            await asyncio.sleep(3600)
        finally:
            gone.append(True)

    with pytest.raises(ApiError, match="left"):
        await unless_gone(receive, starting())
    await some_turns()
    assert gone == [True]
    assert watched.count("client_watch") == 1


def test_a_request_s_time_out_reaches_its_client_though_a_worker_cannot_be_told(
    start_gateway, monkeypatch
):
    gateway = start_gateway(request_timeout_seconds=0.2)
    link = gateway.link
    link.pause()
    send = link.send

    def breaks_for_aborts(worker_id, command):
        if isinstance(command, Abort):
            breaks()
        return send(worker_id, command)

    monkeypatch.setattr(link, "send", breaks_for_aborts)
    assert Later(gateway).error() == (504, "timeout")
    wait_for(lambda: faults(gateway, CALLBACK) == 1)
    monkeypatch.setattr(link, "send", send)
    assert gateway.service.requests.is_empty
