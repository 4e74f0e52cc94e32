"""Random numbers for tests: the same in every run, so that a red test runs red again.

With BATON_EXPLORE set they are others each time, as hypothesis's examples are. The seed is printed
either way: pytest shows it with a test that fails.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections import Counter

import numpy as np

_n_made = Counter[str]()


def new_rng() -> np.random.Generator:
    """Return a generator of its own for the test that runs."""
    if "BATON_EXPLORE" in os.environ:
        seed = secrets.randbits(63)
    else:
        # By the test and how many it made before: those of one test must differ among themselves.
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        seed = zlib.crc32(f"{test} {_n_made[test]}".encode())
        _n_made[test] += 1
    print("drawn with np.random.default_rng of", seed)
    return np.random.default_rng(seed)
