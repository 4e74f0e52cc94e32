"""Which two workers may be a pair, in one place, and in words where they may not.

KV means something only to the weights that made it: a pair has equal hashes and equal weights, and
is of one revision unless the configuration says that revisions may mix. Workers of a group, as a
pod with both roles is one, were put together for their KV to stay there: they pair with each other
alone. Owns this rule. Knows no load and no link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from baton_worker.messages import WorkerInfo

_EQUAL = ("model", "semantic_hash", "config_hash", "pair_group")
_SHOWN_DIGITS = 12

Kind = tuple[object, ...]
"""What makes workers interchangeable: those of a kind may pair with the same ones."""

kind_of = attrgetter("role", *_EQUAL, "model_fingerprint", "revision", "wire_min", "wire_max")
"""The kind of a `WorkerInfo`."""

_equal_facts = attrgetter(*_EQUAL)


class WeightsIdentity(NamedTuple):
    """Whose tokens and KV a worker's are; fields as in `WorkerInfo`."""

    semantic_hash: int
    model_fingerprint: str
    revision: str

    def are_those_of(self, other: WeightsIdentity) -> bool:
        """Whether one may go on with what the other began.

        A version that does not say its fingerprint is trusted within its own revision: the operator
        makes a revision of one model, and decode refuses foreign KV in any case.
        """
        if self.semantic_hash != other.semantic_hash:
            return False
        if self.model_fingerprint and other.model_fingerprint:
            return self.model_fingerprint == other.model_fingerprint
        return self.revision == other.revision


def weights_of(info: WorkerInfo) -> WeightsIdentity:
    """Return what a worker says of its weights."""
    return WeightsIdentity(info.semantic_hash, info.model_fingerprint, info.revision)


@dataclass(frozen=True, slots=True)
class Pairing:
    """The rule. `across_revisions`: workers of two revisions may pair when all else is equal."""

    across_revisions: bool = False

    def allows(self, prefill: WorkerInfo, decode: WorkerInfo) -> bool:
        """Whether decode may take what prefill hands over."""
        return next(self.differences(prefill, decode), None) is None

    def differences(self, prefill: WorkerInfo, decode: WorkerInfo) -> Iterator[str]:
        """Yield what keeps two workers apart, with both values."""
        for name in _EQUAL:
            ours, theirs = getattr(prefill, name), getattr(decode, name)
            if ours != theirs:
                yield f"{name} ({ours}, {theirs})"
        if prefill.semantic_hash == decode.semantic_hash and not weights_of(prefill).are_those_of(
            weights_of(decode)
        ):
            yield f"model_fingerprint ({_shown(prefill)}, {_shown(decode)})"
        if prefill.revision != decode.revision and not self.across_revisions:
            yield f"revision ({prefill.revision or 'none'}, {decode.revision or 'none'})"
        if prefill.wire_min > decode.wire_max or decode.wire_min > prefill.wire_max:
            yield (
                f"wire range ({prefill.wire_min}-{prefill.wire_max}, "
                f"{decode.wire_min}-{decode.wire_max})"
            )

    def partners(
        self, prefills: Iterable[WorkerInfo], decodes: Iterable[WorkerInfo]
    ) -> dict[Kind, list[Kind]]:
        """Return which kinds of decode each kind of prefill may pair with; one worker a kind is
        given. It takes no longer for kinds that nothing could make a pair of.
        """
        near: dict[tuple[object, ...], list[WorkerInfo]] = {}
        for decode in decodes:
            near.setdefault(self._bounds(decode), []).append(decode)
        return {
            kind_of(prefill): [
                kind_of(decode)
                for decode in near.get(self._bounds(prefill), ())
                if self.allows(prefill, decode)
            ]
            for prefill in prefills
        }

    def _bounds(self, info: WorkerInfo) -> tuple[object, ...]:
        """Return what must be equal of a pair."""
        return (_equal_facts(info), "" if self.across_revisions else info.revision)


def _shown(info: WorkerInfo) -> str:
    return info.model_fingerprint[:_SHOWN_DIGITS] or "not said"
