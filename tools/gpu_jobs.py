"""The GPU suite as several processes at once, on one GPU or on several of a kind.

Owns which tests may share a GPU's memory and time with others and which may not, whose first GPU is
which, and how processes are started and ended; what becomes of their reports is `gpu_reports`'.
Knows nothing of what the tests are.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ALONE = (
    "tests/gpu/test_long_contexts_fit_and_are_exact.py",
    "tests/gpu/test_an_engine_starts_from_a_folder.py",
    "tests/engine/device/test_device_contract.py",
    "tests/gpu/test_two_gpus_compute_as_one.py",
)
"""Whose tests look at the whole device's free memory, or at how long a start takes, or whose GPUs
wait for each other.
"""
OVER_GPUS = "test_two_gpus_compute_as_one"
OVER_RANKS = "-ranks"
"""A job, and the end of the name of a model, that several GPUs compute, waiting for each other."""
BY_PARAMETER = ("tests/gpu/test_the_same_bits_any_way_it_is_served.py",)
"""Whose tests take a model that is loaded once for all of them, by its name."""
PARTS = {"test_transformers_computes_the_same": 6, "test_two_processes_say_the_same": 2, "cuda": 3}
"""Jobs that are cut into so many, or one of them would run long after all others."""
LONGEST = (
    "test_transformers_computes_the_same",
    "test_the_same_bits_any_way_it_is_served-gpu-qwen3-8b",
    "test_two_processes_say_the_same",
    "test_the_same_bits_any_way_it_is_served-gpu-tiny",
    "test_the_same_bits_any_way_it_is_served-gpu-tiny-float32",
    "test_the_same_bits_any_way_it_is_served-gpu-qwen3-8b-12",
    "test_the_same_bits_any_way_it_is_served-gpu-mimo-7b-12",
    "test_the_same_bits_any_way_it_is_served-gpu-qwen3-30b-a3b-8",
    "test_the_same_bits_any_way_it_is_served-gpu-qwen3-8b-fp8-12",
    "test_the_same_bits_any_way_it_is_served-gpu-qwen3-30b-a3b-fp8-8",
    "test_real_shapes_are_transformers",
    "cuda",
)
"""Jobs that take longest or hold most, so they begin first; the others in their tests' order."""
JOBS = 4
"""Processes at once, on each GPU."""
GIB = 1 << 30
MOST_GIB = {
    "test_the_same_bits_any_way_it_is_served-gpu-qwen3-8b": 55,
    "test_the_same_bits_any_way_it_is_served-gpu-qwen3-8b-12": 35,
    "test_the_same_bits_any_way_it_is_served-gpu-mimo-7b-12": 35,
    "test_the_same_bits_any_way_it_is_served-gpu-qwen3-30b-a3b-8": 35,
    "test_the_same_bits_any_way_it_is_served-gpu-qwen3-8b-fp8-12": 40,
    "test_the_same_bits_any_way_it_is_served-gpu-qwen3-30b-a3b-fp8-8": 40,
    "test_real_shapes_are_transformers": 45,
    "test_two_processes_say_the_same": 30,
    "test_the_suite_finds_what_is_not_exact": 30,
    "test_a_deployment_on_the_gpu_is_exact": 20,
}
"""What jobs hold at most of the GPU's memory: weights, and pools for 256 requests at once."""
OTHERS_GIB = 4
ON_ALL = ("test_two_processes_say_the_same", "test_a_deployment_on_the_gpu_is_exact", "cuda")
"""Jobs that use what other GPUs there are beside their own, and may share them."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""What tells the libraries that compute on the CPU how many threads to take."""
CHOOSING = ("-k", "-m", "--deselect", "--ignore", "--ignore-glob")
"""Options of pytest's, each with a value, that say which tests."""
POLL_S = 0.2
STOP_S = 10.0
SILENT_S = 900.0
"""After so long without a word a job hangs where pytest's own timeout cannot end it."""


class Job(NamedTuple):
    """Tests of one process, by pytest's ids; `part`: of those that it is cut into, from 1 on.

    One that is `alone` shares its GPU with no other.
    """

    kind: str
    tests: tuple[str, ...]
    alone: bool = False
    part: int = 0

    @property
    def name(self) -> str:
        """What its files and its line in the output are called."""
        return f"{self.kind}-part-{self.part}" if self.part else self.kind

    @property
    def uses_all(self) -> bool:
        """Whether it uses what other GPUs there are beside its own."""
        return self.kind in (*ON_ALL, OVER_GPUS) or self.kind.endswith(OVER_RANKS)

    @property
    def most_bytes(self) -> int:
        """What it holds at most of the GPU's memory."""
        return MOST_GIB.get(self.kind, OTHERS_GIB) * GIB


class Ended(NamedTuple):
    """A job that has ended: pytest's status, and where its report and its words are."""

    job: Job
    code: int
    report: Path
    log: Path
    seconds: float


def jobs_of(tests: Iterable[str]) -> list[Job]:
    """Return jobs that have each test once: what needs all GPUs for itself, what needs one, then
    the longest.
    """
    found: dict[str, list[str]] = {}
    for test in tests:
        found.setdefault(_job_name(test), []).append(test)
    jobs = [
        Job(kind, tuple(some), some[0].startswith(ALONE) or kind.endswith(OVER_RANKS), part)
        for kind, whole in found.items()
        for part, some in _parts(whole, PARTS.get(kind, 1))
    ]
    rank = {kind: place for place, kind in enumerate(LONGEST)}

    def order(job: Job) -> tuple[int, int]:
        place = rank.get(job.kind, len(rank))
        return (0, not job.uses_all) if job.alone else (1, place)

    return sorted(jobs, key=order)


def _parts(tests: Sequence[str], count: int) -> list[tuple[int, Sequence[str]]]:
    """Return the tests in so many parts with their numbers, in turns, as neighbours take alike."""
    if count == 1:
        return [(0, tests)]
    parts = [(part + 1, tests[part::count]) for part in range(count)]
    return [(part, some) for part, some in parts if some]


def _job_name(test: str) -> str:
    """Return the name of the job that a test belongs to."""
    path, _, name = test.partition("::")
    if path.startswith("tests/ops/"):
        return Path(path).parent.name
    stem = Path(path).stem
    if path in BY_PARAMETER and "[" in name:
        return f"{stem}-{name.partition('[')[2].removesuffix(']')}"
    return stem


def collected(words: Sequence[str], root: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the ids of the tests that pytest would run, given its options.

    Raises:
        RuntimeError: what pytest says when it cannot collect, or finds none.
    """
    others = [word for word in words if word != "-q"]  # twice, it leaves the ids out
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header", *others]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    lines = done.stdout.splitlines()
    found = [line for line in lines if "::" in line and not line.startswith(" ")]
    if not found:
        raise RuntimeError(f"{' '.join(command)}\nno test is chosen by these words")
    return found


def not_choosing(words: Sequence[str]) -> str:
    """Return the first of pytest's words that is neither a place nor chooses tests; "": none is."""
    left = iter(words)
    for word in left:
        if word in CHOOSING:
            next(left, "")
        elif word.startswith("-") and word.partition("=")[0] not in CHOOSING:
            return word
    return ""


class _Going(NamedTuple):
    """A job under way: when it began, and the number of its own GPU."""

    process: subprocess.Popen[bytes]
    began: float
    gpu: int


class Running:
    """Processes of jobs; `folder` takes reports and logs, each GPU has `memory_bytes`.

    A job sees all of `gpus`, its own first; without names it sees what there is. Each is told of
    each test as it ends; one that says nothing for `silent_s` is killed, with what it has started:
    a call that never comes back, of CUDA's say, keeps Python from its signals, and so pytest's
    timeout from ending the test.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        root: Path,
        environment: Mapping[str, str],
        memory_bytes: int,
        silent_s: float = SILENT_S,
        gpus: Sequence[str] = (),
    ) -> None:
        self._words, self._folder = words, folder
        self._root = root
        self._environment = dict(environment) | {"PYTHONUNBUFFERED": "1"}
        self._memory_bytes = memory_bytes
        self._silent_s = silent_s
        self._gpus = tuple(gpus)
        self._going: dict[Job, _Going] = {}

    def start(self, job: Job, gpu: int = 0) -> None:
        """Begin a job on the GPU of this number."""
        listed = self._folder / f"{job.name}.tests"
        listed.write_text("\n".join(job.tests) + "\n")
        report = f"--junitxml={self._folder / job.name}.xml"
        command = [sys.executable, "-m", "pytest", *self._words, report, f"@{listed}"]
        seen = ",".join([*self._gpus[gpu:], *self._gpus[:gpu]])
        environment = self._environment | ({"CUDA_VISIBLE_DEVICES": seen} if seen else {})
        with (self._folder / f"{job.name}.log").open("wb") as log, undisturbed():
            process = subprocess.Popen(
                command, cwd=self._root, env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            self._going[job] = _Going(process, time.monotonic(), gpu)

    @property
    def any(self) -> bool:
        """Whether a job has not ended."""
        return bool(self._going)

    def gpu_for(self, job: Job, most: int) -> int | None:
        """Return on which GPU a job may begin now, where so many may share each: that of which
        least is held; None for none.

        One that needs more memory than there is begins where no other goes on, and tells so itself.
        """
        if not self._going:
            return 0
        all_gpus = range(max(len(self._gpus), 1))
        on = {gpu: [job for job in self._going if self._is_on(job, gpu)] for gpu in all_gpus}
        shared = [
            not (some and (job.alone or any(one.alone for one in some))) for some in on.values()
        ]
        held = [sum(one.most_bytes for one in some) for some in on.values()]
        has_memory = [bytes_ + job.most_bytes <= self._memory_bytes for bytes_ in held]
        free = [a and b for a, b in zip(shared, has_memory, strict=True)]
        if job.uses_all and not all(free):
            return None
        counts = [sum(going.gpu == gpu for going in self._going.values()) for gpu in all_gpus]
        fit = [gpu for gpu in all_gpus if free[gpu] and counts[gpu] < most]
        return min(fit, key=held.__getitem__, default=None)

    def _is_on(self, job: Job, gpu: int) -> bool:
        """Whether a job under way holds memory of this GPU."""
        return job.uses_all or self._going[job].gpu == gpu

    def ended(self) -> list[Ended]:
        """Return the jobs that have ended since the last call."""
        found = []
        for job, (process, began, _) in list(self._going.items()):
            place, seconds = self._folder / job.name, time.monotonic() - began
            if process.poll() is None and not self._ended_for_silence(process, place):
                continue
            del self._going[job]
            found.append(
                Ended(job, process.returncode, _named(place, "xml"), _named(place, "log"), seconds)
            )
        return found

    def _ended_for_silence(self, process: subprocess.Popen[bytes], place: Path) -> bool:
        """Kill a process that has long said nothing, and note so in its log."""
        log = _named(place, "log")
        if time.time() - log.stat().st_mtime < self._silent_s:
            return False
        _signalled(process, signal.SIGKILL)
        process.wait()
        with log.open("a") as words:
            words.write(f"\n[gpu] killed: it said nothing for {self._silent_s:.0f} s\n")
        return True

    def stop(self) -> None:
        """End what still runs, and what that has started."""
        for going in self._going.values():
            _signalled(going.process, signal.SIGTERM)
        for going in self._going.values():
            try:
                going.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                _signalled(going.process, signal.SIGKILL)
                going.process.wait()


def _signalled(process: subprocess.Popen[bytes], which: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, which)


def _named(place: Path, kind: str) -> Path:
    return place.with_name(f"{place.name}.{kind}")


def run(running: Running, jobs: Sequence[Job], most: int) -> Iterable[Ended]:
    """Yield jobs as they end: those that run alone with their GPU to themselves, of the others so
    many at once on each.

    A job for which memory is short lets others go before it.
    """
    waiting = list(jobs)
    with ExitStack() as stack:
        stack.callback(running.stop)
        while waiting or running.any:
            for job in list(waiting):
                if (gpu := running.gpu_for(job, most)) is not None:
                    waiting.remove(job)
                    running.start(job, gpu)
            told = running.ended()
            yield from told
            if not told:
                time.sleep(POLL_S)


def end_on_sigterm() -> None:
    """Have SIGTERM end this process as an exception does: what it has started is ended too, and
    does not stay on the GPUs beside whoever has them next. A second one cuts that not short.
    """

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Have what ends this process wait until the block has ended: a process that was started, and
    of which nobody has taken note yet, would be left to itself.

    They are not blocked, for what is started inherits that, as what this process ignores.
    """
    came: list[int] = []
    all_before = {which: signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGINT)}
    before = {which: how for which, how in all_before.items() if how is not signal.SIG_IGN}
    try:  # before the first is put off: what comes between the two would leave that one so
        for which in before:
            signal.signal(which, lambda number, frame: came.append(number))
        yield
    finally:
        for which, how in before.items():
            signal.signal(which, how)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a program, which ends with the block at the latest; `options` are those of `Popen`."""
    with ExitStack() as stack:
        with undisturbed():
            process = stack.enter_context(subprocess.Popen(command, text=True, **options))
            stack.callback(process.kill)  # nothing, if it has ended and was waited for
        yield process


@contextmanager
def held(build: Path, *, alone: bool) -> Iterator[None]:
    """Hold the folder of the library and of reports, alone for the suite; end where it is taken."""
    build.mkdir(parents=True, exist_ok=True)
    with (build / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            others = "a suite, or programs run by this tool," if alone else "the suite"
            sys.exit(
                f"[gpu] {others} already at work over what is under {build}; "
                "what shall run at the same time needs a checkout of its own"
            )
        yield


def threads_of(environment: Mapping[str, str], cores: int, processes: int) -> dict[str, str]:
    """Return an environment in which so many processes share the cores, unless it says how.

    Each would take as many threads as there are cores, and wait for those that have none.
    """
    share = str(max(cores // processes, 1))
    return {name: share for name in THREADS} | dict(environment)
