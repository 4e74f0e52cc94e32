"""`Device` over PyTorch: memory, one stream, page-locked memory, events and CUDA graphs.

Owns how PyTorch is asked for these and how its errors are told. Kernels are launched by others:
tvm-ffi asks PyTorch for the calling thread's current stream when an argument is a CUDA tensor (the
`current_work_stream` of `Tensor.__dlpack_c_exchange_api__`), so they follow whatever stream this
module made current. Knows no model and no step.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device import garbage
from baton_worker.engine.backends.device.pieces import Rows, check_pieces
from baton_worker.engine.backends.device.seam import (
    DType,
    Event,
    Graph,
    Host,
    MemoryUse,
    Shared,
    Tensor,
)
from baton_worker.engine.backends.torch.framework import load_torch, require_cuda
from baton_worker.engine.backends.torch.peer_memory import PeerMemory, Range

_bound = threading.local()
"""`stream`: of the device that a thread called last, where its kernels go. One for all devices: who
binds its own takes the thread from the others, on the same GPU too."""


class TorchDevice:
    """`Device`: one CUDA device and a stream of its own.

    Args:
        index: which of the devices that the process may see.

    Raises:
        DeviceError: see `load_torch` and `require_cuda`.
    """

    def __init__(self, index: int = 0) -> None:
        self._torch = load_torch()
        require_cuda(self._torch)
        self.index: int | None = index
        self._index = index
        self._place = f"cuda:{index}"
        if index >= (count := self._torch.cuda.device_count()):
            raise DeviceError(
                f"engine.tensor_parallel_size needs GPU {index}, but this process sees {count}: "
                "give the pod as many GPUs as ranks"
            )
        with _telling(f"use device {index}"):
            self._torch.cuda.set_device(index)  # what has no device of its own goes there
            _bound.stream = None  # whoever is called next takes the thread back
            self.name: str = self._torch.cuda.get_device_name(index)
            self._stream = self._torch.cuda.Stream(self._place)
            self._pulls = self._torch.cuda.Stream(self._place)
        self._sharing: PeerMemory | None = None
        self._shared_bytes = 0  # which PyTorch does not count
        # What another thread copies while this one captures would become part of the graph.
        self._lock = threading.RLock()
        self._is_capturing = False

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """See `Device.empty`."""
        with self._outside_a_capture(f"allocate {dtype}{list(shape)}"):
            return self._torch.empty(shape, dtype=self._dtype(dtype), device=self._place)

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """See `Device.zeros`."""
        with self._outside_a_capture(f"allocate {dtype}{list(shape)}"):
            return self._torch.zeros(shape, dtype=self._dtype(dtype), device=self._place)

    def view(self, buffer: Tensor, at: int, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """See `Device.view`."""
        kind = self._dtype(dtype)
        with _telling(f"view {dtype}{list(shape)} at byte {at} of {buffer.numel()}"):
            part = buffer.narrow(0, at, math.prod(shape) * kind.itemsize)
            return part.view(kind).view(shape)

    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """See `Device.rows`."""
        with _telling(f"take rows {start}:{stop} of {list(tensor.shape)}"):
            return tensor.narrow(0, start, stop - start)

    def columns(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """See `Device.columns`."""
        with _telling(f"take columns {start}:{stop} of {list(tensor.shape)}"):
            return tensor.narrow(1, start, stop - start)

    def copy(self, source: Tensor, to: Tensor) -> None:
        """See `Device.copy`."""
        with self._lock, _telling(f"copy {list(source.shape)} to {list(to.shape)}"):
            self._bind()
            if source.shape != to.shape or source.dtype != to.dtype:
                raise DeviceError(f"{source.dtype} is no {to.dtype}, or the shapes differ")
            to.copy_(source)

    def host(self, n_bytes: int) -> Host:
        """See `Device.host`."""
        with self._outside_a_capture(f"lock {n_bytes} bytes of host memory"):
            locked = self._torch.empty(n_bytes, dtype=self._torch.uint8, pin_memory=True)
            memory: Host = locked.numpy()  # keeps the tensor alive
            return memory

    def upload(self, source: npt.NDArray[Any], to: Tensor) -> None:
        """See `Device.upload`."""
        with self._outside_a_capture(f"upload {source.dtype}{list(source.shape)}"):
            device, host = self._bytes(to), self._host_bytes(source)
            _check_as_many(host, device)
            device.copy_(host, non_blocking=True)

    def download(self, source: Tensor, to: npt.NDArray[Any]) -> Event:
        """See `Device.download`."""
        with self._outside_a_capture(f"download {to.dtype}{list(to.shape)}"):
            device, host = self._bytes(source), self._host_bytes(to)
            _check_as_many(host, device)
            host.copy_(device, non_blocking=True)
            return self._record()

    def shared(self, n_bytes: int) -> Shared:
        """See `Device.shared`."""
        with self._outside_a_capture(f"allocate {n_bytes} bytes to share"):
            memory, descriptor = self._peer_memory().create(n_bytes)
            self._shared_bytes += memory.n_bytes
            tensor = self._torch.as_tensor(memory, device=self._place)[:n_bytes]
            tensor.zero_()
            return Shared(tensor, descriptor, memory.n_bytes)

    def map(self, descriptor: int, n_bytes: int) -> Range:
        """See `Device.map`."""
        with self._outside_a_capture(f"map {n_bytes} bytes of another process"):
            return self._peer_memory().map(descriptor, n_bytes)

    def address(self, memory: Any) -> int:
        """See `Device.address`."""
        if isinstance(memory, Range):
            return memory.address
        return int(self._bytes(memory).data_ptr())

    def pull(
        self, source: Any, to: Any, pieces: npt.NDArray[np.int64], rows: Rows | None = None
    ) -> Event:
        """See `Device.pull`: the copy engines work, over NVLink where there is one."""
        with self._outside_a_capture(f"pull {len(pieces)} pieces"):
            n_bytes = to.n_bytes if isinstance(to, Range) else self._bytes(to).numel()
            check_pieces(pieces, source.n_bytes, n_bytes, rows)
            self._pulls.wait_stream(self._stream)
            memory, stream, into = self._peer_memory(), self._pulls.cuda_stream, self.address(to)
            if rows is None:
                memory.copy(source.address, into, pieces, stream)
            else:
                memory.copy_rows(source.address, into, pieces, rows, stream)
            return self._record(self._pulls)

    def record(self) -> Event:
        """See `Device.record`."""
        with self._outside_a_capture("record an event"):
            return self._record()

    def follow(self, event: Any) -> None:
        """See `Device.follow`."""
        with self._outside_a_capture("follow an event"):
            self._stream.wait_event(event._event)

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `Device.capture`."""
        with garbage.kept(), self._outside_a_capture("capture a graph"):
            self._torch.cuda.synchronize(self._index)
            graph = self._torch.cuda.CUDAGraph()
            # Threads that run other devices' work must not break this capture.
            graph.capture_begin(capture_error_mode="thread_local")
            self._is_capturing = True
            try:
                work()
            except BaseException:
                _abandon(graph)
                raise
            finally:
                self._is_capturing = False
            graph.capture_end()
        return _TorchGraph(graph, self._bind)

    def memory(self) -> MemoryUse:
        """See `Device.memory`; what PyTorch keeps for new tensors counts as free."""
        with _telling("ask for the memory in use"):
            cuda = self._torch.cuda
            free, total = cuda.mem_get_info(self._index)
            kept = cuda.memory_reserved(self._index) - cuda.memory_allocated(self._index)
            peak = cuda.max_memory_allocated(self._index) + self._shared_bytes
            return MemoryUse(free + kept, total, peak)

    def synchronise(self) -> None:
        """See `Device.synchronise`."""
        with self._outside_a_capture("finish the work that was launched"):
            self._torch.cuda.synchronize(self._index)

    def _bind(self) -> None:
        """Make the stream this thread's current one, which is where kernels go."""
        if getattr(_bound, "stream", None) is not self._stream:
            self._torch.cuda.set_stream(self._stream)
            _bound.stream = self._stream

    @contextlib.contextmanager
    def _outside_a_capture(self, what: str) -> Iterator[None]:
        with self._lock:
            if self._is_capturing:
                raise DeviceError(f"{self._place}: cannot {what} in a graph that is captured")
            with _telling(what):
                self._bind()
                yield

    def _record(self, stream: Any = None) -> Event:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._stream if stream is None else stream)
        return _TorchEvent(event)

    def _peer_memory(self) -> PeerMemory:
        if self._sharing is None:
            self._sharing = PeerMemory(self._index)
        return self._sharing

    def _dtype(self, dtype: DType) -> Any:
        return getattr(self._torch, dtype)

    def _bytes(self, tensor: Tensor) -> Any:
        if not tensor.is_contiguous():
            raise DeviceError(f"a tensor of strides {tensor.stride()} is not contiguous")
        return tensor.view(-1).view(self._torch.uint8)

    def _host_bytes(self, array: npt.NDArray[Any]) -> Any:
        if not array.flags.c_contiguous:
            raise DeviceError(f"an array of strides {array.strides} is not contiguous")
        # PyTorch warns of memory that it must not write; a copy of it may be.
        array = array if array.flags.writeable else array.copy()
        return self._torch.from_numpy(array.reshape(-1).view(np.uint8))


class _TorchEvent:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """See `Event.wait`."""
        with _telling("finish the work before an event"):
            self._event.synchronize()

    def has_come(self) -> bool:
        """See `Event.has_come`."""
        with _telling("ask for an event"):
            return bool(self._event.query())

    def seconds_since(self, earlier: Any) -> float:
        """See `Event.seconds_since`; PyTorch refuses events that have not come."""
        with _telling("tell the time between two events"):
            return float(earlier._event.elapsed_time(self._event)) / 1000.0


class _TorchGraph:
    def __init__(self, graph: Any, bind: Callable[[], None]) -> None:
        self._graph = graph
        self._bind = bind

    def replay(self) -> None:
        """See `Graph.replay`."""
        with _telling("launch a captured graph"):
            self._bind()
            self._graph.replay()


def _abandon(graph: Any) -> None:
    """End a capture whose work has failed: that work's own error tells more than this one's."""
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")  # of a graph that holds nothing
        graph.capture_end()


def _check_as_many(host: Any, device: Any) -> None:
    if host.numel() != device.numel():
        raise DeviceError(f"{host.numel()} bytes of the host, {device.numel()} of the device")


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """Turn PyTorch's errors, all of them RuntimeErrors, into one that says what was asked."""
    try:
        yield
    except DeviceError as error:
        raise DeviceError(f"cannot {what}: {error}") from error
    except RuntimeError as error:
        raise DeviceError(f"cannot {what}: {str(error).strip()}") from error
