"""A draft that nobody verified is never a token of the answer (R2)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton_worker.gateway.output.merge import RowMerge
from baton_worker.gateway.output.sequence import SequenceOutput
from baton_worker.gateway.text.vocabulary import Vocabulary
from baton_worker.records.columns import FLAG_FIRST_TOKEN, FLAG_HAS_DRAFT, Finish
from baton_worker.records.rows import Row

WORDS = Vocabulary({i: b"w%d " % i for i in range(20)}, frozenset())
tokens = st.lists(st.integers(0, 19), min_size=1, max_size=6)


def first_row(token: int, drafts: list[int]) -> Row:
    flags = FLAG_FIRST_TOKEN | (FLAG_HAS_DRAFT if drafts else 0)
    return Row(1, 0, 0, [token], 1, flags, [-1.0], [1], [], [], drafts)


@given(first=st.integers(0, 19), drafts=tokens, rest=tokens)
def test_an_answer_is_the_same_whatever_was_drafted(
    first: int, drafts: list[int], rest: list[int]
) -> None:
    answers = []
    for proposed in ([], drafts):
        merge, output = RowMerge(), SequenceOutput(0, WORDS, logprobs_k=0)
        end = Row(1, 0, 1, rest, 1, int(Finish.LENGTH), [-2.0] * len(rest), [1] * len(rest), [], [],
                  [], len(proposed), 0)  # fmt: skip
        deltas = []
        for row in (first_row(first, proposed), end):
            merged = merge.offer(row, now=0.0)
            deltas.append(output.push(merged.parts, merged.finish))
        assert deltas[0].token_ids == [first]
        assert [t for d in deltas for t in d.token_ids] == [first, *rest]
        answers.append(([d._asdict() for d in deltas], output.n_tokens))
    assert answers[0] == answers[1]
