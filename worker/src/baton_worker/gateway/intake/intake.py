"""From a request body to a `GenerationRequest`: the whole judgement before a worker is touched.

Joins schema, validation, tokenizer and the workers' limits. Knows nothing of HTTP beyond the body.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from baton_worker.gateway.errors import ApiError, bad_request, context_exceeded
from baton_worker.gateway.intake.body import (
    MAX_PROMPTS,
    TokenIds,
    TokenLists,
    read_object,
    too_many_tokens,
)
from baton_worker.gateway.intake.conversation import (
    Conversation,
    check_messages,
    shown_tools,
    turns,
    without_text_arguments,
)
from baton_worker.gateway.intake.defaults import SamplingDefaults
from baton_worker.gateway.intake.logit_bias import bad_word_tokens
from baton_worker.gateway.intake.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Prompt,
    TokenizeBody,
    convert,
)
from baton_worker.gateway.intake.unsupported import refuse_other_tokens, refuse_unsupported
from baton_worker.gateway.intake.validate import bind, chat_options, check_ids, completion_options
from baton_worker.gateway.request import (
    Endpoint,
    GenerationRequest,
    ModelLimits,
    PromptAsText,
)
from baton_worker.gateway.text.chat_template import ChatTemplate, ChatTemplateError
from baton_worker.gateway.text.tokenizer import GatewayTokenizer

_FIELDS_OF_TEMPLATES = ("messages", "tools", "add_generation_prompt")
"""What templates see of a request's own fields: told in their variables too, one would be lost."""
_SEED_BITS = 63
_OFF_LOOP_BYTES = 16_384
"""Longer texts are tokenised in a thread: 16 Ki take a few ms."""
_OFF_LOOP_ECHOED_BYTES = 4096
"""Longer ones are looked for in their tokens in a thread: it takes more than to tokenise them."""
_OFF_LOOP_BAD_WORDS_BYTES = 4096
"""Of all of them: each is tokenised twice, alone."""
_BYTES_OF_A_CHARACTER = 4
_OFF_LOOP_TEXTS = 256
_CHECKED_IDS = 4096
"""Token ids that are looked at between two turns of the event loop."""
_LONG_TEXTS_AT_ONCE = 2
"""A text of megabytes takes hundreds of them while it is tokenised."""
_UNKNOWN_CONTEXT_TOKENS = 1 << 17
"""The bound of what is tokenised and back while no worker says what a context is."""


class Intake:
    """Judges bodies for one served model."""

    def __init__(
        self,
        model: str,
        tokenizer: GatewayTokenizer,
        worker_limits: Callable[[], ModelLimits],
        max_top_k: int,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        """`worker_limits` may raise ApiError 503; `max_top_k` is the configured bound; `defaults`
        stand for sampling fields that a request leaves out, None for the API's own.
        """
        self._defaults = defaults or SamplingDefaults()
        self._model = model
        self._tokenizer = tokenizer
        self._worker_limits = worker_limits
        self._max_top_k = max_top_k
        self._long_texts = asyncio.Semaphore(_LONG_TEXTS_AT_ONCE)

    async def generation(self, endpoint: Endpoint, raw: bytes) -> GenerationRequest:
        """Return the validated request.

        Raises:
            ApiError: 400 naming the field, 404 for another model, 503 when no pair is usable.
        """
        kind = ChatBody if endpoint is Endpoint.CHAT else CompletionBody
        value = await read_object(raw, self._most_tokens(), kind)
        refuse_unsupported(endpoint, value)
        seed = secrets.randbits(_SEED_BITS)
        given_texts: Sequence[PromptAsText | None] = ()
        if endpoint is Endpoint.CHAT:
            chat = convert(value, ChatBody)
            self.check_model(chat.model)
            options, limits = chat_options(chat, seed, self._defaults), self._limits()
            text = await self._rendered(
                Conversation(
                    chat.messages,
                    shown_tools(chat.tools, chat.tool_choice),
                    chat.add_generation_prompt,
                    chat.chat_template_kwargs,
                )
            )
            self._check_length("messages", text, limits.context_tokens)
            prompts: Sequence[Sequence[int]] = await self.encode([text], add_special_tokens=False)
        else:
            given = value.get("prompt")
            if isinstance(given, TokenLists | TokenIds):
                value["prompt"] = []
            completion = convert(value, CompletionBody)
            self.check_model(completion.model)
            options = completion_options(completion, seed, self._defaults)
            limits = self._limits()
            if isinstance(given, TokenLists):
                prompts = given
            elif isinstance(given, TokenIds) and given:
                prompts = [given]
            else:
                prompts, given_texts = await self._completion_prompts(
                    completion, limits, echo=options.request.echo
                )
        name = "messages" if endpoint is Endpoint.CHAT else "prompt"
        prompts = await _checked(name, prompts, limits.vocab_size)
        bad_words = await self._bad_word_tokens(options.bad_words)
        return bind(options, prompts, limits, bad_words, given_texts)

    def check_model(self, model: str | None) -> None:
        """Accept the served model's name, or none.

        Raises:
            ApiError: 404.
        """
        if model is not None and model != self._model:
            message = f"the model {model!r} does not exist: this gateway serves {self._model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def render(self, asked: Conversation) -> str:
        """Return the prompt text of a conversation.

        Raises:
            ApiError: 400: no chat template, a message or tools that it cannot take.
        """
        template = self._tokenizer.chat_template
        if template is None:
            raise bad_request("messages", f"the model {self._model!r} has no chat template")
        for name in _FIELDS_OF_TEMPLATES:
            if name in (asked.variables or {}):
                field = f"chat_template_kwargs.{name}"
                raise bad_request(field, f"{field}: it is a field of the request itself")
        if asked.tools and not template.shows_tools:
            raise bad_request(
                "tools",
                f"tools: the chat template of {self._model!r} shows none; describe them in a"
                " message",
                "unsupported_parameter",
            )
        made = turns(asked.messages)
        try:
            return _text(template, asked, made)
        except ChatTemplateError as error:
            raise _at_fault(template, asked, made, error) from error

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return each text's token ids, off the event loop when there is much to do.

        Raises:
            ApiError: 400 for text that is not Unicode.
        """

        def work(encode: Callable[..., list[int]]) -> list[list[int]]:
            return [encode(text, add_special_tokens=add_special_tokens) for text in texts]

        try:
            if _is_long(texts):
                async with self._long_texts:
                    return await asyncio.to_thread(work, self._tokenizer.encode_long)
            return work(self._tokenizer.encode)
        except UnicodeEncodeError as error:
            raise bad_request(None, f"the text is not valid Unicode: {error.reason}") from error

    async def tokenize(self, raw: bytes) -> list[int]:
        """Return the token ids of a tokenize request.

        Raises:
            ApiError: 400, 404.
        """
        value = await read_object(raw, self._most_tokens(), TokenizeBody)
        refuse_other_tokens(value)
        body = convert(value, TokenizeBody)
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("prompt", "give either prompt or messages")
        if body.messages is not None:
            check_messages(body.messages)
            text = await self._rendered(
                Conversation(
                    body.messages,
                    shown_tools(body.tools, body.tool_choice),
                    body.add_generation_prompt,
                    body.chat_template_kwargs,
                )
            )
            name, special = "messages", False
        else:
            name, text, special = "prompt", body.prompt or "", True
        if body.add_special_tokens is not None:
            special = body.add_special_tokens
        self._check_length(name, text, self._most_tokens())
        return (await self.encode([text], add_special_tokens=special))[0]

    async def detokenize(self, raw: bytes) -> str:
        """Return the text of a detokenize request, special tokens written out.

        Raises:
            ApiError: 400, 404.
        """
        most = self._most_tokens()
        value = await read_object(raw, most, DetokenizeBody)
        given = value.get("tokens")
        if isinstance(given, TokenIds):
            value["tokens"] = []
        body = convert(value, DetokenizeBody)
        self.check_model(body.model)
        tokens = given if isinstance(given, TokenIds) else body.tokens
        if len(tokens) > most:
            raise too_many_tokens("tokens", most)
        await _check_slices("tokens", tokens, self._tokenizer.vocabulary.size)
        return await asyncio.to_thread(self._tokenizer.decode, tokens)

    def _most_tokens(self) -> int:
        """Return the longest context, as far as it is known."""
        try:
            return self._worker_limits().context_tokens
        except ApiError:
            return _UNKNOWN_CONTEXT_TOKENS

    def _limits(self) -> ModelLimits:
        limits = self._worker_limits()
        return replace(limits, max_top_k=min(limits.max_top_k, self._max_top_k))

    async def _bad_word_tokens(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Tokenise the words, off the event loop when there is much to do."""

        def work(encode: Callable[..., list[int]]) -> tuple[tuple[int, ...], ...]:
            return bad_word_tokens(words, lambda text: encode(text, add_special_tokens=False))

        try:
            if _bytes_at_most(words) > _OFF_LOOP_BAD_WORDS_BYTES:
                return await asyncio.to_thread(work, self._tokenizer.encode_long)
            return work(self._tokenizer.encode)
        except UnicodeEncodeError as error:
            raise bad_request(
                "bad_words", f"bad_words is not valid Unicode: {error.reason}"
            ) from error

    async def _rendered(self, asked: Conversation) -> str:
        """Return `render`'s text, made off the event loop when there is much to do."""
        if asked.is_long:
            return await asyncio.to_thread(self.render, asked)
        return self.render(asked)

    def _check_length(self, name: str, text: str, context_tokens: int) -> None:
        """Refuse a text that cannot fit even if every token were the longest one, before it costs
        time and memory: a token costs a hundred times its bytes while it is being found.
        """
        most = context_tokens * self._tokenizer.vocabulary.longest
        if len(text) > most:
            told = f"{name}: the prompt has {len(text)} characters, and they hold at most {most}"
            raise context_exceeded(name, context_tokens, told)

    async def _completion_prompts(
        self, body: CompletionBody, limits: ModelLimits, *, echo: bool
    ) -> tuple[Sequence[Sequence[int]], Sequence[PromptAsText | None]]:
        """Return the prompts' ids, and for an echo the texts that they were given as, if any."""
        texts, ids = _split_prompt(body.prompt)
        if ids:
            return ids, ()
        for text in texts:
            self._check_length("prompt", text, limits.context_tokens)
        has_special = body.add_special_tokens is not False
        prompts = await self.encode(texts, add_special_tokens=has_special)
        if not echo or max(map(len, prompts), default=0) > limits.context_tokens:
            return prompts, ()  # what is too long is refused: places would cost twice its ids
        decodes = body.skip_special_tokens is not False

        def work() -> list[PromptAsText | None]:
            return [
                self._as_text(text, ids, add_special_tokens=has_special, decodes=decodes)
                for text, ids in zip(texts, prompts, strict=True)
            ]

        if _bytes_at_most(texts) > _OFF_LOOP_ECHOED_BYTES or len(texts) > _OFF_LOOP_TEXTS:
            async with self._long_texts:
                return prompts, await asyncio.to_thread(work)
        return prompts, work()

    def _as_text(
        self, text: str, ids: Sequence[int], *, add_special_tokens: bool, decodes: bool
    ) -> PromptAsText | None:
        """Return a text with its tokens' places, or None where `decodes` and its tokens are it: as
        nearly all are, and then it need not be kept.
        """
        if decodes and self._tokenizer.decode(ids, skip_special=True) == text:
            return None
        encode = self._tokenizer.encode_with_offsets
        return PromptAsText(text, encode(text, add_special_tokens=add_special_tokens)[1])


def _text(template: ChatTemplate, asked: Conversation, made: Sequence[dict[str, Any]]) -> str:
    return template.render(
        made,
        tools=asked.tools,
        add_generation_prompt=asked.add_generation_prompt is not False,
        variables=asked.variables,
    )


def _at_fault(
    template: ChatTemplate, asked: Conversation, made: Sequence[dict[str, Any]], error: Exception
) -> ApiError:
    """Return an error of a template as one of what it was given: the field that it is about, where
    that is known.
    """
    mended, paths = without_text_arguments(made)
    fields = asked.fields
    param = fields[0] if len(fields) == 1 else None
    if paths:
        with suppress(ChatTemplateError):
            _text(template, asked, mended)
            return bad_request(paths[0], f"{paths[0]}: it is no JSON object, and {error}")
    return bad_request(param, f"{', '.join(fields)}: {error}")


def _is_long(texts: Sequence[str]) -> bool:
    return _bytes_at_most(texts) > _OFF_LOOP_BYTES or len(texts) > _OFF_LOOP_TEXTS


def _bytes_at_most(texts: Sequence[str]) -> int:
    """Return what texts take to tokenise, which goes by bytes, without encoding them first."""
    return sum(len(text) * (1 if text.isascii() else _BYTES_OF_A_CHARACTER) for text in texts)


async def _checked(
    name: str, prompts: Sequence[Sequence[int]], vocab_size: int
) -> list[tuple[int, ...]]:
    """Return prompts whose ids are in the vocabulary, with turns of the event loop between.

    Raises:
        ApiError: 400: an empty one, an id outside.
    """
    found, n_ids = [], 0
    for prompt in prompts:
        check_ids(name, prompt[:1], vocab_size)
        await _check_slices(name, prompt, vocab_size)
        found.append(tuple(prompt))
        n_ids += len(prompt)
        if n_ids > _CHECKED_IDS:
            n_ids = 0
            await asyncio.sleep(0)
    return found


async def _check_slices(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary, with turns of the event loop between."""
    for start in range(0, len(ids), _CHECKED_IDS):
        if start:
            await asyncio.sleep(0)
        check_ids(name, ids[start : start + _CHECKED_IDS], vocab_size)


def _split_prompt(prompt: Prompt) -> tuple[list[str], list[list[int]]]:
    """Return the prompt as texts, or as lists of token ids; the other is empty."""
    if isinstance(prompt, str):
        return [prompt], []
    kinds = set(map(type, prompt))
    if kinds != {int} and len(prompt) > MAX_PROMPTS:
        raise bad_request("prompt", f"prompt has more than {MAX_PROMPTS} prompts")
    if kinds == {str}:
        return [str(text) for text in prompt], []
    if kinds == {int}:
        return [], [[token for token in prompt if isinstance(token, int)]]
    if kinds == {list}:
        return [], [ids for ids in prompt if isinstance(ids, list)]
    raise bad_request(
        "prompt", "prompt must be a string, a list of strings, of token ids or of lists of ids"
    )
