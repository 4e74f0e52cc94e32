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
_SPECIAL_TOKENS_MAP = "special_tokens_map.json"
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


class _Vocabulary(msgspec.Struct, frozen=True):
    vocab_size: int | None = None


class ChatSource(NamedTuple):
    """A model's chat template as its folder has it, with the special tokens that it may name, and
    the other one, if there is one, for requests with tools.
    """

    template: str
    special_tokens: dict[str, str]
    tool_use: str | None = None


def chat_source(folder: Path) -> ChatSource | None:
    """Return the chat template of the model in `folder`, or None when it has none.

    The template's own file, as newer exports write it, comes before the one in the configuration;
    one for tools is then in a folder beside it.

    Raises:
        ConfigError: tokenizer_config.json or chat_template.jinja cannot be read.
    """
    config = tokenizer_config(folder)
    named = _templates_of_files(folder) or _templates_of(config, folder)
    default, tool_use = named.get("default"), named.get("tool_use")
    if not default:
        return None
    tokens = _special_tokens(config, default + (tool_use or ""))
    return ChatSource(default, tokens, tool_use)


def _templates_of_files(folder: Path) -> dict[str, str]:
    """Return templates that have files of their own, by name; none without the main one."""
    path = folder / "chat_template.jinja"
    found = {}
    try:
        if path.exists():
            found["default"] = path.read_text()
            path = folder / "additional_chat_templates" / "tool_use.jinja"
            if path.exists():
                found["tool_use"] = path.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path}: {error}") from error
    return found


def _templates_of(config: dict[str, Any], folder: Path) -> dict[str, str]:
    """Return the templates of tokenizer_config.json by name."""
    try:
        source = msgspec.convert(config.get("chat_template"), str | list[_NamedTemplate] | None)
    except msgspec.ValidationError as error:
        path = folder / _TOKENIZER_CONFIG
        raise ConfigError(f"model.path: {path}: chat_template: {error}") from error
    if isinstance(source, list):
        return {item.name: item.template for item in source}
    return {"default": source} if source else {}


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the model's tokenizer_config.json, empty where there is none.

    Exports that list no added tokens in it may name the special ones in special_tokens_map.json:
    what that says wins then, null too, as in transformers.

    Raises:
        ConfigError: one of the two cannot be read.
    """
    config = _fields(folder / _TOKENIZER_CONFIG)
    if "added_tokens_decoder" in config:
        return config
    return config | _fields(folder / _SPECIAL_TOKENS_MAP)


def _fields(path: Path) -> dict[str, Any]:
    """Return a file's fields, none where there is no file."""
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
    parts = source if source.tool_use else source[:2]
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=16).hexdigest()


def special_token(config: dict[str, Any], name: str) -> str | None:
    """Return `bos_token` or its like: in the file a string, or an object with `content`."""
    value = config.get(name)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _special_tokens(config: dict[str, Any], template: str) -> dict[str, str]:
    """Return the special tokens that have a value. Those that few templates know are left out
    where this one does not name them, so that they make no model another one.
    """
    rare = [name for name in ("cls_token", "mask_token", "sep_token") if name in template]
    names = ("bos_token", "eos_token", "unk_token", "pad_token", *rare)
    found = {name: special_token(config, name) for name in names}
    return {name: token for name, token in found.items() if token is not None}


def process_semantic_hash(config: ProcessConfig) -> int:
    """Return the STEP header's semantic hash for a process of this configuration.

    Raises:
        ConfigError: the folder lacks config.json or tokenizer.json, or the first is malformed.
    """
    folder = Path(config.model.path)
    return semantic_hash(
        config.served_name,
        config.model.revision + _simulated(config),
        tokenizer_hash(config),
        str(_vocab_size(folder / "config.json")),
        LOGPROBS_MODE,
        config.speculative.method,
    )


def _vocab_size(path: Path) -> int | None:
    """Return what config.json says; what else it says is not looked at."""
    try:
        return msgspec.json.decode(_read(path), type=_Vocabulary).vocab_size
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model.path: {path}: {error}") from error


def _simulated(config: ProcessConfig) -> str:
    """Return what makes simulated tokens other ones than the model's, "" for a real model."""
    sim = config.engine.sim
    return f"+sim-{sim.seed}-{sim.vocab_size}" if config.engine.device == "sim" else ""


def process_config_hash(config: ProcessConfig, n_draft_layers: int) -> str:
    """Return the hash of what prefill and decode must share beyond the model itself.

    Args:
        n_draft_layers: see `EngineOptions`. One is not told: so it was when one was all.
    """
    engine = config.engine
    layout = (KV_LAYOUT, KV_DTYPE)
    if engine.device == "gpu":
        layout = (GPU_KV_LAYOUT, engine.dtype)
    parts = (
        str(config.speculative.num_speculative_tokens),
        str(engine.block_size),
        *layout,
        engine.device,
        *((f"draft-layers-{n_draft_layers}",) if n_draft_layers > 1 else ()),
    )
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=6).hexdigest()
