"""The command line: run the operator, or print its CustomResourceDefinitions.

The edge: environment, logging, signals, exit codes, and the only place that knows every part by
its concrete class.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
from dataclasses import replace

from baton_operator import __version__
from baton_operator.settings import SettingError, Settings, read_settings

log = logging.getLogger(__name__)

EXIT_BAD_SETTING = 78
EXIT_FAULT = 70

_EPILOG = """Every setting is an environment variable, for example BATON_WATCH_NAMESPACE=serving;
docs/operator.md lists them. In a pod the service account is used, elsewhere KUBECONFIG."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every subcommand."""
    parser = argparse.ArgumentParser(
        prog="baton-operator",
        description="Serves PDDeployments: prefill and decode in separate pods.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"baton-operator {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("run", help="run the operator until SIGTERM")
    commands.add_parser("crds", help="print the CustomResourceDefinitions as YAML")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit code (78: a bad setting, 70: a fault)."""
    options = build_parser().parse_args(arguments)
    if options.command == "crds":
        from baton_operator.models.crd import render_crds

        sys.stdout.write(render_crds())
        return 0
    try:
        return _run(read_settings(os.environ))
    except SettingError as error:
        sys.stderr.write(f"baton-operator: {error}\n")
        return EXIT_BAD_SETTING


def _run(settings: Settings) -> int:
    import uvloop

    from baton_operator.logs import configure_logging
    from baton_operator.process import lease_namespace, run_operator

    configure_logging(settings.log_level, settings.log_format)
    settings = replace(
        settings,
        identity=settings.identity or f"{socket.gethostname()}-{os.getpid()}",
        lease_namespace=lease_namespace(settings),
    )
    try:
        # What imports made lives as long as we do; looked through again and again, it would stop
        # everything for a twentieth of a second now and then.
        gc.freeze()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_operator(settings))
    except ExceptionGroup as group:
        for error in group.exceptions:
            log.critical("operator ends", exc_info=error)
        return EXIT_FAULT
    log.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
