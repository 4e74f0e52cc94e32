"""How many KV blocks a device has room for: what is left when everything else is there.

Owns the measurement: an engine with a small pool takes a step as large as any, and what the device
then still has is the pool's. Knows no framework and no configuration file, but names its fields.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence

from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device import orders
from baton_worker.engine.backends.device.budget import Budget, told
from baton_worker.engine.backends.device.engine import DeviceEngine, LoadedModel
from baton_worker.engine.backends.device.pool_sharing import RESERVED_BLOCKS
from baton_worker.engine.backends.device.seam import MemoryUse
from baton_worker.engine.closing import closing_on_failure
from baton_worker.engine.model import naming
from baton_worker.engine.model.families.registry import family_of
from baton_worker.engine.model.quantisation import Fp8, is_kept
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.model.shards import head_rows, local_shape
from baton_worker.engine.options import EngineOptions
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

_BESIDE_THE_CHUNK = 4
"""Requests that decode in the step that is measured; all that is sized by requests is there
whatever their number."""


FOR_LESS_WEIGHTS = (
    "choose engine.dtype bfloat16, a smaller model or a larger device, or raise "
    "engine.tensor_parallel_size"
)
"""What to do where weights do not fit, for refusals."""

_SHORTEST = 2
"""Tokens of the shortest request: one of prompt, one of output."""


def check_memory(budget: Budget, free: int, n_blocks: int) -> None:
    """Refuse a model that does not fit, before gigabytes of it have been copied.

    Args:
        budget: what is known by then.
        free: bytes of the device.
        n_blocks: of KV, that the pool is to have; 0: what fits.

    Raises:
        DeviceError: with what is needed and what there is.
    """
    has = f"the device has {told(free)} free of {told(budget.total)}"
    if budget.weights > free:
        raise DeviceError(
            f"the model's weights take {told(budget.weights)}, {has}: {FOR_LESS_WEIGHTS}"
        )
    pool = (n_blocks + RESERVED_BLOCKS) * budget.block_bytes
    if n_blocks and budget.weights + pool > free:
        most = (free - budget.weights) // budget.block_bytes - RESERVED_BLOCKS
        raise DeviceError(
            f"no room for {n_blocks} KV blocks of {told(budget.block_bytes)}, {told(pool)}: {has}, "
            f"and the model's weights take {told(budget.weights)}: {_for_less_kv(budget, most)}"
        )
    if not n_blocks and not budget.is_enough:
        raise DeviceError(f"{budget.refusal()} (a step's working memory comes on top)")


def _for_less_kv(budget: Budget, most: int) -> str:
    """Return what to do where `most` blocks fit, a step's working memory aside, for which there is
    to be less than that: below what the longest request takes, fewer blocks alone would be refused
    too.
    """
    n_tokens = (most - 1) * budget.block_size
    if most > budget.longest_blocks:
        return f"lower engine.kv_blocks to less than {most}, or set it to 0 for what fits"
    longest = (
        f"one request of engine.max_model_len {budget.max_model_len} needs {budget.longest_blocks}"
    )
    if n_tokens < _SHORTEST:
        return f"{longest}, none fits: {FOR_LESS_WEIGHTS}"
    return (
        f"{longest}, less than {most} fit: lower engine.max_model_len to {n_tokens} at most and "
        f"set engine.kv_blocks to 0, or {FOR_LESS_WEIGHTS}"
    )


def weight_bytes(model_shape: ModelShape, n_mtp: int, item_bytes: int, ranks: int = 1) -> int:
    """Return what a model's weights take on each of its ranks; norms are not counted.

    Of a quantised one matrices of decoder layers are, but for those that its config keeps; a
    draft's projection is counted as if it were not.
    """
    hidden, local = model_shape.hidden_size, local_shape(model_shape, ranks)
    fp8 = _StoredFp8(local.quantisation, item_bytes) if local.quantisation else None

    def layer(index: int) -> int:
        width, experts = local.mlp_size(index), local.experts_of(index)
        router_bytes = 0
        if experts is not None:
            router_bytes = 4 * hidden * experts.count  # float32 in every model
        if fp8 is not None:
            return fp8.layer_bytes(local, index) + router_bytes
        if experts is not None:
            width += experts.count * experts.intermediate_size
        items = hidden * (sum(local.projected_sizes) + local.o_size + 3 * width)
        if local.mla is not None:
            items += local.n_heads * local.mla.q_rank * local.mla.query_size
            items += local.n_heads * local.mla.kv_rank * local.mla.unfolded_size
        return items * item_bytes + router_bytes

    vocabulary = model_shape.vocab_size * hidden
    if not model_shape.tie_word_embeddings:
        vocabulary += head_rows(model_shape.vocab_size, ranks) * hidden
    layers = sum(map(layer, range(local.n_layers + n_mtp)))
    return layers + (n_mtp * 2 * hidden * hidden + vocabulary) * item_bytes


class _StoredFp8:
    """What matrices of a quantised model take.

    Args:
        item_bytes: of an element of those that are kept as they are.
    """

    def __init__(self, fp8: Fp8, item_bytes: int) -> None:
        self._fp8 = fp8
        self._item_bytes = item_bytes
        self._patterns = fp8.patterns()

    def layer_bytes(self, local: ModelShape, index: int) -> int:
        """Return those of a layer but its router: the most that any of its names gives."""
        return max(self._named_bytes(local, index, keys) for keys in _layer_keys(local, index))

    def _named_bytes(self, local: ModelShape, index: int, keys: naming.LayerKeys) -> int:
        hidden, experts = local.hidden_size, local.experts_of(index)
        mlps = [(keys.shared if experts else keys.mlp, local.mlp_size(index), 1)]
        if experts is not None:
            mlps.append((keys.expert(0), experts.intermediate_size, experts.count))
        of_mlps = sum(
            count
            * (
                self._bytes(mlp.gate_up[0], [width, width], hidden)
                + self._bytes(mlp.down, [hidden], width)
            )
            for mlp, width, count in mlps
            if width
        )
        o = self._bytes(keys.o, [hidden], local.o_size)
        return self._input_bytes(local, keys) + o + of_mlps

    def _input_bytes(self, local: ModelShape, keys: naming.LayerKeys) -> int:
        """Return those of what makes queries, keys and values."""
        hidden, mla, widths = local.hidden_size, local.mla, local.projected_sizes
        if mla is None:
            parts = [part.stop - part.start for part in local.stretches]
            heads = local.n_heads + local.n_kv_heads
            if len(parts) > 1:
                widths = *(parts * heads), local.kv_size
            return self._bytes(keys.qkv[0], widths, hidden)
        down = self._bytes(keys.query_down if mla.q_rank else keys.query, widths, hidden)
        q_up = self._bytes(keys.query_up, [local.n_heads * mla.query_size], mla.q_rank)
        kv_up = local.n_heads * mla.unfolded_size * mla.kv_rank * self._item_bytes
        return down + (q_up if mla.q_rank else 0) + kv_up

    def _bytes(self, key: str, parts: Sequence[int], inputs: int) -> int:
        """Return those of a matrix: e4m3 numbers, and float32 scales of each row, or of each block
        where all parts are of whole ones (see `placing.stored_parts`).

        Args:
            key: of its first part: parts of one matrix are kept together, or refused.
            parts: rows of each.
        """
        outputs, has_blocks = sum(parts), all(map(self._fp8.has_blocks, parts))
        if is_kept(key, self._patterns):
            return outputs * inputs * self._item_bytes
        group, rows = self._fp8.group, self._fp8.rows if has_blocks else 1
        return outputs * inputs + outputs // rows * 4 * (-(-inputs // group) if group else 1)


def _layer_keys(model_shape: ModelShape, index: int) -> list[naming.LayerKeys]:
    """Return what a layer's keys may be: which scheme drafts have, the checkpoint alone says."""
    n_layers, tied = model_shape.n_layers, model_shape.tie_word_embeddings
    if index < n_layers:
        return [naming.main_layer(index)]
    namings = family_of(model_shape.model_type).mtp_namings
    return [each(index - n_layers, n_layers, tied).layer for each in namings]


def measured_budget(
    model: LoadedModel,
    options: EngineOptions,
    known: Budget,
    clock: Callable[[], float] = time.monotonic,
) -> Budget:
    """Return the budget of the fullest of all ranks when a step as large as any has been taken.

    Args:
        options: of the engine to be; its `n_blocks` is not looked at.
        known: rank 0's, before.

    Raises:
        DeviceError: not even the largest step fits, or no request of `max_model_len`.
    """
    uses, probe_blocks = _measured(model, options, clock)
    gc.collect()  # the probe's memory is given back
    probed = (probe_blocks + RESERVED_BLOCKS) * known.block_bytes
    budget = min((_with_taken(known, use, probed) for use in uses), key=lambda each: each.kv)
    if not budget.is_enough:
        raise DeviceError(budget.refusal())
    return budget


def _with_taken(known: Budget, use: MemoryUse, probed: int) -> Budget:
    taken = use.total - use.free - probed
    working = max(taken - known.others - known.weights, 0)
    return dataclasses.replace(known, total=use.total, working=working)


def _measured(
    model: LoadedModel, options: EngineOptions, clock: Callable[[], float]
) -> tuple[list[MemoryUse], int]:
    """Return what each rank uses when the largest step has been taken, and the blocks it was taken
    with.

    What was in use only while it ran counts as used.
    """
    n_tokens = max(min(options.prefill_tokens, options.max_model_len - 2), 1)
    per_block = options.block_size
    n_blocks = -(-(n_tokens + 2 * per_block) // per_block) + 4 * _BESIDE_THE_CHUNK
    probe = dataclasses.replace(options, n_blocks=n_blocks, overlap=False, prefix_caching=False)
    try:
        engine = DeviceEngine(model, probe, clock)
        with closing_on_failure() as made:
            made.append(engine.close)
            before = _memory_of_ranks(model)
            _take_largest_step(engine, n_tokens)
            behind = _memory_of_ranks(model)
        engine.close()
    except DeviceError as error:
        raise DeviceError(
            f"{error}: no room for a step of engine.max_running {options.max_running} and "
            f"{options.chunk_field} {options.prefill_tokens}; lower them"
        ) from error
    grown = [max(use.peak - other.peak, 0) for use, other in zip(behind, before, strict=True)]
    uses = [use._replace(free=use.free - more) for use, more in zip(behind, grown, strict=True)]
    return uses, n_blocks


def _memory_of_ranks(model: LoadedModel) -> list[MemoryUse]:
    model.device.synchronise()
    own = model.device.memory()
    if model.team is None or model.team.followers is None:
        return [own]
    model.team.followers.tell([orders.Measure()])
    told = model.team.followers.answers()
    return [own, *(answer.use for answer in told if isinstance(answer, orders.Measured))]


def _take_largest_step(engine: DeviceEngine, n_tokens: int) -> None:
    """Take steps until one has fed `n_tokens` of a prompt beside requests that decode."""
    for number in range(min(_BESIDE_THE_CHUNK, engine.options.max_running - 1)):
        engine.submit(_request(1 + number, 1, max_tokens=4, max_top_k=engine.options.max_top_k))
    engine.step()
    last = _request(1 + _BESIDE_THE_CHUNK, n_tokens, 1, max_top_k=engine.options.max_top_k)
    engine.submit(last)
    while engine.has_work():
        engine.step()


def _request(number: int, n_tokens: int, max_tokens: int, max_top_k: int) -> Submit:
    """Return a request that needs all that a step can do."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0,
        top_p=0.9,
        repetition_penalty=1.1,
        ignore_eos=True,
        seed=number,
    )
    return Submit(
        number,
        0,
        prompt_token_ids=(0,) * n_tokens,
        sampling=sampling,
        logprobs_k=max_top_k,
    )
