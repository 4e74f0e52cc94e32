"""Few shapes for many steps, fields that never overlap, and each kept token's own numbers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton_testing.numpy_device import NumpyDevice
from baton_worker.engine.backends.device.inputs import Inputs, input_fields
from baton_worker.engine.backends.device.layout import Layout
from baton_worker.engine.backends.device.program import layouts
from baton_worker.engine.backends.device.results import Results, result_fields
from baton_worker.engine.backends.device.scores import DeviceScores
from baton_worker.engine.backends.device.shapes import (
    Choice,
    StepShape,
    rules_bucket,
    sequence_bucket,
    width_bucket,
)
from baton_worker.engine.sampling.logprobs import EmittedTokens


@given(most=st.integers(1, 600))
def test_a_step_is_rounded_up_to_few_sizes_and_never_beyond_the_most(most: int) -> None:
    sizes = [sequence_bucket(count, most) for count in range(1, most + 1)]
    assert sizes == sorted(sizes)
    assert all(count <= size <= most for count, size in enumerate(sizes, 1))
    assert [sequence_bucket(size, most) for size in sizes] == sizes
    assert len(set(sizes)) <= 40


@given(n_blocks=st.integers(0, 10_000), most=st.integers(1, 10_000))
def test_tables_are_wide_enough_and_no_wider_than_a_requests(n_blocks: int, most: int) -> None:
    width = width_bucket(n_blocks, most)
    assert min(n_blocks, most) <= width <= most
    assert n_blocks <= rules_bucket(n_blocks) <= max(2 * n_blocks, 256)


shapes = st.builds(
    StepShape,
    sequences=st.integers(0, 40),
    q_len=st.integers(1, 6),
    chunks=st.lists(st.integers(1, 50), max_size=4).map(tuple),
    n_complete=st.integers(0, 4),
    width=st.integers(1, 40),
    choice=st.sampled_from(Choice),
    most_top=st.integers(-1, 20),
    n_drafts=st.integers(0, 5),
    draft_top=st.integers(-1, 20),
    n_rules=st.integers(1, 300),
    n_mtp=st.integers(0, 5),
    n_known=st.integers(1, 5),
).filter(lambda shape: shape.q_len >= shape.n_known)


@given(shape=shapes)
def test_fields_follow_each_other_without_overlap(shape: StepShape) -> None:
    inputs, flags, results = layouts(shape)
    assert inputs.stop == flags.start
    assert flags.stop == results.start
    for layout, fields in ((inputs, input_fields(shape)), (results, result_fields(shape))):
        ends = [(layout.at(name), layout.at(name) + f.n_bytes) for name, f in fields.items()]
        assert all(start % 16 == 0 for start, _ in ends)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
        assert ends[-1][1] <= layout.stop


@given(shape=shapes)
def test_what_is_filled_on_the_host_is_what_the_device_reads(shape: StepShape) -> None:
    device, layout = NumpyDevice(), Layout(input_fields(shape))
    up, buffer = device.host(layout.stop), device.empty((layout.stop,), "uint8")
    sent = Inputs(**layout.on_host(up))
    for number, field in enumerate(sent):
        field[...] = number
    device.upload(up, buffer)
    for number, tensor in enumerate(Inputs(**layout.on_device(device, buffer))):
        found = np.empty(tensor.shape, sent[number].dtype)
        device.download(tensor, found).wait()
        assert (found == number).all()


@st.composite
def emitted(draw: Any) -> tuple[list[int], list[int], list[int]]:
    """Draw how many tokens each sequence's verification emitted, how many it kept, and its k."""
    count = draw(st.integers(1, 6))
    each = [draw(st.integers(1, 4)) for _ in range(count)]
    kept = [draw(st.integers(1, n)) for n in each]
    return each, kept, [draw(st.integers(-1, 3)) for _ in range(count)]


@given(step=emitted(), data=st.data())
def test_each_kept_token_has_its_own_numbers(
    step: tuple[list[int], list[int], list[int]], data: st.DataObject
) -> None:
    each, kept, ks = step
    of_row = [(s, j) for s, n in enumerate(each) for j in range(n)]
    scored = [ks[s] >= 0 for s, _ in of_row]
    tops = [max(ks[s], 0) for s, _ in of_row]
    values = {name: np.empty(0) for name in Results._fields} | {
        "n_accepted": np.array(each) - 1,
        "row_offset": np.concatenate([[0], np.cumsum(scored)]),
        "topk_offset": np.concatenate([[0], np.cumsum(tops)]),
        "logprob": np.array([10 * s + j for s, j in of_row if ks[s] >= 0], np.float32),
        "rank": np.array([s for s, _ in of_row if ks[s] >= 0], np.int32),
        "topk_token": np.array([s for s, _ in of_row for _ in range(max(ks[s], 0))], np.int32),
        "topk_logprob": np.array(
            [10 * s + j for s, j in of_row for _ in range(max(ks[s], 0))], np.float32
        ),
    }
    tokens = np.array([[100 * s + j for j in range(4)] for s in range(len(each))], np.int32)
    whole = EmittedTokens(tokens, kept, np.zeros(len(each), np.int32), ks)
    chosen = sorted(data.draw(st.sets(st.integers(0, len(each) - 1), min_size=1)))
    scores = DeviceScores.of(Results(**values), np.arange(len(each))).select(chosen)
    columns = scores.columns(whole.select(chosen), lambda: 0.0).columns
    said = [(s, j) for s in chosen for j in range(kept[s])]
    assert columns["token"].tolist() == [100 * s + j for s, j in said]
    if all(ks[s] < 0 for s in chosen):
        assert set(columns) == {"token"}
        return
    assert columns["logprob"].tolist() == [10 * s + j for s, j in said if ks[s] >= 0]
    assert columns["rank"].tolist() == [s for s, _ in said if ks[s] >= 0]
    wanted = [10 * s + j for s, j in said for _ in range(max(ks[s], 0))]
    assert columns["topk_logprob"].tolist() == wanted
    assert len(columns["topk_token"]) == len(wanted)
