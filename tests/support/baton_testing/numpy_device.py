"""A `Device` over NumPy that holds its callers to what a real one would do to them.

Work is put on a stream and done as late as possible: when an event behind it is waited for. So a
host that reads too early finds filler, and one that overwrites what is still to be uploaded is
told. A capture allows no allocation, no copy from or to the host and no waiting, and is broken
where its thread frees a graph, as the collector of garbage may; a captured graph is a list of
kernel calls over fixed memory, which may not have been given back at its replay.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device import garbage
from baton_worker.engine.backends.device.pieces import Rows, check_pieces
from baton_worker.engine.backends.device.seam import DType, Host, MemoryUse, Shared

FILLER = 0xA5
"""What host memory is filled with until a download has come, and new memory of the device."""

SECONDS_PER_LAUNCH = 1e-6
"""What anything on the stream takes, by this device's clock."""

ASKED_IN_VAIN = 3
"""How often a pull is said not to have come, unless it is waited for."""

LAUNCHES_BESIDE_A_PULL = 60
"""How many things the stream does at most while a pull goes on beside it."""

_ALIGNMENT = 256
_TYPES = {
    "bfloat16": np.uint16,
    "float32": np.float32,
    "float64": np.float64,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
}

Work = Callable[..., None]


MAPPED_FROM_BYTES = 1 << 18
"""Host memory of so many bytes is mapped, not written."""


class _FillerFile:
    """A file without a name, of filler: who maps it has pages of it once it touches them.

    Engines of these sizes touch few of the megabytes that they stage weights and KV in, and writing
    filler into all of them took a sixth of the time of their tests.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._n_bytes = 0
        self._lock = threading.Lock()

    def mapped(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Return memory of its own for whoever asks: what is written there stays there."""
        with self._lock:
            if self._descriptor is None:
                self._descriptor = os.memfd_create("filler")
            if n_bytes > self._n_bytes:
                more = bytes([FILLER]) * (n_bytes - self._n_bytes)
                self._n_bytes += os.pwrite(self._descriptor, more, self._n_bytes)
            if n_bytes > self._n_bytes:
                raise DeviceError(f"no filler for {n_bytes} bytes of the host's memory")
            pages = mmap.mmap(self._descriptor, n_bytes, mmap.MAP_PRIVATE)
        return np.frombuffer(pages, np.uint8)


_FILLER_FILE = _FillerFile()


class _Memory:
    """One allocation, aligned: it lives as long as a tensor of it."""

    def __init__(self, n_bytes: int) -> None:
        raw = np.full(n_bytes + _ALIGNMENT, FILLER, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        self.bytes = raw[start : start + n_bytes]


class NumpyTensor:
    """Memory of the device. Kernels get at its numbers by `on_device`, the host does not."""

    def __init__(self, memory: _Memory, array: npt.NDArray[Any]) -> None:
        self._memory = memory
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self._array.shape

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise DeviceError("memory of the device is read or written by the host")

    __array__ = __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = _refuse
    __dlpack__ = __float__ = __int__ = __index__ = _refuse


def on_device(argument: Any) -> Any:
    """Return a kernel's argument as NumPy has it: tensors, also inside tuples, as arrays."""
    if isinstance(argument, NumpyTensor):
        return argument._array
    if isinstance(argument, tuple):
        parts = [on_device(part) for part in argument]
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    return argument


class _Weak:
    """A tensor as a graph knows it: an address, not a hold on its memory."""

    def __init__(self, tensor: NumpyTensor) -> None:
        self._memory = weakref.ref(tensor._memory)
        self._array = tensor._array

    def tensor(self) -> NumpyTensor:
        memory = self._memory()
        if memory is None:
            raise DeviceError("a graph is replayed over memory that was given back")
        return NumpyTensor(memory, self._array)


def _memories(argument: Any) -> Iterator[_Memory]:
    """Yield the memory of each tensor of a kernel's argument."""
    if isinstance(argument, NumpyTensor):
        yield argument._memory
    elif isinstance(argument, tuple):
        for part in argument:
            yield from _memories(part)


class _Call:
    """A kernel's call as a graph knows it: addresses, not a hold on their memory."""

    def __init__(self, work: Work, arguments: tuple[Any, ...]) -> None:
        self._work = work
        self._memories = tuple({id(m): weakref.ref(m) for m in _memories(arguments)}.values())
        self._arguments = tuple(map(on_device, arguments))

    def held(self) -> Callable[[], None]:
        """Return what does it, which holds the memory until then."""
        held = [memory() for memory in self._memories]
        if None in held:
            raise DeviceError("a graph is replayed over memory that was given back")
        return partial(self._do, held)

    def _do(self, held: list[_Memory | None]) -> None:
        self._work(*self._arguments)


class _Event:
    def __init__(self, device: NumpyDevice, deliver: Callable[[], None]) -> None:
        self._device = device
        self._at = device.n_launched
        self._deliver = deliver

    def wait(self) -> None:
        self._device.run_to(self._at)
        self._deliver()

    def has_come(self) -> bool:
        return self._device.n_done >= self._at

    def seconds_since(self, earlier: Any) -> float:
        if self._device.n_done < max(self._at, earlier._at):
            raise DeviceError("the time of an event is asked that has not come")
        return (self._at - int(earlier._at)) * SECONDS_PER_LAUNCH


class _SharedMemory(_Memory):
    """An allocation that stands in a file without a name, so that its descriptor is all of it."""

    def __init__(self, descriptor: int, n_bytes: int) -> None:
        self.bytes = np.frombuffer(mmap.mmap(descriptor, n_bytes), np.uint8)


class _Mapped:
    """See `seam.Mapped`."""

    def __init__(self, descriptor: int, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.bytes = np.frombuffer(mmap.mmap(descriptor, n_bytes), np.uint8)


class _Pull:
    """A copy beside the stream, done when it is waited for, has been asked after often enough, or
    much later in the stream: whoever has its memory by then finds it overwritten.

    Holds no memory: whoever lets go of it before the copy has come is told.
    """

    def __init__(
        self,
        device: NumpyDevice,
        source: _Mapped,
        to: NumpyTensor | _Mapped,
        pieces: npt.NDArray[np.int64],
        rows: Rows | None,
    ) -> None:
        self._device = device
        self._at = device.n_launched
        self._source = weakref.ref(source)
        self._to = _Weak(to) if isinstance(to, NumpyTensor) else weakref.ref(to)
        self._pieces = pieces.copy()
        self._rows = rows
        self._patience = ASKED_IN_VAIN
        self._has_come = False

    def wait(self) -> None:
        self._device.run_to(self._at)
        if not self._has_come:
            self._copy()
        self._has_come = True

    def has_come(self) -> bool:
        self._patience -= 1
        if self._patience < 0:
            self.wait()
        return self._has_come

    def come_if_late(self) -> bool:
        """Copy where the stream has gone on for long; whether that is done, now or before."""
        if not self._has_come and self._device.n_done >= self._at + LAUNCHES_BESIDE_A_PULL:
            self._copy()
            self._has_come = True
        return self._has_come

    def seconds_since(self, earlier: Any) -> float:
        """See `Event.seconds_since`; what is not done has taken no time yet."""
        if not self._has_come:
            raise DeviceError(f"the time since {earlier} is asked of a pull that has not come")
        return 1e-6

    def _copy(self) -> None:
        source = self._source()
        target = self._to.tensor() if isinstance(self._to, _Weak) else self._to()
        if source is None or target is None:
            raise DeviceError("memory is unmapped that is pulled from or into")
        into, rows = _flat(target), self._rows
        for at, to, count in self._pieces.tolist():
            if rows is None:
                into[to : to + count] = source.bytes[at : at + count]
                continue
            for row in range(count):
                there, here = at + row * rows.apart_there, to + row * rows.apart_here
                into[here : here + rows.n_bytes] = source.bytes[there : there + rows.n_bytes]


class _Graph:
    def __init__(self, device: NumpyDevice, calls: list[_Call]) -> None:
        self._device = device
        self._calls = calls

    def replay(self) -> None:
        for call in self._calls:
            self._device.launch_again(call)

    def __del__(self) -> None:
        self._device.free_graph()


class NumpyDevice:
    """See `seam.Device`.

    Args:
        total: bytes that it has.
        runs_by_itself: what is launched is done on a thread, as on a rank that waits for nothing;
            until `close`. What fails there fails the next launch too.
    """

    name = "numpy"
    index = None

    def __init__(self, total: int = 1 << 32, runs_by_itself: bool = False) -> None:
        self._total = total
        self._used = self._peak = 0
        self._stream: deque[Callable[[], None]] = deque()
        self._captured: list[_Call] | None = None
        self._capturer: int | None = None
        self._is_broken = False
        self._pulls: list[_Pull] = []
        self._lock = threading.RLock()
        self.n_launched = self.n_done = 0
        self.n_replays = self.n_captures = 0
        self._failure: Exception | None = None
        self._work = threading.Semaphore(0)
        self._runner: threading.Thread | None = None
        if runs_by_itself:
            self._runner = threading.Thread(target=self._run, name="numpy-device", daemon=True)
            self._runner.start()

    def close(self) -> None:
        """End the thread, behind what was launched."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self._work.release()
            runner.join()

    def _run(self) -> None:
        while self._runner is not None or self.n_done < self.n_launched:
            self._work.acquire()
            if self._failure is None and self.n_done < self.n_launched:
                try:
                    self.run_to(self.n_done + 1)
                except Exception as error:  # noqa: BLE001 - whoever launches next is told
                    self._failure = error

    def empty(self, shape: tuple[int, ...], dtype: DType) -> NumpyTensor:
        """See `Device.empty`: its bytes are filler, which is NaN nowhere and zero nowhere."""
        what = f"allocate {dtype}{list(shape)}"
        self._refuse_in_capture(what)
        kind = np.dtype(_TYPES[dtype])
        n_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if self._used + n_bytes > self._total:
            raise DeviceError(f"{what}: {n_bytes} bytes, {self._total - self._used} are free")
        memory = _Memory(n_bytes)
        self._used += n_bytes
        self._peak = max(self._peak, self._used)
        weakref.finalize(memory, self._give_back, n_bytes)
        return NumpyTensor(memory, memory.bytes.view(kind).reshape(shape))

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> NumpyTensor:
        """See `Device.zeros`."""
        tensor = self.empty(shape, dtype)
        self.launch(lambda array: array.fill(0), tensor)
        return tensor

    def view(
        self, buffer: NumpyTensor, at: int, shape: tuple[int, ...], dtype: DType
    ) -> NumpyTensor:
        """See `Device.view`."""
        kind = np.dtype(_TYPES[dtype])
        stop = at + int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        array = on_device(buffer)
        if at % 16 or array.dtype != np.uint8 or array.ndim != 1 or stop > len(array):
            raise DeviceError(f"no {dtype}{list(shape)} at byte {at} of {len(array)}")
        return NumpyTensor(buffer._memory, array[at:stop].view(kind).reshape(shape))

    def rows(self, tensor: NumpyTensor, start: int, stop: int) -> NumpyTensor:
        """See `Device.rows`."""
        if not 0 <= start <= stop <= tensor.shape[0]:
            raise DeviceError(f"no rows {start}:{stop} of {tensor.shape[0]}")
        return NumpyTensor(tensor._memory, on_device(tensor)[start:stop])

    def columns(self, tensor: NumpyTensor, start: int, stop: int) -> NumpyTensor:
        """See `Device.columns`."""
        if not 0 <= start <= stop <= tensor.shape[1]:
            raise DeviceError(f"no columns {start}:{stop} of {tensor.shape[1]}")
        return NumpyTensor(tensor._memory, on_device(tensor)[:, start:stop])

    def copy(self, source: NumpyTensor, to: NumpyTensor) -> None:
        """See `Device.copy`."""
        if source.shape != to.shape:
            raise DeviceError(f"copy {list(source.shape)} to {list(to.shape)}: sizes differ")
        self.launch(lambda into, values: np.copyto(into, values), to, source)

    def host(self, n_bytes: int) -> Host:
        """See `Device.host`."""
        self._refuse_in_capture("allocate memory of the host")
        if n_bytes < MAPPED_FROM_BYTES:
            return np.full(n_bytes, FILLER, np.uint8)
        return _FILLER_FILE.mapped(n_bytes)

    def upload(self, source: npt.NDArray[Any], to: NumpyTensor) -> None:
        """See `Device.upload`; raises when waited for if `source` has changed in between."""
        what = f"upload {source.dtype}{list(source.shape)}"
        self._refuse_in_capture(what)
        into = _bytes_of(on_device(to), what)
        if _bytes_of(source, what).nbytes != into.nbytes:
            raise DeviceError(f"{what}: to {into.nbytes} bytes")
        meant = source.tobytes()

        def copy() -> None:
            if source.tobytes() != meant:
                raise DeviceError("host memory was changed before it was uploaded")
            into[:] = np.frombuffer(meant, np.uint8)

        self._put(copy)

    def download(self, source: NumpyTensor, to: npt.NDArray[Any]) -> _Event:
        """See `Device.download`; until the event is waited for, `to` holds filler."""
        what = f"download {to.dtype}{list(to.shape)}"
        self._refuse_in_capture(what)
        values, into = _bytes_of(on_device(source), what), _bytes_of(to, what)
        if values.nbytes != into.nbytes:
            raise DeviceError(f"{what}: from {values.nbytes} bytes")
        into[:] = FILLER
        come = np.empty_like(values)
        self._put(lambda: np.copyto(come, values))
        return _Event(self, lambda: np.copyto(into, come))

    def shared(self, n_bytes: int) -> Shared:
        """See `Device.shared`: a file without a name."""
        self._refuse_in_capture(what := f"allocate {n_bytes} bytes to share")
        size = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._used + size > self._total:
            raise DeviceError(f"{what}: {self._total - self._used} are free")
        descriptor = os.memfd_create("device")
        os.truncate(descriptor, size)
        memory = _SharedMemory(descriptor, size)
        self._used += size
        self._peak = max(self._peak, self._used)
        weakref.finalize(memory, self._give_back, size)
        return Shared(NumpyTensor(memory, memory.bytes[:n_bytes]), descriptor, size)

    def map(self, descriptor: int, n_bytes: int) -> _Mapped:
        """See `Device.map`."""
        self._refuse_in_capture(what := f"map {n_bytes} bytes of another process")
        try:
            if os.fstat(descriptor).st_size < n_bytes:
                raise DeviceError(f"cannot {what}: there are fewer")
            return _Mapped(descriptor, n_bytes)
        except (OSError, ValueError) as error:
            raise DeviceError(f"cannot {what}: {error}") from error

    def address(self, memory: Any) -> int:
        """See `Device.address`."""
        array = memory.bytes if isinstance(memory, _Mapped) else on_device(memory)
        return int(array.ctypes.data)

    def pull(
        self,
        source: _Mapped,
        to: NumpyTensor | _Mapped,
        pieces: npt.NDArray[np.int64],
        rows: Rows | None = None,
    ) -> _Pull:
        """See `Device.pull`."""
        self._refuse_in_capture(f"pull {len(pieces)} pieces")
        check_pieces(pieces, source.n_bytes, len(_flat(to)), rows)
        with self._lock:
            self._pulls.append(pull := _Pull(self, source, to, pieces, rows))
            return pull

    def record(self) -> _Event:
        """See `Device.record`."""
        self._refuse_in_capture("record")
        return _Event(self, lambda: None)

    def follow(self, event: _Event) -> None:
        """See `Device.follow`."""
        self._refuse_in_capture("follow an event")
        self._put(event.wait)

    def capture(self, work: Callable[[], None]) -> _Graph:
        """See `Device.capture`."""
        with garbage.kept(), self._lock:
            self._refuse_in_capture("capture")
            self._captured, self._capturer = [], threading.get_ident()
            self._is_broken = False
            try:
                work()
                if self._is_broken:
                    raise DeviceError("cannot capture a graph: one was freed meanwhile")
                self.n_captures += 1
                return _Graph(self, self._captured)
            finally:
                self._captured = self._capturer = None

    def free_graph(self) -> None:
        """Break the capture if this thread captures, as CUDA does."""
        self._is_broken |= self._capturer == threading.get_ident()

    def memory(self) -> MemoryUse:
        """See `Device.memory`."""
        return MemoryUse(self._total - self._used, self._total, self._peak)

    def synchronise(self) -> None:
        """See `Device.synchronise`: of all work, that beside the stream too."""
        self.run_to(self.n_launched)
        with self._lock:
            pulls, self._pulls = self._pulls, []
        for pull in pulls:
            pull.wait()

    def launch(self, work: Work, *arguments: Any) -> None:
        """Put a kernel on the stream, or into the graph that is being captured."""
        with self._lock:
            if self._captured is not None:
                self._captured.append(_Call(work, arguments))
            else:
                self._put(lambda: work(*map(on_device, arguments)))

    def launch_again(self, call: _Call) -> None:
        """Put a kernel of a graph on the stream, or into another that is being captured."""
        with self._lock:
            if self._captured is not None:
                self._captured.append(call)
            else:
                self._put(call.held())

    def run_to(self, count: int) -> None:
        """Do what was launched, up to the `count`-th thing."""
        with self._lock:
            self._refuse_in_capture("wait")
            while self.n_done < count:
                work = self._stream.popleft()
                try:
                    work()
                finally:
                    self.n_done += 1
                if self._pulls:
                    self._pulls = [pull for pull in self._pulls if not pull.come_if_late()]

    def _put(self, work: Callable[[], None]) -> None:
        if self._failure is not None:
            raise DeviceError(f"the device failed: {self._failure}") from self._failure
        with self._lock:
            self._stream.append(work)
            self.n_launched += 1
        if self._runner is not None:
            self._work.release()

    def _refuse_in_capture(self, what: str) -> None:
        with self._lock:  # another thread waits for the capture's end
            if self._captured is not None:
                raise DeviceError(f"{what}: in a graph that is captured")

    def _give_back(self, n_bytes: int) -> None:
        self._used -= n_bytes


def _flat(memory: NumpyTensor | _Mapped) -> npt.NDArray[np.uint8]:
    """Return the bytes of memory that is pulled into."""
    return memory.bytes if isinstance(memory, _Mapped) else _bytes_of(on_device(memory), "pull")


def _bytes_of(array: npt.NDArray[Any], what: str) -> npt.NDArray[np.uint8]:
    if not array.flags.c_contiguous:
        raise DeviceError(f"{what}: not contiguous")
    return array.reshape(-1).view(np.uint8)
