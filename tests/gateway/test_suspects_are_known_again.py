"""A request that ended as suspect is known when it is sent again, for a while."""

from __future__ import annotations

from baton_worker.gateway.request import Endpoint, GenerationRequest
from baton_worker.gateway.serving.suspects import MAX_REMEMBERED, REMEMBERED_SECONDS, Suspects
from baton_worker.sampling import RequestParams, SamplingParams


def wanted(tokens, seed=1, **changes):
    sampling = SamplingParams(max_tokens=4, seed=seed, **changes)
    return GenerationRequest(
        Endpoint.COMPLETION, (tokens,), 1, RequestParams(sampling=sampling), (), False, False, False
    )


def test_suspects_are_forgotten_after_a_while_and_never_too_many():
    known = Suspects()
    known.condemn(wanted((1, 2), seed=1), 0, 0.0)
    assert known.verdicts(wanted((1, 2), seed=2), REMEMBERED_SECONDS - 1) == 1
    assert known.verdicts(wanted((1, 2)), REMEMBERED_SECONDS) == 0
    assert known.verdicts(wanted((2, 1)), 0.0) == 0
    assert known.verdicts(wanted((1, 2), min_p=0.5), 0.0) == 0
    known.condemn(wanted((1, 2)), 0, 1.0)
    assert known.verdicts(wanted((1, 2)), 1.0) == 1, "who knew of no verdict stood beside the first"
    known.condemn(wanted((1, 2)), 1, 1.0)
    assert known.verdicts(wanted((1, 2)), 1.0) == 2
    known.condemn(wanted((1, 2)), 0, 1.0)
    assert known.verdicts(wanted((1, 2)), 1.0) == 2
    for n in range(MAX_REMEMBERED):
        known.condemn(wanted((3, n)), 0, 1.0)
    assert known.verdicts(wanted((1, 2)), 1.0) == 0
    assert known.verdicts(wanted((3, 0)), 1.0) == 1


def test_a_thousand_suspects_are_remembered_for_ten_minutes():
    assert (MAX_REMEMBERED, REMEMBERED_SECONDS) == (1024, 600.0)
    known = Suspects()
    assert known.n_condemned == 0
    for n in range(MAX_REMEMBERED):
        known.condemn(wanted((3, n)), 0, 0.0)
    assert known.verdicts(wanted((3, 0)), 0.0) == 1
    known.condemn(wanted((3, 1)), 0, 0.0)
    assert known.verdicts(wanted((3, 0)), 0.0) == 1, "one known already takes no other's place"
    known.condemn(wanted((4, 0)), 0, 0.0)
    assert known.n_condemned == MAX_REMEMBERED + 2
    assert [known.verdicts(wanted((3, n)), 0.0) for n in range(3)] == [0, 1, 1]


def test_a_verdict_that_was_forgotten_counts_no_more():
    known = Suspects()
    known.condemn(wanted((1, 2)), 0, 0.0)
    known.condemn(wanted((1, 2)), 1, 0.0)
    known.condemn(wanted((1, 2)), 0, REMEMBERED_SECONDS)
    assert known.verdicts(wanted((1, 2)), REMEMBERED_SECONDS) == 1
    assert known.verdicts(wanted((1, 2)), 2 * REMEMBERED_SECONDS - 1) == 1


def test_what_nobody_has_condemned_has_no_verdict_whatever_its_length():
    known = Suspects()
    assert known.verdicts(wanted((1, 2)), 0.0) == 0
    known.condemn(wanted((1, 2)), 0, 0.0)
    assert known.verdicts(wanted((1, 2, 3)), 0.0) == 0
