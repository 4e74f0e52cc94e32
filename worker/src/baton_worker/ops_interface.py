"""Whether the installed ops are those that this worker was written for.

Asked before anything of the engine is imported: an older wheel lacks names that the engine imports,
or has them for other arguments, which a step would find out once a model is loaded. Owns the number
that the worker needs. Knows no op.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from baton_worker import __version__
from baton_worker.config import ConfigError

NEEDED = 3
"""The `baton_ops.interface.INTERFACE` whose functions the engine calls."""


def require_ops() -> None:
    """Load the native library, and refuse ops of another interface.

    Raises:
        ConfigError: they are of another one, not installed, or their library cannot be loaded.
    """
    has = _interface()
    if has != NEEDED:
        raise ConfigError(
            f"baton-worker {__version__} calls interface {NEEDED} of baton-ops, and the installed "
            f"baton-ops {_installed()} has interface {has}: install the baton-ops of this "
            "baton-worker's release (on a GPU the wheel that `make ops-cuda-fat` builds)"
        )
    from baton_ops import isa

    try:
        isa()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"baton-ops {_installed()}: {error}") from error


def _interface() -> int:
    """Return the installed ops' interface; 0 of those from before it was numbered."""
    try:
        from baton_ops.interface import INTERFACE
    except Exception as error:  # tvm_ffi loads a library of its own: who knows what it raises
        if getattr(error, "name", None) == "baton_ops.interface":
            return 0
        raise ConfigError(f"baton-ops cannot be imported: {error}") from error
    return INTERFACE


def _installed() -> str:
    try:
        return version("baton-ops")
    except PackageNotFoundError:
        return "of no known version"
