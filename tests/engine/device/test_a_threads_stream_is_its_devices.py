"""Whoever of several devices in a process is called, kernels behind the call go to its stream."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.torch.device import TorchDevice


class Cuda:
    """What PyTorch keeps of streams: one that is current in each thread, and its device."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self.is_available = lambda: True
        self.device_count = lambda: 2
        self.set_device = lambda index: None
        self.get_device_name = str
        self.synchronize = lambda index: None
        self.Stream = lambda place: SimpleNamespace(place=place)

    def set_stream(self, stream: Any) -> None:
        self._threads.stream = stream

    def current(self) -> str | None:
        """The place of this thread's stream; None: nobody's."""
        stream = getattr(self._threads, "stream", None)
        return None if stream is None else str(stream.place)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    version = SimpleNamespace(cuda="13.0")
    torch = SimpleNamespace(__version__="2.11.0+cu130", version=version, cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return cuda


def test_devices_take_turns_in_a_thread(cuda: Cuda) -> None:
    devices = {f"cuda:{index}": TorchDevice(index) for index in (0, 1)}
    for place in ("cuda:0", "cuda:1", "cuda:0", "cuda:0", "cuda:1"):
        devices[place].synchronise()
        assert cuda.current() == place


def test_a_rank_without_a_gpu_of_its_own_is_told(cuda: Cuda) -> None:
    with pytest.raises(DeviceError, match="needs GPU 2, but this process sees 2"):
        TorchDevice(2)


def test_each_thread_has_a_stream_of_its_own(cuda: Cuda) -> None:
    first, second = TorchDevice(0), TorchDevice(1)
    first.synchronise()
    found: list[str | None] = []

    def work() -> None:
        found.append(cuda.current())
        second.synchronise()
        found.append(cuda.current())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None, "cuda:1"]
    first.synchronise()
    assert cuda.current() == "cuda:0"
