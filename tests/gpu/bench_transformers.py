"""The decode phase that transformers' continuous batching serves, to set beside the engine's own.

    python tests/gpu/bench_transformers.py --json FILE [--model NAME] [--phase SECONDS]
        [--whole SECONDS]

Owns the model (Qwen3-8B's shape, or another's of `CONFIGS`, as transformers builds it, random
bfloat16 weights), the requests, which are those of bench_phase, and what is read off the times of
their tokens. MiMo-7B is built as Qwen2, which it is but for its draft layer. Knows nothing of the
engine. A process of its own: what it holds of the GPU's memory goes with it. Each phase is
bounded: what a slow one has not finished by then is dropped, and the steps until then are
counted. Needs a GPU, and transformers with continuous batching.

Transformers asks for flash attention. Where its package is not installed, PyTorch's own kernels
stand in for it (`flash_torch`): they are the same ones, but read no block table, so keys and values
are gathered first, as transformers does for every kernel that reads none.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which Python is told not to search

from bench_phase import PROMPT, TIMED, TOKENS

from baton_testing.exactness.random_model import mimo_7b, qwen3_8b, qwen3_30b_a3b
from baton_worker.engine.model.shape import ModelShape

ROWS = (64, 256)
WARM = 10
"""Steps of a full batch that come before those that are counted, as in bench_phase."""
LEAST = 5
"""Fewer steps than these are no measurement."""
BLOCK = 256
STAND_IN, SDPA, EAGER = "paged|flash_torch", "paged|sdpa", "paged|eager"
FEED = {SDPA: 2048, EAGER: 1024}
"""Tokens of prompts at once where each attends to all that is cached, under a mask; eager keeps
the scores too, which is why it serves the smaller batch alone."""
FEED_FLASH = 4096
STARTING = 15.0
"""Seconds that a process may take to import and to end, besides its phases."""


class Limits(NamedTuple):
    """Seconds that a phase may take, and that all may."""

    phase: float
    whole: float


LIMITS = Limits(25.0, 100.0)


class Steps(NamedTuple):
    """Steps of a full batch: tokens a second, a step's median time, and how many there were."""

    tokens_per_s: float
    step_ms: float
    steps: int


class Build(NamedTuple):
    """How transformers builds a model: its shape, its configuration's class and further fields."""

    shape: Callable[[], ModelShape]
    config: str
    more: Callable[[ModelShape], dict[str, Any]]


def _mixture(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of a mixture in every layer."""
    experts = shape.experts
    assert experts is not None, "a mixture's shape tells its experts"
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _head_size(shape: ModelShape) -> dict[str, Any]:
    return {"head_dim": shape.head_dim}


CONFIGS = {
    "qwen3-8b": Build(qwen3_8b, "Qwen3Config", _head_size),
    "mimo-7b": Build(mimo_7b, "Qwen2Config", lambda shape: {}),
    "qwen3-30b-a3b": Build(
        qwen3_30b_a3b, "Qwen3MoeConfig", lambda shape: _head_size(shape) | _mixture(shape)
    ),
}


def fields_of(build: Build) -> dict[str, Any]:
    """Return the fields of a model's configuration."""
    shape = build.shape()
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
    } | build.more(shape)


def model_of(torch: Any, name: str, attention: str, device: str) -> Any:
    """Return transformers' model of a shape, random weights made where they are used."""
    import transformers

    build = CONFIGS[name]
    config = getattr(transformers, build.config)(**fields_of(build))
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        )
    return model.eval()


def flash() -> str:
    """Return the flash attention that is installed, or the one that stands in for it."""
    known = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}
    there = [name for name, module in known.items() if importlib.util.find_spec(module)]
    return f"paged|{there[0]}" if there else STAND_IN


def stand_in(varlen: Any) -> None:
    """Have transformers call `varlen` where it would call flash-attn's function of this name.

    Its own paged forward runs, under a name of ours; the loader is told that this is loaded.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers import modeling_flash_attention_utils as loader
    from transformers.integrations.flash_paged import paged_attention_forward
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(STAND_IN, paged_attention_forward)
    AttentionMaskInterface.register(STAND_IN, flash_attention_mask)
    loader._loaded_implementation = STAND_IN
    loader._flash_fn = loader._flash_with_kvcache_fn = None
    loader._flash_varlen_fn = varlen


def flash_varlen(
    query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **more: Any
) -> Any:
    """Attend causally over packed sequences with PyTorch's flash attention, by flash-attn's names.

    Raises:
        ValueError: when asked for what this is not.
    """
    from torch.nn.attention.varlen import varlen_attn

    if not more["causal"] or more["window_size"] != (-1, -1):
        raise ValueError(f"flash_torch attends causally and without a window, not as in {more}")
    scale = more["softmax_scale"]
    return varlen_attn(
        query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window_size=(-1, 0)
    )


def steps_of(times: Sequence[Sequence[float]]) -> Steps:
    """Read the steps in which every request has a token off the times of their tokens.

    Raises:
        ValueError: when there are too few such steps.
    """
    if not all(times):
        raise ValueError("a request had no token in time: give the phase more seconds")
    last_in = max(times, key=lambda one: one[0])
    begin = last_in[min(WARM, len(last_in) - 1)]
    end = min([*(one[-1] for one in times), *last_in[WARM + TIMED : WARM + TIMED + 1]])
    found = [at for at in last_in if begin <= at <= end]
    if len(found) <= LEAST:
        raise ValueError(f"{len(found)} steps of a full batch in time: give the phase more seconds")
    end = found[-1]
    tokens = sum(begin < at <= end for one in times for at in one)
    between = [after - before for before, after in pairwise(found)]
    return Steps(tokens / (end - begin), statistics.median(between) * 1e3, len(between))


def serve(manager: Any, prompts: list[list[int]], until: float) -> list[list[float]]:
    """Serve prompts until all are done or the time is over; return the times of their tokens.

    Raises:
        RuntimeError: when the server stopped by itself.
    """
    names = manager.add_requests(prompts, max_new_tokens=TOKENS, record_timestamps=True)
    done: dict[str, Any] = {}
    stopped = False
    while len(done) < len(names):
        told = manager.get_result(timeout=0.5)
        if told is not None and told.is_finished():
            if told.error and not stopped:
                raise RuntimeError(told.error)
            done[told.request_id] = told
        elif told is None and not manager.is_running():
            raise RuntimeError(f"stopped: {manager.background_thread_status.fatal_error}")
        if time.monotonic() > until and not stopped:
            stopped = True
            manager.stop(block=True, hard_stop=True)  # the rest comes back as far as it got
    return [list(done[name].timestamps or ()) for name in names]


def measured(torch: Any, model: Any, attention: str, rows: int, seconds: float) -> dict[str, Any]:
    """Serve a full batch of equal requests, where graphs are captured a first time for them."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    until = time.monotonic() + seconds
    served = ContinuousBatchingConfig(
        block_size=BLOCK,
        num_blocks=rows * (-(-(PROMPT + TOKENS) // BLOCK) + 1),
        max_batch_tokens=FEED.get(attention, FEED_FLASH),
        max_requests_per_batch=rows,
        allow_block_sharing=False,
        seed=0,
    )
    drawn = GenerationConfig(do_sample=True, temperature=0.8, top_k=0, eos_token_id=-1)
    rng = np.random.default_rng(0)
    size = model.config.vocab_size
    with model.continuous_batching_context_manager(
        generation_config=drawn, continuous_batching_config=served, timeout=15
    ) as manager:
        graphs = any(manager.continuous_batching_config.cuda_graph_booleans)
        for _ in range(2 if graphs else 1):
            prompts = [rng.integers(2, size, PROMPT).tolist() for _ in range(rows)]
            times = serve(manager, prompts, until)
            if not manager.is_running():
                break
    del manager
    return {"cuda_graphs": graphs} | steps_of(times)._asdict()


def phases(
    torch: Any, name: str, attentions: Sequence[str], device: str, limits: Limits
) -> Iterator[dict[str, Any]]:
    """Measure attentions at each number of requests, for as long as the time suffices."""
    until = time.monotonic() + limits.whole
    if STAND_IN in attentions:
        stand_in(flash_varlen)
    model = model_of(torch, name, attentions[0], device)
    for attention in attentions:
        model.set_attn_implementation(attention)
        for rows in ROWS[:1] if attention == EAGER else ROWS:
            record: dict[str, Any] = {"rows": rows, "attention": attention.removeprefix("paged|")}
            left = until - time.monotonic()
            try:
                if left < limits.phase / 4:
                    raise TimeoutError("no time was left for it")
                record |= measured(torch, model, attention, rows, min(limits.phase, left))
            except Exception as error:  # noqa: BLE001 - the others are still worth having
                record["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            print(record, flush=True)
            yield record
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


def measure_here(name: str, attentions: Sequence[str], limits: Limits, place: Path) -> None:
    """Write the record of these attentions' phases, and by which transformers, as far as it got."""
    import torch
    import transformers

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    found = []
    for record in phases(torch, name, attentions, "cuda", limits):
        found.append(record)
        place.write_text(json.dumps({"version": transformers.__version__, "phases": found}) + "\n")


def measured_apart(limits: Limits, name: str = "qwen3-8b") -> dict[str, Any]:
    """Return the record of all phases of a model; flash attention in a process of its own.

    A kernel that fails takes its process's GPU with it, and shall not take the others' too.
    """
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: its continuous batching is not measured", flush=True)
        return {"version": None, "phases": []}
    record: dict[str, Any] = {"version": None, "phases": []}
    until = time.monotonic() + limits.whole
    for some in ([flash()], [SDPA, EAGER]):
        left = until - time.monotonic()
        words = [
            *some,
            "--model",
            name,
            "--phase",
            str(limits.phase),
            "--whole",
            str(left - STARTING),
        ]
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "found.json"
            command = [sys.executable, __file__, "--json", str(place), "--attention", *words]
            try:
                code = subprocess.run(command, check=False, timeout=max(left, STARTING)).returncode
            except subprocess.TimeoutExpired:
                code = 124
            if place.exists():
                found = json.loads(place.read_text())
                record["version"] = found["version"]
                record["phases"] += found["phases"]
        if code:
            names = "+".join(each.removeprefix("paged|") for each in some)
            error = f"the process ended with status {code}"
            record["phases"].append({"rows": None, "attention": names, "error": error})
    return record


def main() -> None:
    """Measure, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", choices=[*CONFIGS], default="qwen3-8b")
    parser.add_argument(
        "--phase", type=float, default=LIMITS.phase, help="most seconds for a phase"
    )
    parser.add_argument("--whole", type=float, default=LIMITS.whole, help="most seconds for all")
    parser.add_argument("--attention", nargs="+", help="these alone, in this process")
    options = parser.parse_args()
    limits = Limits(options.phase, options.whole)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    if options.attention:
        measure_here(options.model, options.attention, limits, options.json)
    else:
        options.json.write_text(json.dumps(measured_apart(limits, options.model)) + "\n")


if __name__ == "__main__":
    main()
