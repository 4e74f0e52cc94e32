"""Counter-based randomness: the uniform of an output position, as a pure function of its seed.

Owns the one formula that makes a fixed seed give the same tokens under any batch, role, draft count
or preemption: no generator state exists that could be lost or advanced twice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SEED_MASK = (1 << 64) - 1


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Return f64[R] in [0, 1): 53 bits of SplitMix64 per (seed, output position).

    SplitMix64 (Steele, Lea, Flood 2014) output number `position` of the generator whose state is
    the finaliser of `seed`. Mixing the seed first keeps neighbouring seeds from being shifted
    copies of one stream.
    """
    state = _finalise(seeds) + (positions + np.uint64(1)) * _GOLDEN
    bits = _finalise(state) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def as_seed(seed: int) -> int:
    """Return `seed` as the unsigned 64-bit key that `uniforms` takes."""
    return seed & _SEED_MASK


def _finalise(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
