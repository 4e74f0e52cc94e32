"""Which kernel an FP8 product gets, for the products of real models: on Hopper one for Hopper, no
larger a tile than its rows fill, and the same wherever it must not matter.

What is quickest only a GPU tells (`bench_scaled.py --ways`), and that every way on Hopper has the
same bits `test_fp8_products_for_hopper_on_the_host` and the tests on a GPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_testing import host_cuda, host_scaled_choice
from baton_testing.host_scaled_choice import HostChoice
from baton_testing.published_models import REAL

ANY = 0
TILES = {
    1: (64, 32), 2: (64, 64), 3: (128, 16), 4: (128, 32), 5: (128, 64), 6: (128, 128), 7: (64, 16),
}  # fmt: skip
"""Rows of the weight and of x, by way: `ScaledWay` in hopper_scaled.h."""
KINDS = (range(1, 3), range(3, 7), range(7, 8))
"""Ways that differ in their rows of x alone."""
RANKS = (1, 2, 4, 8)
MOST_ROWS = 4096
ROWS = (*range(1, 300), *range(300, MOST_ROWS, 61), MOST_ROWS)


class Product(NamedTuple):
    """Columns of x, columns of the output, whether it is gated; of how many experts, or 0."""

    columns: int
    outputs: int
    is_gated: bool = False
    experts: int = 0


def products_of(fields: dict[str, Any], ranks: int) -> Iterator[Product]:
    """Yield a real model's products, as a rank of so many has them."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if "kv_lora_rank" in fields:
        latent, rotated = fields["kv_lora_rank"], fields["qk_rope_head_dim"]
        queries = heads * (fields["qk_nope_head_dim"] + rotated)
        yield Product(hidden, fields["q_lora_rank"] + latent + rotated)
        yield Product(fields["q_lora_rank"], queries // ranks)
        yield Product(heads * fields["v_head_dim"] // ranks, hidden)
    else:
        size = fields.get("head_dim", hidden // heads)
        kv_heads = max(fields["num_key_value_heads"] // ranks, 1)
        yield Product(hidden, (heads // ranks + 2 * kv_heads) * size)
        yield Product(heads // ranks * size, hidden)
    yield from _mlp(hidden, fields["intermediate_size"] // ranks)
    experts = [fields[name] for name in fields if name.endswith(("num_experts", "routed_experts"))]
    if experts:
        width = fields["moe_intermediate_size"] // ranks
        yield from _mlp(hidden, width, experts[0])
        yield from _mlp(hidden, width)  # those that all tokens share


def _mlp(hidden: int, width: int, experts: int = 0) -> Iterator[Product]:
    yield Product(hidden, width, True, experts)
    yield Product(width, hidden, False, experts)


PRODUCTS = sorted({p for model in REAL.values() for r in RANKS for p in products_of(model, r)})
SOME = st.sampled_from(PRODUCTS)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> HostChoice:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    unit = host_scaled_choice.CHOICE
    return HostChoice(host_cuda.build(compiler, tmp_path_factory.mktemp("choice"), unit))


@pytest.fixture
def choice(compiled: HostChoice) -> HostChoice:
    compiled.set()
    return compiled


def test_all_ways_are_known_here(choice: HostChoice) -> None:
    assert [*choice.ways] == [ANY, *TILES]
    assert {way for kind in KINDS for way in kind} == {*TILES}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("processors", [78, 114, 132, 144])
def test_every_product_of_a_model_gets_a_kernel_for_hopper_whatever_its_rows(
    choice: HostChoice, processors: int
) -> None:
    """Those for any GPU have other bits, and a row has the same beside any others."""
    choice.set(processors=processors)
    for product in PRODUCTS:
        got = {choice.of(rows, *product).way for rows in ROWS}
        assert got <= {*TILES}, product


def test_no_tile_is_larger_than_its_rows_fill(choice: HostChoice) -> None:
    """Where a smaller one of its kind has them all, it takes less of the same."""
    for product in PRODUCTS:
        if product.experts:
            continue
        for rows in ROWS:
            way = choice.of(rows, *product).way
            kind = next((kind for kind in KINDS if way in kind), range(0))
            smaller = [w for w in kind if TILES[w][1] < TILES[way][1]]
            assert all(TILES[w][1] < rows for w in smaller), (product, rows, way)


def test_tiles_grow_with_the_rows_that_each_expert_has(choice: HostChoice) -> None:
    """Whose tiles hold its rows alone. Of other products more tiles of fewer rows may end sooner:
    as many at once as there are multiprocessors.
    """
    for product in PRODUCTS:
        if not product.experts:
            continue
        ways = [choice.of(rows, *product).way for rows in range(1, 256 * product.experts, 7)]
        x_rows = [TILES[way][1] for way in ways]
        assert x_rows == sorted(x_rows), product
        assert x_rows[-1] == 128, product


def test_thousands_of_rows_have_large_tiles(choice: HostChoice) -> None:
    """Which read the weight less often than small ones."""
    for product in PRODUCTS:
        if not product.experts:
            assert TILES[choice.of(MOST_ROWS, *product).way] in [(128, 64), (128, 128)], product


AS_CHOSEN = {
    (132, Product(4096, 6144)): {1: 7, 17: 1, 33: 4, 65: 5, 129: 6, 257: 5, 321: 6},
    (132, Product(4096, 4096)): {1: 7, 33: 1, 65: 4, 129: 5, 257: 6},
    (132, Product(2048, 5120)): {1: 7, 17: 1, 33: 3, 49: 4, 97: 5, 193: 6},
    (132, Product(4096, 12288, True)): {1: 3, 17: 4, 33: 5, 65: 6},
    (78, Product(4096, 6144)): {1: 3, 17: 4, 33: 5, 65: 6, 129: 5, 193: 6},
    (132, Product(2048, 768, True, 128)): {1: 3, 1280: 4, 3456: 5, 6784: 6},
    (132, Product(768, 2048, False, 128)): {1: 3, 1280: 4, 3456: 5, 6784: 6},
}  # fmt: skip
"""Ways by the rows from which on they are taken, of an H200 with so many multiprocessors."""


@pytest.mark.parametrize(("processors", "product"), AS_CHOSEN)
def test_a_choice_changes_only_where_it_is_said_here_too(
    choice: HostChoice, processors: int, product: Product
) -> None:
    """What decides are times of a GPU: whoever changes one sees here what else it moves."""
    choice.set(processors=processors)
    rows = range(1, 64 * product.experts + 1 if product.experts else 401)
    ways = [choice.of(count, *product).way for count in rows]
    changes = {
        n: way for n, way, last in zip(rows, ways, [None, *ways], strict=False) if way != last
    }
    assert changes == AS_CHOSEN[processors, product]


@given(product=SOME, rows=st.integers(1, MOST_ROWS))
def test_whether_rows_are_quantised_yet_changes_no_way(
    compiled: HostChoice, product: Product, rows: int
) -> None:
    compiled.set()
    before, after = (compiled.of(rows, *product, is_plain=plain) for plain in (False, True))
    assert after.way == before.way
    assert (before.n_quantised, after.n_quantised) == (0, 1)


@given(product=SOME, rows=st.integers(1, MOST_ROWS), way=st.sampled_from([ANY, *TILES]))
def test_the_way_that_is_asked_for_is_taken(
    compiled: HostChoice, product: Product, rows: int, way: int
) -> None:
    compiled.set()
    assert compiled.of(rows, *product, way=way).way == way


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 1), (10, 0), (12, 0)])
def test_other_gpus_have_the_kernels_for_any(
    choice: HostChoice, capability: tuple[int, int]
) -> None:
    choice.set(capability)
    for product in PRODUCTS:
        assert {choice.of(rows, *product).way for rows in (1, 16, 64, 1024)} == {ANY}
        with pytest.raises(RuntimeError, match="Hopper do not take"):
            choice.of(16, *product, way=1)


def test_what_the_kernels_for_hopper_do_not_take_goes_to_those_for_any_gpu(
    choice: HostChoice,
) -> None:
    choice.set(takes=False)
    for product in PRODUCTS:
        assert choice.of(64, *product).way == ANY
        with pytest.raises(RuntimeError, match="Hopper do not take"):
            choice.of(64, *product, way=7)


@pytest.mark.parametrize(("rows", "outputs"), [(0, 64), (64, 0)])
def test_a_product_without_rows_or_outputs_launches_nothing(
    choice: HostChoice, rows: int, outputs: int
) -> None:
    assert choice.of(rows, 128, outputs, is_plain=True) == (-1, 0)


@pytest.mark.parametrize(("rows", "columns"), [(1 << 30, 128), (4, 1 << 30)])
def test_sizes_beyond_those_that_are_counted_in_32_bits_are_refused(
    choice: HostChoice, rows: int, columns: int
) -> None:
    choice.of(rows, columns, 64)
    with pytest.raises(RuntimeError, match="x has too many"):
        choice.of(rows + (columns == 128), columns + (rows == 4) * 128, 64)


def test_what_tokens_share_is_made_with_their_experts_where_its_weight_is_on_vectors(
    choice: HostChoice,
) -> None:
    """Scales are read by vectors as the weight is: of both rows alike."""
    assert choice.beside(64, 16, 8) == (1, 1)
    assert choice.beside(64, 16, 8, weight_off=4) == (2, 2)
    assert choice.beside(64, 16, 8, scales_off=4) == (2, 2)


def test_of_as_many_experts_as_there_may_be_what_tokens_share_has_a_launch_of_its_own(
    choice: HostChoice,
) -> None:
    """With them it would be counted as an expert more than there is room for."""
    assert choice.beside(512, 64, 511) == (1, 1)
    assert choice.beside(512, 64, 512) == (2, 2)
