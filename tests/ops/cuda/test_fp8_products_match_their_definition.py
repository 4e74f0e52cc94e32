"""FP8 on a GPU: rows become e4m3 as PyTorch rounds, products are as defined, in any company."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from baton_ops import scaled
from baton_ops._library import library

SHAPES = [(1, 128, 64), (7, 640, 130), (8, 384, 72), (65, 1024, 256)]


def rows_of(torch: ModuleType, rows: int, columns: int, is_whole: bool) -> tuple[Any, Any]:
    values = torch.empty((rows, columns), dtype=torch.uint8, device="cuda")
    groups = 1 if is_whole else columns // 128
    return values, torch.empty((rows, groups), device="cuda")


def quantised(torch: ModuleType, x: Any, is_whole: bool) -> tuple[Any, Any]:
    out = rows_of(torch, *x.shape, is_whole)
    scaled.quantise_rows_into(x, *out)
    return out


def plain(torch: ModuleType, of: tuple[Any, Any]) -> Any:
    values, scales = of
    numbers = values.view(torch.float8_e4m3fn).double()
    return numbers * scales.double().repeat_interleave(values.shape[1] // scales.shape[1], 1)


@pytest.mark.parametrize("is_whole", [False, True], ids=["groups", "rows"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_become_e4m3_as_pytorch_rounds(torch: ModuleType, dtype: str, is_whole: bool) -> None:
    x = (torch.randn(33, 640, device="cuda") * 3).to(getattr(torch, dtype))
    values, scales = quantised(torch, x, is_whole)
    groups = x.float().unflatten(1, (scales.shape[1], -1))
    largest = groups.abs().amax(2)
    # By a tensor: PyTorch's CUDA kernels multiply by a number's reciprocal, which rounds otherwise.
    wanted = largest / torch.full_like(largest, 448.0)
    assert torch.equal(scales, wanted)
    rounded = (groups / wanted[..., None]).to(torch.float8_e4m3fn).flatten(1)
    assert torch.equal(values, rounded.view(torch.uint8))


@pytest.mark.parametrize("is_whole", [False, True], ids=["groups", "rows"])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_as_defined_and_the_same_in_any_company(
    torch: ModuleType, shape: tuple[int, int, int], is_whole: bool
) -> None:
    rows, columns, outputs = shape
    x = quantised(torch, torch.randn(rows, columns, device="cuda"), is_whole)
    weight = quantised(torch, torch.randn(outputs, columns, device="cuda"), is_whole)
    out = torch.full((rows, outputs), torch.nan, device="cuda")
    scaled.scaled_matmul_into(*x, *weight, out)
    a, b = plain(torch, x), plain(torch, weight)
    assert ((out - a @ b.T).abs() <= 1e-5 * (a.abs() @ b.abs().T)).all()
    for count in {1, min(2, rows), rows // 2 or 1}:
        few = torch.full((count, outputs), torch.nan, device="cuda")
        scaled.scaled_matmul_into(x[0][:count], x[1][:count], *weight, few)
        assert torch.equal(few, out[:count])


MODEL_SHAPES = [
    pytest.param(4096, 6144, id="Qwen3-8B's qkv"),
    pytest.param(12288, 4096, id="Qwen3-8B's down"),
    pytest.param(1408, 4096, id="11 groups"),
    pytest.param(4096, 4104, id="a last tile of 8 columns"),
    pytest.param(1000, 4104, id="rows that are no vectors"),
    pytest.param(1040, 72, id="a last group of 16"),
]
COUNTS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 129, 300, 700)


def grouped(
    torch: ModuleType,
    rows: int,
    columns: int,
    is_whole: bool,
    scale: float = 1.0,
) -> Any:
    """Return rows of e4m3 and their scales, also where 128 does not divide the columns."""
    x = torch.randn(rows, columns, device="cuda") * scale
    values = torch.full((rows, columns), 0x5A, dtype=torch.uint8, device="cuda")
    scales = torch.empty((rows, 1 if is_whole else -(-columns // 128)), device="cuda")
    scaled.quantise_rows_into(x, values, scales)
    return values, scales


def whole(torch: ModuleType, of: tuple[Any, Any], columns: int) -> Any:
    """Return in float64 what they stand for."""
    values, scales = of[0][:, :columns].contiguous(), of[1]
    each = values.shape[1] if scales.shape[1] == 1 else 128
    wide = scales.double().repeat_interleave(each, 1)[:, : values.shape[1]]
    return values.view(torch.float8_e4m3fn).double() * wide


@pytest.mark.parametrize("is_whole", [False, True], ids=["groups", "rows"])
@pytest.mark.parametrize(("columns", "outputs"), MODEL_SHAPES)
def test_a_row_has_the_same_bits_whatever_kernel_the_number_of_rows_chooses(
    torch: ModuleType, columns: int, outputs: int, is_whole: bool
) -> None:
    """Tiles of 16 and of 32 rows that split a row, and 128 rows that do not; plain and gated, at
    any place in a tile, beside NaN.
    """
    x = grouped(torch, max(COUNTS), columns, is_whole)
    weight = grouped(torch, outputs, columns, is_whole, 0.02)
    up = grouped(torch, outputs, columns, is_whole, 0.02)
    pair = tuple(torch.cat(parts) for parts in zip(weight, up, strict=True))
    for dtype in (torch.float32, torch.bfloat16):
        for run, of in (
            (scaled.scaled_matmul_into, weight),
            (scaled.scaled_gate_up_silu_into, pair),
        ):
            out = torch.full((max(COUNTS), outputs), torch.nan, device="cuda", dtype=dtype)
            run(*x, *of, out)
            assert bool(out.isfinite().all())
            for count in COUNTS:
                for start in (0, max(COUNTS) - count):
                    rows = slice(start, start + count)
                    few = torch.full_like(out[rows], torch.nan)
                    run(x[0][rows].contiguous(), x[1][rows].contiguous(), *of, few)
                    assert torch.equal(few, out[rows]), (dtype, run.__name__, count, start)
    broken = x[1].clone()
    broken[3::7] = torch.nan
    out = torch.empty((max(COUNTS), outputs), device="cuda")
    scaled.scaled_matmul_into(*x, *weight, out)
    beside = torch.empty_like(out)
    scaled.scaled_matmul_into(x[0], broken, *weight, beside)
    kept = torch.ones(max(COUNTS), dtype=torch.bool, device="cuda")
    kept[3::7] = False
    assert torch.equal(beside[kept], out[kept])
    assert bool(beside[~kept].isnan().all())


@pytest.mark.parametrize("is_whole", [False, True], ids=["groups", "rows"])
@pytest.mark.parametrize("rows", [1, 20, 700])
@pytest.mark.parametrize(("columns", "outputs"), MODEL_SHAPES)
def test_products_of_any_shape_are_as_defined(
    torch: ModuleType, columns: int, outputs: int, rows: int, is_whole: bool
) -> None:
    x = grouped(torch, rows, columns, is_whole)
    weight = grouped(torch, 2 * outputs, columns, is_whole, 0.02)
    out = torch.full((rows, 2 * outputs), torch.nan, device="cuda")
    scaled.scaled_matmul_into(*x, *weight, out)
    a, b = whole(torch, x, columns), whole(torch, weight, columns)
    off = ((out - a @ b.T).abs() / (a.abs() @ b.abs().T)).max().item()
    print(f"{rows} rows of {columns}: off by {off:.2g} of the sum of sizes")
    assert off <= 1e-5
    gated = torch.full((rows, outputs), torch.nan, device="cuda")
    scaled.scaled_gate_up_silu_into(*x, *weight, gated)
    gate, up = out.split(outputs, dim=1)
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 9, 64, 300, 2048])
def test_rows_of_experts_have_the_bits_of_a_product_with_their_experts_weight(
    torch: ModuleType, tokens: int, dtype: str
) -> None:
    """Of 130 experts, of which some have nobody and one has most: every number of rows a tile."""
    experts, hidden, width, chosen = 130, 512, 208, 4
    kind = {"device": "cuda", "dtype": getattr(torch, dtype)}
    x = grouped(torch, tokens, hidden, False)
    gate_up = grouped(torch, experts * 2 * width, hidden, False, 0.05)
    down = grouped(torch, experts * hidden, width, False, 0.05)
    choice = torch.randint(0, 3 * experts, (tokens * chosen,), device="cuda")
    choice = torch.where(choice < experts, choice, 7).sort()
    row = (choice.indices // chosen).int()
    counts = torch.bincount(choice.values, minlength=experts).cumsum(0)
    starts = torch.cat([torch.zeros(1, device="cuda"), counts]).int()
    gated = torch.full((tokens * chosen, width), torch.nan, **kind)
    scaled.scaled_expert_gate_up_silu_into(*x, row, starts, *gate_up, gated)
    middle = (
        torch.empty((tokens * chosen, width), dtype=torch.uint8, device="cuda"),
        torch.empty((tokens * chosen, 2), device="cuda"),
    )
    scaled.quantise_rows_into(gated, *middle)
    made = torch.full((tokens * chosen, hidden), torch.nan, **kind)
    scaled.scaled_expert_matmul_into(*middle, starts, *down, made)
    bounds = starts.tolist()
    for expert in range(experts):
        first, last = bounds[expert], bounds[expert + 1]
        if first == last:
            continue
        rows = row[first:last].long()
        up = [part[expert * 2 * width : (expert + 1) * 2 * width] for part in gate_up]
        wanted = torch.full((last - first, width), torch.nan, **kind)
        scaled.scaled_gate_up_silu_into(x[0][rows], x[1][rows], *up, wanted)
        assert torch.equal(gated[first:last], wanted), expert
        own = [part[expert * hidden : (expert + 1) * hidden] for part in down]
        then = torch.full((last - first, hidden), torch.nan, **kind)
        scaled.scaled_matmul_into(middle[0][first:last], middle[1][first:last], *own, then)
        assert torch.equal(made[first:last], then), expert


WAYS = range(1, 8)
"""Of ScaledWay in ops/csrc/cuda/hopper_scaled.h on Hopper; 0 is the kernels for any GPU."""
ROWS_OF_WAYS = (1, 7, 16, 33, 65, 129, 700)


@pytest.mark.parametrize("is_whole", [False, True], ids=["groups", "rows"])
@pytest.mark.parametrize(
    ("columns", "outputs"), [(4096, 6144), (1408, 4104), (1040, 72), (112, 40), (640, 136)]
)
def test_every_way_on_hopper_has_the_same_bits(
    torch: ModuleType, columns: int, outputs: int, is_whole: bool
) -> None:
    """Which are as near to the truth as bfloat16 is, to a twentieth."""
    all_rows = grouped(torch, max(ROWS_OF_WAYS), columns, is_whole)
    weight = grouped(torch, 2 * outputs, columns, is_whole, 0.02)
    half = tuple(part[:outputs] for part in weight)
    plain, gated = library().cuda_scaled_matmul_by, library().cuda_scaled_gate_up_silu_by
    for rows in ROWS_OF_WAYS:
        x = tuple(part[:rows] for part in all_rows)
        for run, of in ((plain, half), (gated, weight)):
            shape = rows, outputs
            wanted = torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)
            run(WAYS[0], *x, *of, wanted)
            assert bool(wanted.isfinite().all())
            for way in WAYS[1:]:
                out = torch.full_like(wanted, torch.nan)
                run(way, *x, *of, out)
                assert torch.equal(out, wanted), (way, rows, run.__name__)
            if run is plain:
                exact = whole(torch, x, columns) @ whole(torch, half, columns).T
                off = (wanted.double() - exact).norm() / (exact.bfloat16().double() - exact).norm()
                print(f"{rows} rows of {columns}: off by {off:.3f} of what bfloat16 is")
                assert off <= 1.05


def test_float32_comes_of_float16s_products(torch: ModuleType) -> None:
    """Which are exact but for the sums' rounding: of 65 rows, as any GPU's kernels make them."""
    x, weight = grouped(torch, 65, 4096, False), grouped(torch, 6144, 4096, False, 0.02)
    out, wanted = (torch.full((65, 6144), torch.nan, device="cuda") for _ in range(2))
    scaled.scaled_matmul_into(*x, *weight, out)
    library().cuda_scaled_matmul_by(0, *x, *weight, wanted)
    assert torch.equal(out, wanted)
    with pytest.raises(RuntimeError, match="do not take"):
        library().cuda_scaled_matmul_by(WAYS[0], *x, *weight, out)


@pytest.mark.parametrize("tokens", [1, 9, 300, 2048])
def test_every_way_has_these_bits_of_experts_too(torch: ModuleType, tokens: int) -> None:
    experts, hidden, width, chosen = 130, 512, 208, 4
    x = grouped(torch, tokens, hidden, False)
    gate_up = grouped(torch, experts * 2 * width, hidden, False, 0.05)
    down = grouped(torch, experts * hidden, width, False, 0.05)
    choice = torch.randint(0, 3 * experts, (tokens * chosen,), device="cuda")
    choice = torch.where(choice < experts, choice, 7).sort()
    row = (choice.indices // chosen).int()
    counts = torch.bincount(choice.values, minlength=experts).cumsum(0)
    starts = torch.cat([torch.zeros(1, device="cuda"), counts]).int()
    middle = grouped(torch, tokens * chosen, width, False)
    first, second = (
        library().cuda_scaled_expert_gate_up_silu_by,
        library().cuda_scaled_expert_matmul_by,
    )
    for way in WAYS:
        gated = torch.full((tokens * chosen, width), torch.nan, device="cuda", dtype=torch.bfloat16)
        made = torch.full((tokens * chosen, hidden), torch.nan, device="cuda", dtype=torch.bfloat16)
        first(way, *x, row, starts, *gate_up, gated)
        second(way, *middle, starts, *down, made)
        if way == WAYS[0]:
            wanted = gated, made
            assert bool(gated.isfinite().all() and made.isfinite().all())
        assert torch.equal(gated, wanted[0]), way
        assert torch.equal(made, wanted[1]), way


@pytest.mark.parametrize("rows", [129, 700])
def test_a_way_has_the_same_bits_in_launch_after_launch(torch: ModuleType, rows: int) -> None:
    """What overwrites a weight's numbers while they are read shows in few launches of many."""
    columns, outputs = 4096, 6144
    x = grouped(torch, rows, columns, False)
    weight = grouped(torch, outputs, columns, False, 0.02)
    run = library().cuda_scaled_matmul_by
    wanted = torch.full((rows, outputs), torch.nan, device="cuda", dtype=torch.bfloat16)
    run(WAYS[0], *x, *weight, wanted)
    outs = [torch.empty_like(wanted) for _ in range(8)]
    for way in WAYS:
        for _ in range(40):
            for out in outs:
                run(way, *x, *weight, out)
            assert all(torch.equal(out, wanted) for out in outs), way


def both_steps(torch: ModuleType, x: Any, room: Any, run: Any, *rest: Any) -> Any:
    """Return what a product makes of rows that are quantised before it."""
    out = torch.full_like(rest[-1], torch.nan)
    scaled.quantise_rows_into(x, *room)
    run(*room, *rest[:-1], out)
    return out


@pytest.mark.parametrize("is_whole", [False, True], ids=["groups", "rows"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("columns", "outputs"),
    [(4096, 14336), (12288, 4096), (4096, 2816), (1408, 4096), (128, 32), (1040, 72), (4096, 4104)],
)
def test_rows_quantised_on_the_way_have_the_bits_of_both_steps(
    torch: ModuleType, columns: int, outputs: int, rows: int, is_whole: bool
) -> None:
    """GLM-4.5-Air's products, and what a single row's own kernel does not take."""
    weight = grouped(torch, outputs, columns, is_whole, 0.02)
    up = grouped(torch, outputs, columns, is_whole, 0.02)
    pair = tuple(torch.cat(parts) for parts in zip(weight, up, strict=True))
    room = grouped(torch, rows, columns, is_whole)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(rows, columns, device="cuda").to(dtype)
        x[:, : columns // 3] = 0
        for run, then, of in (
            (scaled.quantise_matmul_into, scaled.scaled_matmul_into, weight),
            (scaled.quantise_gate_up_silu_into, scaled.scaled_gate_up_silu_into, pair),
        ):
            out = torch.full((rows, outputs), torch.nan, device="cuda", dtype=dtype)
            wanted = both_steps(torch, x, room, then, *of, out)
            assert bool(wanted.isfinite().all())
            for _ in range(20):
                out.fill_(torch.nan)
                run(x, *room, *of, out)
                assert torch.equal(out, wanted), run.__name__


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("hidden", "width"), [(4096, 1408), (512, 208), (512, 200)])
def test_tokens_quantised_on_the_way_have_the_bits_of_their_experts(
    torch: ModuleType, hidden: int, width: int, tokens: int
) -> None:
    experts, chosen = 130, 8
    gate_up = grouped(torch, experts * 2 * width, hidden, False, 0.05)
    choice = torch.rand(tokens, experts, device="cuda").topk(chosen).indices.flatten().sort()
    row = (choice.indices // chosen).int()
    counts = torch.bincount(choice.values, minlength=experts).cumsum(0)
    starts = torch.cat([torch.zeros(1, device="cuda"), counts]).int()
    room = grouped(torch, tokens, hidden, False)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    out = torch.full((tokens * chosen, width), torch.nan, **kind)
    then = scaled.scaled_expert_gate_up_silu_into
    wanted = both_steps(torch, x, room, then, row, starts, *gate_up, out)
    assert bool(wanted.isfinite().all())
    for _ in range(20):
        out.fill_(torch.nan)
        scaled.quantise_expert_gate_up_silu_into(x, *room, row, starts, *gate_up, out)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("pairs", [1, 8, 9])
@pytest.mark.parametrize(("width", "hidden"), [(1408, 4096), (768, 2048), (384, 72)])
def test_pairs_quantised_on_the_way_have_the_bits_of_their_experts(
    torch: ModuleType, width: int, hidden: int, pairs: int
) -> None:
    """Of one token, and of more rows than that has."""
    experts = 40
    down = grouped(torch, experts * hidden, width, False, 0.05)
    choice = torch.rand(experts, device="cuda").topk(pairs).indices
    counts = torch.bincount(choice, minlength=experts).cumsum(0)
    starts = torch.cat([torch.zeros(1, device="cuda"), counts]).int()
    room = grouped(torch, pairs, width, False)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(pairs, width, device="cuda").to(dtype)
        out = torch.full((pairs, hidden), torch.nan, device="cuda", dtype=dtype)
        wanted = both_steps(torch, x, room, scaled.scaled_expert_matmul_into, starts, *down, out)
        assert bool(wanted.isfinite().all())
        for _ in range(20):
            out.fill_(torch.nan)
            scaled.quantise_expert_matmul_into(x, *room, starts, *down, out)
            assert torch.equal(out, wanted)


@pytest.mark.parametrize(("hidden", "width"), [(4096, 1408), (2048, 768), (520, 208)])
def test_what_all_share_has_its_bits_beside_a_tokens_experts(
    torch: ModuleType, hidden: int, width: int
) -> None:
    """In the experts' launches, or, where their kernel does not take it, before them."""
    experts, chosen, dtype = 40, 8, torch.bfloat16
    gate_up = grouped(torch, experts * 2 * width, hidden, False, 0.05)
    down = grouped(torch, experts * hidden, width, False, 0.05)
    shared_up = grouped(torch, 2 * width, hidden, False, 0.05)
    shared_down = grouped(torch, hidden, width, False, 0.05)
    choice = torch.rand(experts, device="cuda").topk(chosen).indices
    counts = torch.bincount(choice, minlength=experts).cumsum(0)
    starts = torch.cat([torch.zeros(1, device="cuda"), counts]).int()
    row = torch.zeros(chosen, dtype=torch.int32, device="cuda")
    x = torch.randn(1, hidden, device="cuda").to(dtype)
    of_x = grouped(torch, 1, hidden, False)
    of_one, of_each = (grouped(torch, n, width, False) for n in (1, chosen))

    def empty(rows: int, columns: int) -> Any:
        return torch.full((rows, columns), torch.nan, device="cuda", dtype=dtype)

    wanted = [empty(chosen, width), empty(1, width), empty(chosen, hidden), empty(1, hidden)]
    scaled.quantise_expert_gate_up_silu_into(x, *of_x, row, starts, *gate_up, wanted[0])
    scaled.quantise_gate_up_silu_into(x, *of_x, *shared_up, wanted[1])
    scaled.quantise_expert_matmul_into(wanted[0], *of_each, starts, *down, wanted[2])
    scaled.quantise_matmul_into(wanted[1], *of_one, *shared_down, wanted[3])
    for _ in range(20):
        outs = [torch.full_like(each, torch.nan) for each in wanted]
        beside = (x, *of_x, *shared_up, outs[1])
        scaled.quantise_expert_gate_up_silu_into(x, *of_x, row, starts, *gate_up, outs[0], beside)
        beside = (outs[1], *of_one, *shared_down, outs[3])
        scaled.quantise_expert_matmul_into(outs[0], *of_each, starts, *down, outs[2], beside)
        for out, made in zip(outs, wanted, strict=True):
            assert bool(made.isfinite().all())
            assert torch.equal(out, made)


@pytest.mark.parametrize("tokens", [2, 5, 58])
@pytest.mark.parametrize(("hidden", "width"), [(4096, 1408), (520, 208)])
@pytest.mark.parametrize("is_behind", [True, False], ids=["behind", "elsewhere"])
def test_what_all_share_of_some_tokens_has_its_bits_beside_their_experts(
    torch: ModuleType, tokens: int, hidden: int, width: int, is_behind: bool
) -> None:
    """In the experts' launches if it lies behind theirs, or, of few tokens or where it lies
    elsewhere, before them.
    """
    experts, chosen, dtype = 40, 8, torch.bfloat16
    pairs = tokens * chosen
    gate_up = grouped(torch, experts * 2 * width, hidden, False, 0.05)
    down = grouped(torch, experts * hidden, width, False, 0.05)
    shared_up = grouped(torch, 2 * width, hidden, False, 0.05)
    shared_down = grouped(torch, hidden, width, False, 0.05)
    choice = torch.rand(tokens, experts, device="cuda").topk(chosen).indices.flatten().sort()
    row = (choice.indices // chosen).int()
    counts = torch.bincount(choice.values, minlength=experts).cumsum(0)
    starts = torch.cat([torch.zeros(1, device="cuda"), counts]).int()
    x = torch.randn(tokens, hidden, device="cuda").to(dtype)
    of_x = grouped(torch, tokens, hidden, False)
    room = grouped(torch, pairs + tokens, width, False)
    of_each = [each[:pairs] for each in room]
    of_all = [each[pairs:] if is_behind else each[pairs:].clone() for each in room]

    def empty(columns: int) -> tuple[Any, Any]:
        both = torch.full((pairs + tokens, columns), torch.nan, device="cuda", dtype=dtype)
        return both[:pairs], both[pairs:] if is_behind else both[pairs:].clone()

    wanted = [*empty(width), *empty(hidden)]
    scaled.quantise_expert_gate_up_silu_into(x, *of_x, row, starts, *gate_up, wanted[0])
    scaled.quantise_gate_up_silu_into(x, *of_x, *shared_up, wanted[1])
    scaled.quantise_expert_matmul_into(wanted[0], *of_each, starts, *down, wanted[2])
    scaled.quantise_matmul_into(wanted[1], *of_all, *shared_down, wanted[3])
    for _ in range(20):
        outs = [*empty(width), *empty(hidden)]
        beside = (x, *of_x, *shared_up, outs[1])
        scaled.quantise_expert_gate_up_silu_into(x, *of_x, row, starts, *gate_up, outs[0], beside)
        beside = (outs[1], *of_all, *shared_down, outs[3])
        scaled.quantise_expert_matmul_into(outs[0], *of_each, starts, *down, outs[2], beside)
        for out, made in zip(outs, wanted, strict=True):
            assert bool(made.isfinite().all())
            assert torch.equal(out, made)


@pytest.mark.parametrize("tokens", [1, 8, 58, 300, 2000])
@pytest.mark.parametrize(("hidden", "width"), [(4096, 1408), (2048, 768), (256, 128)])
def test_scales_of_blocks_give_experts_the_bits_of_the_same_scales_of_rows(
    torch: ModuleType, tokens: int, hidden: int, width: int
) -> None:
    """By whichever kernel is chosen; 2 to 64 tokens with what all share beside them."""
    experts, chosen, dtype = 40, 8, torch.bfloat16
    choice = torch.rand(tokens, experts, device="cuda").topk(chosen).indices.flatten().sort()
    row = (choice.indices // chosen).int()
    counts = torch.bincount(choice.values, minlength=experts).cumsum(0)
    starts = torch.cat([torch.zeros(1, device="cuda"), counts]).int()
    shapes = ((2 * width * experts, hidden), (hidden * experts, width), (2 * width, hidden))
    rows, blocks = [], []
    for shape in (*shapes, (hidden, width)):
        values, scales = grouped(torch, *shape, False, 0.05)
        rows.append((values, scales[::128].repeat_interleave(128, 0)))
        blocks.append((values, scales[::128].contiguous()))
    x = torch.randn(tokens, hidden, device="cuda").to(dtype)
    of_x = grouped(torch, tokens, hidden, False)
    pairs = tokens * chosen
    room = grouped(torch, pairs + tokens, width, False)
    of_each, of_all = [each[:pairs] for each in room], [each[pairs:] for each in room]

    def made(up: Any, down: Any, shared_up: Any, shared_down: Any) -> list[Any]:
        outs = [
            torch.full((pairs + tokens, n), torch.nan, device="cuda", dtype=dtype)
            for n in (width, hidden)
        ]
        (first, shared), (second, added) = ((each[:pairs], each[pairs:]) for each in outs)
        beside = (x, *of_x, *shared_up, shared)
        scaled.quantise_expert_gate_up_silu_into(x, *of_x, row, starts, *up, first, beside)
        beside = (shared, *of_all, *shared_down, added)
        scaled.quantise_expert_matmul_into(first, *of_each, starts, *down, second, beside)
        return outs

    for out, wanted in zip(made(*blocks), made(*rows), strict=True):
        assert bool(wanted.isfinite().all())
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("rows", COUNTS)
def test_scales_of_blocks_give_dense_products_the_bits_of_the_same_scales_of_rows(
    torch: ModuleType, rows: int, is_gated: bool
) -> None:
    values, scales = grouped(torch, 4096 * (1 + is_gated), 1408, False, 0.05)
    x = grouped(torch, rows, 1408, False)
    run = scaled.scaled_gate_up_silu_into if is_gated else scaled.scaled_matmul_into
    found = []
    for each in (scales[::128].repeat_interleave(128, 0), scales[::128].contiguous()):
        found.append(torch.full((rows, 4096), torch.nan, device="cuda", dtype=torch.bfloat16))
        run(*x, values, each, found[-1])
    assert bool(found[0].isfinite().all())
    assert torch.equal(*found)


@pytest.mark.parametrize("exponent", [-146, -140, -127, -100, -80, 0, 80, 100])
def test_a_row_on_the_way_is_quantised_alike_however_small_or_large(
    torch: ModuleType, exponent: int
) -> None:
    """Also where a scale is no normal number, and where its reciprocal is none."""
    weight = grouped(torch, 64, 1408, False, 0.02)
    room = grouped(torch, 1, 1408, False)
    x = torch.randn(1, 1408, device="cuda", dtype=torch.float64) * 2.0**exponent
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        out = torch.full((1, 64), torch.nan, device="cuda")
        out = out.to(dtype)
        wanted = both_steps(torch, given, room, scaled.scaled_matmul_into, *weight, out)
        scaled.quantise_matmul_into(given, *room, *weight, out)
        assert torch.equal(out, wanted)
