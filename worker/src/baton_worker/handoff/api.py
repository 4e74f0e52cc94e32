"""The KV transport's contract with the roles: offers on one side, arrivals on the other.

Promise: an ask ends in Granted or Failed, an offer in exactly one of Delivered or Failed, unless it
is cancelled. Delivered means that decode has copied the KV into its own pool; until then the
offering engine keeps its blocks. The same offer may arrive more than once (a lost connection is
answered by sending again), so receivers deduplicate by (handle, attempt). Methods are thread-safe
and return at once; events come on the transport's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton_worker.engine.api import Handoff, KvFilled
from baton_worker.handoff.room import Wish
from baton_worker.identity import RequestKey
from baton_worker.messages import DecodeTarget
from baton_worker.records.columns import ErrorCode


@dataclass(frozen=True, slots=True)
class HandoffGranted:
    """Decode keeps a place for the request, `seconds` after it was asked: prefill may begin.

    `kv_stays`: decode will pull its KV out of this process's pool.
    """

    key: RequestKey
    seconds: float
    kv_stays: bool = False


@dataclass(frozen=True, slots=True)
class HandoffDelivered:
    """Decode owns the KV now: the offering side may free its blocks.

    `seconds` times the whole exchange; `transfer_seconds` its first part, until decode said that
    the KV had arrived. The rest is decode's wait for a step and the copy into its pool: all of it
    for `pulled_blocks` that the worker `decode` read out of this process's pool.
    """

    key: RequestKey
    seconds: float
    sent_bytes: int
    transfer_seconds: float
    pulled_blocks: int = 0
    decode: str = ""


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """Decode refused a place or an offer, or was silent until the deadline.

    `is_over`: decode heard first that the request is aborted, as of a client that left.
    """

    key: RequestKey
    code: ErrorCode
    message: str
    is_over: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class HandoffArrived:
    """A prefill worker offers a request; answer with `acknowledge` or `refuse`."""

    handoff: Handoff
    received_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class HandoffFilled:
    """A prefill worker computes a prompt of `n_tokens`, and this much of its KV can be pulled."""

    filled: KvFilled
    n_tokens: int


@dataclass(frozen=True, slots=True)
class HandoffWithdrawn:
    """Of a request that was told as filled no offer will be taken."""

    key: RequestKey


HandoffEvent = (
    HandoffGranted
    | HandoffDelivered
    | HandoffFailed
    | HandoffArrived
    | HandoffFilled
    | HandoffWithdrawn
)


class KvTransport(Protocol):
    """Both ends of KV transfer in one process (a mixed worker uses neither)."""

    @property
    def endpoint(self) -> str:
        """Where this process takes KV: what DecodeTarget.kv_endpoint must say."""

    def start(self, on_event: Callable[[HandoffEvent], None]) -> None:
        """Bind and serve; `on_event` runs on the transport's thread and must not block."""

    def ask(
        self, target: DecodeTarget, key: RequestKey, wish: Wish, deadline_seconds: float
    ) -> None:
        """Ask for a place at a decode worker that has the feature HANDOFF_PLACES."""

    @property
    def has_places(self) -> bool:
        """Whether this process gives places, so that a prompt that it computes itself needs one."""

    def ask_here(self, key: RequestKey, wish: Wish) -> None:
        """Ask this process, which `has_places`, for one of its own: it ends as `ask` does."""

    def tell_filled(self, target: DecodeTarget, filled: KvFilled) -> None:
        """Tell decode what it can pull of a prompt that is still computed.

        It has no outcome and may be lost: the offer tells all of it again.
        """

    def offer(self, target: DecodeTarget, handoff: Handoff, deadline_seconds: float) -> None:
        """Send a handoff; its arrays stay untouched until the outcome event.

        The deadline bounds decode's silence, not the time that a slow connection takes, and ends
        when decode has received all: then its own queue's bound holds.
        """

    def cancel(self, key: RequestKey) -> None:
        """Forget an offer without an event (the request ended otherwise).

        Only an answer or a deadline that came before the call may still make one.
        """

    def leave(self, key: RequestKey, *, code: ErrorCode | None = ErrorCode.HANDOFF_REFUSED) -> None:
        """The request has left this process: a place that was asked or kept for it is free.

        `code`: as what who asks for it later is refused; None: nobody waits for it any more.
        """

    def acknowledge(self, key: RequestKey) -> None:
        """Tell the sender that the KV sits in this process's pool."""

    def refuse(self, key: RequestKey, code: ErrorCode | None, message: str) -> None:
        """Tell the sender that this process will not take it; without a code: it was aborted."""

    def close(self) -> None:
        """Close the sockets and end the thread; open offers get no event."""
