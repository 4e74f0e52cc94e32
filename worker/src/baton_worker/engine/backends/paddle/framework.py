"""The one door to Paddle: imports it quietly, checks it, and keeps its signal handlers out.

Every engine module that computes takes `paddle` from here, and no module outside the engine does,
so that a gateway or a test of the scheduler never loads an accelerator stack. Knows no model.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import threading
import warnings
from typing import Any, Literal

import numpy.typing as npt

from baton_worker import held_signals
from baton_worker.engine.api import DeviceError

Tensor = Any
"""A `paddle.Tensor`. Paddle ships no usable types, so shapes and dtypes stand in docstrings."""

SUPPORTED_VERSION = "3.3."


def _take_signals_back(found: Any) -> None:
    """Undo Paddle's handlers. It leaves the system's defaults, also where Python had others."""
    found.disable_signal_handler()
    if threading.current_thread() is threading.main_thread():
        for number in held_signals.ENDING:
            handler = signal.getsignal(number)
            if handler is not None:
                signal.signal(number, handler)


def _import_paddle() -> Any:
    """Import Paddle, undoing what it does to others.

    It advises to install ccache, which no worker ever needs, and it configures the root logger,
    which would print every line of ours twice. Its C++ side tells of every connection on stderr.
    Its SIGTERM handler, which is there long before the import ends, prints a fatal-error trace and
    exits 143, or does nothing in a container's first process: signals wait until it is gone.

    Raises:
        DeviceError: it is not installed, or cannot be loaded.
    """
    os.environ.setdefault("GLOG_minloglevel", "1")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        with held_signals.held(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No ccache found", category=UserWarning)
            found = importlib.import_module("paddle")
            _take_signals_back(found)
            return found
    except (ImportError, OSError) as error:
        raise DeviceError(
            f"Paddle, which engine.device 'cpu' and engine.framework 'paddle' need, is not there "
            f"({error}): pip install 'baton-worker[cpu]', or 'baton-worker[gpu]' for a GPU"
        ) from error
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


paddle = _import_paddle()


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """Return a CPU tensor over the memory of `array`, which must be writable; nothing is copied.

    Paddle 3.3 never frees one small list in each call of `paddle.Tensor(...)`, and so of
    `to_tensor` and `from_dlpack`: some 80 bytes per input, gigabytes a day in a busy worker.
    A tensor that an op made, pointed at the array's memory, costs the same time and leaks nothing.
    """
    tensor = paddle.empty([0])
    tensor.get_tensor()._share_data_with(paddle.base.core.from_dlpack(array.__dlpack__()))
    return tensor


def _require_cuda(version: str) -> None:
    if not paddle.is_compiled_with_cuda():
        raise DeviceError(
            f"engine.device is 'gpu' but paddle {version} has no CUDA: pip install "
            "'baton-worker[torch]', or the extra 'gpu' in place of 'cpu', or set engine.device to "
            "'cpu'"
        )


def require_device(device: Literal["cpu", "gpu"]) -> None:
    """Select `device`, and see that no handler of Paddle's is in place.

    Raises:
        DeviceError: the installed version is untested, was not built for `device`, or finds none.
    """
    version = str(paddle.__version__)
    if not version.startswith(SUPPORTED_VERSION):
        raise DeviceError(f"paddle {version} is installed, Baton supports {SUPPORTED_VERSION}x")
    if device == "gpu":
        _require_cuda(version)
    _take_signals_back(paddle)
    try:
        paddle.set_device(device)
    except (ValueError, RuntimeError, OSError) as error:
        raise DeviceError(f"engine.device is {device!r}, but paddle {version}: {error}") from error
