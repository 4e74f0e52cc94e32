"""Time the layer of Qwen3-30B-A3B's mixture for 1 to 2,048 tokens, by parts, beside what it reads.

    python tests/bench/gpu/bench_experts.py [--tokens N ...] [--ways] [--json FILE]

128 experts of 2,048 x 768 in bf16, 8 a token. Times are medians of CUDA graphs' replays; weights
rotate over more than the second-level cache holds. The roof is a copy of as many bytes as the
experts have that are chosen. With --ways each product is timed by every tile there is. Equal bits
are for the tests (tests/ops/cuda). Needs PyTorch with a Hopper GPU and the library with CUDA
kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))

import timing
import torch

import gpu
from baton_ops import decoder, experts
from baton_ops._library import library

COUNT, CHOSEN, HIDDEN, WIDTH = 128, 8, 2048, 768
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
WEIGHTS, REPEATS, CALLS = 3, 3, 12
WAYS = {0: 32, 2: 64, 3: 96, 4: 128, 7: 256}
RULE = SimpleNamespace(
    chosen=CHOSEN,
    scores="softmax",
    n_groups=1,
    n_chosen_groups=1,
    normalises=True,
    least_sum=0.0,
    scaling=1.0,
)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return memory of the device."""
    return torch.empty(*shape, device="cuda", dtype=dtype)


class Layer:
    """Weights, and the parts of a layer over one after the other."""

    def __init__(self, tokens: int) -> None:
        """Allocate what so many tokens need, and route them."""
        pairs = tokens * CHOSEN
        self.router = empty(COUNT, HIDDEN, dtype=torch.float32).normal_(0, HIDDEN**-0.5)
        self.weights = [
            (
                empty(COUNT * 2 * WIDTH, HIDDEN).normal_(0, 0.02),
                empty(COUNT * HIDDEN, WIDTH).normal_(0, 0.02),
            )
            for _ in range(WEIGHTS)
        ]
        self.x, self.out = empty(tokens, HIDDEN).normal_(), empty(tokens, HIDDEN)
        ints = [empty(n, dtype=torch.int32) for n in (pairs, pairs, pairs, COUNT + 1)]
        self.routes = SimpleNamespace(
            products=empty(tokens, COUNT, dtype=torch.float32),
            weight=empty(pairs, dtype=torch.float32),
            expert=ints[0],
            place=ints[1],
            row=ints[2],
            starts=ints[3],
        )
        self.spread, self.made = empty(pairs, HIDDEN), empty(pairs, HIDDEN)
        self.gated = empty(pairs, WIDTH)
        self.fed = self.x if tokens == 1 else self.spread
        self.all(0)

    def route(self, i: int) -> None:
        """Choose, and sort."""
        experts.route_into(self.x, self.router, None, RULE, self.routes)

    def gather(self, i: int) -> None:
        """Put each token's row where its pairs stand: more rows than one."""
        if self.fed is self.spread:
            decoder.gather_into(self.x, self.routes.row, self.spread)

    def gate_up(self, i: int) -> None:
        """Feed each expert."""
        weight = self.weights[i % WEIGHTS][0]
        experts.expert_gate_up_silu_into(self.fed, self.routes.starts, weight, self.gated)

    def down(self, i: int) -> None:
        """Project what each made."""
        weight = self.weights[i % WEIGHTS][1]
        experts.expert_matmul_into(self.gated, self.routes.starts, weight, self.made)

    def combine(self, i: int) -> None:
        """Add a token's."""
        experts.combine_into(self.made, self.routes, None, self.out)

    def all(self, i: int) -> None:
        """The layer."""
        for part in (self.route, self.gather, self.gate_up, self.down, self.combine):
            part(i)

    def by(self, way: int, is_gated: bool) -> timing.Launch:
        """Return one product by one way."""
        starts = self.routes.starts
        if is_gated:
            call = library().cuda_expert_gate_up_silu_by
            return lambda i: call(way, self.fed, starts, self.weights[i % 3][0], self.gated)
        call = library().cuda_expert_matmul_by
        return lambda i: call(way, self.gated, starts, self.weights[i % 3][1], self.made)

    def read_bytes(self) -> int:
        """Return what the chosen experts weigh."""
        used = len(torch.unique(self.routes.expert))
        return used * 3 * WIDTH * HIDDEN * 2


def us(launch: timing.Launch) -> float:
    """Return the median microseconds of a call."""
    return timing.by_graph(launch, CALLS, REPEATS).median_us


def copied_us(n_bytes: int) -> float:
    """Return what a copy takes that reads half of so many bytes and writes half."""
    sources = [empty(n_bytes // 4) for _ in range(WEIGHTS)]
    to = empty(n_bytes // 4)
    return us(lambda i: to.copy_(sources[i % WEIGHTS]))


def measured(tokens: int, every_way: bool) -> dict[str, object]:
    """Return microseconds of the layer and its parts, and the share of the roof."""
    layer = Layer(tokens)
    roof = copied_us(layer.read_bytes())
    named = ("route", "gather", "gate_up", "down", "combine")
    parts = {name: us(getattr(layer, name)) for name in named if name != "gather" or tokens > 1}
    whole = us(layer.all)
    ways = {
        f"{'gate_up' if is_gated else 'down'} {columns}": us(layer.by(way, is_gated))
        for way, columns in WAYS.items()
        for is_gated in (True, False)
        if every_way
    }
    told = " | ".join(f"{parts[name]:.1f}" if name in parts else "-" for name in named)
    print(f"| {tokens} | {told} | {whole:.1f} | {roof:.1f} | {roof / whole:.2f} |", flush=True)
    for name, value in ways.items():
        print(f"    {name}: {value:.1f}", flush=True)
    return {"tokens": tokens, "whole": whole, "roof": roof, "parts": parts, "ways": ways}


def main() -> None:
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--ways", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print("| tokens | route | gather | gate, up | down | combine | layer, us | roof | share |")
    record = [measured(tokens, arguments.ways) for tokens in arguments.tokens]
    if arguments.json:
        found = {"machine": gpu.machine(), "commit": gpu.commit(), "layers": record}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
