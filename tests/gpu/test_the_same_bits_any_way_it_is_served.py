"""Every way to serve a request tells it the bits that it is told alone: the promise, by property.

Each subject is a model on a device. What "the same" covers is in `baton_testing.exactness`: prompt
and output logprobs, alternatives, ranks, tokens and endings of requests of every kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from baton_testing.exactness import properties
from baton_testing.exactness.said import Said, digest
from baton_testing.exactness.subjects import Subject

SHOWN = 12


def held(found: list[str]) -> None:
    """Fail with the first of what differs, which pytest would cut."""
    lines = "\n".join(found[:SHOWN])
    assert not found, f"{len(found)} requests were told something else\n{lines}"


@pytest.mark.slow
def test_a_request_is_told_the_same_in_any_batch(subject: Subject, alone: Sequence[Said]) -> None:
    held(properties.any_batch(subject, alone))


@pytest.mark.slow
def test_a_request_is_told_the_same_while_its_batch_changes(
    subject: Subject, alone: Sequence[Said]
) -> None:
    held(properties.a_batch_that_changes(subject, alone))


@pytest.mark.slow
def test_a_prompt_in_chunks_is_the_prompt_at_once(subject: Subject, alone: Sequence[Said]) -> None:
    held(properties.any_chunks(subject, alone))


@pytest.mark.slow
def test_a_chunk_that_is_launched_ahead_is_one_that_waits(
    subject: Subject, alone: Sequence[Said]
) -> None:
    held(properties.chunks_ahead(subject, alone))


@pytest.mark.slow
def test_speculative_decoding_says_what_plain_decoding_says(
    subject: Subject, alone: Sequence[Said]
) -> None:
    held(properties.any_drafts(subject, alone))


@pytest.mark.slow
def test_the_number_of_drafts_may_change_at_any_step(
    subject: Subject, alone: Sequence[Said]
) -> None:
    held(properties.drafts_that_change(subject, alone))


@pytest.mark.slow
def test_a_known_prefix_gives_the_bits_of_a_computed_one(
    subject: Subject, alone: Sequence[Said]
) -> None:
    held(properties.known_prefixes(subject, alone))


@pytest.mark.slow
def test_a_preempted_request_goes_on_exactly(subject: Subject, alone: Sequence[Said]) -> None:
    held(properties.preempted(subject, alone))


@pytest.mark.slow
def test_overlap_changes_nothing(subject: Subject, alone: Sequence[Said]) -> None:
    held(properties.overlapped(subject, alone))


@pytest.mark.slow
def test_graphs_change_nothing(subject: Subject, alone: Sequence[Said]) -> None:
    held(properties.uncaptured(subject, alone))


@pytest.mark.slow
def test_prefill_and_decode_apart_say_what_one_engine_says(
    subject: Subject, alone: Sequence[Said]
) -> None:
    held(properties.handed_over(subject, alone))


@pytest.mark.slow
def test_memory_that_nobody_has_written_is_not_read(
    subject: Subject, alone: Sequence[Said]
) -> None:
    held(properties.poisoned(subject, alone))


@pytest.mark.slow
def test_everything_at_once_changes_nothing(subject: Subject, alone: Sequence[Said]) -> None:
    held(properties.all_at_once(subject, alone))


def test_a_text_is_scored_as_it_was_sampled(subject: Subject) -> None:
    found, compared = properties.score(subject)
    held(found)
    count, tokens = subject.sizes.scored
    assert compared == count * tokens * len(subject.sizes.scored_chunks)


@pytest.mark.slow
def test_a_trainer_gets_the_bits_that_were_sampled(subject: Subject) -> None:
    if subject.loaded.team is not None:
        pytest.skip("a trainer has a whole model; a sum over ranks is another sum")
    held(properties.scored_by_a_trainer(subject))


@pytest.mark.slow
def test_a_second_engine_says_the_same(
    subject: Subject, alone: Sequence[Said], keep_digest: Any
) -> None:
    """The stamp keeps the digest, so that runs of other processes and GPUs can be held to it."""
    again = properties.alone(subject)
    held(properties.differences(again, alone, "once more"))
    keep_digest(subject.name, digest(alone))
