"""Which processes may work on one request: the hashes that HELLO carries and gateways compare.

The semantic hash says that two processes mean the same tokens by the same numbers; the config hash
that prefill's KV and drafts fit decode. Both are semantic: a label or a log level never changes
them. Reads the model folder's small files, never its weights.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from baton_worker.config import ConfigError, ProcessConfig
from baton_worker.identity import semantic_hash

LOGPROBS_MODE = "raw"
KV_LAYOUT = "head-major"
KV_DTYPE = "float32"


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
    parts = (
        str(config.speculative.num_speculative_tokens),
        str(config.engine.block_size),
        KV_LAYOUT,
        KV_DTYPE,
        config.engine.device,
    )
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=6).hexdigest()
