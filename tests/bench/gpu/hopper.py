"""Compiles a kernel for Hopper GPUs into a library, and calls it with tensors and numbers."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def library(source: Path, folder: Path, entry: str, defines: Mapping[str, object]) -> Any:
    """Return the function `entry` of a source, compiled in a folder where generated files lie."""
    path = folder / f"{entry}.so"
    command = ["nvcc", "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared"]
    command += ["-Xcompiler", "-fPIC", f"-I{folder}", "-o", str(path), str(source), "-lcuda"]
    subprocess.run([*command, *(f"-D{k}={v}" for k, v in defines.items())], check=True)
    return ctypes.CDLL(str(path))[entry]


def call(function: Any, *arguments: Any) -> None:
    """Call it on the current stream, which it takes last: tensors by address, numbers as they are.

    Raises:
        RuntimeError: it returned another number than 0.
    """
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    code = function(*map(_converted, arguments), stream)
    if code:
        raise RuntimeError(f"the launch returned {code}")


def _converted(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else argument


def product(name: str, n: int, *, a_in_registers: bool = False) -> str:
    """Return a wrapper of wgmma m64nNk16, bf16 in, fp32 sums: both operands in shared memory; or A
    in registers and B transposed, always added to the sums.
    """
    k = n // 2
    registers = ", ".join(f"%{i}" for i in range(k))
    sums = ", ".join(f'"+f"(d[{i}])' for i in range(k))
    shape = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{registers}}}"
    head = f"static __device__ __forceinline__ void {name}(float (&d)[{k}], "
    if a_in_registers:
        a = ", ".join(f"%{k + i}" for i in range(4))
        return f"""{head}uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {{
  asm volatile("{shape}, {{{a}}}, %{k + 4}, 1, 1, 1, 1;\\n"
    : {sums} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}}
"""
    return f"""{head}uint64_t a, uint64_t b, int adds) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{k + 2}, 0;\\n"
    "{shape}, %{k}, %{k + 1}, p, 1, 1, 0, 0;\\n}}\\n" : {sums} : "l"(a), "l"(b), "r"(adds));
}}
"""
