"""What overload costs those who behave: throughput behind a long queue, and the pace under floods.

    python -m baton_faults.overload [--seconds 120] [--flood-seconds 6] [--rounds 3] [--only PART]
                                    [--urgent]

Saturation: 16 times as many streams as decode has slots, begun at once and kept open, between two
windows in which nobody waits; the shares are those of one run. Floods: the intervals between a
decode worker's steps, by its records' own time stamps, and how late the gateway's event loop is,
while 16 ordinary streams are open, without and with each flood in turn, round after round. Each
flood is held against what it must be compared with: slow readers against quick ones, a slow second
gateway against a well one, and what is poured into the gateway against the same poured into a
program that is none of ours, since that alone takes time from everybody on this machine.

The machine's other load is in every figure, unless `--urgent` (as root) takes it out: then workers
run before everything else and gateways before most. Who floods has what time all others leave.
Exits 1 when a request of the ordinary streams failed, was recomputed, lost or mixed up; times never
decide.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from pathlib import Path

from baton_faults.beside_floods import floods, told_floods
from baton_faults.ordinary import Wrong, say
from baton_faults.saturation import saturation, told_saturation


def main() -> int:
    """Parse the command line, measure, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="of saturation's windows, for each deployment; 720: ten minutes of a queue",
    )
    parser.add_argument("--pairs", type=int, nargs="+", default=[1, 2], help="of saturation")
    parser.add_argument("--flood-seconds", type=float, default=6.0, help="of each phase and round")
    parser.add_argument("--rounds", type=int, default=3, help="of all floods")
    parser.add_argument(
        "--urgent",
        action="store_true",
        help="workers under SCHED_FIFO, gateways at nice -10 (root)",
    )
    parser.add_argument("--only", choices=("saturation", "floods"), help="leave out the other")
    parser.add_argument("--markdown", type=Path, help="write the page here")
    options = parser.parse_args()
    wrong = Wrong()
    load = os.getloadavg()[0]
    lines = [
        "# Overload: what it costs those who behave",
        "",
        f"`python -m baton_faults.overload` on {datetime.datetime.now(datetime.UTC).date()}: "
        f"{os.cpu_count()} processors, load {load:.1f} of other work before it began, simulated "
        "engine, clients on the same machine.",
    ]
    if options.only != "floods":
        lines += ["", "## Saturation"]
        for n_pairs in options.pairs:
            with tempfile.TemporaryDirectory(prefix="baton-overload-") as folder:
                found = saturation(Path(folder), options.seconds, n_pairs, options.urgent, wrong)
            lines += told_saturation(n_pairs, found)
    if options.only != "saturation":
        lines += ["", "## Floods"]
        with tempfile.TemporaryDirectory(prefix="baton-overload-") as folder:
            lines += told_floods(
                floods(
                    Path(folder),
                    options.flood_seconds,
                    options.rounds,
                    options.urgent,
                    wrong,
                )
            )
    page = "\n".join(lines) + "\n"
    sys.stdout.write(page)
    if options.markdown:
        options.markdown.write_text(page)
    for problem in wrong.problems[:50]:
        say(problem)
    return 1 if wrong.problems else 0


if __name__ == "__main__":
    sys.exit(main())
