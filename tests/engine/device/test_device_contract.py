"""What the device's runner relies on, held by every framework's device."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing.numpy_device import NumpyDevice
from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device.pieces import Rows
from baton_worker.engine.backends.device.seam import Device, DType, Mapped, Shared, Tensor

HOST_TYPES: dict[DType, type[np.generic]] = {
    "bfloat16": np.uint16,
    "float32": np.float32,
    "float64": np.float64,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
}


def numpy_device() -> Device:
    return NumpyDevice()


def paddle_device() -> Device:
    pytest.importorskip("paddle", reason="Paddle is absent")
    from baton_worker.engine.backends.paddle.device import PaddleDevice

    return PaddleDevice("cpu")


def torch_device() -> Device:
    torch = pytest.importorskip("torch", reason="PyTorch is absent")
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    from baton_worker.engine.backends.torch.device import TorchDevice

    return TorchDevice()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(numpy_device, id="numpy"),
        pytest.param(paddle_device, id="paddle"),
        pytest.param(torch_device, id="torch", marks=pytest.mark.gpu),
    ],
)
def device(request: pytest.FixtureRequest) -> Device:
    make: Callable[[], Device] = request.param
    return make()


@pytest.fixture
def capturing(device: Device) -> Device:
    """A device that has graphs."""
    if device.name == "Paddle on the CPU":
        with pytest.raises(DeviceError, match="capture a graph: Paddle has none on the CPU"):
            device.capture(lambda: None)
        pytest.skip("Paddle has no graphs on the CPU")
    return device


def fetch(device: Device, tensor: Tensor, dtype: DType = "int32") -> npt.NDArray[Any]:
    shape = tuple(int(size) for size in tensor.shape)
    kind = np.dtype(HOST_TYPES[dtype])
    n_bytes = int(np.prod(shape)) * kind.itemsize
    host = device.host(n_bytes).view(kind).reshape(shape)
    device.download(tensor, host).wait()
    return host


def ints(device: Device, *values: int) -> Tensor:
    tensor = device.empty((len(values),), "int32")
    device.upload(np.array(values, np.int32), tensor)
    device.synchronise()
    return tensor


@pytest.mark.parametrize("dtype", HOST_TYPES)
def test_what_is_uploaded_comes_back(device: Device, dtype: DType) -> None:
    kind = np.dtype(HOST_TYPES[dtype])
    sent = np.arange(6 * kind.itemsize, dtype=np.uint8).view(kind).reshape(2, 3)
    tensor = device.empty((2, 3), dtype)
    device.upload(sent, tensor)
    assert np.array_equal(fetch(device, tensor, dtype), sent)


@pytest.mark.parametrize("dtype", HOST_TYPES)
def test_zeros_are_zeros(device: Device, dtype: DType) -> None:
    assert not fetch(device, device.zeros((3, 5), dtype), dtype).view(np.uint8).any()


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (2, 3, 4)])
def test_every_shape_may_be_made(device: Device, shape: tuple[int, ...]) -> None:
    assert tuple(device.empty(shape, "float32").shape) == shape


def test_a_read_only_array_can_be_uploaded(device: Device) -> None:
    sent = np.arange(4, dtype=np.int32)
    sent.flags.writeable = False
    tensor = device.empty((4,), "int32")
    device.upload(sent, tensor)
    assert fetch(device, tensor).tolist() == [0, 1, 2, 3]


def test_a_view_is_the_buffers_memory(device: Device) -> None:
    buffer = device.zeros((64,), "uint8")
    view = device.view(buffer, 16, (2, 3), "int32")
    device.upload(np.arange(6, dtype=np.int32).reshape(2, 3), view)
    assert tuple(view.shape) == (2, 3)
    assert fetch(device, buffer, "uint8")[16:40].view(np.int32).tolist() == [0, 1, 2, 3, 4, 5]


def test_views_of_nothing_are_empty(device: Device) -> None:
    assert tuple(device.view(device.zeros((64,), "uint8"), 64, (0, 3), "float32").shape) == (0, 3)


def test_a_view_beyond_its_buffer_is_refused(device: Device) -> None:
    with pytest.raises(DeviceError, match=r"float64\[3\]"):
        device.view(device.zeros((32,), "uint8"), 16, (3,), "float64")


def test_rows_and_columns_are_the_tensors_memory(device: Device) -> None:
    tensor = device.zeros((4, 2), "int32")
    column = device.view(device.zeros((16,), "uint8"), 0, (4, 1), "int32")
    device.upload(np.array([[7], [8], [9], [10]], np.int32), column)
    device.upload(np.ones((2, 2), np.int32), device.rows(tensor, 1, 3))
    device.copy(column, device.columns(tensor, 1, 2))
    assert fetch(device, tensor).tolist() == [[0, 7], [1, 8], [1, 9], [0, 10]]


def test_rows_beyond_the_tensor_are_refused(device: Device) -> None:
    with pytest.raises(DeviceError, match="rows 3:5"):
        device.rows(device.zeros((4, 2), "int32"), 3, 5)


def test_copies_keep_the_streams_order(device: Device) -> None:
    first, second = ints(device, 1, 2), ints(device, 3, 4)
    device.copy(first, second)
    device.upload(np.array([5, 6], np.int32), first)
    assert fetch(device, second).tolist() == [1, 2]


def test_memory_may_change_once_an_event_behind_its_upload_has_come(device: Device) -> None:
    host = device.host(1 << 20).view(np.int32)
    tensors = [device.empty((1 << 18,), "int32") for _ in range(8)]
    for number, tensor in enumerate(tensors):
        host[:] = number
        device.upload(host, tensor)
        device.record().wait()
    assert [fetch(device, tensor)[-1] for tensor in tensors] == list(range(8))


def test_the_time_between_events_that_have_come_is_told(device: Device) -> None:
    source, to = device.zeros((1 << 22,), "int32"), device.zeros((1 << 22,), "int32")
    events = [device.record()]
    for _ in range(3):
        device.copy(source, to)
        events.append(device.record())
    events.append(device.download(to, device.host(1 << 24).view(np.int32)))
    events[-1].wait()
    parts = [b.seconds_since(a) for a, b in itertools.pairwise(events)]
    assert min(parts) > 0.0
    assert sum(parts) == pytest.approx(events[-1].seconds_since(events[0]), rel=0.01)


@pytest.mark.usefixtures("capturing")
def test_a_graphs_time_is_told_by_events_around_its_replay(device: Device) -> None:
    source, to = device.zeros((1 << 20,), "int32"), device.zeros((1 << 20,), "int32")
    device.copy(source, to)
    graph = device.capture(lambda: device.copy(source, to))
    before = device.record()
    graph.replay()
    after = device.record()
    after.wait()
    assert after.seconds_since(before) > 0.0


def test_a_copy_of_other_sizes_is_refused(device: Device) -> None:
    tensor = device.zeros((4,), "int32")
    with pytest.raises(DeviceError, match=r"upload int32\[3\]"):
        device.upload(np.zeros(3, np.int32), tensor)
    with pytest.raises(DeviceError, match=r"download int64\[4\]"):
        device.download(tensor, np.zeros(4, np.int64))
    with pytest.raises(DeviceError, match=r"copy \[4\] to \[1\]"):
        device.copy(tensor, device.zeros((1,), "int32"))


def test_strided_memory_is_refused_by_transfers(device: Device) -> None:
    matrix = device.zeros((4, 4), "int32")
    with pytest.raises(DeviceError, match="not contiguous"):
        device.upload(np.zeros((4, 2), np.int32), device.columns(matrix, 0, 2))
    with pytest.raises(DeviceError, match="not contiguous"):
        device.upload(np.zeros((4, 8), np.int32)[:, ::2], matrix)


@pytest.mark.usefixtures("capturing")
def test_a_graph_repeats_its_work_over_the_same_addresses(device: Device) -> None:
    source, between, out = ints(device, 1, 2), ints(device, 0, 0), ints(device, 0, 0)

    def work() -> None:
        device.copy(source, between)
        device.copy(between, out)

    work()
    graph = device.capture(work)
    for values in ([3, 4], [5, 6]):
        device.upload(np.array(values, np.int32), source)
        graph.replay()
        assert fetch(device, out).tolist() == values


@pytest.mark.usefixtures("capturing")
def test_capturing_computes_nothing(device: Device) -> None:
    source, out = ints(device, 1, 2), ints(device, 0, 0)
    device.capture(lambda: device.copy(source, out))
    assert fetch(device, out).tolist() == [0, 0]


FORBIDDEN: dict[str, Callable[[Device, Tensor, npt.NDArray[Any]], object]] = {
    "empty": lambda device, tensor, host: device.empty((2,), "int32"),
    "zeros": lambda device, tensor, host: device.zeros((2,), "int32"),
    "host": lambda device, tensor, host: device.host(8),
    "upload": lambda device, tensor, host: device.upload(host, tensor),
    "download": lambda device, tensor, host: device.download(tensor, host),
    "shared": lambda device, tensor, host: device.shared(8),
    "map": lambda device, tensor, host: device.map(0, 8),
    "record": lambda device, tensor, host: device.record(),
    "synchronise": lambda device, tensor, host: device.synchronise(),
    "capture": lambda device, tensor, host: device.capture(lambda: None),
}


@pytest.mark.parametrize("name", FORBIDDEN)
@pytest.mark.usefixtures("capturing")
def test_what_no_graph_can_hold_is_refused_while_capturing(device: Device, name: str) -> None:
    tensor, host = ints(device, 1, 2), device.host(8).view(np.int32)
    other = ints(device, 0, 0)

    def work() -> None:
        device.copy(tensor, other)
        FORBIDDEN[name](device, tensor, host)

    with pytest.raises(DeviceError, match="in a graph that is captured"):
        device.capture(work)


@pytest.mark.usefixtures("capturing")
def test_a_capture_that_failed_leaves_the_device_of_use(device: Device) -> None:
    source, out = ints(device, 1, 2), ints(device, 0, 0)

    def fails() -> None:
        raise KeyError("the work's own")

    with pytest.raises(KeyError, match="the work's own"):
        device.capture(fails)
    device.capture(lambda: device.copy(source, out)).replay()
    assert fetch(device, out).tolist() == [1, 2]


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_graph_is_captured(device: Device, fails: bool) -> None:
    """It may hold a graph, and one that is freed in a capture breaks it."""
    source, out = ints(device, 1, 2), ints(device, 0, 0)
    older: list[Any] = [device.capture(lambda: device.copy(source, out))]

    def work() -> None:
        device.copy(source, out)
        cycle = [older.pop()]
        cycle.append(cycle)
        del cycle
        assert len([[i] for i in range(100_000)]) == 100_000  # a collection is due many times
        if fails:
            raise KeyError("the work's own")

    if fails:
        with pytest.raises(KeyError, match="the work's own"):
            device.capture(work)
    else:
        device.capture(work).replay()
        assert fetch(device, out).tolist() == [1, 2]
    assert gc.isenabled(), "what a capture stops goes on behind it"


@pytest.mark.usefixtures("capturing")
def test_a_graph_that_is_freed_in_a_capture_breaks_it(device: Device) -> None:
    """Which the test above relies on."""
    source, out = ints(device, 1, 2), ints(device, 0, 0)
    older: list[Any] = [device.capture(lambda: device.copy(source, out))]

    def work() -> None:
        device.copy(source, out)
        older.clear()
        device.copy(source, out)

    with pytest.raises(DeviceError, match="capture"):
        device.capture(work)
    device.capture(lambda: device.copy(source, out)).replay()
    assert fetch(device, out).tolist() == [1, 2]


@pytest.mark.usefixtures("capturing")
def test_other_threads_wait_for_a_capture(device: Device) -> None:
    """What they copy would become part of the graph."""
    source, out, others = ints(device, 1, 2), ints(device, 0, 0), ints(device, 0, 0)
    is_capturing, is_about_to_copy = threading.Event(), threading.Event()
    seen: list[str] = []

    def copies() -> None:
        assert is_capturing.wait(60)
        is_about_to_copy.set()
        device.upload(np.array([7, 8], np.int32), others)
        seen.append("copied")

    def work() -> None:
        is_capturing.set()
        assert is_about_to_copy.wait(60)
        thread.join(0.05)  # it must not get through; were it let, it would in this time
        seen.append("captured")
        device.copy(source, out)

    thread = threading.Thread(target=copies)
    thread.start()
    graph = device.capture(work)
    thread.join(60)
    assert seen == ["captured", "copied"]
    assert fetch(device, others).tolist() == [7, 8]
    graph.replay()
    assert fetch(device, out).tolist() == [1, 2]


@pytest.fixture
def sharing(device: Device) -> None:
    """Skip a device that shares nothing, once it has said so."""
    if "paddle" in type(device).__module__:
        with pytest.raises(DeviceError, match="through PyTorch"):
            device.shared(1)
        pytest.skip("Baton shares no memory through Paddle")


def taken(device: Device, shared: Shared) -> Mapped:
    """Return the memory as another process maps it, which has its own descriptor."""
    mapped = device.map(shared.descriptor, shared.n_bytes)
    os.close(shared.descriptor)
    return mapped


@pytest.mark.usefixtures("sharing")
def test_shared_memory_is_zeros_of_the_size_that_was_asked(device: Device) -> None:
    shared = device.shared(1000)
    os.close(shared.descriptor)
    assert shared.tensor.shape == (1000,)
    assert shared.n_bytes >= 1000
    back = np.ones(1000, np.uint8)
    device.download(shared.tensor, back).wait()
    assert not back.any()


@pytest.mark.usefixtures("sharing")
def test_pieces_are_pulled_from_where_they_lie_to_where_they_belong(device: Device) -> None:
    shared = device.shared(4096)
    values = np.random.default_rng(1).integers(0, 256, 4096).astype(np.uint8)
    device.upload(values, shared.tensor)
    device.synchronise()
    mapped, to = taken(device, shared), device.zeros((3000,), "uint8")
    pieces = np.array([[4000, 0, 96], [16, 100, 1000], [0, 2999, 1]])
    event = device.pull(mapped, to, pieces)
    event.wait()
    assert event.has_come()
    wanted = np.zeros(3000, np.uint8)
    for at, into, n_bytes in pieces.tolist():
        wanted[into : into + n_bytes] = values[at : at + n_bytes]
    back = np.empty(3000, np.uint8)
    device.download(to, back).wait()
    np.testing.assert_array_equal(back, wanted)


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("is_mapped", [False, True], ids=["own", "another's"])
def test_rows_are_pulled_from_where_they_lie_apart(device: Device, is_mapped: bool) -> None:
    """Into one's own memory, or memory that is mapped as another process's would be."""
    shared, behind = device.shared(4096), device.shared(3000)
    values = np.random.default_rng(2).integers(0, 256, 4096).astype(np.uint8)
    device.upload(values, shared.tensor)
    device.synchronise()
    to = device.map(behind.descriptor, behind.n_bytes) if is_mapped else behind.tensor
    os.close(behind.descriptor)
    pieces, rows = np.array([[16, 32, 5], [2000, 1000, 1]]), Rows(48, 160, 64)
    mapped = taken(device, shared)
    device.pull(mapped, to, pieces, rows).wait()
    wanted = np.zeros(3000, np.uint8)
    for at, into, count in pieces.tolist():
        for row in range(count):
            there, here = at + row * 160, into + row * 64
            wanted[here : here + 48] = values[there : there + 48]
    back = np.empty(3000, np.uint8)
    device.download(behind.tensor, back).wait()
    np.testing.assert_array_equal(back, wanted)


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize(
    ("piece", "rows", "told"),
    [
        ([0, 0, 3], Rows(16, 16, 32), "pull 80 bytes at byte 0 of a target of 64"),
        ([0, 0, 3], Rows(16, 1 << 40, 16), "of a source"),
        ([0, 0, 0], Rows(16, 16, 16), "of a source"),
        ([0, 0, 1], Rows(16, 8, 16), "lie over each other"),
        ([0, 0, 1], Rows(0, 8, 8), "lie over each other"),
    ],
)
def test_rows_outside_of_the_memory_are_refused(
    device: Device, piece: list[int], rows: Rows, told: str
) -> None:
    mapped, to = taken(device, device.shared(64)), device.zeros((64,), "uint8")
    with pytest.raises(DeviceError, match=told):
        device.pull(mapped, to, np.array([piece]), rows)


@pytest.mark.usefixtures("sharing")
def test_a_pull_comes_without_being_waited_for(device: Device) -> None:
    mapped, to = taken(device, device.shared(64)), device.zeros((64,), "uint8")
    event = device.pull(mapped, to, np.array([[0, 0, 64]]))
    until = time.monotonic() + 60
    while not event.has_come():
        assert time.monotonic() < until


@pytest.mark.usefixtures("sharing")
def test_a_pull_stands_behind_what_was_launched(device: Device) -> None:
    """Who had the memory before may still be written to by a step in flight."""
    shared, ones = device.shared(1 << 20), np.ones(1 << 20, np.uint8)
    mapped, to = taken(device, shared), device.zeros((1 << 20,), "uint8")
    for _ in range(20):
        device.upload(ones, to)
    device.pull(mapped, to, np.array([[0, 0, 1 << 20]])).wait()
    back = np.ones(1 << 20, np.uint8)
    device.download(to, back).wait()
    assert not back.any()


@pytest.mark.usefixtures("sharing")
def test_memory_outlives_who_shared_it(device: Device) -> None:
    shared = device.shared(16)
    device.upload(np.arange(16, dtype=np.uint8), shared.tensor)
    device.synchronise()
    mapped, to = taken(device, shared), device.zeros((16,), "uint8")
    del shared
    gc.collect()
    device.pull(mapped, to, np.array([[0, 0, 16]])).wait()
    back = np.empty(16, np.uint8)
    device.download(to, back).wait()
    assert back.tolist() == list(range(16))


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize(
    ("piece", "told"),
    [
        ([0, 0, 0], "pull 0 bytes"),
        ([-1, 0, 8], "byte -1 of a source"),
        ([0, -1, 8], "byte -1 of a target of 64"),
        ([0, 57, 8], "byte 57 of a target of 64"),
        ([1 << 62, 0, 8], "of a source"),
        ([0, 0, 1 << 62], "of a source"),
    ],
)
def test_a_pull_outside_of_the_memory_is_refused(
    device: Device, piece: list[int], told: str
) -> None:
    mapped, to = taken(device, device.shared(64)), device.zeros((64,), "uint8")
    with pytest.raises(DeviceError, match=told):
        device.pull(mapped, to, np.array([[0, 0, 8], piece]))


@pytest.mark.usefixtures("sharing")
def test_what_stands_for_no_memory_is_refused(device: Device) -> None:
    with Path("/dev/null").open() as nothing, pytest.raises(DeviceError, match="map 4096 bytes"):
        device.map(nothing.fileno(), 4096)


@pytest.mark.usefixtures("sharing")
def test_more_than_is_shared_is_not_mapped(device: Device) -> None:
    shared = device.shared(64)
    with pytest.raises(DeviceError, match="cannot map"):
        device.map(shared.descriptor, 1 << 40)
    os.close(shared.descriptor)


@pytest.mark.usefixtures("sharing")
def test_unmapped_memory_is_free_again(device: Device) -> None:
    before = device.memory().free
    for _ in range(4):
        shared = device.shared(1 << 28)
        mapped = taken(device, shared)
        del shared, mapped
    gc.collect()
    assert device.memory().free >= before - (1 << 28)


def test_another_threads_work_is_of_the_same_stream(device: Device) -> None:
    source, out = ints(device, 1, 2), ints(device, 0, 0)
    thread = threading.Thread(target=lambda: device.copy(source, out))
    thread.start()
    thread.join(60)
    assert fetch(device, out).tolist() == [1, 2]


@pytest.mark.slow
def test_memory_in_use_is_told(device: Device) -> None:
    before = device.memory()
    kept = device.zeros((1 << 28,), "uint8")
    after = device.memory()
    assert 0 <= after.free <= after.total
    assert after.free <= before.free - (1 << 27), "what a tensor takes is not free"
    assert after.peak >= max(before.peak, 1 << 28), "tests before this one may have taken more"
    del kept
    assert device.memory().peak >= after.peak, "it is of all the time, not of now"


def test_memory_that_is_not_there_is_refused_by_size(device: Device) -> None:
    with pytest.raises(DeviceError, match=r"allocate uint8\[1125899906842624\]"):
        device.empty((1 << 50,), "uint8")
