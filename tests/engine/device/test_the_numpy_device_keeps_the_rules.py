"""What a real device would do wrong silently, the NumPy device refuses: so runners learn of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_testing.numpy_device import FILLER, MAPPED_FROM_BYTES, NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_worker.engine.api import DeviceError


@pytest.fixture
def device() -> NumpyDevice:
    return NumpyDevice()


def _told(device: NumpyDevice, tensor: Any) -> Any:
    found = np.empty(tensor.shape, np.float32)
    device.download(tensor, found).wait()
    return found


def _made(device: NumpyDevice, values: Any) -> Any:
    values = np.ascontiguousarray(values, np.float32)
    tensor = device.empty(values.shape, "float32")
    device.upload(values, tensor)
    device.synchronise()
    return tensor


def test_the_host_sees_no_number_of_the_device_without_a_download(device: NumpyDevice) -> None:
    tensor = device.zeros((2,), "float32")
    for look in (np.asarray, float, bool, iter, lambda t: t[0]):
        with pytest.raises(DeviceError, match="by the host"):
            look(tensor)


def test_a_download_is_filler_until_its_event_was_waited_for(device: NumpyDevice) -> None:
    tensor = _made(device, [1.0, 2.0])
    found = device.host(8)
    event = device.download(tensor, found)
    assert set(found.tolist()) == {0xA5}
    event.wait()
    assert found.view(np.float32).tolist() == [1.0, 2.0]


def test_a_download_brings_what_was_there_when_it_was_asked_for(device: NumpyDevice) -> None:
    tensor = _made(device, [1.0])
    found = np.empty(1, np.float32)
    event = device.download(tensor, found)
    device.upload(np.array([2.0], np.float32), tensor)
    device.synchronise()
    event.wait()
    assert found.tolist() == [1.0]


def test_host_memory_may_not_change_before_it_is_uploaded(device: NumpyDevice) -> None:
    tensor = device.empty((1,), "float32")
    source = np.ones(1, np.float32)
    device.upload(source, tensor)
    source[0] = 2.0
    with pytest.raises(DeviceError, match="changed before"):
        device.synchronise()


def test_it_may_change_once_an_event_behind_has_come(device: NumpyDevice) -> None:
    tensor = device.empty((1,), "float32")
    source = np.ones(1, np.float32)
    device.upload(source, tensor)
    device.record().wait()
    source[0] = 2.0
    assert _told(device, tensor).tolist() == [1.0]


def test_an_event_that_has_not_come_has_no_time(device: NumpyDevice) -> None:
    first = device.record()
    device.zeros((4,), "float32")
    second = device.record()
    with pytest.raises(DeviceError, match="has not come"):
        second.seconds_since(first)
    second.wait()
    assert second.seconds_since(first) > 0.0


FORBIDDEN: dict[str, Callable[[NumpyDevice, Any, Any], object]] = {
    "wait: in a graph": lambda _, t, event: event.wait(),
    "by the host": lambda _, t, event: np.asarray(t),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_capture_lets_nobody_look(device: NumpyDevice, what: str) -> None:
    tensor, event = _made(device, [1.0, 2.0]), device.record()
    with pytest.raises(DeviceError, match=what):
        device.capture(lambda: FORBIDDEN[what](device, tensor, event) and None)
    assert _told(device, tensor).tolist() == [1.0, 2.0], "and it goes on"


def _gated(device: NumpyDevice) -> tuple[Any, Any, Any]:
    """Return x E[1, 2], a weight that makes its first the gate and its second the up, E[1, 1]."""
    x, weight = _made(device, [[1.0, 1.0]]), _made(device, [[1.0, 0.0], [0.0, 1.0]])
    return x, weight, _made(device, [[0.0]])


def test_a_graph_computes_at_its_replays_over_what_is_there_then(device: NumpyDevice) -> None:
    kernels = NumpyKernels(device)
    x, weight, out = _gated(device)
    graph = device.capture(lambda: kernels.gate_up_silu(x, weight, out))
    device.upload(np.array([[0.0, 5.0]], np.float32), x)
    assert _told(device, out).tolist() == [[0.0]], "a capture computes nothing"
    device.upload(np.array([[20.0, 3.0]], np.float32), x)
    graph.replay()
    assert _told(device, out)[0, 0] == pytest.approx(60.0)


def test_a_graph_over_memory_that_was_given_back_is_not_replayed(device: NumpyDevice) -> None:
    kernels = NumpyKernels(device)
    x, weight, out = _gated(device)
    used = device.memory().free

    def work(inputs: list[Any]) -> None:
        kernels.gate_up_silu(inputs[0], weight, out)

    inputs = [x]
    graph = device.capture(lambda: work(inputs))
    del x
    inputs.clear()
    assert device.memory().free > used
    with pytest.raises(DeviceError, match="given back"):
        graph.replay()


def test_views_share_memory_and_stay_inside_it(device: NumpyDevice) -> None:
    buffer = device.zeros((64,), "uint8")
    device.upload(np.arange(4, dtype=np.float32), device.view(buffer, 16, (2, 2), "float32"))
    both = device.view(buffer, 16, (2, 2), "float32")
    assert _told(device, device.rows(both, 1, 2)).tolist() == [[2.0, 3.0]]
    for at, shape in ((8, (1,)), (48, (5,))):
        with pytest.raises(DeviceError):
            device.view(buffer, at, shape, "float32")
    with pytest.raises(DeviceError, match="contiguous"):
        device.download(device.columns(both, 0, 1), np.zeros(2, np.float32))


def test_more_memory_than_there_is_is_refused() -> None:
    device = NumpyDevice(total=100)
    tensor = device.empty((20,), "float32")
    with pytest.raises(DeviceError, match="20 are free"):
        device.empty((21,), "uint8")
    del tensor
    assert device.memory() == (100, 100, 80)


def test_memory_of_the_host_is_filler_and_its_askers_own_however_much_it_is(
    device: NumpyDevice,
) -> None:
    for n_bytes in (100, MAPPED_FROM_BYTES, MAPPED_FROM_BYTES + 4097, MAPPED_FROM_BYTES):
        first, second = device.host(n_bytes), device.host(n_bytes)
        assert len(first) == len(second) == n_bytes
        assert (first == FILLER).all()
        first[:] = 1
        assert (second == FILLER).all()
        assert (device.host(n_bytes) == FILLER).all()
        assert (first == 1).all()
