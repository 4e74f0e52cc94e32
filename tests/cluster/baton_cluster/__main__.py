"""`python -m baton_cluster`: get programs ready, start a real node to play with, stop it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from baton_cluster.clusters import Cluster, node_images, stop_from_before
from baton_cluster.host import HostBusyError
from baton_cluster.images import ImageError
from baton_cluster.isolation import run_isolated
from baton_cluster.preflight import MachineError, require_machine
from baton_cluster.programs import (
    ALL,
    CHART,
    CONTROL_PLANE,
    FAKE_PODS,
    MissingProgramError,
    programs,
)
from baton_cluster.progress import say

PLACE = Path("/var/tmp/baton-cluster")
SETS = {"chart": CHART, "integration": (*CONTROL_PLANE, *CHART, *FAKE_PODS), "node": ALL}


def up() -> int:
    """Start a detached cluster and print how to use it."""
    if PLACE.exists():
        say(f"{PLACE} is there already; run `down` first")
        return 1
    cluster = Cluster(PLACE, is_detached=True)
    try:
        cluster.start()
    except BaseException:
        cluster.stop()
        raise
    say(f"export KUBECONFIG={cluster.plane.kubeconfig('admin')}")
    say(f"export PATH={cluster.bin_folder()}:$PATH")
    say("kubectl apply -f examples/tiny.yaml && kubectl wait --for=condition=Ready pdd/tiny")
    return 0


def down() -> int:
    """Stop it and remove every trace."""
    if not PLACE.exists():
        say("nothing to stop")
        return 0
    stop_from_before(PLACE)
    return 0


def get_programs(name: str) -> int:
    """Find or build the programs of a set; for a node the images too, if it can run here at all."""
    if name == "node":
        require_machine(is_room_asked=True)
    programs(SETS[name])
    if name == "node":
        node_images()
    return 0


def main() -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="baton_cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    get = commands.add_parser("programs", help="find or build the programs of a set")
    get.add_argument("set", choices=sorted(SETS))
    commands.add_parser("check-node", help="say what a real node lacks on this machine")
    commands.add_parser("up", help="start a real node, detached")
    commands.add_parser("down", help="stop it")
    isolated = commands.add_parser("isolated", help="run a command in namespaces of its own")
    isolated.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        if options.command == "programs":
            return get_programs(options.set)
        if options.command == "check-node":
            require_machine(is_room_asked=True)
            return 0
        if options.command == "isolated":
            run_isolated(options.words)
        return up() if options.command == "up" else down()
    except (MachineError, HostBusyError, MissingProgramError, ImageError) as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
