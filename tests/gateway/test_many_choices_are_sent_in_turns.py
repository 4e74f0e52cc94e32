"""Telling workers of many choices with a long prompt leaves the event loop to others in between."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from baton_testing.scripted_link import worker_info
from baton_worker.config import GatewayConfig, ModelConfig, ProcessConfig
from baton_worker.gateway.request import Endpoint, GenerationRequest
from baton_worker.gateway.server.service import GatewayService
from baton_worker.identity import GatewayIdentity, Role
from baton_worker.link.api import WorkerDown, WorkerUp
from baton_worker.messages import Submit
from baton_worker.metrics import MetricFactory
from baton_worker.sampling import RequestParams, SamplingParams

PROMPT = tuple(range(100, 356)) * 128  # 32,768 tokens
CHOICES = 40


class RecordingLink:
    """Notes in which turn of the event loop each command was sent; sends nothing."""

    def __init__(self):
        self.turn, self.sent, self.up, self.told = 0, [], {}, None

    def start(self, on_events):
        self.told = on_events

    def send(self, worker_id, command):
        if worker_id not in self.up:
            return False
        self.sent.append((self.turn, worker_id, command))
        return True

    def applied(self, worker_id, epoch, seq):
        raise AssertionError("no record was sent")

    def set_lag(self, seconds):
        pass

    def close(self):
        pass


def service_of(link, model_folder, tokenizer):
    config = ProcessConfig(model=ModelConfig(str(model_folder), "tiny"), gateway=GatewayConfig())
    factory = MetricFactory(CollectorRegistry(), "tiny", "gateway")
    return GatewayService(config, link, tokenizer, GatewayIdentity(7), factory)


def request_of(n):
    sampling = SamplingParams(max_tokens=4)
    return GenerationRequest(
        Endpoint.COMPLETION, (PROMPT,), n, RequestParams(sampling=sampling), (), False, False, False
    )


async def started(link, model_folder, tokenizer, during):
    """Start the request on two workers, with `during(service)` in every turn of the loop."""
    service = service_of(link, model_folder, tokenizer)
    facts = {"max_model_len": 1 << 16}
    for epoch, name in enumerate(("mixed-0", "mixed-1")):
        link.up[name] = WorkerUp(name, epoch, worker_info(name, Role.MIXED, **facts))
    service.applier.apply(list(link.up.values()))
    work = asyncio.create_task(service.dispatcher.start(request_of(CHOICES), 0.0))
    while not work.done():
        during(service)
        link.turn += 1
        await asyncio.sleep(0)
    generation = await work
    submits = [(turn, w, c) for turn, w, c in link.sent if isinstance(c, Submit)]
    handles = set(generation.live)
    service.dispatcher.cancel(generation, "over")
    assert service.requests.is_empty
    return submits, handles


async def test_each_long_command_has_a_turn_of_its_own(model_folder, tokenizer):
    link = RecordingLink()
    submits, handles = await started(link, model_folder, tokenizer, lambda service: None)
    assert {submit.handle for _, _, submit in submits} == handles
    assert len({turn for turn, _, _ in submits}) == len(submits) == CHOICES


async def test_a_worker_lost_between_two_commands_leaves_each_choice_told_once(
    model_folder, tokenizer
):
    """Those that were for it and not yet sent go elsewhere, and are not sent a second time."""
    link = RecordingLink()

    def lose(service):
        if link.turn == 5:
            lost = link.up.pop("mixed-0")
            service.applier.apply([WorkerDown("mixed-0", lost.epoch, "bye")])

    submits, handles = await started(link, model_folder, tokenizer, lose)
    at_the_other = [submit.handle for _, worker, submit in submits if worker == "mixed-1"]
    assert sorted(at_the_other) == sorted(handles), "each once"
    assert len(handles) == CHOICES
