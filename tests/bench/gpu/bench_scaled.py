"""Time products with FP8 weights beside the same shapes in bf16, for 1 to 4,096 rows.

    python tests/bench/gpu/bench_scaled.py [--ways | --of-one] [--json FILE]

An 8B model's four products, and the experts of a 30B mixture. Times are medians of CUDA graphs'
replays; weights rotate over more than the second-level cache holds. Of each: microseconds, what it
reads of weights and scales a second, and the times of quantising its rows; with --ways instead the
times of each product by every kernel and tile there is, or with --of-one those of a single row's
products of GLM-4.5-Air, quantising included: in two launches, and in one. Scales are of blocks, as
a checkpoint by blocks is loaded. Equal bits are for the tests (tests/ops/cuda). Needs PyTorch with
a Hopper GPU and the library with CUDA kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))

import timing
import torch

import gpu
from baton_ops import decoder, experts, scaled
from baton_ops._library import library

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24_576, 4096), "down": (4096, 12_288)}
"""Of Qwen3-8B: outputs and inputs."""
ROWS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)
TOKENS = (1, 8, 64, 256, 512, 1024, 2048)
EXPERTS, CHOSEN, HIDDEN, WIDTH = 128, 8, 2048, 768
"""Of Qwen3-30B-A3B."""
TILES = ("64x32", "64x64", "128x16", "128x32", "128x64")
WAYS = ("any", *TILES, "straight 128x128", "ranges 64x16")
"""For any GPU, then by tiles: rows of the weight, rows of x, or of x and of the weight."""
CACHE_BYTES, REPEATS = 160 << 20, 3
OF_ONE = {
    "qkv": (14_336, 4096, 0),
    "o": (4096, 12_288, 0),
    "shared gate_up": (2816, 4096, 0),
    "shared down": (4096, 1408, 0),
    "experts' gate_up": (2816, 4096, 128),
    "experts' down": (4096, 1408, 128),
    "dense gate_up": (22_016, 4096, 0),
}
"""Of GLM-4.5-Air: outputs, inputs, experts; gates and ups are gated. The dense one has 64 more of
each, so that blocks are whole."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return memory of the GPU."""
    return torch.empty(*shape, device="cuda", dtype=dtype)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 numbers and scales of groups of 128."""
    rows, columns = x.shape
    made = (
        empty(rows, columns, dtype=torch.uint8),
        empty(rows, columns // 128, dtype=torch.float32),
    )
    scaled.quantise_rows_into(x, *made)
    return made


def weight_of(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers at random and scales of each 128 of their rows, the first one's."""
    values, scales = quantised(empty(rows, columns).normal_(0, 0.02))
    return values, scales[::128].contiguous()


def bytes_of(weight: tuple[torch.Tensor, torch.Tensor]) -> int:
    """Return what numbers and scales take."""
    return sum(each.numel() * each.element_size() for each in weight)


def us(launch: timing.Launch, rows: int) -> float:
    """Return the median microseconds of a call."""
    return timing.by_graph(launch, 4 if rows > 512 else 12, REPEATS).median_us


def dense(name: str, rows: int) -> dict[str, Any]:
    """Time one product of so many rows in both types; `gate_up` is gated."""
    outputs, inputs = SHAPES[name]
    is_gated = name == "gate_up"
    count = max(CACHE_BYTES // (outputs * inputs) + 1, 2)
    plain = [empty(outputs, inputs).normal_(0, 0.02) for _ in range(count)]
    fp8 = [weight_of(outputs, inputs) for _ in plain]
    x = empty(rows, inputs).normal_()
    small, out = quantised(x), empty(rows, outputs // (1 + is_gated))
    of_fp8 = scaled.scaled_gate_up_silu_into if is_gated else scaled.scaled_matmul_into
    of_bf16 = decoder.gate_up_silu_into if is_gated else decoder.matmul_into
    took = us(lambda i: of_fp8(*small, *fp8[i % count], out), rows)
    bf16 = us(lambda i: of_bf16(x, plain[i % count], out), rows)
    quantising = us(lambda i: scaled.quantise_rows_into(x, *small), rows)
    return told(name, rows, took, bf16, quantising, bytes_of(fp8[0]), 2 * rows * outputs * inputs)


def by_ways(name: str, rows: int) -> dict[str, Any]:
    """Time one product of so many rows by each way, see ScaledWay of ops/csrc/cuda."""
    outputs, inputs = SHAPES[name]
    is_gated = name == "gate_up"
    count = max(CACHE_BYTES // (outputs * inputs) + 1, 2)
    fp8 = [weight_of(outputs, inputs) for _ in range(count)]
    x, out = quantised(empty(rows, inputs).normal_()), empty(rows, outputs // (1 + is_gated))
    run = library().cuda_scaled_gate_up_silu_by if is_gated else library().cuda_scaled_matmul_by
    return of_ways(name, rows, lambda i, way: run(way, *x, *fp8[i % count], out), rows)


def of_ways(
    name: str, tokens: int, launch: Callable[[int, int], object], rows: int
) -> dict[str, Any]:
    """Time what takes the number of a call and of a way."""
    took = [us(lambda i, way=way: launch(i, way), rows) for way in range(len(WAYS))]
    print(f"| {name} | {tokens} | " + " | ".join(f"{each:.1f}" for each in took) + " |", flush=True)
    return {"name": name, "rows": tokens, "us": dict(zip(WAYS, took, strict=True))}


def told(
    name: str, rows: int, took: float, bf16: float, quantising: float, n_bytes: int, flop: int
) -> dict[str, Any]:
    """Print a line and return its numbers."""
    read, speed = n_bytes / took / 1e6, flop / took / 1e6
    print(
        f"| {name} | {rows} | {took:.1f} | {bf16:.1f} | {bf16 / took:.2f} | {quantising:.1f} | "
        f"{read:.2f} | {speed:.0f} |",
        flush=True,
    )
    names = ("name", "rows", "us", "bf16_us", "quantising_us", "read_tb_s", "tflop_s")
    return dict(zip(names, (name, rows, took, bf16, quantising, read, speed), strict=True))


class Mixture:
    """Both products of a mixture whose so many tokens choose at random: what they take."""

    def __init__(self, tokens: int) -> None:
        self.pairs = tokens * CHOSEN
        choice = torch.rand(tokens, EXPERTS, device="cuda").topk(CHOSEN).indices.flatten().sort()
        counts = torch.bincount(choice.values, minlength=EXPERTS)
        self.used = int((counts > 0).sum())
        self.row = (choice.indices // CHOSEN).int()
        self.starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        self.x, self.gated = empty(tokens, HIDDEN).normal_(), empty(self.pairs, WIDTH).normal_()
        self.made = empty(self.pairs, HIDDEN)
        self.up = empty(EXPERTS * 2 * WIDTH, HIDDEN).normal_(0, 0.02)
        self.down = empty(EXPERTS * HIDDEN, WIDTH).normal_(0, 0.02)
        self.small, self.middle = quantised(self.x), quantised(self.gated)
        self.up8, self.down8 = (weight_of(*each.shape) for each in (self.up, self.down))
        self.of_up = *self.small, self.row, self.starts, *self.up8, self.gated
        self.of_down = *self.middle, self.starts, *self.down8, self.made


def mixed(tokens: int) -> list[dict[str, Any]]:
    """Time both products of a mixture in both types."""
    of = Mixture(tokens)
    spread = empty(of.pairs, HIDDEN).normal_()
    times = (
        us(lambda _: scaled.scaled_expert_gate_up_silu_into(*of.of_up), of.pairs),
        us(
            lambda _: experts.expert_gate_up_silu_into(spread, of.starts, of.up, of.gated), of.pairs
        ),
        us(lambda _: scaled.quantise_rows_into(of.x, *of.small), of.pairs),
        us(lambda _: scaled.scaled_expert_matmul_into(*of.of_down), of.pairs),
        us(lambda _: experts.expert_matmul_into(of.gated, of.starts, of.down, of.made), of.pairs),
        us(lambda _: scaled.quantise_rows_into(of.gated, *of.middle), of.pairs),
    )
    of_both = ("experts' gate_up", times[:3], of.up8, 2), ("experts' down", times[3:], of.down8, 1)
    flop = 2 * of.pairs * HIDDEN * WIDTH
    return [
        told(name, tokens, *of_it, bytes_of(weight) * of.used // EXPERTS, n * flop)
        for name, of_it, weight, n in of_both
    ]


def mixed_by_ways(tokens: int) -> list[dict[str, Any]]:
    """Time both products of a mixture by each way."""
    of = Mixture(tokens)
    up, down = library().cuda_scaled_expert_gate_up_silu_by, library().cuda_scaled_expert_matmul_by
    return [
        of_ways("experts' gate_up", tokens, lambda _, way: up(way, *of.of_up), of.pairs),
        of_ways("experts' down", tokens, lambda _, way: down(way, *of.of_down), of.pairs),
    ]


def of_one(name: str) -> dict[str, Any]:
    """Time a single row's product from rows of E on: as two launches and as one."""
    outputs, inputs, n_experts = OF_ONE[name]
    is_gated, chosen = name.endswith("gate_up"), CHOSEN if n_experts else 1
    count = 1 if n_experts else max(CACHE_BYTES // (outputs * inputs) + 1, 2)
    rows = outputs * max(n_experts, 1)
    fp8 = [weight_of(rows, inputs) for _ in range(count)]
    x = empty(1 if is_gated else chosen, inputs).normal_()
    out = empty(chosen, outputs // (1 + is_gated))
    room, kind = quantised(x), "gate_up_silu_into" if is_gated else "matmul_into"
    routes: list[tuple[torch.Tensor, ...]] = [()]
    if n_experts:
        kind = f"expert_{kind}"
        row = [torch.zeros(chosen, device="cuda", dtype=torch.int32)] if is_gated else []
        picked = [torch.randperm(n_experts, device="cuda")[:chosen] for _ in range(6)]
        counts = [torch.bincount(each, minlength=n_experts).cumsum(0) for each in picked]
        zero = torch.zeros(1, device="cuda")
        routes = [(*row, torch.cat([zero, each]).int()) for each in counts]
    then, at_once = getattr(scaled, f"scaled_{kind}"), getattr(scaled, f"quantise_{kind}")

    def both(i: int) -> None:
        scaled.quantise_rows_into(x, *room)
        then(*room, *routes[i % len(routes)], *fp8[i % count], out)

    def one(i: int) -> None:
        at_once(x, *room, *routes[i % len(routes)], *fp8[i % count], out)

    n_bytes = bytes_of(fp8[0]) * chosen // max(n_experts, 1)
    apart, took = us(both, 1), us(one, 1)
    read = n_bytes / took / 1e6
    print(f"| {name} | {apart:.1f} | {took:.1f} | {read:.2f} |", flush=True)
    return {"name": name, "apart_us": apart, "us": took, "read_tb_s": read}


def main() -> None:
    """Print a line for each product and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--ways", action="store_true")
    which.add_argument("--of-one", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.of_one:
        print("| product | two launches, us | one, us | TB/s |")
        record = [of_one(name) for name in OF_ONE]
    elif arguments.ways:
        print("| product | rows | " + " | ".join(WAYS) + " |")
        record = [by_ways(name, rows) for name in SHAPES for rows in ROWS]
        record += [line for tokens in TOKENS for line in mixed_by_ways(tokens)]
    else:
        print("| product | rows | FP8, us | bf16, us | ratio | quantising, us | TB/s | TFLOP/s |")
        record = [dense(name, rows) for name in SHAPES for rows in ROWS]
        for tokens in TOKENS:
            record += mixed(tokens)
    if arguments.json:
        found = {"machine": gpu.machine(), "commit": gpu.commit(), "products": record}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
