"""`make gpu-test` counts each test once, names what failed, and finds its own library first."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import types
from pathlib import Path

import gpu_jobs
import gpu_needs
import gpu_reports
import gpu_stamp
import pytest

import gpu

REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="test_one[x]"/>
<testcase classname="tests.gpu.test_a" name="test_two"><failure message="no"/></testcase>
<testcase classname="tests.gpu.test_a" name="test_two"><error message="no"/></testcase>
<testcase classname="tests.ops.cuda.test_b" name="test_three"><skipped message="why"/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_counted_once_for_each_test(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    cases = gpu_reports.cases_of(report)
    results = gpu.results_of(cases, whole=True)
    assert (results.passed, results.failed, results.skipped) == (1, 1, 1)
    assert results.names_failed == ("tests/gpu/test_a.py::test_two",)
    assert results.whole


def test_the_table_has_a_line_for_each_file(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    lines = gpu.table(gpu_reports.cases_of(report)).splitlines()
    assert len(lines) == 4
    assert "tests/gpu/test_a.py" in lines[2]
    assert "tests/ops/cuda/test_b.py" in lines[3]


def test_what_is_laid_out_is_found_before_what_is_installed(tmp_path: Path) -> None:
    library, site = tmp_path / "built.so", tmp_path / "site"
    library.write_bytes(b"no library")
    gpu.lay_out(library, site)
    program = (
        "from tvm_ffi.libinfo import _find_library_by_basename as find;"
        "import baton_ops; print(find('baton-ops', 'baton_ops')); print(baton_ops.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=gpu.environment(site), capture_output=True, text=True, check=True,
    )  # fmt: skip
    found, package = done.stdout.splitlines()
    assert Path(found) == site / "baton_ops/lib/libbaton_ops.so"
    assert Path(package) == gpu.ROOT / "ops/src/baton_ops/__init__.py"


def test_packages_that_are_missing_are_named_by_their_distributions(monkeypatch) -> None:
    monkeypatch.setattr(gpu_needs, "NEEDS", {"json": "json", "no_such_module": "its-distribution"})
    assert gpu_needs.missing_modules() == ["its-distribution"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["test", "--jobs", "0"], "argument --jobs: 0 is less than 1"),
        (["test", "--library", "no/such.so"], "argument --library: no/such.so is no file"),
        (["lay-out"], "lay-out needs --library"),
        (["lay-out", "--library", __file__, "--site", __file__], "is no folder"),
        (["test", "--gpus", "0"], "argument --gpus: 0 is less than 1"),
        (["run"], "run needs a program"),
        (["run", "--json", "x"], "run needs a program"),
        (["run", "no/such.py"], "run needs a program"),
    ],
)
def test_what_could_not_run_is_refused_before_anything_is_built(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        gpu.main(words)
    assert message in capsys.readouterr().err


def test_what_stands_behind_a_program_is_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(gpu_needs, "what_is_missing", lambda builds: "")
    monkeypatch.setattr(gpu, "lay_out", lambda library: None)
    monkeypatch.setattr(gpu, "run", lambda command: ran.append(command) or 0)
    program = "tests/gpu/bench_pair.py"
    words = ["--library", __file__, "run", program, "--gpus", "0,0", "--library", "x"]
    assert gpu.main(words) == 0
    assert ran == [[sys.executable, program, "--gpus", "0,0", "--library", "x"]]
    words = ["test", "-k", "run", "tests/x.py", "--jobs", "3"]
    assert gpu.program_at(words) == len(words), "it is no command there"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--help"], "{test,bench,run,lay-out}"),
        (["test", "-h"], "{test,bench,run,lay-out}"),
        ([], "{test,bench,run,lay-out}"),
        (["run", "tests/gpu/bench_pair.py", "--help"], "usage: bench_pair.py"),
    ],
)
def test_help_is_that_of_what_would_run(words: list[str], told: str) -> None:
    tool = gpu.ROOT / "tools" / "gpu.py"
    done = subprocess.run(
        [sys.executable, str(tool), *words], capture_output=True, text=True, check=False
    )
    assert told in done.stdout
    assert done.returncode == (0 if words else 2)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["H200", "H200"], ""),
        (["H200"], "2 GPUs of one kind are needed, this machine has 1: H200"),
        (["H100", "H200", "H100"], ""),
        (["H100", "H200"], "this machine has 1: H100"),
    ],
)
def test_a_machine_with_too_few_gpus_is_told_so(
    monkeypatch: pytest.MonkeyPatch, names: list[str], told: str
) -> None:
    cuda = types.SimpleNamespace(device_count=lambda: len(names), get_device_name=names.__getitem__)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    said = gpu_needs.too_few_gpus(2)
    assert told in said
    assert bool(said) == bool(told)


def test_a_machine_without_pytorch_is_told_so(monkeypatch) -> None:
    monkeypatch.setattr(gpu_needs.importlib.util, "find_spec", lambda name: None)
    assert "PyTorch" in gpu_needs.what_is_missing(builds=True)


def test_all_that_is_missing_is_told_at_once(monkeypatch) -> None:
    monkeypatch.setattr(gpu_needs, "missing_device", lambda: "no device")
    monkeypatch.setattr(gpu_needs.shutil, "which", lambda name: None)
    monkeypatch.setattr(gpu_needs, "NEEDS", {"no_such_module": "its-distribution"})
    told = gpu_needs.what_is_missing(builds=True)
    for what in ("no device", *gpu_needs.PROGRAMS.values(), "its-distribution"):
        assert what in told
    assert gpu_needs.PROGRAMS["cmake"] not in gpu_needs.what_is_missing(builds=False)


def test_a_program_runs_beside_its_neighbours_with_the_options_that_are_its_own(
    monkeypatch, tmp_path: Path
) -> None:
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "program.py").write_text(
        "import neighbour, sys, baton_testing, pathlib\n"
        "pathlib.Path(sys.argv[-1]).write_text(' '.join(sys.argv[1:-1]))\n"
    )
    monkeypatch.setattr(gpu_needs, "what_is_missing", lambda builds: "")
    monkeypatch.setattr(gpu, "lay_out", lambda library: None)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    library, told = tmp_path / "a.so", tmp_path / "told"
    library.touch()
    own = ["--lib", "x", "--json", str(told)]
    assert gpu.main(["run", "--library", str(library), str(tmp_path / "program.py"), *own]) == 0
    assert told.read_text() == "--lib x --json"


def test_a_stamp_that_is_none_is_told_of_before_the_suite_runs(monkeypatch, tmp_path: Path) -> None:
    stamp = tmp_path / "stamp.json"
    stamp.write_text('{"a": 1}')
    monkeypatch.setattr(gpu, "BUILD", tmp_path / "build")
    monkeypatch.setattr(gpu, "at_once", lambda *_: pytest.fail("the suite ran"))
    options = argparse.Namespace(stamp=stamp, jobs=2)
    with pytest.raises(SystemExit, match=r"is no stamp.*--stamp"):
        gpu.test(options, [])


IN_SUITES = ("-o", f"testpaths={' '.join(gpu.SUITES)}")
"""Where pytest looks when no place is named; what it is told besides does not change that."""


@pytest.mark.parametrize(
    ("jobs", "more", "at_once"),
    [
        (None, [], gpu_jobs.JOBS),
        (3, [], 3),
        (3, ["-k", "ops"], 3),
        (3, ["tests/gpu", "--deselect", "tests/gpu/test_x.py::y"], 3),
        (None, ["tests/gpu/conftest.py::x"], 1),
        (None, ["-x"], 1),
        (1, [], 1),
    ],
)
def test_chosen_tests_share_the_gpus_where_that_is_asked_for(
    monkeypatch, tmp_path: Path, jobs: int | None, more: list[str], at_once: int
) -> None:
    taken: list[tuple[int, tuple[str, ...]]] = []

    def share(words, folder, most, gpus, keep):
        taken.append((most, tuple(words)))
        return []

    def one(command, quiet=False):
        report = next(word for word in command if word.startswith("--junitxml"))
        taken.append((1, tuple(word for word in command[3:] if word != report)))
        return 5

    monkeypatch.setattr(gpu, "at_once", share)
    monkeypatch.setattr(gpu, "run", one)
    monkeypatch.setattr(gpu, "machine", dict)
    monkeypatch.setattr(gpu, "BUILD", tmp_path)
    options = argparse.Namespace(stamp=tmp_path / "stamp.json", jobs=jobs, gpus=2)
    assert gpu.test(options, more), "nothing has passed"
    assert taken == [(at_once, (*gpu.PLAIN, *IN_SUITES, *more))]


@pytest.mark.parametrize(
    ("words", "odd"),
    [
        (["-k", "-x", "tests/gpu"], ""),
        (["--ignore=tests/gpu", "-m", "gpu and slow"], ""),
        (["-k", "x", "-x"], "-x"),
        (["--timeout", "9", "-k", "x"], "--timeout"),
        (["-vv"], "-vv"),
    ],
)
def test_what_chooses_no_tests_is_not_dropped_without_a_word(
    monkeypatch, tmp_path: Path, words: list[str], odd: str
) -> None:
    assert gpu_jobs.not_choosing(words) == odd
    if odd:
        monkeypatch.setattr(gpu, "BUILD", tmp_path)
        options = argparse.Namespace(stamp=tmp_path / "stamp.json", jobs=2, gpus=1)
        with pytest.raises(SystemExit, match=f"{odd} chooses no tests"):
            gpu.test(options, words)


def test_a_suite_that_ended_early_in_one_process_leaves_no_stamp_without_failures(
    monkeypatch, tmp_path: Path
) -> None:
    def ended_early(command: list[str]) -> int:
        report = next(word for word in command if word.startswith("--junitxml="))
        Path(report.partition("=")[2]).write_text(
            '<testsuite><testcase classname="a" name="test_x"/></testsuite>'
        )
        return 3

    monkeypatch.setattr(gpu, "BUILD", tmp_path / "build")
    monkeypatch.setattr(gpu, "run", ended_early)
    monkeypatch.setattr(gpu, "machine", lambda: {"gpu": "x"})
    monkeypatch.setenv("BATON_GPU_DIGESTS", "")
    stamp = tmp_path / "stamp.json"
    assert gpu.test(argparse.Namespace(stamp=stamp, jobs=1), []) == 1
    left = gpu_stamp.read(stamp)
    assert left is not None
    assert left.results.names_failed == ("pytest::status 3",)


@pytest.mark.parametrize("is_whole_before", [True, False])
def test_a_stamp_of_a_part_replaces_none_of_the_whole_suite(
    tmp_path: Path, is_whole_before: bool
) -> None:
    def stamp_with(passed: int, whole: bool) -> gpu_stamp.Stamp:
        results = gpu_stamp.Results(passed, 0, 0, whole=whole)
        return gpu_stamp.Stamp("commit", "content", {}, results, {"gpu": "some"})

    path, part = tmp_path / "stamp.json", tmp_path / "stamp.part.json"
    gpu_stamp.write(stamp_with(9, is_whole_before), path)
    wanted = part if is_whole_before else path
    assert gpu.leave(stamp_with(2, whole=False), path) == wanted
    left = [found.results.passed for found in map(gpu_stamp.read, (path, part)) if found]
    assert left == ([9, 2] if is_whole_before else [2])
    assert gpu.leave(stamp_with(7, whole=True), path) == path
    assert gpu_stamp.read(path) == stamp_with(7, whole=True)
    assert not part.exists()


def test_a_suite_that_is_ended_leaves_a_stamp_of_what_had_run(monkeypatch, tmp_path: Path) -> None:
    """As the time that a machine is lent for ends it."""

    def ended(_words, _folder, _most, _gpus, keep) -> None:
        keep([("a.py::test_x", "passed")])
        keep([("a.py::test_x", "passed"), ("b.py::test_y", "failed")])
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "BUILD", tmp_path / "build")
    monkeypatch.setattr(gpu, "at_once", ended)
    monkeypatch.setattr(gpu, "machine", lambda: {"gpu": "x"})
    monkeypatch.setenv("BATON_GPU_DIGESTS", "")
    stamp = tmp_path / "stamp.json"
    with pytest.raises(KeyboardInterrupt):
        gpu.test(argparse.Namespace(stamp=stamp, jobs=2, gpus=2), [])
    left = gpu_stamp.read(stamp)
    assert left is not None
    assert (left.results.passed, left.results.failed) == (1, 1)
    assert not left.results.whole
