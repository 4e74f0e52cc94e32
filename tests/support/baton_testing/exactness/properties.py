"""Baton's promise, property by property: each returns where a subject breaks it, or nothing.

A property serves the same requests in another way than one at a time and compares bits: prompt and
output logprobs, alternatives, ranks, tokens, endings. `alone` is what one at a time says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from typing import Any
from unittest.mock import patch

from baton_testing.exactness.asks import Ask, serve, serve_in_pair
from baton_testing.exactness.poison import PoisonedDevice
from baton_testing.exactness.said import Said, bits, differences, shown
from baton_testing.exactness.subjects import BLOCK_SIZE, Subject
from baton_worker.engine.engine import StepEngine
from baton_worker.engine.ngram import NgramSizes
from baton_worker.engine.options import DraftSources
from baton_worker.engine.scheduling.plans import StepPlan
from baton_worker.engine.step.in_flight import AheadRunner
from baton_worker.sampling import LogprobParams

LOOKUP = DraftSources(0, NgramSizes(1, 3))

Property = Callable[[Subject, Sequence[Said]], list[str]]


def alone(subject: Subject) -> list[Said]:
    """Return what each request is told when it is the only one, its prompt taken whole."""
    with subject.engine(max_running=1) as engine:
        return serve(engine, subject.asks())


def any_batch(subject: Subject, wanted: Sequence[Said]) -> list[str]:
    """Among 1 to 256 others, all there from the beginning."""
    found: list[str] = []
    for rows in subject.sizes.batches:
        asks = subject.asks()
        repeats = -(-rows // len(asks))
        with subject.engine(max_running=rows) as engine:
            said = serve(engine, asks * repeats)
        found += differences(said, list(wanted) * repeats, f"batch of {rows}")
    return found


def a_batch_that_changes(subject: Subject, wanted: Sequence[Said]) -> list[str]:
    """Others arrive and leave while a request runs: two come before each step."""
    with subject.engine(max_running=max(subject.sizes.batches)) as engine:
        said = serve(engine, subject.asks(), arriving=2)
    return differences(said, wanted, "two arrive a step")


def any_chunks(subject: Subject, wanted: Sequence[Said]) -> list[str]:
    """Prompts are computed in pieces of any size, and several prompts share a step."""
    found: list[str] = []
    for chunk in subject.sizes.chunks:
        with subject.engine(max_running=16, prefill_tokens=chunk) as engine:
            said = serve(engine, subject.asks())
        found += differences(said, wanted, f"chunks of {chunk}")
    return found


def chunks_ahead(subject: Subject, wanted: Sequence[Said]) -> list[str]:
    """A prompt's next chunk, and who decodes beside it, is under way before the last one landed.

    With several draft layers, or a K for which there is none, they wait beside who decodes.
    """
    found: list[str] = []
    chunk, most = min(subject.sizes.chunks), max(subject.sizes.drafts)
    few = {"max_running": 3, "prefill_tokens": chunk // 2}
    for k, sizes in ((0, {"max_running": 16, "prefill_tokens": chunk}), (most, few)):
        with (
            subject.engine(n_draft=k, overlap=True, **sizes) as engine,
            _launched_ahead(engine) as ahead,
        ):
            said = serve(engine, subject.asks())
        found += differences(said, wanted, f"chunks of {sizes['prefill_tokens']} ahead, {k} drafts")
        goes_ahead = not k or len(subject.loaded.weights.mtp) == 1
        if goes_ahead and not any(plan.prefill and plan.decode for plan in ahead):
            found.append(f"{k} drafts: no chunk went ahead, so nothing was tried")
    return found


@contextmanager
def _launched_ahead(engine: StepEngine) -> Iterator[list[StepPlan]]:
    """Give a list that gets the plan of each step that is launched behind one under way."""
    runner, launched = engine._parts.runner, list[StepPlan]()
    assert engine.options.overlap, "or nothing is"
    assert isinstance(runner, AheadRunner), "an engine on a device"
    start_ahead = runner.start_ahead

    def noted(behind: Any, plan: StepPlan, n_draft: int) -> Any:
        flight = start_ahead(behind, plan, n_draft)
        if flight is not None:
            launched.append(plan)
        return flight

    with patch.object(runner, "start_ahead", noted):
        yield launched


def any_drafts(subject: Subject, wanted: Sequence[Said]) -> list[str]:
    """Any number of drafts is verified: the draft layer's, and those that are looked up."""
    found: list[str] = []
    for k in subject.sizes.drafts:
        with subject.engine(n_draft=k) as engine:
            said = serve(engine, subject.asks())
        found += differences(said, wanted, f"{k} drafts")
    with subject.engine(n_draft=max(subject.sizes.drafts), drafts=LOOKUP) as engine:
        said = serve(engine, subject.asks())
    return found + differences(said, wanted, "drafts looked up")


def drafts_that_change(subject: Subject, wanted: Sequence[Said]) -> list[str]:
    """The number of drafts changes before each step."""
    counts = cycle([5, 0, 3, 1, 4, 2])

    def change(engine: StepEngine, step: int) -> None:
        engine.set_num_speculative_tokens(next(counts))

    most = {"n_draft": 5} if subject.has_mtp else {"n_draft": 5, "drafts": LOOKUP}
    with subject.engine(**most) as engine:
        said = serve(engine, subject.asks(), each_step=change)
    return differences(said, wanted, "drafts change each step")


def known_prefixes(subject: Subject, wanted: Sequence[Said]) -> list[str]:
    """Beginnings of prompts are known: each request a second time, its KV left by another batch."""
    found: list[str] = []
    for k in (0, max(subject.sizes.drafts)):
        with subject.engine(max_running=9, n_draft=k, prefix_caching=True) as engine:
            for turn in ("first", "second"):
                said = serve(engine, subject.asks())
                found += differences(said, wanted, f"{turn} time, {k} drafts")
    return found


def preempted(subject: Subject, wanted: Sequence[Said]) -> list[str]:
    """Requests lose their KV half way and are computed again.

    Long prompts, if what little they grow by takes more than is free; short ones with much output
    for certain, of which a few are more than fit.
    """
    few, (prompt, output) = max(subject.sizes.asks // 3, 8), (6, 4)
    if subject.sizes.tokens < BLOCK_SIZE:
        prompt = output = 2  # small, and each such subject preempts some
    short = subject.tried(asks=few, longest=prompt * BLOCK_SIZE, tokens=output * BLOCK_SIZE)
    tried = [(short, alone(short))]
    if 2 * subject.sizes.tokens > BLOCK_SIZE:  # of whom grow by less, none is preempted
        tried.append((subject, list(wanted)))
    found: list[str] = []
    preemptions: list[int] = []
    for some, alone_said in tried:
        for k in (0, max(subject.sizes.drafts)):
            options = some.options(max_running=12)
            a_request = -(-options.max_model_len // options.block_size)
            preemptions.clear()
            with some.engine(max_running=12, n_draft=k, n_blocks=a_request + 2) as engine:
                said = serve(engine, some.asks(), counted=preemptions)
            found += differences(said, alone_said, f"few blocks, {k} drafts")
            if some is short and not sum(preemptions):
                found.append(f"{k} drafts: nothing was preempted, so nothing was tried")
    return found


def overlapped(subject: Subject, wanted: Sequence[Said]) -> list[str]:
    """The next step is under way while a step's output is made; drafts are the draft layer's, or
    looked up and fed where a step waits for them.
    """
    found: list[str] = []
    most = max(subject.sizes.drafts)
    looked_up = {"n_draft": most, "drafts": LOOKUP}
    for drafts, what in (
        ({"n_draft": 0}, "0 drafts"),
        ({"n_draft": most}, f"{most} drafts"),
        (looked_up, "drafts looked up"),
    ):
        with subject.engine(max_running=24, overlap=True, **drafts) as engine:
            said = serve(engine, subject.asks(), arriving=3)
        found += differences(said, wanted, f"overlap, {what}")
    return found


def uncaptured(subject: Subject, wanted: Sequence[Said]) -> list[str]:
    """Nothing is captured as a graph: every kernel of every step is launched by itself."""
    eager = subject.uncaptured()
    found: list[str] = []
    for k in (0, max(subject.sizes.drafts)):
        with eager.engine(max_running=20, n_draft=k) as engine:
            said = serve(engine, subject.asks(), arriving=5)
        found += differences(said, wanted, f"without graphs, {k} drafts")
    return found


def handed_over(subject: Subject, wanted: Sequence[Said]) -> list[str]:
    """One engine computes the prompt, another goes on with its KV."""
    found: list[str] = []
    for k, overlap in ((0, False), (max(subject.sizes.drafts), True)):
        chunk = min(subject.sizes.chunks)
        with (
            subject.engine(
                max_running=8, n_draft=k, prefill_tokens=chunk, overlap=overlap
            ) as prefill,
            subject.engine(max_running=32, n_draft=k, overlap=overlap) as decode,
        ):
            said = serve_in_pair(prefill, decode, subject.asks())
        found += differences(said, wanted, f"handed over, {k} drafts")
    return found


def poisoned(subject: Subject, wanted: Sequence[Said]) -> list[str]:
    """Every block that nobody has, and all working memory, holds NaN before each step.

    So do blocks that a request gets: those behind its last position, or of who was dropped.
    """
    found: list[str] = []
    for k, overlap in ((0, False), (max(subject.sizes.drafts), True)):
        device = PoisonedDevice(subject.loaded.device)
        nan = subject.over_device(device)
        chunk = min(subject.sizes.chunks)
        with nan.engine(max_running=12, n_draft=k, overlap=overlap, prefill_tokens=chunk) as engine:
            device.fill_pool(engine)
            said = serve(engine, subject.asks(), arriving=3, each_step=device.between_steps)
        found += differences(said, wanted, f"memory of NaN, {k} drafts")
    return found


def all_at_once(subject: Subject, wanted: Sequence[Said]) -> list[str]:
    """Batch, chunks, drafts, cache, few blocks and overlap together."""
    options = subject.options(max_running=24)
    a_request = -(-options.max_model_len // options.block_size)
    with subject.engine(
        max_running=24,
        n_draft=3,
        prefill_tokens=min(subject.sizes.chunks) + 7,
        prefix_caching=True,
        overlap=True,
        n_blocks=3 * a_request,
    ) as engine:
        said = serve(engine, subject.asks(), arriving=2)
    return differences(said, wanted, "all at once")


def scored_as_sampled(subject: Subject, wanted: Sequence[Said]) -> list[str]:
    """The logprobs of sampled tokens are those that the same text has as a prompt."""
    return score(subject)[0]


def score(subject: Subject) -> tuple[list[str], int]:
    """Return where a text is scored otherwise than it was sampled, and the tokens compared."""
    count, tokens = subject.sizes.scored
    top = 2
    raw = {"logprobs_k": top, "logprobs": LogprobParams()}
    asks = [replace(ask, tokens=tokens, **raw) for ask in subject.asks(count, seed=7)]
    length = subject.sizes.longest + tokens + 8
    sizes = {"max_model_len": min(subject.max_model_len, length)}
    with subject.engine(max_running=64, n_draft=3, overlap=True, **sizes) as engine:
        said = serve(engine, asks)
    texts = [
        Ask(ask.prompt + told.tokens, 1, {"temperature": 0.0}, 0, LogprobParams(prompt_k=top))
        for ask, told in zip(asks, said, strict=True)
    ]
    found: list[str] = []
    compared = 0
    for chunk in subject.sizes.scored_chunks:
        with subject.engine(max_running=16, prefill_tokens=chunk, **sizes) as engine:
            scored = serve(engine, texts)
        for number, (ask, told, text) in enumerate(zip(asks, said, scored, strict=True)):
            columns = zip(told.tokens, told.logprobs, told.ranks, told.topk, strict=True)
            sampled = tuple((int(t), b, r, top) for t, b, r, top in columns)
            prompt = text.prompt[len(ask.prompt) - 1 :]
            compared += len(prompt)
            where = f"scored in chunks of {chunk}, request {number}"
            found += _first_unequal(prompt, sampled, where)
    return found, compared


def scored_by_a_trainer(subject: Subject) -> list[str]:
    """`TextScorer`, over the same weights and no engine, gives sampled tokens their logprobs."""
    from baton_worker.engine.backends.device.scorer import TextScorer

    top = 2
    raw = {"logprobs_k": top, "logprobs": LogprobParams()}
    asks = [replace(ask, **raw) for ask in subject.asks(seed=8)]
    with subject.engine(max_running=24, n_draft=3, overlap=True) as engine:
        said = serve(engine, asks)
    longest = subject.sizes.longest + subject.sizes.tokens
    found: list[str] = []
    for at_once in (min(subject.sizes.chunks) + 3, longest):
        scorer = TextScorer(subject.loaded, longest, at_once, top)
        for number, (ask, told) in enumerate(zip(asks, said, strict=True)):
            columns = scorer.score(ask.prompt + told.tokens, top)
            start = len(ask.prompt) - 1
            got = tuple(map(bits, columns.logprob[start:].tolist()))
            tops = tuple(map(bits, columns.topk_logprob[top * start :].tolist()))
            wanted = tuple(b for row in told.topk for _, b in row)
            where = f"scored {at_once} at once, request {number}"
            found += _first_unequal(got, told.logprobs, where)
            found += _first_unequal(tops, wanted, where)
            found += _first_unequal(columns.rank[start:].tolist(), told.ranks, where)
    return found


def _first_unequal(scored: Sequence[object], sampled: Sequence[object], where: str) -> list[str]:
    if len(scored) != len(sampled):
        return [f"{where}: {len(scored)} tokens scored, {len(sampled)} sampled"]
    for place, (a, b) in enumerate(zip(scored, sampled, strict=True)):
        if a != b:
            return [f"{where}, token {place}: {shown(a)}, sampled {shown(b)}"]
    return []


PROPERTIES: Mapping[str, Property] = {
    "any batch": any_batch,
    "a batch that changes": a_batch_that_changes,
    "any chunks": any_chunks,
    "chunks ahead": chunks_ahead,
    "any drafts": any_drafts,
    "drafts that change": drafts_that_change,
    "known prefixes": known_prefixes,
    "preempted": preempted,
    "overlapped": overlapped,
    "uncaptured": uncaptured,
    "handed over": handed_over,
    "poisoned": poisoned,
    "all at once": all_at_once,
    "scored as sampled": scored_as_sampled,
}
"""By what they are called in the table of docs/exactness.md."""


def broken(subject: Subject, names: Sequence[str] = tuple(PROPERTIES)) -> dict[str, list[str]]:
    """Return the properties that a subject breaks, each with what differs."""
    wanted = alone(subject)
    found = {name: PROPERTIES[name](subject, wanted) for name in names}
    return {name: lines for name, lines in found.items() if lines}
