"""Tensors that say they are on a GPU, for the checks that ops make before they launch anything.

Owns the DLPack description of memory that is the host's. With a library that has CUDA code, on a
machine without a driver, an op that is content with its arguments gets as far as asking for the
device, and fails there; one that is not names the argument. Nothing is ever launched.
"""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_ops._library import library
from baton_testing.numpy_device import NumpyDevice, NumpyTensor, on_device
from baton_testing.numpy_kernels import NumpyKernels
from baton_worker.engine.backends.kernels import OpsKernels

NO_DRIVER = "CUDA driver version is insufficient"
"""What the runtime says where the checks have passed and there is no driver."""

_CUDA = 2
_KEPT: deque[Any] = deque(maxlen=4096)
"""What descriptions of a call's arguments point to; a call has some dozens."""
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4}


def need_code_and_no_driver(op: str) -> None:
    """Skip the test where the library has no such CUDA op, or where it would be launched."""
    try:
        library().get_function(op)
    except (AttributeError, RuntimeError, ValueError):
        pytest.skip("baton_ops was built without CUDA kernels")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    pytest.skip("there is a driver: what claims to be on the GPU would be launched over")


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("n_dims", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Claimed:
    """An array that claims to be on the first GPU; uint16 is told as bfloat16."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA, 0)

    def __dlpack__(self, **_: object) -> Any:
        array = self._array
        sizes = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
        steps = [step // array.itemsize for step in array.strides]
        strides = (ctypes.c_int64 * max(array.ndim, 1))(*steps)
        kind = array.dtype.name.rstrip("0123456789")
        code = _CODES["bfloat" if array.dtype == np.uint16 else kind]
        dtype = _DType(code, 8 * array.itemsize, 1)
        managed = _Managed(
            _Tensor(array.ctypes.data, _Device(_CUDA, 0), array.ndim, dtype, sizes, strides, 0)
        )
        _KEPT.append((managed, sizes, strides, array))
        return _new_capsule(ctypes.addressof(managed), b"dltensor", None)


def claimed(argument: Any) -> Any:
    """Return a kernel's argument with every tensor of a NumPy device claimed to be on a GPU."""
    if isinstance(argument, NumpyTensor):
        return Claimed(on_device(argument))
    if isinstance(argument, tuple):
        parts = [claimed(part) for part in argument]
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    return argument


class CheckedKernels(NumpyKernels):
    """NumPy's kernels, each call shown to the op of that name first.

    Attributes:
        passed: how often an op was content, by name.
        refused: what ops said that were not.
    """

    def __init__(self, device: NumpyDevice) -> None:
        super().__init__(device)
        self._ops = OpsKernels.__new__(OpsKernels)  # it would ask for the device
        self.passed: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        kernel = object.__getattribute__(self, name)
        if name == "latent":
            return _CheckedLatent(self, kernel)
        is_op = not name.startswith("_") and not name.endswith("_bytes") and callable(kernel)
        if not is_op or not hasattr(OpsKernels, name):
            return kernel
        return self.shown(name, getattr(self._ops, name), kernel)

    def shown(
        self, name: str, op: Callable[..., None], kernel: Callable[..., None]
    ) -> Callable[..., None]:
        """Return the kernel behind the op, whose word is counted under that name."""

        def call(*arguments: Any) -> None:
            try:
                op(*map(claimed, arguments))
                self.refused[f"{name}: was launched"] += 1
            except (TypeError, ValueError, RuntimeError) as error:
                told = str(error).strip().splitlines()[0]
                if NO_DRIVER in told:
                    self.passed[name] += 1
                else:
                    self.refused[f"{name}: {told}"] += 1
            if not any(map(_is_bfloat16, arguments)):  # NumPy cannot; any numbers will do
                kernel(*arguments)

        return call


class _CheckedLatent:
    """NumPy's `LatentKernels` likewise, counted as `latent.fold` and so on."""

    def __init__(self, kernels: CheckedKernels, latent: Any) -> None:
        self._kernels, self._latent = kernels, latent

    def __getattr__(self, name: str) -> Any:
        op, kernel = getattr(OpsKernels.latent, name), getattr(self._latent, name)
        return self._kernels.shown(f"latent.{name}", op, kernel)


def _is_bfloat16(argument: Any) -> bool:
    return isinstance(argument, NumpyTensor) and on_device(argument).dtype == np.uint16
