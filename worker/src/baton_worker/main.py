"""The command line: one program, a subcommand for each process.

Owns flags, environment, logging and exit codes; imports a process's machinery only when that
process is asked for, so `--help` is instant and the gateway never loads Paddle.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import msgspec

from baton_worker import __version__, held_signals
from baton_worker.config import ConfigError, ProcessConfig, load_config
from baton_worker.identity import Role
from baton_worker.local.flags import add_flags, local_options
from baton_worker.logs import configure_logging, say_within
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
    local = commands.add_parser(
        "local",
        help="run gateway, prefill and decode as processes on loopback",
        description="Run a whole deployment on this machine; Ctrl-C ends every process.",
    )
    add_flags(local)
    _add_log_flags(local)
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
        with held_signals.handled(_end):  # until who serves does, seconds of imports later
            return _process(options)
    except ConfigError as error:
        sys.stderr.write(f"baton-worker: {error}\n")
        return EXIT_BAD_CONFIG


def _end(number: int, _frame: FrameType | None) -> None:
    """End at once: nobody has been given work, and what is read or loaded may take for ever."""
    name = signal.Signals(number).name
    say_within(lambda: log.info("ending before it served", extra={"signal": name}), 1.0)
    os._exit(0)


def _process(options: argparse.Namespace) -> int:
    if options.with_parent:
        die_with_parent()
    config = effective_config(options)
    shown = config.worker_id or f"{options.command}-{socket.gethostname()}"
    configure_logging(shown, options.log_level, options.log_format)
    _require_folder(config.model.path)

    def on_ready(ready: Ready) -> None:
        log.info("ready", extra={"metrics_url": ready.metrics_url})
        announce(ready, options.ready_fd)

    if options.command == GATEWAY:
        from baton_worker.gateway.process import run_gateway

        return run_gateway(config, on_ready=on_ready)
    with held_signals.held():  # by the threads of what is imported, for good: see `run_worker`
        from baton_worker.ops_interface import require_ops

        require_ops()  # the engine, which is imported next, names what only its own ops have
        from baton_worker.roles.process import run_worker

    return run_worker(config, Role[options.command.upper()], on_ready=on_ready)


def _require_folder(path: str) -> None:
    """Refuse what is no folder before a file of it is missed: whoever gives a hub's name, or a
    relative path from elsewhere, reads what is meant and not which file was looked for.
    """
    try:
        if path and Path(path).is_dir():
            return
        seen_from = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
    except OSError as error:  # of a folder above it that this user may not read
        raise ConfigError(f"model.path is {path!r}: {error.strerror}") from error
    raise ConfigError(
        f"model.path is {path!r}, and there is no such folder{seen_from}: name one in Hugging "
        "Face layout (config.json, tokenizer.json, *.safetensors); nothing is downloaded"
    )


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

    configure_logging("local", options.log_level, options.log_format)
    log_options = ["--log-level", options.log_level, "--log-format", options.log_format]
    return run_local(local_options(options), as_json=options.json, log_options=log_options)


def _top(options: argparse.Namespace) -> int:
    from baton_worker.top.command import TopOptions, run_top

    if not 0.1 <= options.interval <= 3600:
        raise ConfigError(f"--interval is {options.interval:g}, not in 0.1..3600")
    return run_top(TopOptions(tuple(options.url), options.interval, options.once))


if __name__ == "__main__":
    sys.exit(main())
