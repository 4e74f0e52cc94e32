"""What the engine counts: steps, tokens, drafts, logprobs, queues and blocks.

Owns the metric names of the engine. Reads `StepStats` and `EngineLoad` only, so any engine may be
counted by it.
"""

from __future__ import annotations

import collections
from bisect import bisect_left
from collections.abc import Mapping

from prometheus_client import Counter

from baton_worker.engine.api import (
    WHY_LEFT_AHEAD,
    DeviceLoad,
    EngineLoad,
    Launched,
    LaunchKind,
    StepStats,
)
from baton_worker.engine.load_progress import LoadProgress
from baton_worker.engine.options import MAX_DRAFTS
from baton_worker.metrics import MetricFactory

_K_UPPER_BOUNDS = (0, 5, 20, 64)
K_LABELS = ("0", "1-5", "6-20", "21-64")
"""Ranges of k as label values: one series for each k would be 65."""

_SEQUENCE_UPPER_BOUNDS = (8, 64, 256)
SEQUENCE_LABELS = ("1-8", "9-64", "65-256", "257-")
"""Ranges of a graph's sequences as label values."""

_STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WAIT_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_OP_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01)


class EngineMetrics:
    """The engine's counters, gauges and histograms; `observe` once per step."""

    def __init__(self, factory: MetricFactory) -> None:
        self._tokens = _TokenMetrics(factory)
        self._drafts = _DraftMetrics(factory)
        self._logprobs = _LogprobMetrics(factory)
        self._load = _LoadMetrics(factory)
        self._device = _DeviceMetrics(factory)
        self._step_seconds = factory.histogram(
            "baton_engine_step_seconds",
            "Wall time of one engine step, or its share of it where steps overlap",
            _STEP_SECONDS,
        )
        self._preemptions = factory.counter(
            "baton_engine_preemptions", "Requests that lost their KV blocks and are recomputed"
        )
        self._queue_seconds = factory.histogram(
            "baton_engine_queue_seconds",
            "From submission to admission, of each attempt that gave a token",
            _WAIT_SECONDS,
        )
        self._prefill_seconds = factory.histogram(
            "baton_engine_prefill_seconds",
            "From its first admission to its first token, of each attempt",
            _WAIT_SECONDS,
        )

    def observe(self, stats: StepStats, load: EngineLoad) -> None:
        """Count one step and the occupancy after it."""
        self._step_seconds.observe(stats.step_seconds)
        if stats.preempted:
            self._preemptions.inc(stats.preempted)
        self._tokens.observe(stats)
        self._drafts.observe(stats)
        self._logprobs.observe(stats)
        self.observe_load(load)
        for _, queue_seconds, prefill_seconds in stats.first_tokens:
            self._queue_seconds.observe(queue_seconds)
            self._prefill_seconds.observe(prefill_seconds)

    def observe_load(self, load: EngineLoad) -> None:
        """Set the occupancy gauges; between steps too, since a release changes it without one."""
        self._load.observe(load)
        if load.device is not None:
            self._device.observe(load.device)


class WeightMetrics:
    """How far the weights are, of this process: of several GPUs, rank 0's part."""

    def __init__(self, factory: MetricFactory) -> None:
        self._total = factory.gauge(
            "baton_weights_bytes",
            "Bytes of the checkpoint that this process reads (of several GPUs, the first's part); "
            "0 before they are known, and for a simulated model",
        )
        self._read = factory.gauge("baton_weights_read_bytes", "Of those bytes, the ones passed on")
        self._seconds = factory.gauge(
            "baton_weights_load_seconds", "Time that reading them has taken, or takes so far"
        )

    def follow(self, progress: LoadProgress) -> None:
        """Tell how far it is whenever somebody asks, from whatever thread."""
        self._total.set_function(lambda: progress.now().n_bytes)
        self._read.set_function(lambda: progress.now().n_read)
        self._seconds.set_function(lambda: progress.now().seconds)


class _TokenMetrics:
    def __init__(self, factory: MetricFactory) -> None:
        self._prompt = factory.counter("baton_prompt_tokens", "Prompt tokens fed, recomputed too")
        self._emitted = factory.counter(
            "baton_tokens",
            "Output tokens emitted, each by the worker that computed it; also what a stop string "
            "cuts off, and the one behind a prompt that is scored alone",
        )
        self._decode_rows = factory.counter(
            "baton_engine_decode_rows", "Decode rows stepped; tokens per row shows MTP's gain"
        )
        self._queried = factory.counter(
            "baton_prefix_cache_query_tokens", "Tokens looked up in the prefix cache at admission"
        )
        self._hits = factory.counter(
            "baton_prefix_cache_hit_tokens", "Tokens whose KV the prefix cache held"
        )

    def observe(self, stats: StepStats) -> None:
        self._prompt.inc(stats.prefill_tokens)
        self._emitted.inc(stats.emitted_tokens)
        self._decode_rows.inc(stats.decode_rows)
        self._queried.inc(stats.prefix_query_tokens)
        self._hits.inc(stats.prefix_hit_tokens)


class _DraftMetrics:
    """Verified drafts only: a prefill worker's proposals count where decode verifies them (R43)."""

    def __init__(self, factory: MetricFactory) -> None:
        self._proposed = _by_position(
            factory, "baton_draft_proposed_tokens", "Draft tokens verified, by draft position"
        )
        self._accepted = _by_position(
            factory, "baton_draft_accepted_tokens", "Draft tokens accepted, by draft position"
        )
        self._lengths = factory.histogram(
            "baton_accept_length_tokens",
            "Tokens that verification yielded per decode row: accepted drafts + 1",
            range(1, MAX_DRAFTS + 2),
        )

    def observe(self, stats: StepStats) -> None:
        for counters, counts in (
            (self._proposed, stats.proposed_by_position),
            (self._accepted, stats.accepted_by_position),
        ):
            for counter, count in zip(counters, counts.tolist(), strict=False):
                counter.inc(count)
        for length, count in collections.Counter(stats.accept_lengths).items():
            self._lengths.observe_many(length, count)


def _by_position(factory: MetricFactory, name: str, documentation: str) -> list[Counter]:
    """Return one bound counter per draft position 1..5."""
    counter = factory.counter(name, documentation, labels=("position",))
    return [counter.labels(*factory.values(str(p + 1))) for p in range(MAX_DRAFTS)]


class _LogprobMetrics:
    def __init__(self, factory: MetricFactory) -> None:
        self._rows = _by_k(
            factory, "baton_logprob_rows", "Tokens emitted with logprobs, by alternatives asked for"
        )
        self._columns = _by_k(
            factory,
            "baton_logprob_columns",
            "Logprob entries (sampled tokens and alternatives), by alternatives asked for",
        )
        self._prompt_rows = _by_k(
            factory,
            "baton_prompt_logprob_rows",
            "Prompt tokens told with logprobs, by alternatives asked for",
        )
        self._seconds = factory.histogram(
            "baton_logprob_op_seconds",
            "Time in the logprob op for output tokens, per calling step",
            _OP_SECONDS,
        )

    def observe(self, stats: StepStats) -> None:
        for k, rows in stats.logprob_rows_by_k:
            bucket = bisect_left(_K_UPPER_BOUNDS, k)
            self._rows[bucket].inc(rows)
            self._columns[bucket].inc(rows * (1 + k))
        for k, rows in stats.prompt_rows_by_k:
            self._prompt_rows[bisect_left(_K_UPPER_BOUNDS, k)].inc(rows)
        if stats.logprob_rows_by_k:
            self._seconds.observe(stats.logprob_op_seconds)


def _by_k(factory: MetricFactory, name: str, documentation: str) -> list[Counter]:
    """Return one bound counter per range of k."""
    counter = factory.counter(name, documentation, labels=("k",))
    return [counter.labels(*factory.values(label)) for label in K_LABELS]


class _LoadMetrics:
    def __init__(self, factory: MetricFactory) -> None:
        self._running = factory.gauge("baton_engine_running_requests", "Requests being stepped")
        self._waiting = factory.gauge("baton_engine_waiting_requests", "Requests in line")
        self._held = factory.gauge(
            "baton_engine_held_handoffs", "Prefilled requests whose KV waits for its pull"
        )
        self._used = factory.gauge("baton_engine_kv_blocks_used", "KV blocks handed out")
        self._total = factory.gauge("baton_engine_kv_blocks", "KV blocks of the pool")
        self._cached = factory.gauge(
            "baton_engine_kv_blocks_cached", "Free KV blocks that the prefix cache can still give"
        )
        pulled = factory.counter(
            "baton_engine_kv_pulled_blocks",
            "Decode: KV blocks read out of prefill workers' pools, by when: there before the offer "
            "came, or not; of a block of which some layers were read, that part",
            labels=("when",),
        )
        self._ahead, self._behind = (
            pulled.labels(*factory.values(when)) for when in ("ahead", "behind")
        )
        self._n_ahead = self._n_behind = 0.0
        left = factory.counter(
            "baton_engine_kv_left_ahead",
            "Decode: words of filled blocks that nothing of use was pulled for, by why (blocks: "
            "not its own, or none of the pool's; lease: lent no more; times: pulled too often; "
            "room: those who run need it; unfit: values that no pool may hold; lost: it has not "
            "come; coming: others took some, or it was lost, while something comes for the rest); "
            "a later word's pull or the offer's brings them",
            labels=("reason",),
        )
        self._left = {why: left.labels(*factory.values(why)) for why in WHY_LEFT_AHEAD}
        self._n_left: Mapping[str, int] = {}
        self._drafts = factory.gauge(
            "baton_engine_num_speculative_tokens", "K as it is set now: drafts per step and request"
        )

    def observe(self, load: EngineLoad) -> None:
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._held.set(load.held_handoffs)
        self._used.set(load.kv_blocks_used)
        self._total.set(load.kv_blocks_total)
        self._cached.set(load.kv_blocks_cached)
        self._ahead.inc(load.kv_pulled_ahead_blocks - self._n_ahead)
        self._behind.inc(load.kv_pulled_behind_blocks - self._n_behind)
        self._n_ahead, self._n_behind = load.kv_pulled_ahead_blocks, load.kv_pulled_behind_blocks
        for why, count in load.kv_left_ahead.items():
            self._left[why].inc(count - self._n_left.get(why, 0))
        self._n_left = load.kv_left_ahead
        self._drafts.set(load.num_speculative_tokens)


class _DeviceMetrics:
    """Zero on a worker that computes on the host."""

    def __init__(self, factory: MetricFactory) -> None:
        self._used = factory.gauge(
            "baton_device_memory_used_bytes", "Memory of the GPU in use, by all on it"
        )
        self._total = factory.gauge("baton_device_memory_bytes", "Memory of the GPU")
        self._peak = factory.gauge(
            "baton_device_memory_peak_bytes", "Most memory that this worker's tensors took at once"
        )
        self._graphs = factory.counter(
            "baton_device_graphs", "Graphs captured of decoding steps; a rise while serving is late"
        )
        kept = factory.gauge(
            "baton_device_graphs_kept",
            "Graphs at hand, by the sequences that a step of theirs has room for",
            labels=("sequences",),
        )
        self._kept = [kept.labels(*factory.values(label)) for label in SEQUENCE_LABELS]
        self._steps = _by_kind(
            factory,
            "baton_device_steps",
            "Steps launched: graph, replayed as one; decode or mixed, kernel by kernel",
        )
        self._seconds = _by_kind(
            factory,
            "baton_device_seconds",
            "Time of the device on steps, each from its first kernel until its results are copied",
        )
        self._captured = 0
        self._launched = dict.fromkeys(LaunchKind, Launched())

    def observe(self, load: DeviceLoad) -> None:
        self._used.set(load.memory_used)
        self._total.set(load.memory_total)
        self._peak.set(load.memory_peak)
        self._graphs.inc(load.graphs_captured - self._captured)
        self._captured = load.graphs_captured
        kept = [0] * len(self._kept)
        for sequences, count in load.graphs_kept.items():
            kept[bisect_left(_SEQUENCE_UPPER_BOUNDS, sequences)] += count
        for gauge, count in zip(self._kept, kept, strict=True):
            gauge.set(count)
        for kind, now in load.launched.items():
            before = self._launched[kind]
            self._steps[kind].inc(now.steps - before.steps)
            self._seconds[kind].inc(now.seconds - before.seconds)
            self._launched[kind] = now


def _by_kind(factory: MetricFactory, name: str, documentation: str) -> dict[LaunchKind, Counter]:
    """Return one bound counter per way to launch a step."""
    counter = factory.counter(name, documentation, labels=("kind",))
    return {kind: counter.labels(*factory.values(kind)) for kind in LaunchKind}
