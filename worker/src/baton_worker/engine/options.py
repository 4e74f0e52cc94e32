"""The engine's own limits, resolved: no zero means "default" behind this point.

Owns what `ProcessConfig.engine` says once the model's shape is known. Knows no file, no framework.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_worker.config import ConfigError, EngineConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.kv.layout import MIN_KEYS
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.model.shards import check_divides
from baton_worker.engine.ngram import NgramSizes

MAX_DRAFTS = 5
"""Largest K: what tables, records and handoffs have room for."""

KV_BYTES_PER_STEP = 8 << 20
"""KV of handoffs that a step checks and copies at most: milliseconds of a core's work, several
times as many where memory is touched for the first time."""

CHUNK_FIELD = "engine.prefill_chunk_tokens"
"""Where a person says how many prompt tokens a step takes, but for `chunk_field`."""


@dataclass(frozen=True, slots=True)
class DraftSources:
    """Where drafts come from.

    Attributes:
        max_model_steps: most drafts that the MTP layer makes per step, 0 for none.
        ngram: n-grams to look up for the rest of K, None for no lookup.
    """

    max_model_steps: int = MAX_DRAFTS
    ngram: NgramSizes | None = None

    @property
    def is_none(self) -> bool:
        """Whether no draft is ever made."""
        return not self.max_model_steps and self.ngram is None

    def model_steps(self, n_draft: int) -> int:
        """Return how many of `n_draft` drafts the MTP layer makes."""
        return min(n_draft, self.max_model_steps)


NO_DRAFTS = DraftSources(0)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Resolved limits.

    Attributes:
        n_blocks: KV blocks that requests share.
        max_model_len: most tokens of a request, prompt and output together.
        prefill_tokens: prompt tokens fed per step, all requests together.
        chunk_field: where a person said that, for what is told of it.
        n_draft: K at start.
        use_mtp: load the MTP layers that draft and keep their KV.
        n_draft_layers: how many these are: number i makes draft i, the last one those behind.
        drafts: where drafts come from.
        prefix_caching: share KV blocks between requests of equal beginnings.
        max_top_k: most logprob alternatives a request may ask for.
        overlap: launch the next step before a step's output work.
        tensor_parallel_size: processes that compute each step together.
        share_kv: other processes may read the KV pool, and it theirs.
        map_kv: by mapping it, where they are on the same host.
        kv_bytes_per_step: most KV of handoffs that a step imports, and most that it exports.
        stuck_seconds, first_step_seconds: when a step counts as hung, see `progress`.
    """

    block_size: int
    n_blocks: int
    max_running: int
    max_waiting: int
    max_model_len: int
    prefill_tokens: int
    n_draft: int
    use_mtp: bool
    max_top_k: int
    overlap: bool
    tensor_parallel_size: int = 1
    n_draft_layers: int = 1
    drafts: DraftSources = NO_DRAFTS
    prefix_caching: bool = True
    share_kv: bool = False
    map_kv: bool = True
    kv_bytes_per_step: int = KV_BYTES_PER_STEP
    stuck_seconds: float = 10.0
    first_step_seconds: float = 120.0
    chunk_field: str = CHUNK_FIELD

    @property
    def n_mtp(self) -> int:
        """MTP layers that are loaded."""
        return self.n_draft_layers if self.use_mtp else 0

    @property
    def n_open_tokens(self) -> int:
        """Newest tokens of a request that a step feeds.

        The last has no KV yet, and KV of draft layer i (from 0) depends on the token i + 1 behind.
        """
        return max(self.n_mtp, 1)

    @property
    def table_width(self) -> int:
        """Blocks in a request's table: its tokens', and what three steps may feed behind them."""
        n_positions = max(self.max_model_len + 3 * (MAX_DRAFTS + 1), MIN_KEYS)
        return -(-n_positions // self.block_size)


def resolve_options(config: ProcessConfig, shape: ModelShape) -> EngineOptions:
    """Fill in the defaults that depend on the model.

    Raises:
        ConfigError: a limit that the model or the KV pool cannot keep, naming field and value.
    """
    engine, speculative = config.engine, config.speculative
    max_model_len = engine.max_model_len or shape.max_position_embeddings
    if max_model_len > shape.max_position_embeddings:
        raise ConfigError(
            f"engine.max_model_len is {max_model_len}, the model's max_position_embeddings is "
            f"{shape.max_position_embeddings}: give that at most, or 0 for all of it"
        )
    if max_model_len < 2:
        raise ConfigError(
            f"engine.max_model_len is {max_model_len}, one token of prompt and one of output take "
            "2: give that at least, or 0 for what the model can"
        )
    per_request = -(-max_model_len // engine.block_size)
    n_blocks = engine.kv_blocks or engine.max_running * per_request
    if n_blocks < per_request:
        whose = "" if engine.max_model_len else ", the model's own,"
        raise ConfigError(
            f"engine.kv_blocks is {n_blocks}, one request of engine.max_model_len {max_model_len}"
            f"{whose} needs {per_request} blocks of {engine.block_size}: give that at least, or 0 "
            f"for enough, or lower engine.max_model_len to {n_blocks * engine.block_size} at most"
        )
    n_draft_layers = _draft_layers(config, shape)
    try:
        check_divides(shape, engine.tensor_parallel_size, may_repeat_heads=engine.device == "gpu")
    except ValueError as error:
        raise ConfigError(f"engine.tensor_parallel_size is {error}") from error
    return EngineOptions(
        block_size=engine.block_size,
        n_blocks=n_blocks,
        max_running=engine.max_running,
        max_waiting=engine.max_waiting,
        max_model_len=max_model_len,
        prefill_tokens=engine.prefill_chunk_tokens,
        chunk_field=chunk_field(engine),
        n_draft=speculative.num_speculative_tokens,
        use_mtp=speculative.uses_mtp,
        max_top_k=min(config.logprobs.max_top_k, shape.vocab_size),
        overlap=engine.overlap,
        tensor_parallel_size=engine.tensor_parallel_size,
        n_draft_layers=n_draft_layers,
        drafts=_draft_sources(speculative),
        prefix_caching=engine.prefix_caching,
        share_kv=bool(config.handoff.shared_dir) or config.handoff.nixl != "off",
        map_kv=bool(config.handoff.shared_dir),
        stuck_seconds=engine.stuck_seconds,
        first_step_seconds=engine.first_step_seconds,
    )


def chunk_field(engine: EngineConfig) -> str:
    """Return the field that the worker's chunk was read from; a decode worker that computes prompts
    has one of its own, and both say the same.
    """
    is_decodes = engine.decode_prompt_chunk_tokens == engine.prefill_chunk_tokens
    return "engine.decode_prompt_chunk_tokens" if is_decodes else CHUNK_FIELD


def _draft_layers(config: ProcessConfig, shape: ModelShape) -> int:
    """Return how many MTP layers draft, where they do; whatever K is, for K may change."""
    method, prefill_tokens = config.speculative.method, config.engine.prefill_chunk_tokens
    if not config.speculative.uses_mtp:
        return 1
    if not shape.n_mtp_layers:
        raise ConfigError(
            f"speculative.method is {method!r}, but the model has no MTP layer; "
            "'ngram' drafts without one"
        )
    count = min(shape.n_mtp_layers, MAX_DRAFTS)
    if prefill_tokens < count:
        raise ConfigError(
            f"{chunk_field(config.engine)} is {prefill_tokens}, and {count} draft layers take the "
            f"tokens of as many positions at once: give {count} at least"
        )
    return count


def _draft_sources(speculative: SpeculativeConfig) -> DraftSources:
    sizes = NgramSizes(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
    match speculative.method:
        case "mtp":
            return DraftSources()
        case "ngram":
            return DraftSources(0, sizes)
        case "mtp_ngram":
            return DraftSources(speculative.num_model_steps, sizes)
        case "none":
            return NO_DRAFTS
