"""One choice's output: merged rows become text, tokens and logprobs, cut where a stop string says.

Pure. Owns which tokens count and which are text: a token that ends the request counts, has its
logprob, and adds no text. Knows nothing of HTTP or JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from baton_worker.gateway.output.merge import Part
from baton_worker.gateway.output.step_details import StepDetail, StepsOf
from baton_worker.gateway.output.stops import StopMatcher, StopScan
from baton_worker.gateway.text.vocabulary import Vocabulary
from baton_worker.records.columns import Finish
from baton_worker.records.scored import ScoredRow

_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}


class LogprobsMissingError(Exception):
    """A row lacks the logprob columns that its request asked for."""


PER_TOKEN = ("token_ids", "logprobs", "text_offsets", "drafts")
"""What a delta has of each token, or of none."""
PER_ALTERNATIVE = ("topk_tokens", "topk_logprobs")
"""What it has of each token's k alternatives."""


class DraftScore(NamedTuple):
    """What the draft model said of a position: its token, and k alternatives."""

    token_id: int
    logprob: float
    topk_tokens: list[int]
    topk_logprobs: list[float]


class Delta(NamedTuple):
    """What a choice gained.

    Attributes:
        choice_index: the choice.
        text: characters to append.
        token_ids: tokens to append.
        logprobs: one per token, or empty when none were asked for.
        topk_tokens, topk_logprobs: k per token, by token.
        text_offsets: characters of the output before each token, or empty when not asked for.
        finish_reason: set once, on the last delta.
        steps: the engine steps that the tokens come from, when asked for.
        drafts: when asked for, one per token; None where the draft model proposed nothing, or its
            logprob did not come.
        prompt: the prompt's tokens with their logprobs, when asked for; before all output.
    """

    choice_index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    topk_tokens: list[int]
    topk_logprobs: list[float]
    text_offsets: list[int]
    finish_reason: str | None
    steps: tuple[StepDetail, ...] = ()
    drafts: tuple[DraftScore | None, ...] = ()
    prompt: tuple[ScoredRow, ...] = ()

    def tells(self, shows_tokens: bool) -> bool:
        """Whether a client learns anything from it; see `GenerationRequest.shows_tokens`."""
        has_tokens = shows_tokens and bool(self.token_ids)
        return bool(self.text or self.finish_reason or self.prompt) or has_tokens

    def between(self, start: int, stop: int) -> Delta:
        """Return what stands beside tokens `start` to `stop`, and nothing of what does not."""
        k = len(self.topk_tokens) // len(self.token_ids)
        part: dict[str, Any] = {name: getattr(self, name)[start:stop] for name in PER_TOKEN}
        for name in PER_ALTERNATIVE:
            part[name] = getattr(self, name)[start * k : stop * k]
        return self._replace(text="", steps=(), prompt=(), **part)


_new = tuple.__new__
"""Makes one of all its values, for what is made once a row; see `records.rows`."""


class SequenceOutput:
    """Turns the merged rows of one choice into deltas.

    Attributes:
        n_tokens: tokens given out.
        accepted, rejected: drafts whose tokens were given out; drafts that verification refused.
    """

    __slots__ = (
        "_characters",
        "_detokeniser",
        "_index",
        "_k",
        "_min_tokens",
        "_nothing",
        "_steps_of",
        "_stops",
        "_want_drafts",
        "_want_offsets",
        "accepted",
        "n_tokens",
        "rejected",
    )

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        logprobs_k: int = -1,
        want_offsets: bool = False,
        want_drafts: bool = False,
        steps_of: StepsOf | None = None,
    ) -> None:
        """Begin; `logprobs_k`, `want_drafts` and `steps_of` say what deltas shall tell."""
        self._index = index
        self._detokeniser = vocabulary.detokeniser()
        self._stops = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._k = logprobs_k
        self._want_offsets = want_offsets
        self._want_drafts = want_drafts
        self._steps_of = steps_of
        self._characters = 0
        self._nothing = Delta(index, "", [], [], [], [], [], None)
        self.n_tokens = 0
        self.accepted = 0
        self.rejected = 0

    @property
    def index(self) -> int:
        """Which choice this is."""
        return self._index

    def goes_on_at(self, alone: str) -> None:
        """Note who computes what comes from now on, as `StepsOf.alone`: another attempt's."""
        if self._steps_of is not None:
            self._steps_of.alone = alone

    def push(self, parts: Sequence[Part], finish: Finish) -> Delta:
        """Return what these rows add; `finish` is how the worker ended the request, or NONE.

        A delta whose `finish_reason` is set although `finish` is NONE was ended by a stop string:
        the tokens after it are not in the delta.

        Raises:
            LogprobsMissingError: a row has other logprob columns than the request asked for.
        """
        if len(parts) == 1:  # what nearly every row adds
            ends = finish is Finish.STOP and parts[0].row.finish is Finish.STOP
            delta = self._deliver(parts[0], ends=ends)
        else:
            delta = self._deliver_all(parts, finish)
        if delta.finish_reason:
            return delta
        if finish in _REASONS:
            tail, stopped = self._flush(n_ending=int(finish is Finish.STOP))
            reason = "stop" if stopped else _REASONS[finish]
            return delta._replace(text=delta.text + tail, finish_reason=reason)
        return delta

    def _deliver_all(self, parts: Sequence[Part], finish: Finish) -> Delta:
        deltas = []
        for part in parts:
            ends = finish is Finish.STOP and part.row.finish is Finish.STOP
            deltas.append(self._deliver(part, ends=ends))
            if deltas[-1].finish_reason:
                break
        return joined(deltas or [self._nothing])

    def tell_prompt(self, told: tuple[ScoredRow, ...], prompt: Sequence[int], k: int) -> Delta:
        """Return the delta that tells the prompt's logprobs.

        Raises:
            LogprobsMissingError: they are of another prompt, or have fewer alternatives.
        """
        tokens = [token for row in told for token in row.tokens]
        if tokens != list(prompt[1:]) or any(
            row.width <= k or len(row.logprobs) < len(row.tokens) for row in told
        ):
            raise LogprobsMissingError(
                f"the logprobs of {len(tokens)} prompt tokens came, not of {len(prompt) - 1} with"
                f" {k} alternatives"
            )
        return self._nothing._replace(prompt=told)

    def _deliver(self, part: Part, *, ends: bool) -> Delta:
        row, skip = part
        tokens = row.tokens[skip:] if skip else row.tokens
        textual = tokens[:-1] if ends else tokens
        offsets: list[int] = []
        if self._stops is None and (not self._want_offsets or len(tokens) == 1):
            text, used, reason = self._detokeniser.feed(textual), len(tokens), None
            if self._want_offsets:
                offsets = [self._characters]
                self._characters += len(text)
        else:
            text, used, reason, offsets = self._feed_each(textual, ends=ends)
            if not self._want_offsets:
                offsets = []
        self._count(part, used)
        if used < len(tokens):
            tokens = tokens[:used]
        told: tuple[list[float], list[int], list[float]] = ([], [], [])
        if self._k < 0:
            offsets = []
        else:
            told = self._logprobs(part, used)
        delta = _new(Delta, (self._index, text, tokens, *told, offsets, reason, (), (), ()))
        if self._want_drafts:
            delta = delta._replace(drafts=tuple(_draft_scores(part, used)))
        if self._steps_of is None:
            return delta
        return delta._replace(steps=(self._steps_of.detail(part, used),))

    def _feed_each(
        self, tokens: list[int], *, ends: bool
    ) -> tuple[str, int, str | None, list[int]]:
        """Feed token by token; return the text, tokens used, a finish reason, and offsets."""
        text, offsets = "", list[int]()
        for used, token in enumerate(tokens, 1):
            offsets.append(self._characters)
            piece = self._detokeniser.feed((token,))
            self._characters += len(piece)
            if self._stops is None:
                text += piece
                continue
            scan = self._stops.feed(piece, may_end=self.n_tokens + used > self._min_tokens)
            text += scan.text
            if scan.stopped:
                return text, used, "stop", offsets
        if ends:
            offsets.append(self._characters)
        return text, len(tokens) + ends, None, offsets

    def _flush(self, n_ending: int) -> StopScan:
        """Return what was held back, up to a stop string that the unfinished character completes;
        the last `n_ending` tokens are none of text.
        """
        tail = self._detokeniser.flush()
        if self._stops is None:
            return StopScan(tail, False)
        if self.n_tokens - n_ending <= self._min_tokens:
            return StopScan(self._stops.flush() + tail, False)
        scan = self._stops.feed(tail)
        return scan if scan.stopped else StopScan(scan.text + self._stops.flush(), False)

    def _logprobs(self, part: Part, used: int) -> tuple[list[float], list[int], list[float]]:
        row, skip = part
        k = row.width - 1
        if k != self._k:
            raise LogprobsMissingError(
                f"position {row.position} came with {row.width} logprob columns per token, not"
                f" {self._k + 1}"
            )
        if not skip and used == len(row.tokens):
            return row.logprobs, row.topk_tokens, row.topk_logprobs
        end = skip + used
        return (
            row.logprobs[skip:end],
            row.topk_tokens[skip * k : end * k],
            row.topk_logprobs[skip * k : end * k],
        )

    def _count(self, part: Part, used: int) -> None:
        """A row's first `n_accepted` tokens are drafts; one that was cut off was not given out."""
        row, skip = part
        self.n_tokens += used
        if n_proposed := row.n_proposed:
            n_accepted = row.n_accepted
            self.rejected += n_proposed - n_accepted
            if n_accepted:
                self.accepted += min(n_accepted, skip + used) - min(n_accepted, skip)


class PromptAlone(SequenceOutput):
    """A choice that wants its prompt told and no output: every token is dropped."""

    __slots__ = ()

    def push(self, parts: Sequence[Part], finish: Finish) -> Delta:
        """Return nothing, and at the end that the length, none, is reached."""
        reason = _REASONS[Finish.LENGTH] if finish in _REASONS else None
        return self._nothing._replace(finish_reason=reason)


def _draft_scores(part: Part, used: int) -> Iterator[DraftScore | None]:
    """Yield what the draft model said of each delivered position, joined by position (R28)."""
    row, skip = part
    told = row.verified_drafts
    for position in range(row.position + skip, row.position + skip + used):
        at = -1 if told is None else position - told.first
        if told is None or not 0 <= at < len(told.logprobs):
            yield None
            continue
        k = told.width - 1
        top = slice(at * k, (at + 1) * k)
        yield DraftScore(
            told.tokens[at], told.logprobs[at], told.topk_tokens[top], told.topk_logprobs[top]
        )


_TEXT, _FINISH_REASON = map(Delta._fields.index, ("text", "finish_reason"))


def joined(deltas: Sequence[Delta]) -> Delta:
    """Return consecutive deltas of one choice as one; the last one's finish reason counts."""
    parts: list[Any] = []
    for first, values in zip(deltas[0], zip(*deltas, strict=True), strict=True):
        kind = type(first)
        parts.append(kind(chain.from_iterable(values)) if kind in (list, tuple) else first)
    parts[_TEXT] = "".join([delta.text for delta in deltas])
    parts[_FINISH_REASON] = deltas[-1].finish_reason
    return Delta._make(parts)
