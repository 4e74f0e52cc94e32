"""The native library: finding it and loading it, once per process.

Everything untyped of the binding ends here. This module knows no op.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Protocol

from tvm_ffi.libinfo import load_lib_module


class Tensor(Protocol):
    """Any array that shares its memory by DLPack: NumPy, Paddle and PyTorch tensors do."""

    @property
    def shape(self) -> Any:
        """Sizes by dimension; a framework's own sequence type."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Share the memory."""

    def __dlpack_device__(self) -> Any:
        """Tell the device."""


@functools.cache
def library() -> Any:
    """Return the loaded tvm-ffi module, set up from the environment.

    Reads BATON_OPS_THREADS (1..64) and BATON_OPS_ISA (auto, portable, avx2).

    Raises:
        RuntimeError: the package holds no library for this platform.
        ValueError: an environment variable has an unusable value.
    """
    module = load_lib_module("baton-ops", "baton_ops")
    threads = os.environ.get("BATON_OPS_THREADS")
    if threads is not None:
        if not threads.isdecimal():
            raise ValueError(f"BATON_OPS_THREADS must be a number, got {threads!r}")
        module.set_threads(int(threads))
    module.set_isa(os.environ.get("BATON_OPS_ISA", "auto"))
    return module
