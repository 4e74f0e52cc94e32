"""The one door to PyTorch: imports it, and says what is missing where it cannot serve.

Everything untyped of PyTorch begins here. Only `device` takes `torch` from here. Knows no model.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

from baton_worker.engine.api import DeviceError

INSTALL = "pip install 'baton-worker[torch]'"
"""What brings a PyTorch that this package was run with."""

_TESTED = ((2, 11), (2, 12))
"""Versions from the first up to, not with, the second: those of the extra `torch`. Older ones hand
tensors to tvm-ffi through an extension that it compiles when it is first loaded."""


def load_torch() -> Any:
    """Import PyTorch and return it.

    Raises:
        DeviceError: it is not installed, cannot be loaded, or is of a version that Baton was not
            made for; with the command that installs one.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise DeviceError(
            f"engine.framework 'torch' is not there ({error}): {INSTALL}, or set engine.device to "
            "'cpu'"
        ) from error
    _check_version(str(torch.__version__))
    return torch


def require_cuda(torch: Any) -> None:
    """Refuse a PyTorch that finds no device to compute on.

    Raises:
        DeviceError: it was built without CUDA, the driver is missing or too old, or there is no
            device; with the driver's or PyTorch's own words.
    """
    if torch.version.cuda is None:
        raise DeviceError(
            f"engine.device is 'gpu', but torch {torch.__version__} was built without CUDA: "
            f"{INSTALL} on Linux, or set engine.device to 'cpu'"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of is raised by init
        if torch.cuda.is_available():
            return
    raise DeviceError(
        f"engine.device is 'gpu', but torch {torch.__version__} finds no device for CUDA "
        f"{torch.version.cuda}: {_why_none(torch)}{_visible()}; give the pod a GPU and its node a "
        "newer driver, or set engine.device to 'cpu'"
    )


def _why_none(torch: Any) -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "it counts none"


def _visible() -> str:
    """Tell which devices this process was left, `local --gpus` for one, if it was left some."""
    left = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if left is None else f", of those that CUDA_VISIBLE_DEVICES={left!r} leaves"


def _check_version(version: str) -> None:
    first, behind = _TESTED
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if not first <= numbers < behind:
        low, high = (".".join(map(str, v)) for v in _TESTED)
        raise DeviceError(
            f"torch {version} is installed, Baton supports {low} up to, not with, {high}: {INSTALL}"
        )
