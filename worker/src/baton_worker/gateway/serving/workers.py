"""The workers that are linked, and what each has been given: the mutable side of `balance`."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import msgspec

from baton_worker.gateway.request import ModelLimits
from baton_worker.gateway.serving.assignment import choose_all
from baton_worker.gateway.serving.balance import (
    WITHIN_REVISIONS,
    Needs,
    Pair,
    WorkerLoad,
    context_tokens,
    cost_tokens,
    has_usable_pair,
    limits,
    unusable_reasons,
)
from baton_worker.gateway.serving.capacity import Tier, has_room, most_choices, tiers, to_keep
from baton_worker.gateway.serving.helping import NO_HELP, HelpRule, helper_of, is_willing
from baton_worker.gateway.serving.pairing import Pairing
from baton_worker.identity import Role
from baton_worker.messages import WorkerInfo

RETURN_SECONDS = 120.0
"""How long a worker that is gone may be on its way back: what a restart takes."""

_REMEMBERED = 256
_MAX_DIFFERENT = 4
"""Lengths in one request up to which it is compared with others."""


class LinkedWorkers:
    """Linked workers by id, for one model; `on_room` is told when they may have more room."""

    def __init__(
        self,
        model: str,
        tokenizer_hash: str = "",
        pairing: Pairing = WITHIN_REVISIONS,
        clock: Callable[[], float] = time.monotonic,
        *,
        chat_template_hash: str = "",
        help_rule: HelpRule = NO_HELP,
    ) -> None:
        """Keep out workers of another model or tokenizer.

        Args:
            model: the served name.
            tokenizer_hash: of the tokenizer that turns this gateway's tokens into text.
            pairing: which of them may be a pair.
            clock: seconds; ejected workers are tried again by it.
            chat_template_hash: of the template that turns chats into this gateway's prompts.
            help_rule: when decode computes a prompt.
        """
        self.on_room: Callable[[], None] = lambda: None
        self._clock = clock
        self._model = model
        self._tokenizer_hash = tokenizer_hash
        self._pairing = pairing
        self._turned_away: dict[str, tuple[int, str]] = {}
        self._loads: dict[str, WorkerLoad] = {}
        self._in_use: tuple[WorkerLoad, ...] = ()
        self._limits: ModelLimits | None = None
        self._contexts: list[int] = []
        self._chat_template_hash = chat_template_hash
        self._help_rule, self._may_help = help_rule, False
        self._doubted: set[str] = set()
        self._gone: OrderedDict[str, tuple[WorkerInfo, float]] = OrderedDict()

    @property
    def limits(self) -> ModelLimits | None:
        """What at least one usable pair can take, or None when there is no usable pair."""
        return self._limits

    def loads(self) -> tuple[WorkerLoad, ...]:
        """Return the linked workers that serve this model."""
        return tuple(self._loads.values())

    def unusable_reasons(self) -> list[str]:
        """Return why there is no usable pair, in words; empty when there is one."""
        return unusable_reasons(self.loads(), self._pairing)

    def epoch(self, worker_id: str) -> int | None:
        """Return the epoch of a linked worker, or None."""
        load = self._loads.get(worker_id)
        return load.epoch if load else None

    def role(self, worker_id: str) -> Role | None:
        """Return the role of a linked worker, or None."""
        load = self._loads.get(worker_id)
        return Role(load.info.role) if load else None

    def count(self, role: Role) -> int:
        """Return how many workers of a role are linked."""
        return sum(load.info.role == role for load in self._loads.values())

    def turned_away(self) -> list[str]:
        """Return why linked workers are not used, in words for `/readyz`."""
        away = [f"{worker_id} {why}" for worker_id, (_, why) in self._turned_away.items()]
        used = {load.info.worker_id for load in self._in_use}
        return away + [
            f"{worker_id} has another chat template than this gateway, and is spared while a pair "
            "has its own"
            for worker_id in self._loads
            if worker_id not in used
        ]

    def lacks_help(self) -> bool:
        """Whether there is a pair, but no decode worker that gives the help that is asked for."""
        return self._help_rule.is_asked and self._limits is not None and not self._may_help

    def up(self, worker_id: str, epoch: int, info: WorkerInfo) -> bool:
        """Enter a worker, or its changed facts. False if it is turned away."""
        reason = self._misfit(info)
        if reason:
            self._turned_away[worker_id] = (epoch, reason)
            return False
        self._turned_away.pop(worker_id, None)
        known = self._loads.get(worker_id)
        if known is not None and known.epoch == epoch:
            known.info = info
        else:
            self._loads[worker_id] = WorkerLoad(info, epoch)
            self._doubted.discard(worker_id)
            self._gone.pop(worker_id, None)
        self._count()
        return True

    def down(self, worker_id: str) -> None:
        """Remove a worker; its requests must have been released before."""
        load = self._loads.pop(worker_id, None)
        self._doubted.discard(worker_id)
        if load is not None:
            self._gone[worker_id] = load.info, self._clock()
            self._gone.move_to_end(worker_id)
            if len(self._gone) > _REMEMBERED:
                self._gone.popitem(last=False)
        self._count()

    def _count(self) -> None:
        """Take note of who is there: workers with another chat template are made for other prompts
        than this gateway's, and are the second choice.
        """
        fitting = tuple(load for load in self._loads.values() if self._is_prompted_by(load.info))
        self._in_use = fitting if has_usable_pair(fitting, self._pairing) else self.loads()
        self._limits = limits(self._in_use, self._pairing)
        self._contexts = sorted({context_tokens(load.info) for load in self._in_use})
        self._may_help = any(map(is_willing, self._in_use))
        self.on_room()

    def _is_prompted_by(self, info: WorkerInfo) -> bool:
        hashes = {info.chat_template_hash, self._chat_template_hash} - {""}
        return len(hashes) < 2

    def _misfit(self, info: WorkerInfo) -> str:
        if info.model != self._model:
            return f"serves model {info.model!r}, not {self._model!r}"
        if info.tokenizer_hash and info.tokenizer_hash != self._tokenizer_hash:
            return "has another tokenizer than this gateway"
        return ""

    def forget(self, worker_id: str, epoch: int) -> None:
        """Forget a process that was turned away, now that it is gone."""
        if self._turned_away.get(worker_id, (None, ""))[0] == epoch:
            del self._turned_away[worker_id]

    def now(self) -> float:
        """Return the time by which attempts and failures are told apart."""
        return self._clock()

    def ejected(self) -> list[str]:
        """Return which workers are ejected and why, in words for `/readyz`."""
        return [
            f"{worker_id} is ejected: {load.circuit.failures} failures in a row, the last:"
            f" {load.circuit.reason}"
            for worker_id, load in self._loads.items()
            if load.circuit.is_ejected
        ]

    def failed(
        self, worker_id: str, begun: float, reason: str, *, is_full: bool, n_rows: int = 0
    ) -> bool:
        """Note an attempt that a worker failed; True if it is ejected by that."""
        load = self._loads.get(worker_id)
        if load is None:
            return False
        self._doubted.add(worker_id)
        now = self._clock()
        return load.circuit.failed(begun, now, reason, is_full=is_full, n_rows=n_rows)

    def is_doubted(self, worker_id: str) -> bool:
        """Whether what it does well matters: it has failed, and nothing has gone well since."""
        return worker_id in self._doubted

    def worked(self, worker_id: str, begun: float, n_rows: float = math.inf) -> bool:
        """Note an attempt that goes well, as `Circuit.worked`; True if the worker is restored."""
        load = self._loads.get(worker_id)
        if load is None:
            return False
        is_restored = load.circuit.worked(begun, n_rows)
        if not (load.circuit.failures or load.circuit.excused):
            self._doubted.discard(worker_id)
        if is_restored:
            self.on_room()
        return is_restored

    def excuse(self, worker_id: str) -> bool:
        """Take back a failure that was the request's, as `Circuit.excuse`; True if that restores
        the worker.
        """
        load = self._loads.get(worker_id)
        is_restored = load is not None and load.circuit.excuse()
        if is_restored:
            self.on_room()
        return is_restored

    def look(self) -> None:
        """Notice ejected workers whose trial has become due: that is room, and no event tells it.

        Call it now and then.
        """
        self._judge(self._loads.values())

    def _judge(self, loads: Iterable[WorkerLoad]) -> None:
        """Find out who of them is ejected now. Whoever asks may be the first to see a trial due,
        even between two questions about one request, so that each tells of it.
        """
        now, is_due = self._clock(), False
        for load in loads:
            was_ejected, load.is_ejected = load.is_ejected, not load.circuit.admits(now)
            is_due |= was_ejected and not load.is_ejected
        if is_due:
            self.on_room()

    def assign(self, needs: Needs, avoided: frozenset[str] = frozenset()) -> Pair | None:
        """Choose a pair and account the choice to it; None when no pair can take it."""
        pairs = self.assign_all([needs], avoided)
        return pairs[0] if pairs else None

    def assign_all(
        self,
        needs: Sequence[Needs],
        avoided: frozenset[str] = frozenset(),
        kept: frozenset[str] = frozenset(),
    ) -> list[Pair] | None:
        """Choose a pair for each choice of one request, which tries an ejected worker that is due
        as a whole; None when not all of them can be taken. `kept`: workers whose room is kept for
        others, as `to_keep` says.

        One for which there is a pair may be decode's alone (`helping`); not one of several choices,
        which get their workers all at once. A line counts a prompt for each choice: a worker that
        is given them together computes it for each, for none has computed it for the others yet.
        """
        loads, now = self._usable(avoided), self._clock()
        pairs = choose_all(loads, needs, self._pairing, kept)
        if pairs is None:
            return None
        if self._may_help and len(needs) == 1:
            helper = helper_of(loads, needs[0], self._help_rule, self._pairing, kept)
            pairs = pairs if helper is None else [Pair(helper, None)]
        for pair, one in zip(pairs, needs, strict=True):
            pair.prefill.line_tokens += one.prompt_tokens
            for load in filter(None, pair):
                load.circuit.given(now)
                load.outstanding_tokens += cost_tokens(load.info, one)
                load.outstanding_requests += 1
                load.prompt_tokens += one.prompt_tokens
                load.dispatched += 1
        return pairs

    def _usable(self, avoided: frozenset[str] = frozenset()) -> list[WorkerLoad]:
        """Return the workers in use, knowing of each whether it is ejected now."""
        loads = [load for load in self._in_use if load.info.worker_id not in avoided]
        self._judge(loads)
        return loads

    def unassign(self, pair: Pair, needs: Needs) -> None:
        """Undo `assign` for a choice that is not sent: who waits for room has no more of it."""
        pair.prefill.line_tokens -= needs.prompt_tokens
        for load in filter(None, pair):
            load.circuit.not_given()
            load.dispatched -= 1
            self._take_off(load, needs)

    def most_choices(self, needs: Needs, avoided: frozenset[str] = frozenset()) -> int:
        """Return how many such choices the workers could have at once if they had nothing else."""
        loads = [load for load in self._in_use if load.info.worker_id not in avoided]
        return most_choices(loads, needs, self._pairing)

    def too_many(self, needs: Sequence[Needs]) -> Tier | None:
        """Return what of a request there could never be room for at once; None when there could be
        for all.
        """
        return _scarce(tiers(self._in_use, needs, self._pairing))

    def may_have_room(self, needs: Sequence[Needs]) -> bool:
        """Whether there could be room for a request at once if workers that drain, and those that
        went a moment ago, were back.
        """
        since = self._clock() - RETURN_SECONDS
        infos = [load.info for load in self._in_use]
        infos += [info for info, at in self._gone.values() if at >= since]
        back = [WorkerLoad(msgspec.structs.replace(info, draining=False), 0) for info in infos]
        return _scarce(tiers(back, needs, self._pairing)) is None

    def are_usable(self, needs: Sequence[Needs]) -> bool:
        """Whether workers could have all choices of a request without those ejected now."""
        found = tiers(self._usable(), needs, self._pairing, spares_ejected=True)
        return _scarce(found) is None

    def kind_of(self, needs: Mapping[Needs, int]) -> Hashable:
        """Return what is equal of requests that the same workers have room for, or lack it: as many
        choices for each of them. `needs` are counted; too many different ones have no equals.
        """
        if len(needs) > _MAX_DIFFERENT:
            return id(needs)
        counts: Counter[tuple[object, ...]] = Counter()
        for one, n in needs.items():
            n_too_small = bisect_left(self._contexts, one.tokens)
            counts[n_too_small, one.logprobs_k, one.features] += n
        return frozenset(counts.items())

    def to_keep(self, needs: Sequence[Needs]) -> frozenset[str]:
        """Return the workers whose room is to be kept for a request that waits for it."""
        return to_keep(self._usable(), needs)

    def has_room(self, kept: frozenset[str]) -> bool:
        """Whether any request may have room at workers that are not in `kept`."""
        return has_room(self._usable(), kept, self._pairing)

    def missing_features(self, needs: Needs) -> list[str]:
        """Return which of the needed features no linked worker has."""
        known = {feature for load in self._loads.values() for feature in load.info.features}
        return [feature for feature in needs.features if feature not in known]

    def release(self, worker_id: str, needs: Needs) -> None:
        """Take a request off a worker's account."""
        load = self._loads.get(worker_id)
        if load is not None:
            self._take_off(load, needs)
            self.on_room()

    def prompt_computed(self, worker_id: str, needs: Needs) -> None:
        """Take a prompt out of the line of the worker that was to compute it: its first token has
        come, or it has ended.
        """
        load = self._loads.get(worker_id)
        if load is not None:
            load.line_tokens -= needs.prompt_tokens

    def _take_off(self, load: WorkerLoad, needs: Needs) -> None:
        load.outstanding_tokens -= cost_tokens(load.info, needs)
        load.outstanding_requests -= 1
        load.prompt_tokens -= needs.prompt_tokens


def _scarce(found: Sequence[Tier]) -> Tier | None:
    """Return the first tier that there are too few places for."""
    return next((tier for tier in found if tier.most < tier.n_choices), None)
