"""What the simulated engine must say, computed without it.

A position's state is a hash of all tokens up to it, and the likeliest next token follows from that
state alone. So a greedy request's whole text is known before it is sent, whatever happens on its
way. Written from the definition, in Python's integers, to be no copy of what it judges.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15 | 1
_EMPTY = 0x243F6A8885A308D3


def _mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class SimText:
    """The greedy text of one simulated model.

    Args:
        vocab_size: V.
        silent: ids that are never the likeliest (end of sequence).
        seed: `engine.sim.seed`.
    """

    def __init__(self, vocab_size: int, silent: Sequence[int], seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._silent = frozenset(silent)
        self._seed = _mixed(seed)
        self._by_likelihood = np.random.default_rng(seed).permutation(vocab_size).tolist()

    def after(self, prompt: Sequence[int], n_tokens: int) -> tuple[int, ...]:
        """Return the `n_tokens` tokens behind a prompt."""
        state, said = _EMPTY, list[int]()
        for token in prompt:
            state = (state * _BASE + token + 1) & _MASK
        for _ in range(n_tokens):
            said.append(self._next(state))
            state = (state * _BASE + said[-1] + 1) & _MASK
        return tuple(said)

    def _next(self, state: int) -> int:
        turn = _mixed(state ^ self._seed) % self._vocab_size
        turned = ((place - turn) % self._vocab_size for place in self._by_likelihood)
        return next(token for token in turned if token not in self._silent)
