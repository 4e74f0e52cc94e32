"""How many KV blocks a device has room for: what is left when everything else is there.

Owns the measurement: an engine with a small pool takes a step as large as any, and what the device
then still has is the pool's. Knows no framework and no configuration file, but names its fields.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable

from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device import orders
from baton_worker.engine.backends.device.engine import DeviceEngine, LoadedModel, kv_shape
from baton_worker.engine.backends.device.pool import RESERVED_BLOCKS
from baton_worker.engine.backends.device.seam import MemoryUse
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.model.shards import head_rows, local_shape
from baton_worker.engine.options import EngineOptions
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

MOST_BLOCKS = 1 << 20
"""Blocks of tiny models: more of them would serve nobody, and the host keeps lists of them."""

_BESIDE_THE_CHUNK = 4
"""Requests that decode in the step that is measured; all that is sized by requests is there
whatever their number."""


def check_weights(
    use: MemoryUse, model_shape: ModelShape, n_mtp: int, item_bytes: int, ranks: int = 1
) -> None:
    """Refuse weights that do not fit, before gigabytes of them have been copied.

    Raises:
        DeviceError: with what they take and what there is.
    """
    wanted = weight_bytes(model_shape, n_mtp, item_bytes, ranks)
    if wanted > use.free:
        raise DeviceError(
            f"the model's weights take {_told(wanted)}, the device has {_told(use.free)} free of "
            f"{_told(use.total)}: choose engine.dtype bfloat16, a smaller model or a larger "
            "device, or raise engine.tensor_parallel_size"
        )


def weight_bytes(model_shape: ModelShape, n_mtp: int, item_bytes: int, ranks: int = 1) -> int:
    """Return what a model's weights take on each of its ranks; norms are not counted."""
    hidden, local = model_shape.hidden_size, local_shape(model_shape, ranks)

    def layer(index: int) -> int:
        width, experts = local.mlp_size(index), local.experts_of(index)
        router_bytes = 0
        if experts is not None:
            width += experts.count * experts.intermediate_size
            router_bytes = 4 * hidden * experts.count  # float32 in every model
        items = hidden * (sum(local.projected_sizes) + local.o_size + 3 * width)
        if local.mla is not None:
            items += local.n_heads * local.mla.q_rank * local.mla.query_size
            items += local.n_heads * local.mla.kv_rank * local.mla.unfolded_size
        return items * item_bytes + router_bytes

    vocabulary = model_shape.vocab_size * hidden
    if not model_shape.tie_word_embeddings:
        vocabulary += head_rows(model_shape.vocab_size, ranks) * hidden
    main = sum(map(layer, range(local.n_layers)))
    draft = layer(local.n_layers) + 2 * hidden * hidden * item_bytes
    return main + n_mtp * draft + vocabulary * item_bytes


def fitting_blocks(
    model: LoadedModel,
    options: EngineOptions,
    share: float,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Return how many blocks fit when the engine takes no more than a share of the device, on the
    fullest of all ranks'.

    Args:
        options: of the engine to be; its `n_blocks` is not looked at.
        share: of the device's memory, for all that is on it.

    Raises:
        DeviceError: not even the largest step fits, or no request of `max_model_len`.
    """
    block_bytes = kv_shape(model, options).block_bytes
    uses, probe_blocks = _measured(model, options, clock)
    gc.collect()  # the probe's memory is given back
    probed = (probe_blocks + RESERVED_BLOCKS) * block_bytes
    left, taken, use = min(
        (int(share * use.total) - (taken := use.total - use.free - probed), taken, use)
        for use in uses
    )
    n_blocks = min(max(left // block_bytes - RESERVED_BLOCKS, 0), MOST_BLOCKS)
    needed = -(-options.max_model_len // options.block_size)
    if n_blocks < needed:
        raise DeviceError(
            f"{_told(max(left, 0))} of the device's {_told(use.total)} are left for KV within "
            f"engine.gpu_memory_utilization {share:g}, after {_told(taken)} for weights, working "
            f"memory and others; one request of engine.max_model_len {options.max_model_len} needs "
            f"{_told((needed + RESERVED_BLOCKS) * block_bytes)}: lower it, engine.max_running or "
            "engine.prefill_chunk_tokens, or raise the share"
        )
    return n_blocks


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
        before = _memory_of_ranks(model)
        _take_largest_step(engine, n_tokens)
        behind = _memory_of_ranks(model)
        engine.close()
    except DeviceError as error:
        raise DeviceError(
            f"{error}: no room for a step of engine.max_running {options.max_running} and "
            f"engine.prefill_chunk_tokens {options.prefill_tokens}; lower them"
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


def _told(n_bytes: int) -> str:
    if n_bytes >= 1 << 30:
        return f"{n_bytes / (1 << 30):.1f} GiB"
    return f"{n_bytes / (1 << 20):.2f} MiB"
