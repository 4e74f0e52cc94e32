"""Logit bias and bad words of one request, in the form that a step applies.

Owns what they mean: a bias is added to its token's logit; a bad word is a token sequence whose last
token is forbidden wherever the output ends with the tokens before it. The prompt does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton_worker.sampling import SamplingParams

Words = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """One request's bias and bad words.

    Attributes:
        bias_ids, bias: i64[N], f32[N].
        always: tokens that are bad words by themselves.
        words: the longer ones.
        reach: how many output tokens decide what is forbidden next.
    """

    bias_ids: npt.NDArray[np.int64]
    bias: npt.NDArray[np.float32]
    always: tuple[int, ...]
    words: Words
    reach: int

    def forbidden(self, output_tail: tuple[int, ...], assumed: tuple[int, ...]) -> list[int]:
        """Return the tokens that may not come next.

        Args:
            output_tail: the output's last `reach` tokens, or all of fewer.
            assumed: tokens taken as emitted behind them.
        """
        history = output_tail + assumed
        found = list(self.always)
        for word in self.words:
            before = len(word) - 1
            if len(history) >= before and history[-before:] == word[:-1]:
                found.append(word[-1])
        return found


def logit_bias_of(sampling: SamplingParams) -> LogitBias | None:
    """Return the bias that `sampling` asks for; None when it asks for none."""
    if not sampling.logit_bias and not sampling.bad_words:
        return None
    words = tuple(word for word in sampling.bad_words if len(word) > 1)
    return LogitBias(
        bias_ids=np.array([token for token, _ in sampling.logit_bias], np.int64),
        bias=np.array([value for _, value in sampling.logit_bias], np.float32),
        always=tuple(word[0] for word in sampling.bad_words if len(word) == 1),
        words=words,
        reach=max((len(word) - 1 for word in words), default=0),
    )
