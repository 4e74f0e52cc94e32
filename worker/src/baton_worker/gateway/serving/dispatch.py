"""Starts requests: admission in fair order, and the choice of workers that are put to work.

Runs on the event loop. Who waits for room, and for how long, is the matter of `admission_queue` and
`slots`; what the workers answer is `apply`'s; how requests end is `live_requests`'.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from baton_worker.gateway.errors import (
    WORKER_LOST,
    ApiError,
    bad_request,
    internal,
    left,
    suspect_again,
    unavailable,
)
from baton_worker.gateway.output.client_queue import ClientQueue, Round
from baton_worker.gateway.output.merge import RowMerge
from baton_worker.gateway.output.sequence import PromptAlone, SequenceOutput
from baton_worker.gateway.output.slices import SLICE_ENTRIES
from baton_worker.gateway.output.step_details import StepsOf
from baton_worker.gateway.request import Choice, Endpoint, GenerationRequest, ModelLimits
from baton_worker.gateway.serving.admission_queue import AdmissionQueue, Lack
from baton_worker.gateway.serving.balance import Needs, Pair
from baton_worker.gateway.serving.commands import commands_of, send_all
from baton_worker.gateway.serving.failures import MAX_HARMS, Loss
from baton_worker.gateway.serving.live_requests import Generation, LiveRequest
from baton_worker.gateway.serving.pairing import weights_of
from baton_worker.gateway.serving.parts import ServingParts
from baton_worker.gateway.serving.retry import Retrier
from baton_worker.gateway.serving.slots import Slots
from baton_worker.gateway.text.vocabulary import Vocabulary
from baton_worker.identity import GatewayIdentity, RequestKey
from baton_worker.supervision import going_on

log = logging.getLogger(__name__)

_ENTRIES_PER_COMMAND = 16
_TOKENS_PER_ENTRY = 16
"""What it costs to send a request, in the entries of `slices`."""


class DispatchLimits(NamedTuple):
    """Bounds from the gateway's configuration."""

    max_outstanding_requests: int
    request_timeout_seconds: float
    client_queue_tokens: int
    max_choices: int
    max_waiting_requests: int
    max_wait_seconds: float


class _Plan(NamedTuple):
    live: LiveRequest
    pair: Pair


class _Asked(NamedTuple):
    """A request as it is tried, again and again."""

    generation: Generation
    traceparent: str
    choices: list[Choice]
    needs: list[Needs]


class _Begun(NamedTuple):
    """A request that is accounted to workers, which have not been told yet."""

    generation: Generation
    plans: list[_Plan]


class Dispatcher:
    """Takes validated requests to workers.

    Attributes:
        is_leaving: the gateway is told to stop: it still serves, and no longer says it is ready.
    """

    def __init__(
        self,
        parts: ServingParts,
        retrier: Retrier,
        vocabulary: Vocabulary,
        limits: DispatchLimits,
        identity: GatewayIdentity,
    ) -> None:
        self._link, self._workers, self._requests, self._metrics, self._clock, _ = parts
        self._retrier = retrier
        self._vocabulary = vocabulary
        self._limits = limits
        self._identity = identity
        self._closing = False
        self._round = Round()
        self._freed_at = -math.inf
        self._n_arriving = 0
        self._turns = itertools.count(1)
        self.is_leaving = False
        self._slots = Slots[Any](limits.max_outstanding_requests, limits.max_waiting_requests)
        self._queue = AdmissionQueue[_Begun](
            self._slots, parts.metrics, limits.max_wait_seconds, parts.clock, retrier
        )
        parts.workers.on_room = self._queue.room
        parts.requests.on_end = self._freed

    @property
    def n_waiting(self) -> int:
        """Requests that wait in line for room."""
        return len(self._queue)

    def worker_limits(self) -> ModelLimits:
        """Return what the workers that are up can take.

        Raises:
            ApiError: 503 when no pair is usable, or the gateway is shutting down.
        """
        limits = self._workers.limits
        if self._closing:
            raise unavailable("the gateway is shutting down", "shutting_down")
        if limits is None:
            reasons = "; ".join(self._workers.unusable_reasons())
            raise unavailable(f"no usable workers: {reasons}", "no_usable_pair")
        return limits

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Know of a request that has yet to be read and understood before it is started."""
        self._n_arriving += 1
        try:
            yield
        finally:
            self._n_arriving -= 1
            self._freed_at = self._clock()

    def quiet_seconds(self) -> float:
        """Return for how long no request has been live, waited or been on its way in."""
        is_quiet = not (len(self._requests) or self.n_waiting or self._n_arriving)
        return self._clock() - self._freed_at if is_quiet else 0.0

    def now(self) -> float:
        """Return seconds of the steady clock that requests are timed by."""
        return self._clock()

    async def start(
        self,
        request: GenerationRequest,
        arrived: float,
        traceparent: str = "",
        request_id: str = "",
        client: str = "",
    ) -> Generation:
        """Send a request to workers; its deltas come through the generation's queue.

        Args:
            request: validated.
            arrived: when its body began to be read, by `now`.
            traceparent: the client's trace context, or "".
            request_id: what the client will know it by.
            client: with whom it shares its part of the slots.

        Raises:
            ApiError: 400 for more choices than the gateway or its workers have room for, and for
                what workers failed under before, 429 when there was no room for too long, or the
                line is full, 503 when no pair is usable.
        """
        self.worker_limits()
        bound = min(self._limits.max_choices, self._slots.most)
        if request.n_choices > bound:
            raise _too_many(request, bound)
        generation = Generation(
            request,
            ClientQueue(self._limits.client_queue_tokens, self._round),
            arrived,
            request_id=request_id,
            client=client,
        )
        self._note_verdicts(generation)
        asked = _asked(generation, traceparent)
        begin = partial(self._begin, asked)
        kind = partial(self._workers.kind_of, Counter(asked.needs))
        begun = await self._queue.begin(client, request.n_choices, begin, self._undo, kind)
        try:
            await self._send_all(begun)
        except asyncio.CancelledError:
            self._undo(begun)
            raise
        except Exception:
            error = internal("the gateway failed to send the request")
            self._requests.fail(generation, error, discard=True)
            raise
        return generation

    def _note_verdicts(self, generation: Generation) -> None:
        """Note how often such a request was found suspect; refuse it when that was too often."""
        suspects = self._retrier.suspects
        generation.verdicts = suspects.verdicts(generation.request, self._clock())
        generation.judged_at = suspects.n_condemned
        if generation.verdicts >= MAX_HARMS:
            log.warning("a suspect request is refused", extra={"request": generation.request_id})
            raise suspect_again()

    def _begin(self, asked: _Asked, kept: frozenset[str]) -> _Begun | Lack:
        """Take slots and account every choice to workers, or say why it cannot be now."""
        generation = asked.generation
        self.worker_limits()
        if generation.judged_at != self._retrier.suspects.n_condemned:  # while it was in line
            self._note_verdicts(generation)
        plans = self._plan(asked, kept)
        if isinstance(plans, Lack):
            return plans
        self._slots.take(generation.client, generation.request.n_choices)
        with going_on("tracing"):
            self._requests.trace(generation, asked.traceparent)
        for plan in plans:
            self._requests.add(plan.live)
        generation.deadline = asyncio.get_running_loop().call_later(
            self._limits.request_timeout_seconds, self._expire, generation
        )
        return _Begun(generation, plans)

    async def _send_all(self, begun: _Begun) -> None:
        """Tell the workers; the event loop has its turn between large commands."""
        generation, entries = begun.generation, 0
        for plan in begun.plans:
            if entries >= SLICE_ENTRIES:
                entries = 0
                await asyncio.sleep(0)
            if not generation.live:  # an earlier choice could not be sent, or the client left
                return
            # A worker that went meanwhile has had the choice sent elsewhere, or ended.
            if plan.live.key.handle in generation.live and not plan.live.key.attempt:
                self._send(plan)
            entries += _ENTRIES_PER_COMMAND + plan.live.needs.prompt_tokens // _TOKENS_PER_ENTRY
        if generation.live:
            self._metrics.prompt_tokens.inc(generation.request.prompt_tokens)

    def _undo(self, begun: _Begun) -> None:  # no `cancel`: the 499 that is answered counts him
        self._requests.fail(begun.generation, left("client_gone"), discard=True)

    def _freed(self, generation: Generation) -> None:
        self._freed_at = self._clock()
        self._slots.release(generation.client)
        self._queue.room()

    def cancel(self, generation: Generation, reason: str) -> None:
        """End a generation because of its client; nothing happens if it has ended."""
        if generation.live:
            self._metrics.client_aborted(reason)
            self._requests.fail(generation, left(reason), discard=True)

    def close(self) -> None:
        """Refuse new requests and end the live ones with an explicit error."""
        self._closing = True
        self._queue.close(unavailable("the gateway is shutting down", "shutting_down"))
        for generation in self._requests.generations():
            error = unavailable("the gateway is shutting down", "shutting_down")
            self._requests.fail(generation, error)

    def _plan(self, asked: _Asked, kept: frozenset[str]) -> list[_Plan] | Lack:
        """Account every choice to workers before any of them is told; those that are `kept` have
        room for others alone.
        """
        pairs = self._workers.assign_all(asked.needs, kept=kept)
        if pairs is None:
            return self._lack(asked.generation.request, asked.needs, kept)
        with contextlib.ExitStack() as undo:  # a defect must not keep what was accounted
            undo.callback(self._unassign, pairs, asked.needs)
            plans = [
                _Plan(self._live(asked.generation, *planned), planned[-1])
                for planned in zip(asked.choices, asked.needs, pairs, strict=True)
            ]
            undo.pop_all()
        return plans

    def _unassign(self, pairs: Sequence[Pair], needs: Sequence[Needs]) -> None:
        for pair, its_needs in zip(pairs, needs, strict=True):
            self._workers.unassign(pair, its_needs)

    def _lack(
        self, request: GenerationRequest, needs: Sequence[Needs], kept: frozenset[str]
    ) -> Lack:
        """Say what would make room, or refuse what nothing would.

        Raises:
            ApiError: 503 for what no workers can do that are there now, 400 for more choices than
                all could ever have, those that may be back among them.
        """
        least, most = min(needs), max(needs)  # of one request: they differ in their prompts alone
        missing = self._workers.missing_features(most)
        if missing:
            names = ", ".join(missing)
            raise unavailable(f"no linked worker can do {names}", "no_feature")
        if not self._workers.most_choices(most):
            raise unavailable("no linked workers can take this request", "no_usable_pair")
        too_many = self._workers.too_many(needs)
        if too_many is not None:
            tokens = too_many.shortest.tokens if least != most else 0
            refusal = _too_many(request, too_many.most, tokens)
            if not self._workers.may_have_room(needs):
                raise refusal
            raise unavailable(f"{refusal.message} while workers are not back", "too_few_workers")
        if not self._workers.are_usable(needs):
            return Lack()
        kept |= self._workers.to_keep(needs)
        return Lack(kept, is_for_all=not self._workers.has_room(kept))

    def _live(
        self, generation: Generation, choice: Choice, needs: Needs, pair: Pair
    ) -> LiveRequest:
        request, params = generation.request, choice.params
        kind = PromptAlone if request.scores_only else SequenceOutput
        output = kind(
            choice.choice_index,
            self._vocabulary.as_text(skip_special=request.skip_special_tokens),
            stops=request.stops,
            min_tokens=params.sampling.min_tokens,
            logprobs_k=params.logprobs_k,
            want_offsets=params.logprobs_k >= 0 and request.endpoint is Endpoint.COMPLETION,
            want_drafts=params.logprobs.draft_logprobs,
            steps_of=self._steps_of(request, pair),
        )
        return LiveRequest(
            key=RequestKey(self._identity.new_handle(), 0),
            generation=generation,
            choice=choice,
            needs=needs,
            merge=RowMerge(
                prompt_tokens=needs.prompt_tokens if params.logprobs.prompt_k >= 0 else 0
            ),
            output=output,
            holders=pair.worker_ids,
            sources=pair.worker_ids,
            weights=weights_of(pair.prefill.info),
            begun=self._workers.now(),
            turn=next(self._turns),
        )

    def _steps_of(self, request: GenerationRequest, pair: Pair) -> StepsOf | None:
        if not request.step_details:
            return None
        return StepsOf(self._vocabulary, alone=pair.alone)

    def _send(self, plan: _Plan) -> None:
        live = plan.live
        commands = commands_of(live, plan.pair, self._limits.request_timeout_seconds)
        unsent = send_all(self._link, commands)
        if unsent is None:
            return
        worker_id, error = unsent
        ended: ApiError | None = error
        if error.code == WORKER_LOST:
            ended = self._retrier.recover(live, Loss.NOT_SENT, worker_id, error)
        if ended is not None:
            log.warning("a request could not be sent", extra={"detail": ended.message})
            self._requests.fail(live.generation, ended)

    def _expire(self, generation: Generation) -> None:
        seconds = self._limits.request_timeout_seconds
        error = ApiError(504, f"the request took longer than {seconds:g} s", code="timeout")
        self._requests.fail(generation, error)


def _asked(generation: Generation, traceparent: str) -> _Asked:
    choices = list(generation.request.choices())
    needs = [
        Needs(
            len(p.prompt_token_ids),
            p.sampling.max_tokens,
            max(p.logprobs_k, p.logprobs.prompt_k),
            p.features,
        )
        for _, p in choices
    ]
    return _Asked(generation, traceparent, choices, needs)


def _too_many(request: GenerationRequest, most: int, tokens: int = 0) -> ApiError:
    """Return the answer to a request that no waiting would make room for; `tokens`: how long the
    choices are that there are too many of, where they differ.
    """
    field = "n" if len(request.prompts) == 1 else "prompt"
    which = f": of those of {tokens} tokens or more" if tokens else ":"
    return bad_request(field, f"{request.n_choices} choices at once{which} the most is {most}")
