"""kill -9 of prefill and decode workers on GPUs, many times, while they serve and hand KV over.

    python3 tools/gpu.py --gpus 2 run tests/gpu/bench_kills.py [--kills 200] [--cells N] [--json F]

Several deployments of the tiny model stand side by side (`kill_cell`), and in each workers die in
turn: half of them while KV is under way. Nothing may be lost, doubled or other bits than an
undisturbed run's; no block and no byte of the cards may stay taken. How many kills there were is
told, for time may run out first; how long a worker took to come back, too. `--engine cpu` or `sim`
tries it without a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools"), str(HERE.parent / "faults")]

import kill_cell  # noqa: E402
from pair_report import Report, memory_used_mib, say  # noqa: E402

GRACE_SECONDS, END_SECONDS = 20.0, 10.0
SETTLE_SECONDS, SPARE_MIB = 20.0, 64


class Cells:
    """The deployments, each in a process; a context, which ends them."""

    def __init__(self, options: argparse.Namespace, until: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.told, self._leave = context.Queue(), context.Event()
        each = -(-options.kills // options.cells)
        self._processes = [
            context.Process(
                target=kill_cell.run,
                args=(
                    kill_cell.CellOptions(
                        number,
                        options.engine,
                        options.gpus,
                        options.kv,
                        each,
                        until,
                        options.forks,
                    ),
                    self.told,
                    self._leave,
                ),
            )
            for number in range(options.cells)
        ]
        for process in self._processes:
            process.start()

    def let_go(self) -> None:
        """Let all deployments end."""
        self._leave.set()
        for process in self._processes:
            process.join(END_SECONDS)

    def __enter__(self) -> Cells:
        """Nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """End what has not ended; workers end with their parents."""
        for process in self._processes:
            process.kill()
            process.join()


def measured(options: argparse.Namespace, report: Report) -> None:
    """Let the deployments serve and die, and note what each of them tells."""
    report.told["memory_mib"] = {"before": memory_used_mib()}
    until = time.monotonic() + options.seconds
    with Cells(options, until) as cells:
        waiting, ready = set(range(options.cells)), 0
        while waiting:
            left = until + GRACE_SECONDS - time.monotonic()
            heard = kill_cell.next_of(cells.told, left)
            if heard is None:
                raise TimeoutError(f"deployments {sorted(waiting)} have not come to an end")
            number, kind, what = heard
            if kind == "ready":
                ready += 1
                report.add("ready_seconds", what["seconds"])
                if ready == options.cells:
                    report.told["memory_mib"]["all_stand"] = memory_used_mib()
                    say(f"{ready} deployments of 4 workers stand")
            elif kind == "plain":
                report.add("plain_starts", what["why"])
                say(f"deployment {number} is not forked: {what['why']}")
            elif kind == "round":
                report.add("kills", what)
                say(line(what, report.told["kills"]))
            else:
                waiting.discard(number)
                if kind == "failed":
                    report.told["unmeasured"].append(f"deployment {number}: {what['why']}")
        report.told["memory_mib"]["all_stand_again"] = memory_used_mib()
        cells.let_go()
    report.told["memory_mib"]["after"] = settled(report.told["memory_mib"]["before"])


def settled(before: Sequence[int]) -> list[int]:
    """Return what is taken on the cards when all have ended: a dead process's memory goes late."""
    until = time.monotonic() + SETTLE_SECONDS
    while (now := memory_used_mib()) and time.monotonic() < until and leaked(before, now):
        time.sleep(0.5)
    return now


def leaked(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether more of a card is taken than before, but for what a driver keeps."""
    return any(b - a > SPARE_MIB for a, b in zip(before, after, strict=True))


def line(one: dict[str, Any], all_of_them: Sequence[dict[str, Any]]) -> str:
    """Return a round in words."""
    n_kills = sum(len(other["kills"]) for other in all_of_them)
    under_way = sum(bool(kill["open_offers"]) for kill in one["kills"])
    back = ", ".join(f"{seconds:.1f}" for seconds in one["start_seconds"])
    wrong = one["violations"] or one["leaks"] or one["ended"] or "nothing wrong"
    return (
        f"deployment {one['cell']}: {len(one['kills'])} killed, {under_way} with KV under way, "
        f"back in {back} s; {one['served']} served, ends {one['ends']}, {wrong}; {n_kills} in all"
    )


def problems(told: dict[str, Any]) -> list[str]:
    """Return what is wrong with what was seen."""
    rounds = told.get("kills", ())
    found = [line for one in rounds for line in (*one["first"], *one["leaks"])]
    found += [f"ended by itself: {one['ended']}" for one in rounds if one["ended"]]
    memory = told.get("memory_mib", {})
    if leaked(memory.get("before", ()), memory.get("after", memory.get("before", ()))):
        found.append(f"memory of the cards, MiB: {memory}")
    return found


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=["gpu", "cpu", "sim"], default="gpu")
    parser.add_argument("--gpus", default="0,1", help="of prefill and of decode")
    parser.add_argument("--kills", type=int, default=200, help="in all, if there is time")
    parser.add_argument("--cells", type=int, default=12, help="deployments of four workers")
    parser.add_argument("--kv", choices=kill_cell.KV_WAYS, default="nvlink", help="its way")
    parser.add_argument("--forks", action=argparse.BooleanOptionalAction, default=True,
                        help="fork workers from a process that has imported all")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=170, help="no kill comes after them")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(words)
    first, _, second = options.gpus.partition(",")
    options.gpus = (first, second or first)
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Kill and judge; 1 if something was wrong, or not measured."""
    options = parsed(words)
    told = {
        "wanted": options.kills,
        "cells": options.cells,
        "kv": options.kv,
        "forks": options.forks,
    }
    report = Report(options.json, options.engine, told)
    with report.part("kills"):
        measured(options, report)
    found = problems(report.told)
    report.told["problems"] = found[:20]
    report.write()
    for one in (*found, *report.told["unmeasured"]):
        say(f"WRONG: {one}")
    return int(bool(found or report.told["unmeasured"]))


if __name__ == "__main__":
    sys.exit(main())
