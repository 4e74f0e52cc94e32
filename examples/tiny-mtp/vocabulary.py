"""The tokenizer and chat format of the tiny model.

Owns the special tokens, the byte-level BPE training and the chat template, and writes the files a
gateway reads: tokenizer.json, tokenizer_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS = "<s>"
EOS = "</s>"
END = "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, END, "<|system|>", "<|user|>", "<|assistant|>")
BOS_ID = SPECIAL_TOKENS.index(BOS)
EOS_ID = SPECIAL_TOKENS.index(EOS)
END_ID = SPECIAL_TOKENS.index(END)

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('role ' + message['role'] + ' is not system, user or assistant') }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] }}
    {{- eos_token if message['role'] == 'assistant' else '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a BPE over bytes: every UTF-8 string has tokens, and decoding gives it back.

    `encode` puts the beginning-of-sequence token in front, unless `add_special_tokens=False`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def render_chat(messages: list[dict[str, str]]) -> str:
    """Return the messages in the chat format, without a prompt for another answer."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(CHAT_TEMPLATE).render(
        messages=messages, bos_token=BOS, eos_token=EOS, add_generation_prompt=False
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_tokens: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
