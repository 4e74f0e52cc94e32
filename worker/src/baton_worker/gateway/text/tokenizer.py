"""The model's tokenizer: text to ids, ids to text, and the vocabulary behind both.

Reads a Hugging Face folder (`tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`).
Knows nothing of requests; the chat template is rendered by `chat_template`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, processors

from baton_worker.compatibility import chat_source, special_token, tokenizer_config
from baton_worker.config import ConfigError
from baton_worker.gateway.text.chat_template import ChatTemplate
from baton_worker.gateway.text.tokenizer_info import tokenizer_info
from baton_worker.gateway.text.vocabulary import (
    UnsupportedTokenizerError,
    Vocabulary,
    read_vocabulary,
)

_SENTENCEPIECE_ALONE = (
    "; the folder has tokenizer.model alone: load it with transformers' AutoTokenizer and save it"
    " with save_pretrained, which writes tokenizer.json"
)


_TOKENS_IN_A_TURN = 1024
"""Whose places are found before other threads may run; Python alone lets them wait for 5 ms."""


class _Document(msgspec.Struct):
    """What of tokenizer.json the library does not tell; the rest, megabytes, becomes no object."""

    decoder: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None


class GatewayTokenizer:
    """A loaded tokenizer. `chat_template` is None for a model that has none; `info` is what
    clients are told of it, as JSON.
    """

    __slots__ = ("_tokenizer", "chat_template", "info", "vocabulary")

    def __init__(
        self,
        tokenizer: Any,
        vocabulary: Vocabulary,
        chat_template: ChatTemplate | None,
        info: dict[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self.info = info
        self.vocabulary = vocabulary
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a short text; other threads stand still meanwhile."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_long(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the same ids; other threads run on, since of the library's calls only those that
        take many texts release the GIL. Costs more for a short text, and half for a long one.
        """
        found = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found[0].ids
        return ids

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool
    ) -> tuple[list[int], Sequence[int]]:
        """Return the same ids, and how many characters of the text come before each; for a token
        that the tokenizer puts before or behind it, as many as before what is next to it. Other
        threads run on.
        """
        (found,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        offsets, last_start, last_end = array("Q"), 0, 0
        for i in range(len(ids)):  # all at once would hold the others up
            start, end = found.token_to_chars(i) or (last_end, last_end)
            if start == end:  # some steps count what was put around a text to it, at 0
                start = last_end
            last_start = max(start, last_start)
            last_end = max(end, last_end)
            offsets.append(last_start)
            if not len(offsets) % _TOKENS_IN_A_TURN:
                time.sleep(0)
        return ids, offsets

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of a whole sequence, special tokens written out unless `skip_special`;
        other threads run on.
        """
        texts: list[str] = self._tokenizer.decode_batch(
            [list(token_ids)], skip_special_tokens=skip_special
        )
        return texts[0]


def load_tokenizer(folder: Path) -> GatewayTokenizer:
    """Load the tokenizer of the model in `folder`.

    Raises:
        ConfigError: a file is missing or malformed, or the tokenizer is of an unsupported kind.
    """
    path = folder / "tokenizer.json"
    try:
        content = path.read_bytes()
        document = msgspec.json.decode(content, type=_Document)
        if _set_untrimmed(document.post_processor):
            whole = msgspec.json.decode(content) | {"post_processor": document.post_processor}
            content = msgspec.json.encode(whole)
        tokenizer = Tokenizer.from_buffer(content)
    except OSError as error:
        hint = _SENTENCEPIECE_ALONE if (folder / "tokenizer.model").exists() else ""
        raise ConfigError(f"model.path: {path}: {error.strerror}{hint}") from error
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise ConfigError(f"model.path: {path}: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    try:
        vocabulary = _vocabulary(tokenizer, document.decoder)
    except UnsupportedTokenizerError as error:
        raise ConfigError(f"model.path: {path}: {error}") from error
    config, source = tokenizer_config(folder), chat_source(folder)
    _set_ends(tokenizer, config, folder)
    template = ChatTemplate(*source) if source else None
    info = tokenizer_info(config, source.template if source else None)
    return GatewayTokenizer(tokenizer, vocabulary, template, info)


def _set_untrimmed(post_processor: Any) -> bool:
    """Let no step of it leave spaces out of tokens' places in a text (GPT-2's kind may); return
    whether one did.
    """
    if isinstance(post_processor, list):
        return any([_set_untrimmed(step) for step in post_processor])
    if not isinstance(post_processor, dict):
        return False
    did = post_processor.get("trim_offsets") is True
    if did:
        post_processor["trim_offsets"] = False
    return _set_untrimmed(post_processor.get("processors")) or did


def _set_ends(tokenizer: Any, config: dict[str, Any], folder: Path) -> None:
    """Put before and behind every text what `add_bos_token` and `add_eos_token` say, as
    transformers 4 does: where the configuration says either, what tokenizer.json adds is no longer
    looked at. DeepSeek's adds nothing, and its models need the first token. (transformers 5 passes
    over both flags beside a tokenizer.json, and so begins DeepSeek-V3's texts without it.)

    Raises:
        ConfigError: a flag is no boolean, or its token none of the tokenizer's.
    """
    if config.get("add_bos_token") is None and config.get("add_eos_token") is None:
        return
    try:
        bos, eos = (_end(tokenizer, config, name) for name in ("bos", "eos"))
    except ValueError as error:
        other = "special_tokens_map.json"
        beside = f" or {other} beside it" if (folder / other).exists() else ""
        path = folder / "tokenizer_config.json"
        raise ConfigError(f"model.path: {path}{beside}: {error}") from error
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*(end["id"] for end in bos), "$A", *(end["id"] for end in eos)],
        special_tokens=[*bos, *eos],
    )


def _end(tokenizer: Any, config: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the token that one flag adds, none where it is off, by its id: the library would read
    some tokens' texts as instructions.

    Raises:
        ValueError: see `_set_ends`.
    """
    flag, field = f"add_{name}_token", f"{name}_token"
    is_added, token = config.get(flag), special_token(config, field)
    if not isinstance(is_added, bool | None):
        raise ValueError(f"{flag} is {is_added!r}: it must be true or false")
    if not is_added:
        return []
    token_id = None if token is None else tokenizer.token_to_id(token)
    if token_id is None:
        told = repr(config.get(field) if token is None else token)
        raise ValueError(
            f"{field} is {told}, which is no token of tokenizer.json: name one, or make {flag}"
            " false"
        )
    return [{"id": name, "ids": [token_id], "tokens": [token]}]


def _vocabulary(tokenizer: Any, decoder: dict[str, Any] | None) -> Vocabulary:
    added = {  # as decoding writes them: "<|a|>" may stand for "▁<|a|>", by its normaliser
        i: (tokenizer.id_to_token(i), bool(token.special))
        for i, token in tokenizer.get_added_tokens_decoder().items()
    }
    tokens = tokenizer.get_vocab(with_added_tokens=False)
    return read_vocabulary(decoder, tokens, added)
