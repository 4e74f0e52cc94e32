"""Run every benchmark, one after the other, and write their tables and JSON.

Each script measures its baseline in the same run and prints ratios: absolute numbers of a shared
machine say little. `--only NAME` runs one; results go to `out/bench/` unless `--out` says
otherwise.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def scripts() -> list[Path]:
    """Return the benchmark scripts that run on any machine."""
    return sorted(HERE.glob("bench_*.py"))


def main() -> int:
    """Run them; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [path.stem.removeprefix("bench_") for path in scripts()]
    parser.add_argument("--only", choices=names, help="run one of them")
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "out" / "bench")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for path in scripts():
        name = path.stem.removeprefix("bench_")
        if options.only not in (None, name):
            continue
        sys.stdout.write(f"\n=== {name} ===\n")
        sys.stdout.flush()
        started = time.monotonic()
        command = [sys.executable, str(path), "--json", str(options.out / f"{name}.json")]
        failed += subprocess.run(command, check=False).returncode != 0
        sys.stdout.write(f"[bench] {name}: {time.monotonic() - started:.0f} s\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
