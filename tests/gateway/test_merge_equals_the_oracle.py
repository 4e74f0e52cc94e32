"""Any interleaving, repetition and replay of rows gives the one sequence, each token once."""

from hypothesis import given
from hypothesis import strategies as st

from baton_worker.gateway.output.merge import MAX_HELD_ROWS, RowMerge
from baton_worker.records.columns import FLAG_ECHO, Finish
from baton_worker.records.rows import Row


def make_row(position, tokens, finish=Finish.NONE, attempt=0, flags=0):
    return Row(1, attempt, position, list(tokens), 0, flags | finish, [], [], [], [], [])


@st.composite
def sequences(draw):
    """A sequence, and two ways of cutting it into rows that end alike."""
    tokens = draw(st.lists(st.integers(0, 500), min_size=1, max_size=30))
    finish = draw(st.sampled_from([Finish.STOP, Finish.LENGTH]))

    def cut():
        rows, at = [], 0
        while at < len(tokens):
            n = draw(st.integers(1, 6))
            ends = at + n >= len(tokens)
            rows.append(make_row(at, tokens[at : at + n], finish if ends else Finish.NONE))
            at += n
        return rows

    return tokens, finish, cut(), cut()


def deliver(rows):
    merge, delivered, finishes, faults = RowMerge(), [], [], []
    for row in rows:
        merged = merge.offer(row, now=0.0)
        for part in merged.parts:
            assert part.row.position + part.skip == len(delivered)
            delivered += part.row.tokens[part.skip :]
        if merged.finish:
            finishes.append(merged.finish)
            break
        faults += [merged.fault] if merged.fault else []
    return merge, delivered, finishes, faults


@given(sequences(), st.data())
def test_any_order_and_repetition_delivers_every_token_once(case, data):
    tokens, finish, first, second = case
    pool = first + second + data.draw(st.lists(st.sampled_from(first + second), max_size=10))
    rows = data.draw(st.permutations(pool))
    _, delivered, finishes, faults = deliver(rows)
    assert faults == []
    assert delivered == tokens
    assert finishes == [finish]


@given(sequences(), st.data())
def test_prefill_and_decode_interleave_in_any_way(case, data):
    tokens, finish, cut, _ = case
    first = make_row(0, tokens[:1])
    echo = make_row(0, tokens[:1], flags=FLAG_ECHO)
    steps = [row for row in cut if row.position + len(row.tokens) > 1] or [
        make_row(0, tokens, finish)
    ]
    decode = [echo, *steps]
    at = data.draw(st.integers(0, len(decode)))
    replayed_from = data.draw(st.integers(0, at))
    rows = [*decode[:at], first, *decode[replayed_from:]]
    _, delivered, finishes, faults = deliver(rows)
    assert faults == []
    assert delivered == tokens
    assert finishes == [finish]


@given(sequences())
def test_rows_in_reverse_wait_and_then_come_in_order(case):
    tokens, finish, cut, _ = case
    merge, delivered, finishes, faults = deliver(list(reversed(cut)))
    assert len(cut) <= MAX_HELD_ROWS
    assert (delivered, finishes, faults) == (tokens, [finish], [])
    assert merge.held_rows == 0


@given(sequences(), st.data())
def test_the_count_of_held_rows_follows_every_change(case, data):
    _, _, first, second = case
    merge, held = RowMerge(), 0
    for row in data.draw(st.permutations(first + second)):
        merged = merge.offer(row, now=0.0)
        held += merged.held
        assert held == merge.held_rows
        if merged.finish or merged.fault:
            break
