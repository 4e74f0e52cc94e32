"""Host memory that claims to be a GPU's, so that an op's checks of its arguments can be tried.

A library that was built with CUDA checks what it is given before it asks for a device. Where there
is none, that is as far as a call gets: a wrong dtype, size or stride is told as on a GPU, and what
is right fails for want of a driver. Never to be used where a GPU is: ops would take the addresses
for its own.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_CUDA = 2
_KINDS = {"i": 0, "u": 1, "f": 2}


class _Tensor(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """`DLManagedTensor`."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_delete_nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)


class CudaStub:
    """A NumPy array under a CUDA device's name; it must outlive the call that it is given to."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.shape = array.shape
        sizes = ctypes.c_int64 * max(array.ndim, 1)
        self._kept = (
            array,
            sizes(*array.shape),
            sizes(*(s // array.itemsize for s in array.strides)),
        )
        self._managed = _Managed(
            _Tensor(
                data=array.ctypes.data,
                device_type=_CUDA,
                ndim=array.ndim,
                code=_KINDS[array.dtype.kind],
                bits=8 * array.itemsize,
                lanes=1,
                shape=self._kept[1],
                strides=self._kept[2],
            ),
            deleter=ctypes.cast(_delete_nothing, ctypes.c_void_p),
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        """Tell the device that it is not on."""
        return _CUDA, 0

    def __dlpack__(self, *_: object, **__: object) -> Any:
        """Share the memory."""
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)


def has_gpu() -> bool:
    """Whether this machine has a device that would run what stubs are given to."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def stub(argument: Any) -> Any:
    """Return a kernel's argument with arrays, also inside tuples, as stubs."""
    if isinstance(argument, np.ndarray):
        return CudaStub(argument)
    if isinstance(argument, tuple):
        parts = [stub(part) for part in argument]
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    return argument
