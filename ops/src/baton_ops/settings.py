"""Speed settings of the CPU path, process-wide: they change no result beyond rounding.

Owns no state: the library does.
"""

from __future__ import annotations

from baton_ops._library import library


def threads() -> int:
    """Return how many threads one CPU call may use, the caller's among them."""
    return int(library().threads())


def set_threads(count: int) -> None:
    """Set how many threads one CPU call may use. Results do not depend on it.

    Raises:
        ValueError: `count` is not in [1, 64].
    """
    library().set_threads(count)


def isa() -> str:
    """Return the instruction set in use: `avx2` or `portable`."""
    return str(library().isa())


def set_isa(name: str) -> None:
    """Choose the instruction set: `auto`, `avx2` or `portable`. Logprobs agree within 2e-6.

    Raises:
        ValueError: unknown, or not available on this processor.
    """
    library().set_isa(name)
