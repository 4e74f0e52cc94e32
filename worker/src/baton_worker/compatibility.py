"""Which processes may work on one request: the hashes that HELLO carries and gateways compare.

The semantic hash says that two processes mean the same tokens by the same numbers; the config hash
that prefill's KV and drafts fit decode. Both are semantic: a label or a log level never changes
them. Reads the model folder's small files, never its weights.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from baton_worker.config import ConfigError, ProcessConfig
from baton_worker.identity import semantic_hash

LOGPROBS_MODE = "raw"
KV_LAYOUT = "head-major"
KV_DTYPE = "float32"
_TOKENIZER_CONFIG = "tokenizer_config.json"
GPU_KV_LAYOUT = "by-block"
"""A GPU's KV is of the engine's dtype; auto means the same where the checkpoint is the same."""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"model.path: cannot read {path}: {error.strerror}") from error


def tokenizer_hash(config: ProcessConfig) -> str:
    """Return the hash of the model's tokenizer.json.

    Raises:
        ConfigError: there is none.
    """
    content = _read(Path(config.model.path) / "tokenizer.json")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class ChatSource(NamedTuple):
    """A model's chat template as its folder has it, with the special tokens that it may name."""

    template: str
    special_tokens: dict[str, str]


def chat_source(folder: Path) -> ChatSource | None:
    """Return the chat template of the model in `folder`, or None when it has none.

    The template's own file, as newer exports write it, comes before the one in the configuration.

    Raises:
        ConfigError: tokenizer_config.json or chat_template.jinja cannot be read.
    """
    config, template_path = tokenizer_config(folder), folder / "chat_template.jinja"
    try:
        source = (
            template_path.read_text() if template_path.exists() else config.get("chat_template")
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {template_path}: {error}") from error
    try:
        source = msgspec.convert(source, str | list[_NamedTemplate] | None)
    except msgspec.ValidationError as error:
        path = folder / _TOKENIZER_CONFIG
        raise ConfigError(f"model.path: {path}: chat_template: {error}") from error
    if isinstance(source, list):
        source = next((item.template for item in source if item.name == "default"), None)
    return ChatSource(source, _special_tokens(config)) if source else None


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the model's tokenizer_config.json, empty where there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    path = folder / _TOKENIZER_CONFIG
    try:
        if not path.exists():
            return {}
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model.path: {path}: {error}") from error


def chat_template_hash(config: ProcessConfig) -> str:
    """Return the hash of what turns a chat into text, "" for a model without a chat template.

    Raises:
        ConfigError: as `chat_source`.
    """
    source = chat_source(Path(config.model.path))
    if source is None:
        return ""
    return hashlib.blake2b(msgspec.json.encode(source, order="sorted"), digest_size=16).hexdigest()


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token` and its like; each is a string or an object with `content`."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def process_semantic_hash(config: ProcessConfig) -> int:
    """Return the STEP header's semantic hash for a process of this configuration.

    Raises:
        ConfigError: the model folder lacks config.json or tokenizer.json.
    """
    folder = Path(config.model.path)
    model = msgspec.json.decode(_read(folder / "config.json"), type=dict)
    return semantic_hash(
        config.served_name,
        config.model.revision + _simulated(config),
        tokenizer_hash(config),
        str(model.get("vocab_size")),
        LOGPROBS_MODE,
        config.speculative.method,
    )


def _simulated(config: ProcessConfig) -> str:
    """Return what makes simulated tokens other ones than the model's, "" for a real model."""
    sim = config.engine.sim
    return f"+sim-{sim.seed}-{sim.vocab_size}" if config.engine.device == "sim" else ""


def process_config_hash(config: ProcessConfig) -> str:
    """Return the hash of what prefill and decode must share beyond the model itself."""
    engine = config.engine
    layout = (KV_LAYOUT, KV_DTYPE)
    if engine.device == "gpu":
        layout = (GPU_KV_LAYOUT, engine.dtype)
    parts = (
        str(config.speculative.num_speculative_tokens),
        str(engine.block_size),
        *layout,
        engine.device,
    )
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=6).hexdigest()
