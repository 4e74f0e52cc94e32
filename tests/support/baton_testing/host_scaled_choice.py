"""The choice among the products of FP8 as a function of the host: what is called computes nothing.

Owns the layout of its calls. Knows no test.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

from baton_testing import host_cuda
from baton_testing.host_scaled import check

CHOICE = host_cuda.Unit(
    ("scaled.cc",), "scaled_choice_entry.cc", lambda _, text: text, language="gpu.h"
)
"""The choice among all of them, which computes nothing."""


class Chosen(NamedTuple):
    """What a product comes to: its way, and how often rows were quantised before."""

    way: int
    n_quantised: int


class HostChoice:
    """The compiled choice of a way, on a GPU that is set."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.host_scaled_choice.restype = ctypes.c_char_p
        self._library.host_scaled_beside.restype = ctypes.c_char_p
        self.ways = range(int(self._library.host_scaled_ways()))
        self.set()

    def set(
        self, capability: tuple[int, int] = (9, 0), processors: int = 132, takes: bool = True
    ) -> None:
        """Set the GPU, and whether the kernels for Hopper take what comes."""
        self._library.host_gpu(*capability, processors, takes)

    def of(
        self,
        rows: int,
        columns: int,
        outputs: int,
        is_gated: bool = False,
        experts: int = 0,
        *,
        is_plain: bool = False,
        way: int | None = None,
    ) -> Chosen:
        """Return what becomes of a product out[rows, outputs], of experts of all their rows.

        Args:
            is_plain: its rows are yet to be quantised.
            way: the one that is asked for.

        Raises:
            RuntimeError: it is refused.
        """
        sizes = [ctypes.c_int64(size) for size in (rows, columns, outputs)]
        found, quantised = ctypes.c_int(), ctypes.c_int()
        asked = -1 if way is None else way
        of_experts = is_gated, ctypes.c_int64(experts), is_plain, asked
        to = ctypes.byref(found), ctypes.byref(quantised)
        check(self._library.host_scaled_choice(*sizes, *of_experts, *to))
        return Chosen(found.value, quantised.value)

    def beside(
        self, pairs: int, tokens: int, experts: int, *, weight_off: int = 0, scales_off: int = 0
    ) -> tuple[int, int]:
        """Return how often experts' second product and what all tokens share, which lies behind
        it, are launched, and how often rows are quantised.

        Args:
            weight_off: so many bytes behind a vector the weight of what is shared begins.
            scales_off: or its scales.
        """
        sizes = [ctypes.c_int64(size) for size in (pairs, tokens, experts)]
        launched, quantised = ctypes.c_int(), ctypes.c_int()
        to = ctypes.byref(launched), ctypes.byref(quantised)
        check(self._library.host_scaled_beside(*sizes, weight_off, scales_off, *to))
        return launched.value, quantised.value
