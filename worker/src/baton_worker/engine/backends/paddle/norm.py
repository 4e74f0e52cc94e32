"""RMS norm on any processor: Paddle's fused kernel where it can run, plain ops elsewhere.

Paddle 3.3 compiles `fused_rms_norm` for AVX-512 and calls it without asking the processor: where
there is none, the process ends with SIGILL. Plain ops cost a few calls more and are as exact; the
last bits differ, as all arithmetic does between types of CPU. Owns that choice and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from baton_worker.engine.backends.paddle.framework import Tensor, paddle

_NEEDED = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})

_MINUS_HALF = paddle.full([1], -0.5)

RmsNorm = Callable[[Tensor, Tensor, float], Tensor]
"""Rows f32[N, H] scaled to a root mean square of 1, times weight f32[H]; the last is epsilon."""


def has_avx512(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor runs what Paddle's fused kernels are compiled to.

    A system that does not tell (no Linux, another architecture) counts as one that does not.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split()) >= _NEEDED


def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One kernel; needs AVX-512."""
    return paddle.incubate.nn.functional.fused_rms_norm(x, weight, None, eps, begin_norm_axis=1)[0]


def composed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain ops. A row's result does not depend on the rows beside it, as with the kernel: `mean`
    and `pow` by a tensor take each row or element by itself. `sqrt` and `rsqrt` do not: what a
    vector register holds together has other last bits than what is left over.
    """
    mean_square = paddle.mean(x * x, axis=1, keepdim=True)
    return x * paddle.pow(mean_square + eps, _MINUS_HALF) * weight


rms_norm: RmsNorm = fused if has_avx512() else composed
