"""Memory of a GPU that other processes may map, by CUDA's virtual memory management.

A file descriptor stands for it, so that namespaces do not matter as they do to CUDA's older IPC:
it goes over a Unix socket. Owns address ranges and copies between them, over NVLink where the
memory is another GPU's. Takes the driver from NVIDIA's `cuda-bindings`; knows no tensor, and of a
stream its handle.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device.pieces import Rows

FIRST_CALL, LATER_CALL_TIMES = 16, 3
"""Copies of the first call to the driver, and how many times as many each later one has."""


class Range:
    """Memory mapped into this process; unmapped when nobody refers to it any more.

    Whoever lets go of it last sees to it that no work uses it.

    Attributes:
        address: where it begins.
        n_bytes: its size, whole pages.
        __cuda_array_interface__: frameworks make a tensor over it of this, and keep it alive.
    """

    def __init__(self, driver: _Driver, handle: Any, n_bytes: int, device: int) -> None:
        cuda = driver.cuda
        self._driver = driver
        self.n_bytes = n_bytes
        self.address = int(driver.call("cuMemAddressReserve", n_bytes, 0, cuda.CUdeviceptr(0), 0))
        self._is_mapped = False
        driver.call("cuMemMap", self.address, n_bytes, 0, handle, 0)
        self._is_mapped = True
        access = cuda.CUmemAccessDesc()
        access.location = _place(cuda, device)
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        driver.call("cuMemSetAccess", self.address, n_bytes, [access], 1)
        self.__cuda_array_interface__ = {
            "shape": (n_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        address = getattr(self, "address", 0)
        if not address:
            return
        # Nothing can be done about a failure here; the process's end frees what is left.
        if self._is_mapped:
            self._driver.cuda.cuMemUnmap(address, self.n_bytes)
        self._driver.cuda.cuMemAddressFree(address, self.n_bytes)


class PeerMemory:
    """What a device shares and maps.

    Raises:
        DeviceError: cuda-bindings is not installed.
    """

    def __init__(self, device: int) -> None:
        self._driver = _Driver()
        self._device = device

    def create(self, n_bytes: int) -> tuple[Range, int]:
        """Return new memory, not cleared, and a descriptor of it that the caller closes."""
        cuda, call = self._driver.cuda, self._driver.call
        prop = cuda.CUmemAllocationProp()
        prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location = _place(cuda, self._device)
        prop.requestedHandleTypes = self._driver.by_descriptor
        if self._reaches_network_cards():
            prop.allocFlags.gpuDirectRDMACapable = 1
        least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        page = int(call("cuMemGetAllocationGranularity", prop, least))
        size = -(-n_bytes // page) * page
        handle = call("cuMemCreate", size, prop, 0)
        try:
            memory = Range(self._driver, handle, size, self._device)
            by = self._driver.by_descriptor
            return memory, int(call("cuMemExportToShareableHandle", handle, by, 0))
        finally:
            call("cuMemRelease", handle)  # the mapping holds the memory now

    def _reaches_network_cards(self) -> bool:
        """Whether such memory may be read over RDMA, if it is asked for so."""
        attribute = self._driver.cuda.CUdevice_attribute
        what = attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        device = self._driver.call("cuDeviceGet", self._device)
        return bool(self._driver.call("cuDeviceGetAttribute", what, device))

    def map(self, descriptor: int, n_bytes: int) -> Range:
        """Return another process's memory; `n_bytes` is what its `create` told."""
        call, by = self._driver.call, self._driver.by_descriptor
        handle = call("cuMemImportFromShareableHandle", descriptor, by)
        try:
            return Range(self._driver, handle, n_bytes, self._device)
        finally:
            call("cuMemRelease", handle)

    def copy(self, source: int, to: int, pieces: npt.NDArray[np.int64], stream: int) -> None:
        """Launch copies of (byte of source, byte of to, bytes), in any order among themselves.

        Nothing is copied before a call to the driver returns, and a call's time grows with its
        copies, so that a short one begins and each longer one is prepared while others run: 8,192
        tokens of Qwen3-8B take 3.08 ms so, and 3.42 by one call (H100s, NV18).
        """
        cuda = self._driver.cuda
        how = cuda.CUmemcpyAttributes()
        how.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        how.flags = cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE.value
        for some in calls_of(pieces):
            sources = [cuda.CUdeviceptr(at) for at in (some[:, 0] + source).tolist()]
            into = [cuda.CUdeviceptr(at) for at in (some[:, 1] + to).tolist()]
            sizes = some[:, 2].tolist()
            self._driver.call(
                "cuMemcpyBatchAsync", into, sources, sizes, len(sizes), [how], [0], 1, stream
            )

    def copy_rows(
        self, source: int, to: int, pieces: npt.NDArray[np.int64], rows: Rows, stream: int
    ) -> None:
        """Launch copies of (byte of source, byte of to, rows), each row as `rows` says."""
        cuda = self._driver.cuda
        how = cuda.CUDA_MEMCPY2D()
        how.srcMemoryType = how.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        how.WidthInBytes, how.srcPitch, how.dstPitch = rows
        for there, here, count in pieces.tolist():
            how.srcDevice = cuda.CUdeviceptr(source + there)
            how.dstDevice = cuda.CUdeviceptr(to + here)
            how.Height = count
            self._driver.call("cuMemcpy2DAsync", how, stream)


def calls_of(pieces: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the pieces of each call to the driver, a few and then ever more; none of none."""
    begin, count = 0, FIRST_CALL
    while begin < len(pieces):
        yield pieces[begin : begin + count]
        begin, count = begin + count, count * LATER_CALL_TIMES


class _Driver:
    def __init__(self) -> None:
        try:
            self.cuda: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise DeviceError(
                f"memory is shared through cuda-bindings, which is not there ({error}): "
                "pip install 'baton-worker[torch]'"
            ) from error
        kinds = self.cuda.CUmemAllocationHandleType
        self.by_descriptor = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def call(self, name: str, *arguments: Any) -> Any:
        """Return what the driver's function gives.

        Raises:
            DeviceError: it fails, with its name and the driver's word.
        """
        error, *results = getattr(self.cuda, name)(*arguments)
        if error != self.cuda.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{name}: {error.name}")
        return results[0] if results else None


def _place(cuda: Any, device: int) -> Any:
    location = cuda.CUmemLocation()
    location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location
