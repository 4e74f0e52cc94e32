"""`make gpu-test` runs each test once in several processes, and loses nothing of what they say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_jobs
import gpu_reports
import pytest
from gpu_jobs import Ended, Job

import gpu
from baton_testing.processes import wait_until

EXACT = "tests/gpu/test_the_same_bits_any_way_it_is_served.py"
TESTS = [
    "tests/ops/cuda/test_a.py::test_x[1-2]",
    "tests/ops/cuda/test_b.py::test_y",
    "tests/engine/device/test_device_contract.py::test_memory[torch]",
    "tests/gpu/test_far.py::test_far[gpu-tiny]",
    f"{EXACT}::test_overlap[gpu-tiny]",
    f"{EXACT}::test_overlap[gpu-qwen3-8b]",
    f"{EXACT}::test_graphs[gpu-qwen3-8b]",
    "tests/gpu/test_an_engine_starts_from_a_folder.py::test_a_start",
    "tests/gpu/test_long_contexts_fit_and_are_exact.py::test_chunks[a]",
    "tests/gpu/test_two_gpus_compute_as_one.py::test_two",
    f"{EXACT}::test_overlap[gpu-qwen3-8b-12-2-ranks]",
]
ENOUGH_BYTES = 1 << 40
SUITE = {
    "test_one.py": "import pytest\n@pytest.mark.parametrize('n', ['a b', 'c[d]'])\n"
    "def test_fine(n): pass\ndef test_not(): assert 0, 'it is not'\n",
    "test_two.py": "import pytest\n@pytest.mark.skip(reason='why')\ndef test_later(): pass\n",
    "test_three.py": "import os\ndef test_before(): pass\ndef test_gone(): os._exit(7)\n",
}


def going(number: int | None) -> Any:
    """A job under way on the GPU of this number."""
    return SimpleNamespace(gpu=number)


def test_each_test_is_in_one_job_and_a_model_is_loaded_by_one() -> None:
    jobs = gpu_jobs.jobs_of(TESTS)
    assert sorted(test for job in jobs for test in job.tests) == sorted(TESTS)
    of = {test: job.name for job in jobs for test in job.tests}
    assert of[TESTS[5]] == of[TESTS[6]] != of[TESTS[4]]
    assert [of[test] for test in TESTS[:2]] == ["cuda-part-1", "cuda-part-2"]
    assert all(job.tests for job in jobs), "no process is started for nothing"
    assert len({job.name for job in jobs}) == len(jobs), "each has files of its own"


def test_what_looks_at_the_whole_device_runs_first_and_alone_then_the_longest() -> None:
    jobs = gpu_jobs.jobs_of(TESTS)
    assert [job.alone for job in jobs] == [True] * 5 + [False] * 5
    assert {Path(job.tests[0].partition("::")[0]).as_posix() for job in jobs[:5]} == {
        *gpu_jobs.ALONE,
        EXACT,  # of the model that several GPUs compute
    }
    assert [job.uses_all for job in jobs[:5]] == [True, True, False, False, False]
    assert jobs[5].tests[0].endswith("[gpu-qwen3-8b]")
    assert jobs[-1].name == "test_far"


def test_the_files_that_are_named_are_there() -> None:
    root = Path(gpu_jobs.__file__).parents[1]
    for name in (*gpu_jobs.ALONE, *gpu_jobs.BY_PARAMETER):
        assert (root / name).is_file()


def test_jobs_share_no_more_memory_than_there_is_and_the_rest_go_first(tmp_path: Path) -> None:
    class Taken(gpu_jobs.Running):
        def start(self, job: Job, on: int = 0) -> None:
            began.append(job.name)
            self._going[job] = going(on)

        def ended(self) -> list[Ended]:
            held.append(sum(job.most_bytes for job in self._going) // gpu_jobs.GIB)
            job = next(iter(self._going))
            del self._going[job]
            return [Ended(job, 0, tmp_path, tmp_path, 0.0)]

    began: list[str] = []
    held: list[int] = []
    names = [*gpu_jobs.MOST_GIB, "small", "other"]
    running = Taken((), tmp_path, tmp_path, {}, 60 * gpu_jobs.GIB)
    ended = list(gpu_jobs.run(running, [Job(name, ()) for name in names], 3))
    assert sorted(one.job.name for one in ended) == sorted(names) == sorted(began)
    assert began[:3] == [names[0], "small", names[1]]
    assert 55 < max(held) <= 60
    running = Taken((), tmp_path, tmp_path, {}, 50 * gpu_jobs.GIB)
    assert running.gpu_for(Job(names[0], ()), 3) == 0, "it may tell itself that memory is short"


def test_jobs_go_where_least_is_held_and_those_that_use_all_gpus_where_all_have_room(
    tmp_path: Path,
) -> None:
    large = Job(next(iter(gpu_jobs.MOST_GIB)), ())
    small, other, third = (Job(name, ()) for name in ("small", "other", "third"))
    on_all = Job(gpu_jobs.ON_ALL[0], ())
    running = gpu_jobs.Running((), tmp_path, tmp_path, {}, 60 * gpu_jobs.GIB, gpus=("4", "7"))
    running._going[large] = going(running.gpu_for(large, 2))
    assert running.gpu_for(small, 2) == 1
    assert running.gpu_for(on_all, 2) is None, "the first GPU has no memory for it"
    running._going[small] = going(1)
    running._going[other] = going(1)
    assert running.gpu_for(third, 2) == 0, "as many as may share it are on the second"
    assert running.gpu_for(third, 3) == 1
    del running._going[large]
    assert running.gpu_for(on_all, 2) == 0
    running._going.clear()
    running._going[on_all] = going(0)
    running._going[third] = going(0)
    assert running.gpu_for(large, 3) is None, "what uses all holds memory of either"
    del running._going[on_all]
    assert running.gpu_for(large, 3) == 1


@pytest.mark.slow
def test_a_process_sees_its_own_gpu_first(tmp_path: Path) -> None:
    (tmp_path / "test_seen.py").write_text(
        "import os\ndef test_it():\n    assert os.environ['CUDA_VISIBLE_DEVICES'] == '7,4'\n"
    )
    running = gpu_jobs.Running(
        ["-q", "-p", "no:cacheprovider"], tmp_path, tmp_path, os.environ, 1, gpus=("4", "7")
    )
    running.start(Job("seen", (str(tmp_path / "test_seen.py"),)), 1)
    ended: list[Ended] = []
    while not ended:
        ended = running.ended()
    assert ended[0].code == 0, ended[0].log.read_text()


@pytest.mark.parametrize(
    ("told", "cores", "processes", "wanted"),
    [({}, 64, 20, "3"), ({}, 2, 20, "1"), ({"OMP_NUM_THREADS": "7"}, 64, 20, "7")],
)
def test_processes_share_the_cores(
    told: dict[str, str], cores: int, processes: int, wanted: str
) -> None:
    shared = gpu_jobs.threads_of({"HOME": "x"} | told, cores, processes)
    assert shared["OMP_NUM_THREADS"] == wanted
    assert shared["HOME"] == "x"


def test_a_suite_has_its_folder_to_itself_and_programs_share_it(tmp_path: Path) -> None:
    folder = tmp_path / "gpu"
    for alone, other in [(True, True), (True, False), (False, True)]:
        with gpu_jobs.held(folder, alone=alone):
            with pytest.raises(SystemExit, match="at work"), gpu_jobs.held(folder, alone=other):
                pass
            with gpu_jobs.held(tmp_path / "other", alone=other):
                pass
    with gpu_jobs.held(folder, alone=False), gpu_jobs.held(folder, alone=False):
        pass


def test_a_run_that_is_refused_leaves_the_library_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "BUILD", tmp_path / "gpu")
    monkeypatch.setattr("gpu_needs.what_is_missing", lambda builds: "")
    laid: list[Path] = []
    monkeypatch.setattr(gpu, "lay_out", laid.append)
    with gpu_jobs.held(tmp_path / "gpu", alone=True):
        for what in (["test"], ["run", "tests/gpu/bench_pair.py"]):
            with pytest.raises(SystemExit, match="at work"):
                gpu.main(["--library", __file__, *what])
    assert laid == []


def test_a_library_that_is_replaced_stays_whole_for_whoever_has_mapped_it(tmp_path: Path) -> None:
    library = tmp_path / "built.so"
    library.write_bytes(b"first")
    gpu.lay_out(library, tmp_path / "site")
    with (tmp_path / "site/baton_ops/lib/libbaton_ops.so").open("rb") as mapped:
        library.write_bytes(b"2")
        gpu.lay_out(library, tmp_path / "site")
        assert mapped.read() == b"first"


@pytest.mark.parametrize(
    ("wanted", "seen", "names"),
    [(1, "4,7", []), (2, None, ["0", "1"]), (2, "4,7,9", ["4", "7"])],
)
def test_gpus_are_named_as_the_process_was_told(
    monkeypatch: pytest.MonkeyPatch, wanted: int, seen: str | None, names: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert gpu.gpu_names(wanted) == names


def test_jobs_of_which_the_memory_is_told_are_there() -> None:
    root = Path(gpu_jobs.__file__).parents[1]
    for name in gpu_jobs.MOST_GIB:
        assert (root / "tests" / "gpu" / f"{name.partition('-')[0]}.py").is_file()


def test_a_job_that_runs_alone_shares_the_device_with_none(tmp_path: Path) -> None:
    class Taken(gpu_jobs.Running):
        def start(self, job: Job, on: int = 0) -> None:
            self._going[job] = going(on)

    running = Taken((), tmp_path, tmp_path, {}, ENOUGH_BYTES)
    alone, some, other = (Job(name, (), name == "alone") for name in ("alone", "some", "other"))
    assert running.gpu_for(alone, 2) == 0
    running.start(alone)
    assert running.gpu_for(some, 2) is None
    running._going.clear()
    running.start(some)
    assert running.gpu_for(alone, 2) is None
    assert running.gpu_for(other, 2) == 0
    assert running.gpu_for(other, 1) is None


def test_of_several_gpus_one_job_that_runs_alone_takes_its_own_and_others_go_on(
    tmp_path: Path,
) -> None:
    running = gpu_jobs.Running((), tmp_path, tmp_path, {}, ENOUGH_BYTES, gpus=("4", "7"))
    first, second = (Job(name, (), alone=True) for name in ("first", "second"))
    some, on_all = Job("some", ()), Job(gpu_jobs.ON_ALL[0], ())
    over_all = Job(f"a{gpu_jobs.OVER_RANKS}", (), alone=True)
    running._going[first] = going(running.gpu_for(first, 3))
    assert running.gpu_for(second, 3) == 1
    assert running.gpu_for(some, 3) == 1
    assert running.gpu_for(on_all, 3) is None
    assert running.gpu_for(over_all, 3) is None
    running._going[some] = going(1)
    assert running.gpu_for(second, 3) is None, "it would not be alone"
    del running._going[first]
    assert running.gpu_for(second, 3) == 0
    assert running.gpu_for(on_all, 3) is not None
    assert running.gpu_for(over_all, 3) is None, "one of its GPUs is another's"
    running._going.clear()
    running._going[over_all] = going(running.gpu_for(over_all, 3))
    assert [running.gpu_for(job, 3) for job in (first, some, on_all)] == [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 3])
def test_outcomes_of_all_processes_are_told_and_those_of_one_that_died_are_failures(
    tmp_path: Path, most: int
) -> None:
    suite, folder = tmp_path / "suite", tmp_path / "reports"
    suite.mkdir()
    folder.mkdir()
    (suite / "pytest.ini").write_text("[pytest]\n")
    for name, text in SUITE.items():
        (suite / name).write_text(text)
    words, environment = ["-q", "-p", "no:cacheprovider"], dict(os.environ)
    tests = gpu_jobs.collected(words, suite, environment)
    jobs = gpu_jobs.jobs_of(tests)
    assert len(tests) == 6
    running = gpu_jobs.Running(words, folder, suite, environment, ENOUGH_BYTES)
    ended = list(gpu_jobs.run(running, jobs, most))
    assert {one.job.name for one in ended} == {"test_one", "test_two", "test_three"}
    cases = dict(case for one in ended for case in gpu_reports.cases_of_job(one))
    assert cases == {
        "test_one.py::test_fine[a b]": "passed",
        "test_one.py::test_fine[c[d]]": "passed",
        "test_one.py::test_not": "failed",
        "test_two.py::test_later": "skipped",
        "test_three::status 7, 2 of 2 tests not told of": "failed",
    }
    said = {one.job.name: gpu_reports.last_words(one) for one in ended}
    assert "1 skipped" in said["test_two"]
    assert "it is not" in said["test_one"]


@pytest.mark.slow
def test_words_that_choose_no_test_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_one.py").write_text("def test_it(): pass\n")
    words = ["-p", "no:cacheprovider"]
    assert len(gpu_jobs.collected(words, tmp_path, dict(os.environ))) == 1
    for more in (["-k", "other"], ["-v"]):
        with pytest.raises(RuntimeError, match=r"other|no test is chosen"):
            gpu_jobs.collected([*words, *more], tmp_path, dict(os.environ))


@pytest.mark.slow
def test_tests_that_cannot_be_collected_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_wrong.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(RuntimeError, match="no_such_module_at_all"):
        gpu_jobs.collected(["-p", "no:cacheprovider"], tmp_path, dict(os.environ))


def test_a_status_that_no_test_explains_is_a_failure(tmp_path: Path) -> None:
    report = tmp_path / "a.xml"
    report.write_text('<testsuite><testcase classname="a" name="test_x"/></testsuite>')
    ended = Ended(Job("a", ("a.py::test_x",)), 3, report, tmp_path / "a.log", 1.0)
    assert gpu_reports.cases_of_job(ended) == [
        ("a.py::test_x", "passed"),
        ("a::status 3", "failed"),
    ]


def test_a_test_that_was_skipped_and_whose_fixture_failed_has_failed(tmp_path: Path) -> None:
    report = tmp_path / "a.xml"
    inner = "<skipped/><error message='teardown'/>"
    report.write_text(f'<testsuite><testcase classname="a" name="t">{inner}</testcase></testsuite>')
    assert gpu_reports.cases_of(report) == [("a.py::t", "failed")]


def test_a_session_that_ended_early_is_no_test_that_passed(tmp_path: Path) -> None:
    report = tmp_path / "a.xml"
    report.write_text('<testsuite><testcase classname="" name=""/></testsuite>')
    ended = Ended(Job("a", ("a.py::t",)), 2, report, tmp_path / "a.log", 1.0)
    told = [("a::status 2, 1 of 1 tests not told of", "failed")]
    assert gpu_reports.cases_of_job(ended) == told


@pytest.mark.parametrize("written", ["", '<testsuite><testcase classname="a" na'])
def test_a_report_that_was_being_written_tells_of_none(tmp_path: Path, written: str) -> None:
    report = tmp_path / "a.xml"
    report.write_text(written)
    ended = Ended(Job("a", ("a.py::t",)), -9, report, tmp_path / "a.log", 1.0)
    told = [("a::status -9, 1 of 1 tests not told of", "failed")]
    assert gpu_reports.cases_of_job(ended) == told


HANGS = """import ctypes, subprocess, sys
def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    open("child", "w").write(str(child.pid))
    lock, c = (ctypes.c_char * 64)(), ctypes.CDLL(None)
    c.pthread_mutex_lock(lock)
    c.pthread_mutex_lock(lock)
"""


def state_of(pid: int) -> str:
    """Return the letter for what a process does; X when it is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def test_a_job_that_hangs_where_python_cannot_end_it_is_killed_with_what_it_started(
    tmp_path: Path,
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 3\n")
    (tmp_path / "test_hangs.py").write_text(HANGS)
    words = ["-q", "-p", "no:cacheprovider"]
    job, child = Job("hangs", ("test_hangs.py::test_hangs",)), tmp_path / "child"
    for silent_s in (5, 30, 120, 600):  # a busy machine begins late
        running = gpu_jobs.Running(words, tmp_path, tmp_path, os.environ, ENOUGH_BYTES, silent_s)
        (ended,) = gpu_jobs.run(running, [job], 1)
        if child.is_file():
            break
    told = [("hangs::status -9, 1 of 1 tests not told of", "failed")]
    assert gpu_reports.cases_of_job(ended) == told
    assert f"killed: it said nothing for {silent_s} s" in gpu_reports.last_words(ended)
    pid = int(child.read_text())
    wait_until("its child has ended", lambda: state_of(pid), lambda state: state in "ZX")


ENDED = """
import os, pathlib, gpu_jobs
gpu_jobs.end_on_sigterm()
here = pathlib.Path.cwd()
running = gpu_jobs.Running(["-q", "-p", "no:cacheprovider"], here, here, os.environ, 1 << 40)
list(gpu_jobs.run(running, [gpu_jobs.Job("waits", ("test_waits.py::test_waits",))], 1))
"""
WAITS = """
import os, pathlib, signal
def test_waits():
    pathlib.Path("new").write_text(str(os.getpid()))
    os.rename("new", "pid")
    signal.pause()
"""


def test_jobs_end_with_a_run_that_is_told_to_end(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_waits.py").write_text(WAITS)
    told = dict(os.environ) | {"PYTHONPATH": str(Path(gpu_jobs.__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", ENDED], cwd=tmp_path, env=told) as run:
        try:
            wait_until("its test runs", (tmp_path / "pid").is_file, bool)
            pid = int((tmp_path / "pid").read_text())
            run.terminate()
            assert run.wait(600) == 143
        finally:
            run.kill()
    assert state_of(pid) in "ZX"


TOLD_AT_A_START = """
import os, pathlib, signal, subprocess, sys, gpu, gpu_jobs
class Told(subprocess.Popen):
    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        pathlib.Path("pid").write_text(str(self.pid))
        os.kill(os.getpid(), signal.{which})
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the suite ignores
gpu_jobs.end_on_sigterm()
gpu.subprocess.Popen = Told
here = pathlib.Path.cwd()
job = gpu_jobs.Job("waits", ("test_waits.py::test_waits",))
{start}
"""
STARTS = {
    "a job": "list(gpu_jobs.run(gpu_jobs.Running([], here, here, os.environ, 1 << 40), [job], 1))",
    "a program": 'gpu.run([sys.executable, "-c", "import signal; signal.pause()"])',
    "one whose words are kept": 'gpu.run([sys.executable, "-c", "import signal; signal.pause()"],'
    " quiet=True)",
}


@pytest.mark.slow
@pytest.mark.parametrize("which", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_what_is_started_as_the_run_is_told_to_end_ends_too(
    tmp_path: Path, start: str, which: str
) -> None:
    """The signal comes when the process is there and nobody has taken note of it."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_waits.py").write_text(WAITS)
    told = dict(os.environ) | {"PYTHONPATH": str(Path(gpu_jobs.__file__).parent)}
    program = TOLD_AT_A_START.format(which=which, start=start)
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=told,
        timeout=600,
        check=False,
        capture_output=True,
    )
    assert run.returncode == (143 if which == "SIGTERM" else -signal.SIGINT), run.stderr.decode()
    pid = int((tmp_path / "pid").read_text())
    has_ended = state_of(pid) in "ZX"
    if not has_ended:
        os.kill(pid, signal.SIGKILL)
    assert has_ended


IGNORED = """
import signal, sys, gpu, gpu_jobs
signal.signal(signal.SIGINT, signal.SIG_IGN)
gpu_jobs.end_on_sigterm()
sys.exit(gpu.run([sys.executable, "-c", "import signal, sys;"
    "sys.exit(signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)"]))
"""


def test_what_a_run_in_the_background_of_a_script_starts_ignores_interrupts_too() -> None:
    """Such a shell has its own interrupt for itself: nothing behind it ends by that."""
    told = dict(os.environ) | {"PYTHONPATH": str(Path(gpu_jobs.__file__).parent)}
    subprocess.run([sys.executable, "-c", IGNORED], env=told, timeout=600, check=True)


def test_an_interrupt_as_endings_are_put_off_leaves_all_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes between the two: one that stayed put off would end nothing any more."""
    ended: list[int] = []
    outer = signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    put, told = signal.signal, list[int]()

    def interrupted(which: int, how: Any) -> Any:
        told.append(which)
        before = put(which, how)
        if len(told) == 1:
            raise KeyboardInterrupt
        return before

    try:
        monkeypatch.setattr(gpu_jobs.signal, "signal", interrupted)
        with pytest.raises(KeyboardInterrupt), gpu_jobs.undisturbed():
            pass
        signal.raise_signal(signal.SIGTERM)
    finally:
        put(signal.SIGTERM, outer)
    assert ended == [signal.SIGTERM]


STAYS = """
import os, pathlib, signal
def told(number, frame):
    pathlib.Path("told").touch()
def test_waits():
    signal.signal(signal.SIGTERM, told)
    pathlib.Path("new").write_text(str(os.getpid()))
    os.rename("new", "pid")
    while True:
        signal.pause()
"""


@pytest.mark.slow
def test_a_run_that_is_told_twice_to_end_still_kills_who_stays(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_waits.py").write_text(STAYS)
    told = dict(os.environ) | {"PYTHONPATH": str(Path(gpu_jobs.__file__).parent)}
    program = ENDED.replace("gpu_jobs.end_on", "gpu_jobs.STOP_S = 2\ngpu_jobs.end_on")
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=told) as run:
        try:
            wait_until("its test runs", (tmp_path / "pid").is_file, bool)
            run.terminate()
            wait_until("its test is told", (tmp_path / "told").is_file, bool)
            run.terminate()
            assert run.wait(600) == 143
            assert state_of(int((tmp_path / "pid").read_text())) in "ZX"
        finally:
            run.kill()
            if (tmp_path / "pid").is_file():
                with suppress(ProcessLookupError):
                    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_digests_of_processes_that_write_at_once_are_all_kept(tmp_path: Path) -> None:
    program = "import pathlib, sys\nfrom gpu_reports import kept\n"
    program += "for n in range(50): kept(f'{sys.argv[1]}-{n}', 'ab', pathlib.Path(sys.argv[2]))"
    tools = str(Path(gpu_jobs.__file__).parent)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", program, name, str(tmp_path)],
            env=dict(os.environ) | {"PYTHONPATH": tools},
        )
        for name in ("one", "two")
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    found, torn = gpu_reports.digests_of(tmp_path)
    assert (len(found), torn) == (100, [])


def test_a_workload_that_two_processes_are_told_otherwise_is_named(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('{"tiny": "aa", "large": "cc"}')
    (tmp_path / "2.json").write_text('{"tiny": "bb", "large": "cc"}')
    assert gpu_reports.digests_of(tmp_path) == ({"tiny": "aa", "large": "cc"}, ["tiny"])
