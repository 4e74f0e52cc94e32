"""A text's logprobs without an engine: what a trainer calls to get the bits that were sampled.

Owns the way from token ids to `LogprobColumns` over the kernels and the decoder that serve. No
queue, no cache, no request: a text after the other, over weights that the caller may change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import baton_ops
from baton_worker.engine.backends.device.decoder import Decoder, Fed, Group
from baton_worker.engine.backends.device.engine import LoadedModel
from baton_worker.engine.backends.device.prompts import PromptScorer
from baton_worker.engine.backends.device.seam import Places, Tensor
from baton_worker.engine.backends.device.workspace import Sizes, Workspace
from baton_worker.engine.kv.pool import TRASH_BLOCK

_BLOCK_SIZE = 16
_PROMPT_ROWS = 256


class TextScorer:
    """Scores texts of up to `longest` tokens, `at_once` of them a pass; no size changes a bit.

    Args:
        model: the weights may be a trainer's own tensors, laid out as `DeviceWeights` says.
        most_top: alternatives of a token at most.

    Raises:
        DeviceError: the device has too little memory.
    """

    def __init__(
        self, model: LoadedModel, longest: int, at_once: int = 2048, most_top: int = 0
    ) -> None:
        assert model.team is None, "a whole model's bits; a sum over ranks has others"
        device, kernels, model_shape, weights = model[:4]
        self._device = device
        self._longest, self._at_once, self._most_top = longest, at_once, most_top
        self._vocab_size = model_shape.vocab_size
        n_blocks = -(-longest // _BLOCK_SIZE)
        sizes = Sizes(
            tokens=at_once,
            sequences=1,
            decoded=_PROMPT_ROWS,
            rows=_PROMPT_ROWS,
            positions=n_blocks * _BLOCK_SIZE,
            prompt_rows=_PROMPT_ROWS,
        )
        self._space = Workspace(device, kernels, model_shape, weights.dtype, sizes)
        kv = device.zeros(
            (TRASH_BLOCK + 1 + n_blocks, *model_shape.kv_block(_BLOCK_SIZE)), weights.dtype
        )
        self._decoder = Decoder(
            device, kernels, model_shape, weights, kv, self._space.attention, sizes.positions
        )
        self._prompts = PromptScorer(device, kernels, self._decoder, self._space, max(most_top, 1))
        self._table = self._put(np.arange(n_blocks, dtype=np.int32)[None] + TRASH_BLOCK + 1)

    def score(self, tokens: Sequence[int], top: int = 0) -> baton_ops.LogprobColumns:
        """Return raw logprobs and ranks of tokens 1 and on, and `top` alternatives of each.

        They have the bits of a request's logprobs that sampled this text behind any part of it, in
        any batch, on a GPU of this kind.

        Raises:
            ValueError: the text is shorter than two tokens or longer than the scorer, one of them
                is no id of the model's (kernels take any, and padding would be scored as a token),
                or `top` is more than there is room for.
        """
        if not 2 <= len(tokens) <= self._longest:
            raise ValueError(f"{len(tokens)} tokens, from 2 to {self._longest} can be scored")
        if not 0 <= top <= self._most_top:
            raise ValueError(f"top is {top}, there is room for 0 to {self._most_top}")
        ids = self._checked(tokens)
        parts: list[baton_ops.LogprobColumns] = []
        for start in range(0, len(ids) - 1, self._at_once):
            fed = ids[start : min(start + self._at_once, len(ids) - 1)]
            final = self._fed(fed, start)
            following = ids[start + 1 : start + 1 + len(fed)].tolist()
            parts += self._scored(final, following, top)
        return baton_ops.LogprobColumns(*(np.concatenate(c) for c in zip(*parts, strict=True)))

    def _checked(self, tokens: Sequence[int]) -> npt.NDArray[np.int32]:
        ids = np.asarray(tokens)
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise ValueError(f"tokens are {ids.dtype}{list(ids.shape)}, not a list of integers")
        wrong = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(f"token {at} is {ids[at]}, not an id in 0..{self._vocab_size - 1}")
        return ids.astype(np.int32)

    def _fed(self, tokens: npt.NDArray[np.int32], start: int) -> Tensor:
        """Feed a part of the text; return its normed states E[N, H]."""
        n = len(tokens)
        places = Places(
            sequence=self._put(np.zeros(n, np.int32)),
            position=self._put(np.arange(start, start + n, dtype=np.int32)),
            tables=self._table,
        )
        contexts = self._put(np.array([start + n], np.int32))
        group = Group(0, n, self._table, contexts)
        space = self._space.tokens(n)
        ids = self._put(tokens)
        self._decoder.run(Fed(ids, places, (group,)), space)
        return space.final

    def _scored(
        self, final: Tensor, following: list[int], top: int
    ) -> list[baton_ops.LogprobColumns]:
        found, at_once = [], self._prompts.at_once
        for start in range(0, len(following), at_once):
            some = following[start : start + at_once]
            rows = range(start, start + len(some))
            found.append(self._prompts.score(final, rows, some, top))
        return found

    def _put(self, array: npt.NDArray[np.int32]) -> Tensor:
        tensor = self._device.empty(array.shape, "int32")
        self._device.upload(array, tensor)
        self._device.record().wait()
        return tensor
