"""The native library: finding it and loading it, once per process.

Everything untyped of the binding ends here. This module knows no op.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Protocol

from tvm_ffi.libinfo import load_lib_module

from baton_ops.interface import INTERFACE

GIL_KEPT_ELEMENTS = 1 << 16
"""Up to so many elements read, some 30 to 100 us of work, a call keeps the GIL."""


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
        RuntimeError: the package holds no library for this platform, or one whose interface
            has another number than this Python code's.
        ValueError: an environment variable has an unusable value.
    """
    module = load_lib_module("baton-ops", "baton_ops")
    _require_interface(module)
    threads = os.environ.get("BATON_OPS_THREADS")
    if threads is not None:
        if not threads.isdecimal():
            raise ValueError(f"BATON_OPS_THREADS must be a number, got {threads!r}")
        module.set_threads(int(threads))
    module.set_isa(os.environ.get("BATON_OPS_ISA", "auto"))
    return module


def _require_interface(module: Any) -> None:
    """Refuse a library whose functions are not those that are called here."""
    try:
        told = int(module.interface())
    except AttributeError:
        told = 0  # before libraries told it
    if told != INTERFACE:
        raise RuntimeError(
            f"the native library of baton-ops has interface {told}, and the Python code that calls "
            f"it is of interface {INTERFACE}: build baton-ops again (`make env`, `make "
            "ops-cuda-fat`), or install one wheel whole"
        )


def op(name: str, rows: Tensor, values: Tensor) -> Any:
    """Return the op of this name for a call that reads a row of `values` for each of `rows`.

    A call that releases the GIL hands it to whoever waits and waits in turn: two or more switches
    between threads, each dearer than a small op. Large ones release it, so that others can work.
    """
    rows_shape: Any = getattr(rows, "shape", ())
    values_shape: Any = getattr(values, "shape", ())
    is_sized = len(rows_shape) and len(values_shape)  # else the op refuses it by name
    elements = rows_shape[0] * values_shape[-1] if is_sized else 0
    return _function(name, elements <= GIL_KEPT_ELEMENTS)


@functools.cache
def _function(name: str, keeps_gil: bool) -> Any:
    function = library().get_function(name)
    function.release_gil = not keeps_gil
    return function


def blocking(name: str) -> Any:
    """Return the function of this name, which waits for something: it releases the GIL."""
    return _function(name, False)


def launch(name: str) -> Any:
    """Return the function of this name, which launches work on a device.

    It keeps the GIL: a launch takes less time than handing the GIL over and back.
    """
    return _function(name, True)
