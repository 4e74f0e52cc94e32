"""What `baton-worker local` takes on its command line, and what is asked for by it.

Owns the flags, their ranges and what they need of each other. Imports no machinery, so that
`--help` is instant.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from baton_worker.config import ConfigError, EngineConfig, LinkConfig, SimConfig
from baton_worker.config_decode_prompts import DecodePromptsConfig, check_chunk
from baton_worker.config_errors import explain
from baton_worker.local.layout import LocalOptions


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all but those of the log."""
    parser.add_argument("--model", required=True, help="model folder in Hugging Face layout")
    parser.add_argument("--served-name", default="", help="model name for clients (folder's name)")
    parser.add_argument("--host", default="127.0.0.1", help="address of the API (%(default)s)")
    parser.add_argument("--port", type=int, default=8000,
                        help="port of the OpenAI API (%(default)s; 0: a free one)")  # fmt: skip
    for role, default in (("prefill", 1), ("decode", 1), ("mixed", 0)):
        parser.add_argument(f"--{role}", type=int, default=default, metavar="N",
                            help=f"{role} workers (%(default)s)")  # fmt: skip
    parser.add_argument("--gateways", type=int, default=1, metavar="N",
                        help="gateways that share the API's port: one is one processor's worth "
                        "(%(default)s)")  # fmt: skip
    parser.add_argument("-k", "--num-speculative-tokens", type=int, default=1, metavar="K",
                        help="drafts per step, 0..5 (%(default)s; 0: no speculation)")  # fmt: skip
    methods = ["mtp", "ngram", "mtp_ngram"]
    parser.add_argument("--speculative-method", default="mtp", choices=methods,
                        help="how drafts are made (%(default)s)")  # fmt: skip
    parser.add_argument("--tp", type=int, default=1, metavar="N",
                        help="processes that share a worker's model (%(default)s)")  # fmt: skip
    _add_engine_flags(parser)
    parser.add_argument("--api-keys-file", default="",
                        help="require an API key, one a line (none is needed)")  # fmt: skip
    parser.add_argument("--curve", action="store_true", help="encrypt and authenticate the links")
    parser.add_argument("--share-kv", action="store_true",
                        help="decode reads prefill's memory, on gpus over NVLink")  # fmt: skip
    parser.add_argument("--nixl", action="store_true",
                        help="decode reads prefill's memory by NIXL")  # fmt: skip
    parser.add_argument("--traces", default="", metavar="URL", help="OTLP/HTTP trace collector")
    parser.add_argument("--generation-config", default="auto", choices=["auto", "none"],
                        help="sampling fields left out: the model's (%(default)s)")  # fmt: skip
    parser.add_argument("--decode-prompts-behind", type=int, metavar="TOKENS", help="decode "
        "(--decode-prompt-chunk) helps behind more than that in every prefill's line; 0: never "
        "(%(default)s)", default=DecodePromptsConfig().behind_tokens)  # fmt: skip
    parser.add_argument("--dead-after", type=float, metavar="SECONDS",
                        help="give up a process that is silent for so long: more where others "
                        "use the machine (%(default)s)",
                        default=LinkConfig().dead_after_seconds)  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one line per process as it is ready")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-top-k", type=int, default=20, metavar="K",
                        help="most top_logprobs, up to 64 (%(default)s)")  # fmt: skip
    parser.add_argument("--max-running", type=int, default=32, metavar="N",
                        help="requests stepped at once (%(default)s)")  # fmt: skip
    parser.add_argument("--max-model-len", type=int, default=0, metavar="TOKENS",
                        help="most tokens of prompt and output together "
                        "(%(default)s: what the model can)")  # fmt: skip
    parser.add_argument("--max-waiting", type=int, default=1024, metavar="N",
                        help="requests queued beyond them (%(default)s)")  # fmt: skip
    parser.add_argument("--kv-blocks", type=int, default=0, metavar="N",
                        help="KV blocks per worker (%(default)s: enough)")  # fmt: skip
    parser.add_argument("--block-size", type=int, default=16, choices=[8, 16, 32, 64],
                        help="tokens in a KV block (%(default)s)")  # fmt: skip
    parser.add_argument("--prefill-chunk", type=int, default=512, metavar="TOKENS",
                        help="most prompt tokens in a step (%(default)s)")  # fmt: skip
    parser.add_argument("--decode-prompt-chunk", type=int, default=0, metavar="TOKENS",
                        help="decode computes prompts too, so many tokens in a step (16 or more), "
                        "while prefill's line is long (%(default)s: never)")  # fmt: skip
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True,
                        help="share KV between requests that begin alike (on)")  # fmt: skip
    parser.add_argument("--engine", default="cpu", choices=["cpu", "gpu", "sim"],
                        help="sim: made-up text at a set pace (%(default)s)")  # fmt: skip
    parser.add_argument("--gpu-memory", type=float, default=None, metavar="SHARE",
                        help="of a gpu's memory, for one worker (0.9)")  # fmt: skip
    parser.add_argument("--gpus", default=None, metavar="ID,ID",
                        help="gpus that workers are spread over in turn, as CUDA_VISIBLE_DEVICES "
                        "names them (all workers on the first that is seen)")  # fmt: skip
    parser.add_argument("--sim", action="append", default=[], metavar="FIELD=VALUE",
                        help="a field of engine.sim (docs/configuration.md), as "
                        "decode_step_seconds=0.05 or acceptance=[0.9,0.7,0.5,0.3,0.1]")  # fmt: skip


def local_options(options: argparse.Namespace) -> LocalOptions:
    """Return what was asked for.

    Raises:
        ConfigError: a flag is out of its range, or does not go with another.
    """
    for flag, low, high in (
        *((name, 0, 64) for name in ("prefill", "decode", "mixed", "max_top_k")),
        ("num_speculative_tokens", 0, 5),
        ("gateways", 1, 64),
        ("tp", 1, 64),
        ("port", 0, 65535),
        ("max_running", 1, 1 << 20),
        ("max_waiting", 1, 1 << 20),
        ("max_model_len", 0, 1 << 31),
        ("kv_blocks", 0, 1 << 31),
        ("prefill_chunk", 1, 1 << 20),
        ("decode_prompt_chunk", 0, 1 << 20),
        ("decode_prompts_behind", 0, 1 << 30),
        ("dead_after", 2, 3600),
    ):
        value = getattr(options, flag)
        if not low <= value <= high:
            raise ConfigError(f"--{flag.replace('_', '-')} is {value}, not in {low}..{high}")
    if not options.mixed and not (options.prefill and options.decode):
        raise ConfigError(
            f"--prefill is {options.prefill} and --decode {options.decode}: a deployment needs a "
            "prefill and a decode process, or a mixed one (--mixed 1)"
        )
    return LocalOptions(
        model_path=str(Path(options.model).resolve()),
        served_name=options.served_name or Path(options.model).resolve().name,
        host=options.host,
        port=options.port,
        prefill=options.prefill,
        decode=options.decode,
        mixed=options.mixed,
        gateways=options.gateways,
        speculative_method=options.speculative_method,
        num_speculative_tokens=options.num_speculative_tokens,
        max_top_k=options.max_top_k,
        engine=_engine_config(options),
        gpus=_gpus(options),
        api_keys_file=options.api_keys_file and str(Path(options.api_keys_file).resolve()),
        has_curve=options.curve,
        share_kv=options.share_kv,
        nixl=options.nixl,
        traces_endpoint=options.traces,
        generation_config=options.generation_config,
        decode_prompts_behind=options.decode_prompts_behind,
        dead_after_seconds=options.dead_after,
    )


def _engine_config(options: argparse.Namespace) -> EngineConfig:
    known = {"gpu": (1, 2, 4, 8), "sim": (1,)}.get(options.engine, (options.tp,))
    if options.tp not in known:
        raise ConfigError(f"--tp is {options.tp}, --engine {options.engine} takes one of {known}")
    try:
        check_chunk(options.decode_prompt_chunk)
    except ValueError as error:
        raise ConfigError(f"--decode-prompt-chunk: {error}") from error
    return EngineConfig(
        device=options.engine,
        sim=_sim_config(options),
        block_size=options.block_size,
        kv_blocks=options.kv_blocks,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        max_model_len=options.max_model_len,
        prefill_chunk_tokens=options.prefill_chunk,
        decode_prompt_chunk_tokens=options.decode_prompt_chunk,
        tensor_parallel_size=options.tp,
        prefix_caching=options.prefix_caching,
        gpu_memory_utilization=_memory_of_a_worker(options),
    )


def _gpus(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the GPUs that were named, each once."""
    if options.gpus is None:
        return ()
    if options.engine != "gpu":
        raise ConfigError(f"--gpus is {options.gpus!r}, which needs --engine gpu")
    names = tuple(name.strip() for name in options.gpus.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"--gpus is {options.gpus!r}: name each GPU once, as in 0,1")
    if len(names) % options.tp:
        raise ConfigError(f"--gpus is {options.gpus!r}: --tp {options.tp} needs a multiple of that")
    return names


def _memory_of_a_worker(options: argparse.Namespace) -> float:
    """Return the share of the GPU that a worker alone on it takes.

    Each of several would see the others' memory as taken, so their pools are not measured.
    """
    workers = options.prefill + options.decode + options.mixed
    on_one = -(-workers // max(len(_gpus(options)) // options.tp, 1))
    if options.engine == "gpu" and on_one > 1 and not options.kv_blocks:
        raise ConfigError(f"--engine gpu with {on_one} workers on one GPU needs --kv-blocks: what "
                          "one measures as free, the others are taking")  # fmt: skip
    if options.gpu_memory is None:
        return EngineConfig().gpu_memory_utilization
    if options.engine != "gpu":
        raise ConfigError(f"--gpu-memory is {options.gpu_memory}, which needs --engine gpu")
    if not 0.05 <= options.gpu_memory <= 0.98:
        raise ConfigError(f"--gpu-memory is {options.gpu_memory}, not in 0.05..0.98")
    return float(options.gpu_memory)


def _sim_config(options: argparse.Namespace) -> SimConfig:
    if options.sim and options.engine != "sim":
        raise ConfigError(f"--sim {options.sim[0]} needs --engine sim")
    values: dict[str, object] = {}
    for flag in options.sim:
        name, is_given, value = flag.partition("=")
        if not is_given:
            raise ConfigError(f"--sim {flag} is not FIELD=VALUE")
        try:
            values[name] = msgspec.yaml.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--sim {flag}: the value is not YAML: {error}") from error
    try:
        return msgspec.convert(values, SimConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--sim: {explain(error, values, SimConfig)}") from error
