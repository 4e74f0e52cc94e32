"""Which framework gives a GPU's memory and graphs.

Owns the choice alone; imports a framework only when it is chosen.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device.seam import Device


def open_device(framework: Literal["auto", "paddle", "torch"], index: int = 0) -> Device:
    """Return a device over the framework that was asked for; auto prefers PyTorch.

    Args:
        index: which of the devices that this process may see.

    Raises:
        DeviceError: it is not installed, or finds no such device; with the command that installs
            it.
    """
    if framework == "torch" or (framework == "auto" and find_spec("torch") is not None):
        from baton_worker.engine.backends.torch.device import TorchDevice

        return TorchDevice(index)
    if framework == "auto" and find_spec("paddle") is None:
        raise DeviceError(
            "engine.device is 'gpu', but neither PyTorch nor Paddle is installed: "
            "pip install 'baton-worker[torch]', or set engine.device to 'sim'"
        )
    if index:
        raise DeviceError(
            "engine.tensor_parallel_size is more than 1, but Paddle's memory cannot be shared: "
            "pip install 'baton-worker[torch]'"
        )
    from baton_worker.engine.backends.paddle.device import PaddleDevice

    return PaddleDevice()
