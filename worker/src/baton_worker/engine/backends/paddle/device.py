"""`Device` over Paddle: what `backends.torch.device` is over PyTorch, by the same contract.

Owns how Paddle is asked for memory, streams and graphs. Run on tensors of the CPU only, where there
are no graphs and work is done at once; on a GPU it has not been run. Knows no model and no step.

A view that begins behind its memory's start must not change its dtype: Paddle 3.3 then takes an
offset in values for one in bytes. So memory gets its dtype first and is cut then.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device import garbage
from baton_worker.engine.backends.device.pieces import Rows
from baton_worker.engine.backends.device.seam import (
    DType,
    Event,
    Graph,
    Host,
    Mapped,
    MemoryUse,
    Shared,
    Tensor,
)
from baton_worker.engine.backends.paddle.framework import as_tensor, paddle, require_device

_ITEM_BYTES: dict[DType, int] = {
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
}

_NOT_SHARED = "Baton shares a GPU's memory through PyTorch (engine.framework: torch)"
_bound = threading.local()
"""`stream`: of the device that a thread called last, where its kernels go."""


class PaddleDevice:
    """`Device`: the process's first GPU and a stream of its own, or the CPU for tests.

    Raises:
        DeviceError: see `require_device`.
    """

    def __init__(self, kind: Literal["cpu", "gpu"] = "gpu") -> None:
        require_device(kind)
        self._is_gpu = kind == "gpu"
        self.name: str = "Paddle on the CPU"
        self.index = 0 if self._is_gpu else None
        self._stream: Any = None
        with _telling("use the device"):
            if self._is_gpu:
                self.name = paddle.device.cuda.get_device_name()
                self._stream = paddle.device.Stream()
        # What another thread copies while this one captures would become part of the graph.
        self._lock = threading.RLock()
        self._is_capturing = False

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """See `Device.empty`."""
        with self._outside_a_capture(f"allocate {dtype}{list(shape)}"):
            return paddle.empty(list(shape), dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """See `Device.zeros`."""
        with self._outside_a_capture(f"allocate {dtype}{list(shape)}"):
            return paddle.zeros(list(shape), dtype=dtype)

    def view(self, buffer: Tensor, at: int, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """See `Device.view`."""
        n_bytes, item = int(buffer.shape[0]), _ITEM_BYTES[dtype]
        size = math.prod(shape)
        with _telling(f"view {dtype}{list(shape)} at byte {at} of {n_bytes}"):
            if at % 16 or at + size * item > n_bytes:
                raise DeviceError("it does not lie there")
            if not size:
                return paddle.empty(list(shape), dtype=dtype)
            typed = buffer if item == 1 else paddle.view(buffer[: n_bytes - n_bytes % item], dtype)
            return paddle.view(typed[at // item : at // item + size], list(shape))

    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """See `Device.rows`."""
        with _telling(f"take rows {start}:{stop} of {list(tensor.shape)}"):
            _check_within(start, stop, tensor.shape[0])
            return tensor[start:stop]

    def columns(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """See `Device.columns`."""
        with _telling(f"take columns {start}:{stop} of {list(tensor.shape)}"):
            _check_within(start, stop, tensor.shape[1])
            return tensor[:, start:stop]

    def copy(self, source: Tensor, to: Tensor) -> None:
        """See `Device.copy`."""
        with self._lock, _telling(f"copy {list(source.shape)} to {list(to.shape)}"):
            self._bind()
            if list(source.shape) != list(to.shape) or source.dtype != to.dtype:
                raise DeviceError(f"{source.dtype} is no {to.dtype}, or the shapes differ")
            to.copy_(source, False)

    def host(self, n_bytes: int) -> Host:
        """See `Device.host`."""
        with self._outside_a_capture(f"lock {n_bytes} bytes of host memory"):
            if not self._is_gpu:
                return np.zeros(n_bytes, np.uint8)
            locked = paddle.empty([n_bytes], dtype="uint8").pin_memory()
            return np.from_dlpack(locked).view(np.uint8)  # keeps the tensor alive

    def upload(self, source: npt.NDArray[Any], to: Tensor) -> None:
        """See `Device.upload`."""
        with self._outside_a_capture(f"upload {source.dtype}{list(source.shape)}"):
            to.copy_(self._on_host(source, to), not self._is_gpu)

    def download(self, source: Tensor, to: npt.NDArray[Any]) -> Event:
        """See `Device.download`."""
        with self._outside_a_capture(f"download {to.dtype}{list(to.shape)}"):
            self._on_host(to, source).copy_(source, not self._is_gpu)
            return self._record()

    def shared(self, n_bytes: int) -> Shared:
        """See `Device.shared`; refused: nothing of it was ever run with Paddle."""
        raise DeviceError(f"cannot share {n_bytes} bytes: {_NOT_SHARED}")

    def address(self, tensor: Tensor) -> int:
        """See `Device.address`."""
        return int(tensor.data_ptr())

    def map(self, descriptor: int, n_bytes: int) -> Mapped:
        """See `Device.map`; refused."""
        raise DeviceError(f"cannot map {n_bytes} bytes: {_NOT_SHARED}")

    def pull(
        self,
        source: Mapped,
        to: Tensor | Mapped,
        pieces: npt.NDArray[np.int64],
        rows: Rows | None = None,
    ) -> Event:
        """See `Device.pull`; refused."""
        raise DeviceError(f"cannot pull {len(pieces)} pieces: {_NOT_SHARED}")

    def record(self) -> Event:
        """See `Device.record`."""
        with self._outside_a_capture("record an event"):
            return self._record()

    def follow(self, event: Event) -> None:
        """See `Device.follow`; refused."""
        raise DeviceError(f"cannot follow another device's event: {_NOT_SHARED}")

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `Device.capture`; the CPU has none."""
        with garbage.kept(), self._outside_a_capture("capture a graph"):
            if not self._is_gpu:
                raise DeviceError("Paddle has none on the CPU")
            paddle.device.synchronize()
            graph = paddle.device.cuda.graphs.CUDAGraph(mode="thread_local")
            graph.capture_begin()
            self._is_capturing = True
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError, OSError):  # the work's own tells more
                    graph.capture_end()
                raise
            finally:
                self._is_capturing = False
            graph.capture_end()
        return _PaddleGraph(graph, self._bind)

    def memory(self) -> MemoryUse:
        """See `Device.memory`; Paddle does not tell what others hold of a GPU."""
        with _telling("ask for the memory in use"):
            if not self._is_gpu:
                return _host_memory()
            cuda = paddle.device.cuda
            total = int(cuda.get_device_properties().total_memory)
            return MemoryUse(total - cuda.memory_allocated(), total, cuda.max_memory_allocated())

    def synchronise(self) -> None:
        """See `Device.synchronise`."""
        with self._outside_a_capture("finish the work that was launched"):
            if self._is_gpu:
                paddle.device.synchronize()

    def _bind(self) -> None:
        """Make the stream this thread's current one, which is where kernels go."""
        if self._is_gpu and getattr(_bound, "stream", None) is not self._stream:
            paddle.device.set_stream(self._stream)
            _bound.stream = self._stream

    @contextlib.contextmanager
    def _outside_a_capture(self, what: str) -> Iterator[None]:
        with self._lock:
            if self._is_capturing:
                raise DeviceError(f"{self.name}: cannot {what} in a graph that is captured")
            with _telling(what):
                self._bind()
                yield

    def _record(self) -> Event:
        event = None
        if self._is_gpu:
            event = paddle.device.Event(enable_timing=True)
            event.record(self._stream)
        return _PaddleEvent(event)

    def _on_host(self, array: npt.NDArray[Any], like: Tensor) -> Tensor:
        """Return a tensor over an array's memory, of the shape and dtype of `like`."""
        if not (array.flags.c_contiguous and like.is_contiguous()):
            raise DeviceError("the memory is not contiguous")
        n_bytes = math.prod(like.shape) * like.element_size()
        if array.nbytes != n_bytes:
            raise DeviceError(f"{array.nbytes} bytes of the host, {n_bytes} of the device")
        array = array if array.flags.writeable else array.copy()
        flat = as_tensor(array.reshape(-1).view(np.uint8))
        typed = flat if like.element_size() == 1 else paddle.view(flat, like.dtype)
        return paddle.view(typed, list(like.shape))


class _PaddleEvent:
    """`event`: None on the CPU, whose work is done when it is recorded."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self._at_seconds = 0.0 if event is not None else time.perf_counter()

    def wait(self) -> None:
        """See `Event.wait`."""
        if self._event is not None:
            with _telling("finish the work before an event"):
                self._event.synchronize()

    def has_come(self) -> bool:
        """See `Event.has_come`."""
        with _telling("ask for an event"):
            return self._event is None or bool(self._event.query())

    def seconds_since(self, earlier: Any) -> float:
        """See `Event.seconds_since`."""
        if self._event is None:
            return self._at_seconds - float(earlier._at_seconds)
        with _telling("tell the time between two events"):
            return float(earlier._event.elapsed_time(self._event)) / 1000.0


class _PaddleGraph:
    def __init__(self, graph: Any, bind: Callable[[], None]) -> None:
        self._graph = graph
        self._bind = bind

    def replay(self) -> None:
        """See `Graph.replay`."""
        with _telling("launch a captured graph"):
            self._bind()
            self._graph.replay()


def _host_memory() -> MemoryUse:
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    core = paddle.base.core
    used = core.host_memory_stat_current_value("Allocated", 0)
    return MemoryUse(total - used, total, core.host_memory_stat_peak_value("Allocated", 0))


def _check_within(start: int, stop: int, size: int) -> None:
    if not 0 <= start <= stop <= size:
        raise DeviceError(f"there are {size}")


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """Turn Paddle's errors, which are of many kinds, into one that says what was asked."""
    try:
        yield
    except DeviceError as error:
        raise DeviceError(f"cannot {what}: {error}") from error
    except (RuntimeError, OSError, ValueError, MemoryError, SystemError) as error:
        told = str(error).strip().splitlines() or [repr(error)]
        raise DeviceError(f"cannot {what}: {told[-1]}") from error
