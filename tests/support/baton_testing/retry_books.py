"""The books of a gateway that retries, without socket, thread or clock.

Real tables of workers and requests on a wire that says who is there, driven as `apply` and
`dispatch` drive them.
"""

from __future__ import annotations

import itertools

import pytest
from prometheus_client import CollectorRegistry

from baton_testing.scripted_link import worker_info
from baton_worker.gateway.errors import WORKER_LOST, ApiError, left, unavailable
from baton_worker.gateway.metrics import GatewayMetrics
from baton_worker.gateway.output.client_queue import ClientQueue
from baton_worker.gateway.output.merge import RowMerge
from baton_worker.gateway.output.sequence import SequenceOutput
from baton_worker.gateway.request import Endpoint, GenerationRequest
from baton_worker.gateway.serving.balance import Needs
from baton_worker.gateway.serving.failures import Loss
from baton_worker.gateway.serving.helping import NO_HELP
from baton_worker.gateway.serving.live_requests import Generation, LiveRequest, LiveRequests
from baton_worker.gateway.serving.pairing import weights_of
from baton_worker.gateway.serving.parts import ServingParts
from baton_worker.gateway.serving.retry import Retrier
from baton_worker.gateway.serving.workers import LinkedWorkers
from baton_worker.gateway.text.vocabulary import Vocabulary
from baton_worker.identity import RequestKey, Role, make_handle
from baton_worker.messages import Submit
from baton_worker.metrics import MetricFactory
from baton_worker.records.rows import Row
from baton_worker.sampling import RequestParams, SamplingParams

WORDS = Vocabulary({0: b"", 1: b"a"}, frozenset({0}))


class Wire:
    """A link: nothing is sent to who is not there, and nothing that no message can hold."""

    def __init__(self):
        self.there, self.sent, self.is_narrow = set(), [], False

    def send(self, worker_id, command):
        if worker_id not in self.there:
            return False
        if self.is_narrow and isinstance(command, Submit):
            raise ValueError("the message is too long")
        self.sent.append((worker_id, command))
        return True

    def of(self, kind):
        return [(worker_id, command) for worker_id, command in self.sent if type(command) is kind]


class Books:
    """See the module."""

    def __init__(self, help_rule=NO_HELP, **options):
        self.lost = unavailable("worker w is gone: silent", WORKER_LOST)
        self.broken = ApiError(500, "worker w: broken", code="internal")
        self.now, self.wire = 100.0, Wire()
        self.registry, self.numbers = CollectorRegistry(), itertools.count(1)
        metrics = GatewayMetrics(MetricFactory(self.registry, "tiny", "gateway"))
        self.workers = LinkedWorkers("tiny", clock=lambda: self.now, help_rule=help_rule)
        self.requests = LiveRequests(self.wire, self.workers, metrics)
        options = {"max_retries": 3, "max_wait_seconds": 30.0, "reserve_seconds": 60.0} | options
        clocks = (lambda: self.now, lambda: self.now)
        parts = ServingParts(self.wire, self.workers, self.requests, metrics, *clocks)
        self.retrier = Retrier(parts, **options)

    def up(self, *names, **facts):
        for name in names:
            role = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[name[0]]
            self.wire.there.add(name)
            self.workers.up(name, 1, worker_info(name, role, **facts))

    def down(self, name, cause=Loss.DIED):
        self.wire.there.discard(name)
        for live in self.requests.depending_on(name):
            if live.key.handle in live.generation.live:
                self.fail(live, cause, name, self.lost)
        self.workers.down(name)
        self.requests.aborts.lost(name)

    def ask(self, n=1, prompt=(5, 6)):
        """Give a request of `n` choices to workers; None when they have no room."""
        sampling = SamplingParams(max_tokens=4)
        request = GenerationRequest(
            Endpoint.COMPLETION,
            (prompt,),
            n,
            RequestParams(sampling=sampling),
            (),
            False,
            False,
            False,
        )
        needs = Needs(len(prompt), 4, -1)
        pairs = self.workers.assign_all([needs] * n)
        if pairs is None:
            return None
        generation = Generation(request, ClientQueue(100), self.now, request_id="cmpl-1")
        for choice, pair in zip(request.choices(), pairs, strict=True):
            live = LiveRequest(
                RequestKey(make_handle(7, next(self.numbers)), 0), generation, choice, needs,
                RowMerge(), SequenceOutput(0, WORDS), pair.worker_ids, pair.worker_ids,
                weights_of(pair.prefill.info), begun=self.workers.now(),
            )  # fmt: skip
            self.requests.add(live)
        return generation

    def ask_one(self):
        (live,) = self.ask().live.values()
        return live

    def fail(self, live, cause, worker_id, error=None):
        """Report a failure as `apply` does; return what ended the request, or None."""
        ended = self.retrier.recover(live, cause, worker_id, error or self.broken)
        if ended is not None:
            self.requests.fail(live.generation, ended)
        return ended

    def leave(self, generation):
        self.requests.fail(generation, left("client_gone"), discard=True)

    def metric(self, name, **labels):
        facts = {"model": "tiny", "role": "gateway"} | labels
        return self.registry.get_sample_value(name, facts) or 0

    def taken(self):
        return {
            load.info.worker_id: load.outstanding_requests
            for load in self.workers.loads()
            if load.outstanding_requests
        }

    @staticmethod
    def tell(live, *tokens):
        """The attempt's next tokens reach the client."""
        row = Row(live.key.handle, live.key.attempt, live.merge.next_position, [*tokens], 0, 0,
                  [], [], [], [], [])  # fmt: skip
        assert live.merge.offer(row, 0.0).parts

    @staticmethod
    def end_of(generation):
        """Return what a client was told that ended the request."""
        assert not generation.live
        with pytest.raises(ApiError) as ended:
            generation.queue.take().send(None)
        return ended.value
