"""The gateway without its sockets: every part joined to a link, and the loop's housekeeping.

Owns the crossing from the link's thread to the event loop (one wake-up per batch) and the measuring
of how far the loop lags behind. Knows nothing of processes and signals.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from baton_worker.compatibility import chat_template_hash, tokenizer_hash
from baton_worker.config import ProcessConfig
from baton_worker.config_decode_prompts import DecodePromptsConfig
from baton_worker.gateway.intake.defaults import SamplingDefaults, not_taken_over, read_defaults
from baton_worker.gateway.intake.intake import Intake
from baton_worker.gateway.metrics import GatewayMetrics
from baton_worker.gateway.server.api_key import read_api_keys
from baton_worker.gateway.server.health import HealthParts, build_health_app
from baton_worker.gateway.server.http import HttpParts, build_app
from baton_worker.gateway.serving.apply import Applier
from baton_worker.gateway.serving.dispatch import Dispatcher, DispatchLimits
from baton_worker.gateway.serving.helping import HelpRule
from baton_worker.gateway.serving.live_requests import LiveRequests
from baton_worker.gateway.serving.pairing import Pairing
from baton_worker.gateway.serving.parts import ServingParts
from baton_worker.gateway.serving.retry import Retrier
from baton_worker.gateway.serving.workers import LinkedWorkers
from baton_worker.gateway.text.tokenizer import GatewayTokenizer
from baton_worker.http_edge.gate import Gate
from baton_worker.http_edge.metrics import HttpMetrics
from baton_worker.identity import GatewayIdentity
from baton_worker.link.api import GatewayLink, GatewayLinkEvent
from baton_worker.listening import ListeningClock
from baton_worker.metrics import MetricFactory
from baton_worker.supervision import begin, going_on
from baton_worker.tracing.build import build_tracing

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.1
_STOOD_STILL_SECONDS = 1.0
_CATCH_UP_SECONDS = 2.0
"""How long what came while the loop stood still may take to be heard: a link that broke is made
anew, a worker without credit sends what it held back.
"""
_QUIET_SECONDS = 1.0
"""How long after its last request a gateway that leaves may be asked for the next one: who asks
again on the same connection, whose stream began before he could be told to go elsewhere, needs a
moment, and so does a prompt before it is a request.
"""


class GatewayService:
    """A gateway on a link.

    Attributes:
        app: the ASGI application.
        health_app: that of `gateway.health`'s port.
        gates: the bounds of both listeners.
        requests: what is alive.
        retrier: moves requests of lost workers to others.
        dispatcher: starts and cancels requests.
        faults: what breaks on the loop.
        broken: set when that cannot be lived with: end the process.
        usable: set when a pair could be given a request, for the first time.
    """

    def __init__(
        self,
        config: ProcessConfig,
        link: GatewayLink,
        tokenizer: GatewayTokenizer,
        identity: GatewayIdentity,
        factory: MetricFactory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join the parts; `identity` is the one the link announces.

        Raises:
            ConfigError: the API key file or the model's generation_config.json cannot be used.
        """
        self._link = link
        self._clock = clock
        self._worst_lag_seconds = 0.0
        self._listening = ListeningClock(
            clock(), most_seconds=_STOOD_STILL_SECONDS, catch_up_seconds=_CATCH_UP_SECONDS
        )
        self._is_closed = False
        self._idle = asyncio.Event()
        self.broken = asyncio.Event()
        self.usable = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._settle_seconds = config.gateway.settle_seconds
        self._drain_seconds = config.gateway.drain_seconds
        self._metrics = GatewayMetrics(factory)
        workers = self.workers = LinkedWorkers(
            config.served_name,
            tokenizer_hash(config),
            Pairing(across_revisions=config.gateway.pair_across_revisions),
            clock,
            chat_template_hash=chat_template_hash(config),
            help_rule=_help_rule(config.gateway.decode_prompts),
        )
        self._tracing = build_tracing(config.tracing, "baton-gateway", config.worker_id)
        self.requests = LiveRequests(link, workers, self._metrics, self._tracing)
        parts = ServingParts(
            link, workers, self.requests, self._metrics, clock, self._listened_seconds
        )
        self.retrier = Retrier(
            parts,
            max_retries=config.gateway.max_retries,
            max_wait_seconds=config.gateway.max_wait_seconds,
            reserve_seconds=config.gateway.request_timeout_seconds,
        )
        self.dispatcher = Dispatcher(
            parts, self.retrier, tokenizer.vocabulary, _limits(config), identity
        )
        self.applier = Applier(parts, self.retrier)
        http, inner = HttpMetrics(factory), config.gateway.health or config.gateway.http
        self.faults = http.faults
        self.gates = (
            Gate("api", config.gateway.http.limits, http),
            Gate("health", inner.limits, http),
        )
        health = HealthParts(self.dispatcher, workers, factory.registry, self.faults)
        self.health_app = build_health_app(health)
        self.app = build_app(self._http_parts(config, tokenizer, workers, health))

    def start(self) -> None:
        """Start the link; called on the running event loop, once."""
        loop = asyncio.get_running_loop()

        def on_events(events: Sequence[GatewayLinkEvent]) -> None:
            loop.call_soon_threadsafe(self._apply, events, self._clock())

        self.faults.watch(self._on_fatal)
        self._link.start(on_events)
        self._ticker = begin("housekeeping", self._tick(), is_essential=True)

    async def drain(self) -> None:
        """Serve on until no balancer sends clients here, no request is live and none comes behind
        the last one, or time is up, or something essential broke.
        """
        self.dispatcher.is_leaving = True
        log.info("draining", extra={"requests": len(self.requests)})
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settle_seconds):
                await self.broken.wait()
        if self.broken.is_set():  # nobody would tell when the gateway is idle
            return
        self._idle.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                await self._idle.wait()

    def refuse_and_end(self) -> None:
        """Refuse new requests; end the live ones with an explicit error."""
        self.dispatcher.close()

    async def close(self) -> None:
        """Stop housekeeping and close the link."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait([self._ticker])
        self._is_closed = True  # the loop goes on beside the link's end, and events still come
        await asyncio.to_thread(self._link.close)
        await asyncio.to_thread(self._tracing.close)

    def _listened_seconds(self) -> float:
        return self._listening.at(self._clock())

    def _on_fatal(self) -> None:
        self.broken.set()
        self._idle.set()  # nobody may look after it any more

    def _apply(self, events: Sequence[GatewayLinkEvent], received: float) -> None:
        if self._is_closed:  # a link that is closed takes no answer
            return
        lag = self._clock() - received
        self._metrics.lag.observe(lag)
        self._worst_lag_seconds = max(self._worst_lag_seconds, lag)
        self.applier.apply(events)
        if not self.usable.is_set() and not self.workers.unusable_reasons():
            self.usable.set()

    async def _tick(self) -> None:
        """Report the worst lag of each interval, this timer's own included; close old gaps; end
        retries that waited in vain; notice workers that are due to be tried, and when nobody asks
        any more.

        Each turn has one time, at which the next turn's lag begins: a pause of this process,
        wherever it falls, is the lag of one turn. It is nobody's lateness: who is late is judged by
        the time in which this process listened.
        """
        before = self._clock()
        self._listening.look(before)  # nothing could be heard before
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = self._clock()
            own_lag, before = now - before - _TICK_SECONDS, now
            lag = max(own_lag, self._worst_lag_seconds, 0.0)
            self._worst_lag_seconds = 0.0
            with going_on("report_lag"):
                self._link.set_lag(lag)
            if self._listening.look(now, lag):
                told = {"seconds": lag, "stood_still_seconds": max(own_lag, 0.0)}
                log.warning("the event loop was late", extra=told)
            with going_on("expire_gaps"):
                self.applier.expire_gaps(self._listening.judged)
            with going_on("expire_retries"):
                self.retrier.expire(self._listening.judged)
            with going_on("look_at_workers"):
                self.workers.look()
            if self.dispatcher.quiet_seconds() >= _QUIET_SECONDS:
                self._idle.set()

    def _http_parts(
        self,
        config: ProcessConfig,
        tokenizer: GatewayTokenizer,
        workers: LinkedWorkers,
        health: HealthParts,
    ) -> HttpParts:
        model, dispatcher = config.served_name, self.dispatcher
        top_k, defaults = config.logprobs.max_top_k, _sampling_defaults(config)
        return HttpParts(
            model=model,
            started_unix_seconds=int(time.time()),
            tokenizer=tokenizer,
            sampling_defaults=defaults,
            intake=Intake(model, tokenizer, dispatcher.worker_limits, top_k, defaults),
            dispatcher=dispatcher,
            workers=workers,
            metrics=self._metrics,
            api_keys=read_api_keys(config.gateway.api_keys_file),
            has_playground=config.gateway.playground,
            sse_comment_seconds=config.gateway.sse_comment_seconds,
            health=None if config.gateway.health else health,
        )


def _sampling_defaults(config: ProcessConfig) -> SamplingDefaults:
    if config.gateway.generation_config == "none":
        return SamplingDefaults()
    folder = Path(config.model.path)
    defaults, others = read_defaults(folder), not_taken_over(folder)
    if defaults != SamplingDefaults():
        log.info("sampling defaults are the model's", extra=msgspec.structs.asdict(defaults))
    if others:
        log.warning("generation_config.json asks for what is not taken over", extra=others)
    return defaults


def _limits(config: ProcessConfig) -> DispatchLimits:
    gateway = config.gateway
    return DispatchLimits(
        gateway.max_outstanding_requests,
        gateway.request_timeout_seconds,
        gateway.client_queue_tokens,
        gateway.max_choices,
        gateway.max_waiting_requests,
        gateway.max_wait_seconds,
    )


def _help_rule(config: DecodePromptsConfig) -> HelpRule:
    is_asked = config.behind_tokens > 0 and config != DecodePromptsConfig()
    return HelpRule(config.behind_tokens, config.slowness, is_asked)
