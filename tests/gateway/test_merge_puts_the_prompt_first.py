"""A prompt's logprobs come whole before any output, whatever is lost, repeated or started again."""

from hypothesis import given
from hypothesis import strategies as st

from baton_worker.gateway.output.merge import MAX_GAP_SECONDS, Fault, RowMerge
from baton_worker.records.columns import Finish
from baton_worker.records.rows import Row
from baton_worker.records.scored import ScoredRow


def output_row(position, tokens, finish=Finish.NONE):
    return Row(1, 0, position, tokens, 0, int(finish), [], [], [], [], [])


def prompt_row(first, tokens):
    told = ScoredRow(first, tokens, 1, [-1.0] * len(tokens), [1] * len(tokens), [], [])
    return Row(1, 0, 0, [], 0, 0, [], [], [], [], [], prompt_tokens=told)


@given(st.data())
def test_any_interleaving_of_prefill_and_decode_gives_prompt_then_output(data):
    """Each worker's rows keep their order; decode's may come before, between or after."""
    length = data.draw(st.integers(2, 9))
    tokens, told, first = list(range(40, 40 + length)), [], 1
    while first < length:
        size = data.draw(st.integers(1, length - first))
        told.append(prompt_row(first, tokens[first : first + size]))
        first += size
    prefill = [*told, output_row(0, [1])]
    decode = [output_row(0, [1]), output_row(1, [2, 3]), output_row(3, [4], Finish.LENGTH)]
    order = data.draw(st.permutations([0] * len(prefill) + [1] * len(decode)))
    sources, merge, seen, ended = (iter(prefill), iter(decode)), RowMerge(0, length), [], []
    for source in order:
        merged = merge.offer(next(sources[source]), now=0.0)
        assert merged.fault is None
        seen += [("prompt", t) for row in merged.prompt for t in row.tokens]
        seen += [("out", t) for part in merged.parts for t in part.row.tokens[part.skip :]]
        ended += [merged.finish] if merged.finish else []
    expected = [("prompt", t) for t in tokens[1:]] + [("out", t) for t in (1, 2, 3, 4)]
    assert seen == expected
    assert ended == [Finish.LENGTH]
    assert merge.held_rows == 0


def test_a_prompt_that_stays_open_is_a_gap_that_expires():
    merge = RowMerge(0, 5)
    assert merge.offer(prompt_row(1, [41, 42]), 0.0).prompt == ()
    assert merge.offer(output_row(0, [1]), 1.0).held == 1
    assert not merge.gap_expired(MAX_GAP_SECONDS)
    assert merge.gap_expired(1.0 + MAX_GAP_SECONDS)


def test_a_missing_piece_is_a_fault_and_a_repeated_one_a_duplicate():
    merge = RowMerge(0, 9)
    merge.offer(prompt_row(1, [41, 42]), 0.0)
    assert merge.offer(prompt_row(1, [41, 42]), 0.0).duplicates == 1
    assert merge.offer(prompt_row(4, [44]), 0.0).fault is Fault.GAP_TIMEOUT


def test_the_last_token_makes_a_prompt_whole_and_its_output_free():
    merge = RowMerge(0, 3)
    assert merge.offer(output_row(0, [9]), 0.0).held == 1
    assert merge.offer(prompt_row(1, [41]), 0.0).prompt == ()
    assert merge.lacks_prompt
    whole = merge.offer(prompt_row(2, [42]), 0.0)
    assert [row.tokens for row in whole.prompt] == [[41], [42]]
    assert [part.row.tokens for part in whole.parts] == [[9]]
    assert not merge.lacks_prompt


def test_a_prompt_whose_first_piece_is_missing_is_a_fault():
    assert RowMerge(0, 3).offer(prompt_row(2, [42]), 0.0).fault is Fault.GAP_TIMEOUT


def test_without_a_prompt_to_tell_output_waits_for_nothing():
    assert RowMerge().offer(output_row(0, [9]), 0.0).parts
    assert RowMerge(0, 1).offer(output_row(0, [9]), 0.0).parts, "the first token has none"
    assert not RowMerge(0, 2).offer(output_row(0, [9]), 0.0).parts


def test_another_attempt_tells_a_part_again_and_a_whole_not():
    merge = RowMerge(0, 4)
    merge.offer(prompt_row(1, [41, 42]), 0.0)
    merge.begin_attempt(1)
    again = prompt_row(1, [41, 42, 43])._replace(attempt=1)
    assert [row.tokens for row in merge.offer(again, 0.0).prompt] == [[41, 42, 43]]
    merge.begin_attempt(2)
    assert not merge.lacks_prompt
    assert merge.offer(again._replace(attempt=2), 0.0).duplicates == 1
