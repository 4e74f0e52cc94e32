"""`logit_bias` and `bad_words` of a request body, as the engine takes them.

Owns their limits and how a word becomes token sequences. Pure but for the tokenizer's `encode`,
which is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from baton_worker.gateway.errors import bad_request
from baton_worker.sampling import MAX_LOGIT_BIAS

MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256


def logit_bias(value: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Return OpenAI's map of token id to bias as pairs, by id.

    Raises:
        ApiError: 400: a key that is no id, an id named twice, a bias beyond +-100, too many.
    """
    if not value:
        return ()
    if len(value) > MAX_BIASED_TOKENS:
        raise bad_request("logit_bias", f"logit_bias has {len(value)}: most {MAX_BIASED_TOKENS}")
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        token = _token_id(key)
        if token in pairs:
            raise bad_request("logit_bias", f"logit_bias names token {token} twice")
        if not abs(bias) <= MAX_LOGIT_BIAS:
            raise bad_request(
                "logit_bias", f"logit_bias of token {token} is {bias}: it must be -100 to 100"
            )
        pairs[token] = float(bias)
    return tuple(sorted(pairs.items()))


def check_bad_words(words: Sequence[str] | None) -> tuple[str, ...]:
    """Return the distinct words.

    Raises:
        ApiError: 400: too many, an empty or too long one.
    """
    distinct = tuple(dict.fromkeys(words or ()))
    if len(distinct) > MAX_BAD_WORDS:
        raise bad_request("bad_words", f"{len(distinct)} bad_words: the most is {MAX_BAD_WORDS}")
    for word in distinct:
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARACTERS:
            raise bad_request(
                "bad_words",
                f"a bad word has 1 to {MAX_BAD_WORD_CHARACTERS} characters besides white space,"
                f" not {len(word)}",
            )
    return distinct


def bad_word_tokens(
    words: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences to forbid: each word as a text begins with it, and after a space.

    vLLM does the same, but drops the second when it has another length; a word that is one token
    behind a space and two at the start would then still appear.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        stem = word.lstrip()
        for text in (stem, f" {stem}"):
            found[tuple(encode(text))] = None
    return tuple(tokens for tokens in found if tokens)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise bad_request("logit_bias", f"logit_bias: {key!r} is not a token id")
    return int(key)
