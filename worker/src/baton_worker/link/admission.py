"""Whom a gateway lets in: what a HELLO must say, and what another worker's life forbids. Pure.

A name, a key and a KV endpoint are a worker's as long as it lives: a newcomer that claims one of
them is turned away, and tries again. Whose connection has ended is not alive: its successor, which
a restart brings within moments, takes over at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from baton_worker.identity import Role
from baton_worker.link.curve import is_key
from baton_worker.link.endpoints import is_endpoint
from baton_worker.link.gateway_end import GatewayEnd, LinkState
from baton_worker.link.refusals import ENDPOINT_TAKEN, KEY_BOUND, NAME_TAKEN, QUARANTINED
from baton_worker.messages import WorkerInfo
from baton_worker.records.control import Hello
from baton_worker.records.layout import MAJOR

MAX_WORKERS = 4096
_REMEMBERED = 4096
_ROLES = frozenset(Role)


class Visitor(NamedTuple):
    """Who said HELLO: `info` None when that was not understood; `reason` says why it may not come
    in, "" if it may; `is_expelled`: its connection is to end.
    """

    info: WorkerInfo | None
    reason: str = ""
    detail: str = ""
    is_expelled: bool = False


class Door:
    """Judges HELLOs, and remembers which processes may not come again.

    Args:
        admit: returns why a worker with this authenticated key may not be who it says it is, or "".
    """

    def __init__(self, admit: Callable[[str, WorkerInfo], str]) -> None:
        self.admit = admit
        self._retired: OrderedDict[int, str] = OrderedDict()
        self._decoder = msgspec.msgpack.Decoder(WorkerInfo)

    def retire(self, epoch: int, reason: str) -> None:
        """Let this process not in again."""
        self._retired[epoch] = reason
        if len(self._retired) > _REMEMBERED:
            self._retired.popitem(last=False)

    def judge(
        self,
        ends: Mapping[str, GatewayEnd],
        speaker: GatewayEnd | None,
        user_id: str,
        hello: Hello,
    ) -> Visitor:
        """Return who it is that says HELLO over a connection, and whether it may come in.

        Args:
            ends: every worker by its id.
            speaker: whose connection it is so far.
            user_id: the key that authenticated it.
            hello: what was said, in bounds.
        """
        try:
            info = self._decoder.decode(hello.body)
        except msgspec.DecodeError as error:
            return Visitor(None, "hello_body", str(error), is_expelled=True)
        if speaker is not None and speaker.worker_id != info.worker_id:
            return Visitor(info, "renamed", info.worker_id, is_expelled=True)
        reason = (
            misfit(info)
            or self._retired.get(hello.epoch, "")
            or self.admit(user_id, info)
            or conflict(ends, speaker, user_id, hello, info)
        )
        return Visitor(info, reason, info.worker_id)


def misfit(info: WorkerInfo) -> str:
    """Return why a worker that says this of itself cannot be served, or ""."""
    if not info.wire_min <= MAJOR <= info.wire_max:
        return "wire_version"
    if info.role not in _ROLES:
        return "role"
    if info.kv_endpoint and not is_endpoint(info.kv_endpoint):
        return "kv_endpoint"
    if info.kv_public_key and not is_key(info.kv_public_key.encode()):
        return "kv_public_key"
    return ""


def conflict(
    ends: Mapping[str, GatewayEnd],
    speaker: GatewayEnd | None,
    user_id: str,
    hello: Hello,
    info: WorkerInfo,
) -> str:
    """Return what of a HELLO belongs to a worker that lives, or ""; see `Door.judge`."""
    holder = ends.get(info.worker_id)
    if holder is None and len(ends) >= MAX_WORKERS:
        return "too_many_workers"
    if holder is not None:
        is_same = holder.epoch == hello.epoch
        if is_same and holder.standing is LinkState.QUARANTINED:
            return QUARANTINED
        if holder.standing is LinkState.UP and holder.user_id != user_id:
            return KEY_BOUND
        if not is_same and speaker is not holder and _is_alive(holder):
            return NAME_TAKEN
    if info.kv_endpoint and any(
        other is not holder and other.info.kv_endpoint == info.kv_endpoint and _is_alive(other)
        for other in ends.values()
    ):
        return ENDPOINT_TAKEN
    return ""


def _is_alive(end: GatewayEnd) -> bool:
    """Whether a worker is up over a connection that stands, as far as is known."""
    return end.standing is LinkState.UP and not end.is_cut_off
