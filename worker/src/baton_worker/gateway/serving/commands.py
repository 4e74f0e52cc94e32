"""What workers are told to begin a request, or to go on with one that others began.

Pure but for the sending. Owns the order: decode hears first, so that its place is held before
prefill can be done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from baton_worker.gateway.errors import WORKER_LOST, ApiError, bad_request, unavailable
from baton_worker.gateway.serving.balance import Pair
from baton_worker.gateway.serving.live_requests import LiveRequest
from baton_worker.link.api import GatewayLink
from baton_worker.messages import Command, DecodeTarget, Reserve, Submit
from baton_worker.sampling import LogprobParams


class Addressed(NamedTuple):
    """A command and the worker that it is for."""

    worker_id: str
    command: Command


class Unsent(NamedTuple):
    """A command that could not be sent: to whom, and what to tell the client."""

    worker_id: str
    error: ApiError


def commands_of(live: LiveRequest, pair: Pair, reserve_seconds: float) -> list[Addressed]:
    """Return what `pair` is told about the attempt that `live` stands at."""
    handle, attempt = live.key
    params = msgspec.structs.replace(
        live.choice.params,
        logprobs=_still_wanted(live),
        output_token_ids=live.merge.delivered,
        traceparent=live.generation.traceparent,
    )
    target, commands = None, list[Addressed]()
    if pair.decode is not None:
        decode = pair.decode.info
        target = DecodeTarget(
            decode.worker_id,
            decode.kv_endpoint,
            decode.kv_public_key,
            decode.features,
            decode.kv_door,
        )
        n_prompt, n_output = live.needs.prompt_tokens, live.needs.max_tokens
        reserve = Reserve(handle, attempt, n_prompt, n_output, reserve_seconds, params.traceparent)
        commands.append(Addressed(decode.worker_id, reserve))
    submit = Submit(
        handle,
        attempt,
        decode=target,
        gateway_sent_unix_ns=time.time_ns(),
        turn=live.turn,
        **params.fields(),
    )
    return [*commands, Addressed(pair.prefill.info.worker_id, submit)]


def _still_wanted(live: LiveRequest) -> LogprobParams:
    """Return what an attempt has to tell: a prompt that was told is not told again."""
    wanted = live.choice.params.logprobs
    if live.key.attempt == 0 or live.merge.lacks_prompt:
        return wanted
    return msgspec.structs.replace(wanted, prompt_k=-1)


def send_all(link: GatewayLink, commands: Sequence[Addressed]) -> Unsent | None:
    """Send in order; return the first that could not be sent, and send nothing behind it."""
    for worker_id, command in commands:
        try:
            is_up = link.send(worker_id, command)
        except ValueError as error:
            message = f"the request is too large: {error}"
            return Unsent(worker_id, bad_request(None, message, "request_too_large"))
        if not is_up:
            return Unsent(worker_id, unavailable(f"worker {worker_id} went away", WORKER_LOST))
    return None
