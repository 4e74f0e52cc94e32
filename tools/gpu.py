"""Build the ops for this machine's GPU, then test or measure the engine on it.

    python3 tools/gpu.py test [--library FILE] [--jobs N] [pytest's options]
    python3 tools/gpu.py bench [--library FILE] [the benchmark's options]
    python3 tools/gpu.py [--library FILE] run PROGRAM [the program's options]
    python3 tools/gpu.py lay-out --library FILE --site FOLDER

Needs a Hopper GPU, PyTorch, nvcc and CMake, and names the Python packages that are missing with the
command that installs them. Everything is built under ops/build/gpu; nothing is installed. `test`
leaves the stamp docs/benchmarks/results/gpu-stamp.json (see gpu_stamp), one of what has run so far
behind each process; with options of pytest's, or ended before its end, the suite is not whole, the
stamp says so, and goes beside one of the whole suite (gpu-stamp.part.json). Its processes share the
GPUs, `--jobs` of them at once on each of `--gpus` (see gpu_jobs); pytest's options, with `--jobs`
said too, choose the tests that they share. `run` is for the benchmarks in
tests/gpu and tests/bench/gpu: a program of this checkout over that library, its options as it takes
them. `lay-out` needs no GPU: it makes a folder in which Python finds a library before one that is
installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_jobs
import gpu_needs
import gpu_reports
import gpu_stamp

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "ops" / "build" / "gpu"
SITE = BUILD / "site"
PLAIN = ("-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short")
"""What pytest is told in any case."""
SUITES = ("tests/ops/cuda", "tests/engine/device/test_device_contract.py", "tests/gpu")


def architecture() -> str:
    """Return the CUDA architecture to build for: this GPU's own, with all that it alone can do."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}{'a' if major >= 9 else ''}-real"


def built_library() -> Path:
    """Build the library with CUDA for this machine's GPU and return it."""
    say(f"building the ops for {architecture()}")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = {
        "BATON_OPS_CUDA": "ON",
        "BATON_OPS_CUDA_ARCHITECTURES": architecture(),
        "CMAKE_BUILD_TYPE": "Release",
        "Python_EXECUTABLE": sys.executable,
    }
    defines = [f"-D{name}={value}" for name, value in options.items()]
    place = BUILD / "cmake"
    run(["cmake", "-S", str(ROOT / "ops"), "-B", str(place), *generator, *defines], quiet=True)
    run(["cmake", "--build", str(place), "--parallel", str(os.cpu_count() or 1)], quiet=True)
    return place / "libbaton_ops.so"


def lay_out(library: Path, site: Path = SITE) -> None:
    """Make `site` the place where Python finds this library, before any that is installed.

    What is installed is found by its distribution's list of files, so here is one.
    """
    name = "baton_ops/lib/libbaton_ops.so"
    (site / name).parent.mkdir(parents=True, exist_ok=True)
    new = (site / name).with_suffix(".new")
    shutil.copyfile(library, new)
    new.replace(site / name)  # whoever has the one before mapped keeps it
    info = site / f"baton_ops-{(ROOT / 'VERSION').read_text().strip()}.dist-info"
    info.mkdir(exist_ok=True)
    version = info.name.removeprefix("baton_ops-").removesuffix(".dist-info")
    metadata = f"Metadata-Version: 2.1\nName: baton-ops\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata)
    (info / "RECORD").write_text(f"{name},,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")


def environment(site: Path = SITE) -> dict[str, str]:
    """Return the environment in which this checkout's code is what runs, over that library."""
    ours = [site, ROOT / "ops" / "src", ROOT / "worker" / "src", ROOT / "tests" / "support"]
    known = os.environ.get("PYTHONPATH")
    path = [*map(str, ours), *([known] if known else [])]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def run(command: Sequence[str], quiet: bool = False) -> int:
    """Run a command here; a quiet one speaks, and ends this program, only when it fails."""
    where = subprocess.PIPE if quiet else None
    with gpu_jobs.started(
        command, cwd=ROOT, env=environment(), stdout=where, stderr=where
    ) as process:
        said, errors = process.communicate()
    if quiet and process.returncode:
        sys.exit(f"{' '.join(command)}\n{said[-4000:]}{errors[-4000:]}")
    return process.returncode


def say(text: str) -> None:
    """Tell what goes on."""
    sys.stdout.write(f"[gpu] {text}\n")
    sys.stdout.flush()


def results_of(cases: Sequence[tuple[str, str]], whole: bool) -> gpu_stamp.Results:
    """Count outcomes; a test that failed and whose fixtures failed too counts once."""
    outcomes = dict(cases)
    failed = tuple(dict.fromkeys(name for name, outcome in cases if outcome == "failed"))
    counts = Counter(outcome for name, outcome in outcomes.items() if name not in failed)
    return gpu_stamp.Results(counts["passed"], len(failed), counts["skipped"], failed, whole)


def table(cases: Sequence[tuple[str, str]]) -> str:
    """Return a line for each file of tests: how many passed, failed, and were skipped."""
    files: dict[str, Counter[str]] = {}
    for name, outcome in cases:
        files.setdefault(name.split("::")[0], Counter())[outcome] += 1
    kinds = ("passed", "failed", "skipped")
    lines = [f"| {'tests':<64} | " + " | ".join(kinds) + " |", "|---" * 4 + "|"]
    lines += [
        f"| {name:<64} | " + " | ".join(f"{count[kind]:>{len(kind)}}" for kind in kinds) + " |"
        for name, count in sorted(files.items())
    ]
    return "\n".join(lines)


def machine() -> dict[str, str]:
    """Return what the suite ran on."""
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    driver = "unknown"
    if shutil.which("nvidia-smi"):
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        driver = done.stdout.strip() or driver
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
    }


def gpu_memory_bytes() -> int:
    """Return how much memory the GPU has."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def commit() -> str:
    """Return the commit that is checked out, or what BATON_COMMIT says where there is no git."""
    if told := os.environ.get("BATON_COMMIT"):
        return told
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def gpu_names(wanted: int) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES calls so many GPUs, [] for one: that is whoever is first."""
    if wanted == 1:
        return []
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (seen.split(",") if seen else [str(number) for number in range(wanted)])[:wanted]


Cases = list[tuple[str, str]]
"""Each test's id and its outcome."""


def at_once(
    words: Sequence[str],
    folder: Path,
    most: int,
    gpus: int,
    keep: Callable[[Cases], object] = lambda cases: None,
) -> Cases:
    """Run the suite as several processes, tell how each ended, and return the cases of all.

    Args:
        words: pytest's, which choose the tests.
        keep: is given all cases so far behind each process: who is ended meanwhile loses no more
            than what is under way.
    """
    try:
        tests = gpu_jobs.collected(words, ROOT, environment())
    except RuntimeError as error:
        sys.exit(f"[gpu] the suite cannot be collected\n{error}")
    jobs = gpu_jobs.jobs_of(tests)
    say(f"{len(tests)} tests in {len(jobs)} processes, at most {most} at once on a GPU")
    cases: Cases = []
    shared = gpu_jobs.threads_of(environment(), os.cpu_count() or 1, most * gpus)
    running = gpu_jobs.Running(
        PLAIN, folder, ROOT, shared, gpu_memory_bytes(), gpus=gpu_names(gpus)
    )
    for ended in gpu_jobs.run(running, jobs, most):
        cases += gpu_reports.cases_of_job(ended)
        say(f"{ended.job.name}: {ended.seconds:.0f} s: {gpu_reports.last_words(ended)}")
        keep(cases)
    return cases


def stamp_of(cases: Cases, digests: Path, whole: bool) -> gpu_stamp.Stamp:
    """Return the stamp of what has run, on this machine and of this code."""
    kept, torn = gpu_reports.digests_of(digests)
    told = [(f"two processes of this run::{name} is told otherwise", "failed") for name in torn]
    files = gpu_stamp.hashes()
    return gpu_stamp.Stamp(
        commit=commit(),
        content=gpu_stamp.content_of(files),
        files=files,
        results=results_of([*cases, *told], whole=whole),
        machine=machine(),
        digests=kept,
    )


def leave(stamp: gpu_stamp.Stamp, path: Path) -> Path:
    """Write the stamp and return where: one of a part never replaces one of the whole suite."""
    place = gpu_stamp.place_of(stamp, path)
    gpu_stamp.write(stamp, place)
    if stamp.results.whole:
        gpu_stamp.part_of(path).unlink(missing_ok=True)
    return place


def test(options: argparse.Namespace, more: Sequence[str]) -> int:
    """Run the kernels' tests and the exactness suite, print a table, leave the stamp."""
    try:  # first: what is found after the run must not cost its results
        before = gpu_stamp.read(options.stamp)
    except ValueError as error:
        sys.exit(f"[gpu] {error}; remove it, or name another file by --stamp")
    folder, digests = BUILD / "reports", BUILD / "digests"
    for stale in (folder, digests):
        shutil.rmtree(stale, ignore_errors=True)
        stale.mkdir(parents=True)
    os.environ["BATON_GPU_DIGESTS"] = str(digests)
    suites = [name for name in SUITES if (ROOT / name).exists()]
    jobs = options.jobs or (1 if more else gpu_jobs.JOBS)
    places = ["-o", f"testpaths={' '.join(suites)}"]  # where pytest looks if no place is named
    if jobs == 1:
        report = folder / "whole.xml"
        code = run([sys.executable, "-m", "pytest", *PLAIN, f"--junitxml={report}", *places, *more])
        if not report.exists():
            return code or 1
        cases = gpu_reports.cases_of(report)
        cases += gpu_reports.unexplained("pytest", code, cases)
    else:

        def keep(cases: Cases) -> None:
            leave(stamp_of(cases, digests, whole=False), options.stamp)

        if odd := gpu_jobs.not_choosing(more):
            sys.exit(
                f"[gpu] {odd} chooses no tests, which is all that --jobs shares: leave one out"
            )
        words = [*places, *more]
        code, cases = 0, at_once([*PLAIN, *words], folder, jobs, options.gpus, keep)
    stamp = stamp_of(cases, digests, whole=not more)
    results = stamp.results
    others = gpu_stamp.unlike(before, stamp) if before else []
    place = leave(stamp, options.stamp)
    sys.stdout.write(table(cases) + "\n")
    say(f"{results.passed} passed, {results.failed} failed, {results.skipped} skipped")
    say(f"stamp: {place}" + ("" if place == options.stamp else ", the whole suite's stays"))
    for name in others:
        say(f"{name} said other bits than in the run that left the stamp before, of the same code")
    return 1 if results.failed or not results.passed or others else code


def bench(options: argparse.Namespace, more: Sequence[str]) -> int:
    """Run the benchmark of the engine on the GPU."""
    return run([sys.executable, str(ROOT / "tests" / "gpu" / "bench_engine.py"), *more])


def program(_options: argparse.Namespace, more: Sequence[str]) -> int:
    """Run a program of this checkout over the library, its neighbours there to be imported."""
    known = os.environ.get("PYTHONPATH")
    folder = str((ROOT / more[0]).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *([known] if known else [])])
    return run([sys.executable, *more])


def at_least_one(word: str) -> int:
    """Return a count: with none at once the suite would wait for ever.

    Raises:
        ValueError: it is no number.
        argparse.ArgumentTypeError: it is less than 1.
    """
    count = int(word)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is less than 1")
    return count


def program_at(words: Sequence[str]) -> int:
    """Return where the program of `run` stands: what is behind it is the program's, however called,
    for it may have a --gpus of its own.
    """
    is_run = "run" in words and not {"test", "bench", "lay-out"} & {*words[: words.index("run")]}
    run_at = words.index("run") if is_run else len(words)
    programs = (at for at, word in enumerate(words) if at > run_at and word.endswith(".py"))
    return next(programs, len(words))


def a_file(word: str) -> Path:
    """Return the path of a file that is there.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    path = Path(word)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{word} is no file")
    return path


def a_folder(word: str) -> Path:
    """Return the path of a folder, which may not be there yet.

    Raises:
        argparse.ArgumentTypeError: something else is there.
    """
    path = Path(word)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{word} is no folder")
    return path


def main(words: Sequence[str] | None = None) -> int:
    """Check what is needed, build, and run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what is not ours is pytest's, or the benchmark's
        add_help=False,  # that of a program is the program's
    )
    parser.add_argument("what", nargs="?", choices=["test", "bench", "run", "lay-out"])
    parser.add_argument("-h", "--help", action="store_true", help="this, or the program's own")
    parser.add_argument(
        "--gpus", type=at_least_one, default=1, help="of one kind that there must be, or it ends"
    )
    parser.add_argument(
        "--jobs",
        type=at_least_one,
        help=f"processes of `test` at once on a GPU, {gpu_jobs.JOBS} unless said; 1, which it is "
        "with options of pytest's unless said: one for all, which are pytest's own",
    )
    parser.add_argument("--library", type=a_file, help="a libbaton_ops.so with CUDA, built before")
    parser.add_argument("--stamp", type=Path, default=gpu_stamp.STAMP, help="where the stamp goes")
    parser.add_argument("--site", type=a_folder, default=SITE, help="where lay-out puts it")
    words = list(sys.argv[1:] if words is None else words)
    ours = program_at(words)
    options, more = parser.parse_known_args(words[:ours])
    more += words[ours:]
    options.help |= bool({"-h", "--help"} & {*words[ours:]})
    if options.what is None or (options.help and options.what not in ("bench", "run")):
        parser.print_help()
        return 0 if options.help else 2
    more += ["--help"] * (options.help and "--help" not in more)
    if options.what == "lay-out":
        if options.library is None:
            parser.error("lay-out needs --library: a libbaton_ops.so")
        lay_out(options.library, options.site)
        return 0
    if options.what == "run" and not (more and (ROOT / more[0]).is_file()):
        parser.error(
            "run needs a program: a file's name, from the repository's root on, goes first"
        )
    chosen: dict[str, Any] = {"test": test, "bench": bench, "run": program}
    if options.help:
        return int(chosen[options.what](options, more))
    if problem := gpu_needs.what_is_missing(builds=options.library is None):
        sys.exit(f"[gpu] {problem}")
    if options.gpus > 1 and (problem := gpu_needs.too_few_gpus(options.gpus)):
        sys.exit(f"[gpu] {problem}")
    gpu_jobs.end_on_sigterm()
    with gpu_jobs.held(BUILD, alone=options.what == "test"):
        lay_out(options.library or built_library())
        return int(chosen[options.what](options, more))


if __name__ == "__main__":
    sys.exit(main())
