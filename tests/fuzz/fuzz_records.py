"""Fuzz the record decoder and the control parser.

    python tests/fuzz/fuzz_records.py [--seconds 60] [--inputs 0] [--engine atheris|mutations]

With atheris, inputs are guided by coverage of the parsers; without it, mutations of the committed
corpus are drawn from a seeded generator. Both leave some inputs broken and give others right
checksums. Goes on until the time is over and `--inputs` inputs were parsed. Prints one JSON line at
the end; exits 1 with the input in hex when a promise is broken.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from baton_fuzz.reporting import guarded, report

if TYPE_CHECKING:
    pass


def run_mutations(seconds: float, inputs: int, seed: int) -> None:
    """Draw mutations until that was enough."""
    from baton_fuzz import record_mutations
    from baton_fuzz.record_oracle import Oracle

    oracle, rng, seeds = Oracle(), random.Random(seed), record_mutations.load_corpus()
    for data in seeds:
        guarded(oracle.check, data)
    started = time.monotonic()
    while time.monotonic() - started < seconds or oracle.tally.inputs < inputs:
        for _ in range(100):
            data = record_mutations.mutate(rng.choice(seeds), seeds, rng)
            guarded(oracle.check, data)
    report(oracle.tally, "mutations", time.monotonic() - started)


def run_atheris(seconds: float, inputs: int, seed: int) -> None:
    """Let libFuzzer choose; its own loop never returns, so the last input ends the process."""
    import atheris

    with atheris.instrument_imports(include=["baton_worker.records"]):
        from baton_fuzz.record_oracle import Oracle
    from baton_fuzz import record_mutations

    oracle, seeds = Oracle(), record_mutations.load_corpus()
    # libFuzzer writes what it finds to the first folder: the committed corpus comes second.
    found = tempfile.mkdtemp(prefix="fuzz-records-")
    started = time.monotonic()

    def test_one_input(data: bytes) -> None:
        guarded(oracle.check, data)
        elapsed = time.monotonic() - started
        if elapsed >= seconds and oracle.tally.inputs >= inputs:
            report(oracle.tally, "atheris", elapsed)
            shutil.rmtree(found)
            os._exit(0)

    def mutator(data: bytes, max_size: int, mutation_seed: int) -> bytes:
        rng = random.Random(mutation_seed)
        if rng.random() < 0.5:
            return record_mutations.mutate(data, seeds, rng)[:max_size]
        mutated = atheris.Mutate(data, max_size)
        return record_mutations.reseal(mutated) if rng.random() < 0.5 else mutated

    options = [
        f"-seed={seed}",
        f"-max_len={record_mutations.MAX_INPUT_BYTES}",
        f"-artifact_prefix={found}/",
    ]
    atheris.Setup(
        [sys.argv[0], *options, found, str(record_mutations.CORPUS)],
        test_one_input,
        custom_mutator=mutator,
    )
    atheris.Fuzz()


def main() -> None:
    """Parse the command line and fuzz."""
    has_atheris = importlib.util.find_spec("atheris") is not None
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--inputs", type=int, default=0, help="inputs to parse at least")
    parser.add_argument(
        "--engine",
        choices=("atheris", "mutations"),
        default="atheris" if has_atheris else "mutations",
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    run = run_atheris if arguments.engine == "atheris" else run_mutations
    run(arguments.seconds, arguments.inputs, arguments.seed)


if __name__ == "__main__":
    main()
