"""A validated generation request: what the gateway works with once the body has been judged.

Owns how choices are numbered and how their seeds differ. Knows nothing of JSON or workers.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from baton_worker.sampling import RequestParams

SEED_MASK = (1 << 64) - 1
_SALT_BYTES = 16


class Endpoint(enum.Enum):
    """Which API the client called; the value is the metric label."""

    CHAT = "chat"
    COMPLETION = "completion"

    def request_id(self, name: str) -> str:
        """Return the id that clients get with their answer, from its unique part."""
        return f"{'chatcmpl' if self is Endpoint.CHAT else 'cmpl'}-{name}"


class Choice(NamedTuple):
    """One sequence to generate."""

    choice_index: int
    params: RequestParams


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the workers that are up can take.

    Attributes:
        context_tokens: of prompt and output together; those with the longest.
        vocab_size: theirs.
        max_top_k: alternatives that any give.
        contexts: (`max_top_k`, `context_tokens`) of who gives more alternatives in shorter
            contexts; none where the longest gives the most.
    """

    context_tokens: int
    vocab_size: int
    max_top_k: int
    contexts: tuple[tuple[int, int], ...] = ()

    def context_with(self, top_k: int) -> int:
        """Return the longest context in which there are so many alternatives, if there are."""
        found = [tokens for most, tokens in self.contexts if most >= top_k]
        return max(found, default=self.context_tokens)


class PromptAsText(NamedTuple):
    """A prompt that was given as text.

    Attributes:
        text: as it was given.
        offsets: characters of it before each of the prompt's tokens; they do not fall.
    """

    text: str
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One HTTP request's worth of generation.

    Attributes:
        prompts: token ids, one tuple per prompt.
        n: choices per prompt.
        params: what is asked for each choice, but for its prompt; the seed is the first ones'.
        stops: stop strings.
        step_details: tell what each engine step did.
        prompt_logprobs_k: as `params.logprobs_k`, for the prompt's tokens.
        echo: the prompt stands before the output (completions).
        given_texts: for `echo`, one per prompt that were given as texts, None where that is what
            the tokens decode to; none for token ids.
        scores_only: there is no output; workers make one token, which nobody is given.
        skip_special_tokens: special tokens add nothing to the text.
        continuous_usage: each chunk of a stream tells the tokens of its choice so far.
    """

    endpoint: Endpoint
    prompts: tuple[tuple[int, ...], ...]
    n: int
    params: RequestParams
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    step_details: bool = False
    prompt_logprobs_k: int = -1
    echo: bool = False
    given_texts: tuple[PromptAsText | None, ...] = ()
    scores_only: bool = False
    skip_special_tokens: bool = True
    continuous_usage: bool = False

    @property
    def shows_tokens(self) -> bool:
        """Whether the answer tells tokens apart, so that one that adds no text is told too."""
        return self.params.logprobs_k >= 0 or self.return_token_ids or self.step_details

    @property
    def is_plain(self) -> bool:
        """Whether the answer tells text, logprobs and why it ends, and nothing else."""
        return not (
            self.return_token_ids
            or self.continuous_usage
            or self.step_details
            or self.echo
            or self.prompt_logprobs_k >= 0
            or self.params.logprobs.draft_logprobs
        )

    @property
    def n_choices(self) -> int:
        """Sequences to generate."""
        return len(self.prompts) * self.n

    @property
    def n_prompt_logprobs(self) -> int:
        """Logprobs of prompt tokens and their alternatives that the answer has, in all choices."""
        echoed = self.params.logprobs_k + 1 if self.echo else 0
        return self.n * self.prompt_tokens * (self.prompt_logprobs_k + 1 + echoed)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens as `usage` counts them: each prompt once, whatever `n` is."""
        return sum(len(prompt) for prompt in self.prompts)

    def prompt_of(self, choice_index: int) -> tuple[int, ...]:
        """Return the prompt that a choice continues."""
        return self.prompts[choice_index // self.n]

    def choices(self) -> Iterator[Choice]:
        """Yield every choice; the index is `prompt_index * n + i`, as OpenAI numbers them."""
        for i in range(self.n):
            sampling = self.params.sampling
            sampling = msgspec.structs.replace(sampling, seed=choice_seed(sampling.seed, i))
            for index, prompt in enumerate(self.prompts):
                params = msgspec.structs.replace(
                    self.params, prompt_token_ids=prompt, sampling=sampling
                )
                yield Choice(index * self.n + i, params)


def choice_seed(seed: int, i: int) -> int:
    """Return the 64-bit seed of a prompt's choice `i`.

    The first keeps the client's seed, and the prompt's place in the request does not enter, so a
    prompt gives the same text alone and in a list.
    """
    if i == 0:
        return seed
    digest = hashlib.blake2b(
        seed.to_bytes(8, "little"), digest_size=8, salt=i.to_bytes(8, "little")
    )
    return int.from_bytes(digest.digest(), "little")


def salt_digest(cache_salt: str | None) -> bytes:
    """Return what workers are told of a client's salt, which stays a secret of its own; empty for
    none.
    """
    if cache_salt is None:
        return b""
    return hashlib.blake2b(
        cache_salt.encode("utf-8", "surrogatepass"), digest_size=_SALT_BYTES
    ).digest()
