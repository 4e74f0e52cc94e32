"""Fuzz a state machine through its parser and its encoder.

    python tests/fuzz/fuzz_machines.py gateway|worker|kv [--seconds 60] [--inputs 0]
        [--engine atheris|random] [--seed 1]

With atheris, conversations are guided by the coverage of link, handoff and records; without it they
are drawn from a seeded generator. Goes on until the time is over and `--inputs` messages were
taken. Prints one JSON line at the end; exits 1 with the input in hex when anything but the declared
error escapes.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import random
import shutil
import sys
import tempfile
import time

from baton_fuzz.reporting import guarded, report

MAX_BYTES = 4096


def run_random(name: str, seconds: float, inputs: int, seed: int) -> None:
    """Draw conversations until that was enough."""
    from baton_fuzz.machines import MACHINES

    machine, rng = MACHINES[name](), random.Random(seed)
    started = time.monotonic()
    while time.monotonic() - started < seconds or machine.tally.words < inputs:
        guarded(machine.check, rng.randbytes(rng.randint(1, 600)))
    report(machine.tally, "random", time.monotonic() - started)


def run_atheris(name: str, seconds: float, inputs: int, seed: int) -> None:
    """Let libFuzzer choose; its own loop never returns, so the last input ends the process."""
    import atheris

    with atheris.instrument_imports(
        include=["baton_worker.records", "baton_worker.link", "baton_worker.handoff"]
    ):
        from baton_fuzz.machines import MACHINES
    machine = MACHINES[name]()
    found = tempfile.mkdtemp(prefix="fuzz-machines-")
    started = time.monotonic()

    def test_one_input(data: bytes) -> None:
        guarded(machine.check, data)
        elapsed = time.monotonic() - started
        if elapsed >= seconds and machine.tally.words >= inputs:
            report(machine.tally, "atheris", elapsed)
            shutil.rmtree(found)
            os._exit(0)

    options = [f"-seed={seed}", f"-max_len={MAX_BYTES}", f"-artifact_prefix={found}/"]
    atheris.Setup([sys.argv[0], *options, "-len_control=0", found], test_one_input)
    atheris.Fuzz()


def main() -> None:
    """Parse the command line and fuzz."""
    has_atheris = importlib.util.find_spec("atheris") is not None
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machine", choices=("gateway", "worker", "kv"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--inputs", type=int, default=0, help="messages to take at least")
    parser.add_argument(
        "--engine", choices=("atheris", "random"), default="atheris" if has_atheris else "random"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # each refusal is a line, and there are millions
    run = run_atheris if arguments.engine == "atheris" else run_random
    run(arguments.machine, arguments.seconds, arguments.inputs, arguments.seed)


if __name__ == "__main__":
    main()
