"""Asks on the prefill side: which requests want a place at which decode worker, and what it said.

Pure state, no socket and no clock: the transport passes `now`. An ask is said as soon as there is a
connection, and again over the next one when that breaks before the place was granted; decode knows
it by its key, so it keeps its place in line. Until decode has answered at all, its silence is
bounded by a deadline; after that the ask waits as long as the connection lives.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton_worker.handoff.api import HandoffFailed, HandoffGranted
from baton_worker.handoff.frames import Answer, AnswerKind, Ask, Withdrawal
from baton_worker.handoff.offers import PROMPT_SECONDS, Address, address_of
from baton_worker.handoff.room import Wish
from baton_worker.handoff.timers import Timers
from baton_worker.identity import RequestKey
from baton_worker.messages import DecodeTarget
from baton_worker.records.columns import ErrorCode


class _Standing(enum.Enum):
    ASKING = enum.auto()
    QUEUED = enum.auto()
    GRANTED = enum.auto()
    LEAVING = enum.auto()


@dataclass(slots=True, eq=False)
class _Entry:
    key: RequestKey
    target: DecodeTarget
    address: Address
    wish: Wish
    asked_at_seconds: float
    deadline_seconds: float
    standing: _Standing = _Standing.ASKING
    was_said: bool = False
    was_cut: bool = False


class AskBook:
    """All asks of one prefill worker, and the places that it was granted."""

    def __init__(self) -> None:
        self._entries: dict[RequestKey, _Entry] = {}
        self._at: dict[Address, dict[RequestKey, _Entry]] = {}
        self._unsaid: dict[Address, dict[RequestKey, None]] = {}
        self._deadlines = Timers[RequestKey]()

    def open(
        self, target: DecodeTarget, key: RequestKey, wish: Wish, deadline_seconds: float, now: float
    ) -> None:
        """Ask for a place; it is to be said at once."""
        entry = _Entry(key, target, address_of(target), wish, now, deadline_seconds)
        self._entries[key] = entry
        self._at.setdefault(entry.address, {})[key] = entry
        self._say_later(entry, now)

    def leave(self, key: RequestKey, now: float) -> None:
        """The request is over before decode has it: decode is told that its place is free."""
        entry = self._entries.get(key)
        if entry is None or entry.standing is _Standing.LEAVING:
            return
        if not entry.was_said:
            self._forget(entry)
            return
        entry.standing = _Standing.LEAVING
        self._say_later(entry, now)

    def is_unanswered(self, key: RequestKey, now: float) -> bool:
        """Whether decode should have said something to an ask by now, and has not; or the
        connection broke by which it did.
        """
        entry = self._entries.get(key)
        if entry is None or entry.standing is not _Standing.ASKING:
            return False
        return entry.was_cut or now - entry.asked_at_seconds >= PROMPT_SECONDS

    def asked(self, key: RequestKey) -> tuple[DecodeTarget, Wish]:
        """Return whom an open ask is for, and what was asked."""
        entry = self._entries[key]
        return entry.target, entry.wish

    def forget(self, key: RequestKey) -> None:
        """Decode knows how the request went on: there is nothing to tell it."""
        entry = self._entries.get(key)
        if entry is not None:
            self._forget(entry)

    def unsaid_at(self) -> list[Address]:
        """Return where something is to be said."""
        return list(self._unsaid)

    def next_unsaid(self, address: Address) -> Ask | Withdrawal | None:
        """Return what to say next there; report it with `said`."""
        key = next(iter(self._unsaid.get(address, ())), None)
        if key is None:
            return None
        entry = self._entries[key]
        if entry.standing is _Standing.LEAVING:
            return Withdrawal(*key)
        return Ask(*key, *entry.wish)

    def said(self, message: Ask | Withdrawal) -> None:
        """It went out."""
        entry = self._entries[message.key]
        entry.was_said = True
        self._hush(entry)
        if entry.standing is _Standing.LEAVING:
            self._forget(entry)

    def is_for_another(self, key: RequestKey, sender: Address) -> bool:
        """Whether an answer is about an ask that somebody else than its sender was told."""
        entry = self._entries.get(key)
        return entry is not None and entry.address != sender

    def answer(self, answer: Answer, now: float) -> HandoffGranted | HandoffFailed | None:
        """Apply decode's answer; None when it ends nothing."""
        entry = self._entries.get(answer.key)
        if entry is None or entry.standing not in (_Standing.ASKING, _Standing.QUEUED):
            return None
        if answer.kind == AnswerKind.QUEUED:
            entry.standing = _Standing.QUEUED
            self._deadlines.drop(entry.key)
        elif answer.kind == AnswerKind.GRANTED:
            entry.standing = _Standing.GRANTED
            self._deadlines.drop(entry.key)
            return HandoffGranted(entry.key, now - entry.asked_at_seconds)
        elif answer.kind == AnswerKind.REFUSED:
            self._forget(entry)
            return HandoffFailed(entry.key, answer.error, answer.message, answer.is_over)
        return None

    def connection_lost(self, address: Address, now: float) -> None:
        """Ask again over the next connection: an answer may have died with this one."""
        for entry in self._at.get(address, {}).values():
            if entry.standing in (_Standing.ASKING, _Standing.QUEUED):
                entry.standing = _Standing.ASKING
                entry.was_cut = True
                self._say_later(entry, now)

    def addresses(self) -> frozenset[Address]:
        """Return where asks and granted places are."""
        return frozenset(self._at)

    def fail(self, address: Address, message: str) -> list[HandoffFailed]:
        """End all that can never be said, because the address is none."""
        entries = list(self._at.get(address, {}).values())
        for entry in entries:
            self._forget(entry)
        return [
            HandoffFailed(entry.key, ErrorCode.HANDOFF_PEER_LOST, message)
            for entry in entries
            if entry.standing is not _Standing.LEAVING
        ]

    def overdue(self, now: float) -> list[HandoffFailed]:
        """End the asks that decode has not answered in time."""
        failed = []
        for key in self._deadlines.take_due(now):
            entry = self._entries[key]
            if entry.standing is not _Standing.LEAVING:
                waited = now - entry.asked_at_seconds
                message = f"{entry.target.worker_id} has not answered for a place in {waited:.1f} s"
                failed.append(HandoffFailed(key, ErrorCode.HANDOFF_TIMEOUT, message))
            if entry.standing is _Standing.LEAVING or not entry.was_said:
                self._forget(entry)
            else:
                self.leave(key, now)
        return failed

    def next_event_at(self) -> float | None:
        """Return when a deadline passes next; None when none does."""
        return self._deadlines.next_at()

    def _say_later(self, entry: _Entry, now: float) -> None:
        self._unsaid.setdefault(entry.address, {})[entry.key] = None
        self._deadlines.set(entry.key, now + entry.deadline_seconds)

    def _hush(self, entry: _Entry) -> None:
        unsaid = self._unsaid.get(entry.address, {})
        unsaid.pop(entry.key, None)
        if not unsaid:
            self._unsaid.pop(entry.address, None)

    def _forget(self, entry: _Entry) -> None:
        self._hush(entry)
        self._deadlines.drop(entry.key)
        del self._entries[entry.key]
        at = self._at[entry.address]
        del at[entry.key]
        if not at:
            del self._at[entry.address]
