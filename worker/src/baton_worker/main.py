"""The command line: one program, a subcommand for each process.

Owns flags, environment, logging and exit codes; imports a process's machinery only when that
process is asked for, so `--help` is instant and the gateway never loads Paddle.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

import msgspec

from baton_worker import __version__
from baton_worker.config import ConfigError, EngineConfig, ProcessConfig, SimConfig, load_config
from baton_worker.config_decode_prompts import DecodePromptsConfig, check_chunk
from baton_worker.config_errors import explain
from baton_worker.identity import Role
from baton_worker.logs import configure_logging
from baton_worker.ranks import with_ranks
from baton_worker.readiness import EXIT_BAD_CONFIG, Ready, announce, die_with_parent

log = logging.getLogger(__name__)

_ROLES = {
    "prefill": "compute prompts and first tokens, hand KV over to decode",
    "decode": "continue from handoffs with MTP drafting and verification",
    "mixed": "both in one process, the baseline that the pair must equal",
    "gateway": "serve the OpenAI API and merge what workers publish",
}

GATEWAY = "gateway"
_NO_CONTROL = (
    "control.socket is empty: in a pod the preStop hook drains the worker through it. An operator "
    "that does not write it is older than this image: upgrade the operator first"
)

_EPILOG = """examples:
  baton-worker local --model examples/tiny-mtp            a whole deployment on this machine
  baton-worker decode --config decode.yaml                one process, as a pod runs it
  baton-worker top 127.0.0.1:8000 127.0.0.1:41001         what each process does, live
  baton-worker control decode.sock drain                  an order to a worker of this machine
  baton-worker keygen --out keys --name gateway           CURVE keys for the links

Environment: BATON_POD_NAME names a worker whose configuration has no worker_id
(without either it is called by its role, host and health port);
BATON_POD_IP is where it takes KV when its configuration has no handoff.advertise_host;
BATON_PAIR_GROUP names who alone it pairs with when its configuration has no pair_group;
BATON_TENSOR_PARALLEL is its number of ranks when its configuration has none.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every subcommand."""
    parser = argparse.ArgumentParser(
        prog="baton-worker",
        description="Prefill, decode and mixed workers and the OpenAI gateway of Baton.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"baton-worker {__version__}")
    _add_log_flags(parser, level="info", form="text")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for role, purpose in _ROLES.items():
        _add_role(commands, role, purpose)
    _add_local(commands)
    _add_top(commands)
    _add_control(commands)
    keygen = commands.add_parser("keygen", help="write a CURVE key pair (Z85 text files)")
    keygen.add_argument("--out", type=Path, required=True, help="folder to write into")
    keygen.add_argument("--name", required=True, help="files are NAME.public and NAME.secret")
    return parser


def _add_log_flags(
    parser: argparse.ArgumentParser,
    *,
    level: str = argparse.SUPPRESS,
    form: str = argparse.SUPPRESS,
) -> None:
    """Take the flags in front of a command and behind it; only those in front have defaults."""
    levels = ["debug", "info", "warning", "error"]
    parser.add_argument("--log-level", default=level, choices=levels, help="least level (info)")
    parser.add_argument("--log-format", default=form, choices=["text", "json"], help="(text)")


def _add_role(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], role: str, purpose: str
) -> None:
    parser = commands.add_parser(role, help=purpose, description=f"Baton {role}: {purpose}.")
    parser.add_argument("--config", type=Path, required=True, help="YAML (docs/configuration.md)")
    parser.add_argument("--model", help="model folder; overrides model.path")
    parser.add_argument("--worker-id", help="stable name of this process; overrides worker_id")
    parser.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)
    _add_log_flags(parser)


def _add_local(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "local",
        help="run gateway, prefill and decode as processes on loopback",
        description="Run a whole deployment on this machine; Ctrl-C ends every process.",
    )
    parser.add_argument("--model", required=True, help="model folder in Hugging Face layout")
    parser.add_argument("--served-name", default="", help="model name for clients (folder's name)")
    parser.add_argument("--host", default="127.0.0.1", help="address of the API (%(default)s)")
    parser.add_argument("--port", type=int, default=8000,
                        help="port of the OpenAI API (%(default)s; 0: a free one)")  # fmt: skip
    for role, default in (("prefill", 1), ("decode", 1), ("mixed", 0)):
        parser.add_argument(f"--{role}", type=int, default=default, metavar="N",
                            help=f"{role} workers (%(default)s)")  # fmt: skip
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
    parser.add_argument("--json", action="store_true", help="one line per process as it is ready")
    _add_log_flags(parser)


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-top-k", type=int, default=20, metavar="K",
                        help="most top_logprobs, up to 64 (%(default)s)")  # fmt: skip
    parser.add_argument("--max-running", type=int, default=32, metavar="N",
                        help="requests stepped at once (%(default)s)")  # fmt: skip
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


def _add_top(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "top",
        help="watch a running deployment in the terminal",
        description="Show tokens, acceptance, queues, KV and links of each process.",
    )
    parser.add_argument("url", nargs="+", help="metrics address of a process; host:port is enough")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS",
                        help="between two looks (%(default)g)")  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print one table and end")


def _add_control(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "control",
        help="drain or undrain a worker of this machine, or change its draft count",
        description="Send an order to a worker's control socket and print the answer.",
    )
    parser.add_argument("socket", help="the worker's control.socket (/run/baton/control in a pod; "
                        "`local` prints those of its workers)")  # fmt: skip
    parser.add_argument("order", choices=["status", "drain", "undrain", "speculative"],
                        help="status: what still needs the worker; drain: be given nothing new; "
                        "undrain: take that back; speculative: draft NUMBER tokens")  # fmt: skip
    parser.add_argument("number", nargs="?", type=int, metavar="NUMBER",
                        help="draft tokens a step, with speculative alone")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit code (78 for a configuration error)."""
    options = build_parser().parse_args(arguments)
    try:
        if options.command == "local":
            return _local(options)
        if options.command == "keygen":
            from baton_worker.link.keygen import run_keygen

            return run_keygen(options.out, options.name)
        if options.command == "top":
            return _top(options)
        if options.command == "control":
            from baton_worker.control import run_control

            return run_control(options.socket, options.order, options.number)
        return _process(options)
    except ConfigError as error:
        sys.stderr.write(f"baton-worker: {error}\n")
        return EXIT_BAD_CONFIG


def _process(options: argparse.Namespace) -> int:
    if options.with_parent:
        die_with_parent()
    config = effective_config(options)
    shown = config.worker_id or f"{options.command}-{socket.gethostname()}"
    configure_logging(shown, options.log_level, options.log_format)

    def on_ready(ready: Ready) -> None:
        log.info("ready", extra={"metrics_url": ready.metrics_url})
        announce(ready, options.ready_fd)

    if options.command == GATEWAY:
        from baton_worker.gateway.process import run_gateway

        return run_gateway(config, on_ready=on_ready)
    from baton_worker.roles.process import run_worker

    return run_worker(config, Role[options.command.upper()], on_ready=on_ready)


def effective_config(options: argparse.Namespace) -> ProcessConfig:
    """Return the file's configuration with what options and the environment say.

    Raises:
        ConfigError: any of them is not right.
    """
    config = load_config(options.config)
    name = options.worker_id or config.worker_id or os.environ.get("BATON_POD_NAME", "")
    group = config.pair_group or os.environ.get("BATON_PAIR_GROUP", "")
    config = msgspec.structs.replace(config, worker_id=name, pair_group=group)
    address = os.environ.get("BATON_POD_IP", "")
    if address and not config.handoff.advertise_host:
        handoff = msgspec.structs.replace(config.handoff, advertise_host=address)
        config = msgspec.structs.replace(config, handoff=handoff)
    if options.model:
        model = msgspec.structs.replace(config.model, path=options.model)
        config = msgspec.structs.replace(config, model=model)
    if (
        os.environ.get("BATON_POD_NAME")
        and not config.control.socket
        and options.command != GATEWAY
    ):
        raise ConfigError(_NO_CONTROL)
    return with_ranks(config, os.environ)


def _local(options: argparse.Namespace) -> int:
    from baton_worker.local.command import run_local
    from baton_worker.local.layout import LocalOptions

    configure_logging("local", options.log_level, options.log_format)
    for flag, low, high in (
        *((name, 0, 64) for name in ("prefill", "decode", "mixed", "max_top_k")),
        ("num_speculative_tokens", 0, 5),
        ("tp", 1, 64),
        ("port", 0, 65535),
        ("max_running", 1, 1 << 20),
        ("max_waiting", 1, 1 << 20),
        ("kv_blocks", 0, 1 << 31),
        ("prefill_chunk", 1, 1 << 20),
        ("decode_prompt_chunk", 0, 1 << 20),
        ("decode_prompts_behind", 0, 1 << 30),
    ):
        value = getattr(options, flag)
        if not low <= value <= high:
            raise ConfigError(f"--{flag.replace('_', '-')} is {value}, not in {low}..{high}")
    if not options.mixed and not (options.prefill and options.decode):
        raise ConfigError(
            f"--prefill is {options.prefill} and --decode {options.decode}: a deployment needs a "
            "prefill and a decode process, or a mixed one (--mixed 1)"
        )
    settings = LocalOptions(
        model_path=str(Path(options.model).resolve()),
        served_name=options.served_name or Path(options.model).resolve().name,
        host=options.host,
        port=options.port,
        prefill=options.prefill,
        decode=options.decode,
        mixed=options.mixed,
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
    )
    log_options = ["--log-level", options.log_level, "--log-format", options.log_format]
    return run_local(settings, as_json=options.json, log_options=log_options)


def _top(options: argparse.Namespace) -> int:
    from baton_worker.top.command import TopOptions, run_top

    if not 0.1 <= options.interval <= 3600:
        raise ConfigError(f"--interval is {options.interval:g}, not in 0.1..3600")
    return run_top(TopOptions(tuple(options.url), options.interval, options.once))


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


if __name__ == "__main__":
    sys.exit(main())
