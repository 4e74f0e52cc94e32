"""Kubernetes quantities (`4Gi`, `200m`), read as the API server reads them."""

from __future__ import annotations

import re
from decimal import Decimal

_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40}))"
    r"(?:(?P<suffix>[numkMGTPE]|[KMGTPE]i)|(?P<exponent>[eE][+-]?[0-9]{1,2}))?"
)
"""A quantity as the API server reads it, but no number whose plain form would be without end."""

_SUFFIXES: dict[str | None, Decimal | int] = {
    None: 1, "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"),
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60,
}  # fmt: skip


def quantity(text: str) -> Decimal | None:
    """Return the number that a quantity stands for; None if it is none."""
    found = _QUANTITY.fullmatch(text)
    if found is None:
        return None
    return Decimal(found["number"] + (found["exponent"] or "")) * _SUFFIXES[found["suffix"]]
