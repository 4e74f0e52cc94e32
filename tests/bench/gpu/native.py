"""Compiles a CUDA source into a library, and calls it with tensors and numbers."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def library(source: Path, folder: Path, entry: str, defines: Mapping[str, object]) -> Any:
    """Return the function `entry` of a source, compiled in a folder."""
    path = folder / f"{entry}.so"
    command = ["nvcc", "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared"]
    command += ["-Xcompiler", "-fPIC", "-o", str(path), str(source)]
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
